// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
)

// pools is a cache of the cluster's AddressPools. Until its watch has delivered them, each call lists them.
type pools struct {
	api API
	// node is the name of the node, and labels returns its labels.
	node    string
	labels  func(context.Context) (map[string]string, error)
	watched atomic.Pointer[cache.Store]
}

func newPools(api API, node string, labels func(context.Context) (map[string]string, error)) *pools {
	return &pools{api: api, node: node, labels: labels}
}

// serves reports whether the pools serve the node. It reads the node's labels if it needs them.
func (p *pools) serves(ctx context.Context, candidates ...*addresspool.Pool) (serves []bool, err error) {
	var own labels.Set
	for _, pool := range candidates {
		if len(pool.NodeSelector) > 0 && own == nil {
			if own, err = p.labels(ctx); err != nil {
				return nil, fmt.Errorf("spec.nodeSelector of AddressPool %s: read the labels of node %s: %w",
					pool.Name, p.node, err)
			}
		}
		serves = append(serves, pool.NodeSelector.AsSelectorPreValidated().Matches(own))
	}
	return serves, nil
}

// watch keeps the pools current until ctx ends, and calls changed after each change.
func (p *pools) watch(ctx context.Context, changed func()) {
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: &cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				return p.api.ListPools(ctx, o)
			},
			WatchFuncWithContext: p.api.WatchPools,
		},
		ObjectType: &network.AddressPool{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { changed() },
			UpdateFunc: func(any, any) { changed() },
			DeleteFunc: func(any) { changed() },
		},
	})
	var synced sync.WaitGroup
	defer synced.Wait()
	synced.Go(func() {
		if cache.WaitForCacheSync(ctx.Done(), controller.HasSynced) {
			p.watched.Store(&store)
			changed()
		}
	})
	controller.RunWithContext(ctx)
}

// all returns all pools, sorted by name; none if the cluster does not have the kind AddressPool.
func (p *pools) all(ctx context.Context) ([]*network.AddressPool, error) {
	var all []*network.AddressPool
	if store := p.watched.Load(); store != nil {
		for _, o := range (*store).List() {
			if pool, ok := o.(*network.AddressPool); ok {
				all = append(all, pool)
			}
		}
	} else {
		list, err := p.api.ListPools(ctx, metav1.ListOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("list AddressPools: %w: is the CustomResourceDefinition of the chart installed?", err)
		}
		for i := range list.Items {
			all = append(all, &list.Items[i])
		}
	}
	slices.SortFunc(all, func(a, b *network.AddressPool) int { return cmp.Compare(a.Name, b.Name) })
	return all, nil
}

// defaults returns the names of a network's default pools that serve the node and the namespace. If several have the
// same IP family, isPreferred decides.
func (p *pools) defaults(ctx context.Context, networkName, namespace string) (names []string, err error) {
	all, err := p.all(ctx)
	if err != nil {
		return nil, err
	}
	var candidates []*addresspool.Pool
	var objects []*network.AddressPool
	for _, object := range all {
		if !object.Spec.Default || object.Spec.Network != networkName || object.DeletionTimestamp != nil ||
			len(object.Spec.Namespaces) > 0 && !slices.Contains(object.Spec.Namespaces, namespace) {
			continue
		}
		pool, err := addresspool.Parse(object)
		if err != nil { // without its address, the pod would start and reach no host
			return nil, fmt.Errorf("AddressPool %s, a default pool of network %s: %w", object.Name, networkName, err)
		}
		candidates, objects = append(candidates, pool), append(objects, object)
	}
	serves, err := p.serves(ctx, candidates...)
	if err != nil {
		return nil, err
	}
	chosen := map[string]*network.AddressPool{}
	for i, pool := range candidates {
		if serves[i] && isPreferred(objects[i], chosen[pool.Family()]) {
			chosen[pool.Family()] = objects[i]
		}
	}
	for _, object := range chosen {
		names = append(names, object.Name)
	}
	slices.Sort(names)
	return names, nil
}

// isPreferred reports whether a default pool applies instead of other, which may be nil: a pool that names namespaces
// takes precedence over one for all, then the older over the newer.
func isPreferred(pool, other *network.AddressPool) bool {
	if other == nil {
		return true
	}
	if names, otherNames := len(pool.Spec.Namespaces) > 0, len(other.Spec.Namespaces) > 0; names != otherNames {
		return names
	}
	return pool.CreationTimestamp.Before(&other.CreationTimestamp)
}

// gateways returns the gateways of a network's pools. known is false until the first list of pools has arrived.
func (p *pools) gateways(networkName string) (gateways []netip.Addr, known bool) {
	store := p.watched.Load()
	if store == nil {
		return nil, false
	}
	for _, o := range (*store).List() {
		object, ok := o.(*network.AddressPool)
		if !ok {
			continue
		}
		pool, err := addresspool.Parse(object)
		if err == nil && pool.Network == networkName && pool.Gateway.IsValid() {
			gateways = append(gateways, pool.Gateway)
		}
	}
	return gateways, true
}

// servesNamespace reports whether a namespace's pods can have a pool's addresses.
func servesNamespace(pool *addresspool.Pool, namespace string) bool {
	return len(pool.Namespaces) == 0 || pool.Namespaces[namespace]
}

// checkNamespace returns an error if a namespace's pods cannot have a pool's addresses.
func checkNamespace(pool *addresspool.Pool, namespace string) error {
	if servesNamespace(pool, namespace) {
		return nil
	}
	return fmt.Errorf("AddressPool %s does not serve namespace %s: spec.namespaces has %s: use another pool, or add the "+
		"namespace to the pool", pool.Name, namespace, list(pool.Namespaces))
}

// named returns the pools that a pod in a namespace can use.
func (p *pools) named(ctx context.Context, names []string, namespace string) (found []*addresspool.Pool, err error) {
	all, err := p.all(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		pool, err := find(all, name)
		if err != nil {
			return nil, err
		}
		if err := checkNamespace(pool, namespace); err != nil {
			return nil, err
		}
		found = append(found, pool)
	}
	return found, nil
}

// items resolves a request to one item for each pool and each reserved address. It fails if the pod
// cannot use a pool.
func (p *pools) items(ctx context.Context, r Request) (items []item, err error) {
	named, err := p.named(ctx, r.Pools, r.PodNamespace)
	if err != nil {
		return nil, err
	}
	for _, pool := range named {
		c, err := r.consumerIn(pool)
		if err != nil {
			return nil, err
		}
		items = append(items, item{pool: pool, consumer: c})
	}
	for _, address := range r.Reserved {
		pool, err := p.containing(ctx, r.Network, address)
		if err != nil {
			return nil, err
		}
		if pool == nil {
			continue
		}
		if err := p.checkReserved(ctx, pool, address); err != nil {
			return nil, err
		}
		if _, err := p.named(ctx, []string{pool.Name}, r.PodNamespace); err != nil {
			return nil, err
		}
		items = append(items, item{pool: pool, consumer: r.namespaceIn(pool), reserved: address})
	}
	return items, nil
}

// containing returns the network's pool that has an address, or nil.
func (p *pools) containing(ctx context.Context, networkName string, address netip.Addr) (*addresspool.Pool, error) {
	all, err := p.all(ctx)
	if err != nil {
		return nil, err
	}
	for _, object := range all {
		pool, err := addresspool.Parse(object)
		if err == nil && pool.Network == networkName && pool.Addresses.Contains(address) {
			return find(all, object.Name)
		}
	}
	return nil, nil
}

// checkStatic returns an error if a pool of the network may assign one of the addresses to
// another pod.
func (p *pools) checkStatic(ctx context.Context, networkName string, addresses []netip.Prefix) error {
	for i, address := range addresses {
		pool, err := p.containing(ctx, networkName, address.Addr())
		if err != nil {
			return err
		}
		if pool == nil {
			continue
		}
		if err := p.checkReserved(ctx, pool, address.Addr()); err != nil {
			return fmt.Errorf("addresses[%d]: Invalid value: %q: %w", i, address, err)
		}
	}
	return nil
}

// checkReserved returns an error unless a pool serves the node and gives an address only to
// claims that name it.
func (p *pools) checkReserved(ctx context.Context, pool *addresspool.Pool, address netip.Addr) error {
	if !pool.Reserved.Contains(address) {
		return fmt.Errorf("AddressPool %s may assign address %s to another pod: add it to spec.reserved of the pool, "+
			"or choose an address that is not in the pool", pool.Name, address)
	}
	return p.checkServes(ctx, pool)
}

// checkServes returns an error unless a pool serves the node.
func (p *pools) checkServes(ctx context.Context, pool *addresspool.Pool) error {
	serves, err := p.serves(ctx, pool)
	if err == nil && !serves[0] {
		err = fmt.Errorf("AddressPool %s serves nodes with the labels %s, which node %s does not have: "+
			"choose another pool, or label the node", pool.Name, pool.NodeSelector, p.node)
	}
	return err
}

// find returns a pool that is ready for use.
func find(all []*network.AddressPool, name string) (*addresspool.Pool, error) {
	i := slices.IndexFunc(all, func(o *network.AddressPool) bool { return o.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("AddressPool %s does not exist: create it, or remove it from addressPools", name)
	}
	pool, err := addresspool.Parse(all[i])
	if err != nil {
		return nil, fmt.Errorf("AddressPool %s: %w", name, err)
	}
	if c := meta.FindStatusCondition(all[i].Status.Conditions, network.ConditionReady); c != nil &&
		c.Status == metav1.ConditionFalse {
		return nil, fmt.Errorf("AddressPool %s is not ready: %s", name, c.Message)
	}
	if all[i].DeletionTimestamp != nil {
		return nil, fmt.Errorf("AddressPool %s is being deleted: wait until it is deleted, or name another pool", name)
	}
	return pool, nil
}

// check returns an error unless the pools exist, belong to the network, serve the namespace and the node,
// and differ in their IP family.
func (p *pools) check(ctx context.Context, networkName, namespace string, names []string) error {
	all, err := p.all(ctx)
	if err != nil {
		return err
	}
	families := map[string]string{}
	for i, name := range names {
		invalid := func(reason error) error {
			return fmt.Errorf("addressPools[%d]: Invalid value: %q: %w", i, name, reason)
		}
		pool, err := find(all, name)
		if err != nil {
			return invalid(err)
		}
		if pool.Network != networkName {
			return invalid(fmt.Errorf("the pool is for network %s, and the device is on network %s",
				pool.Network, networkName))
		}
		if err := checkNamespace(pool, namespace); err != nil {
			return invalid(err)
		}
		if err := p.checkServes(ctx, pool); err != nil {
			return invalid(err)
		}
		if other, taken := families[pool.Family()]; taken {
			return invalid(fmt.Errorf("pool %s has IPv%s addresses, too: name one pool for each IP family",
				other, pool.Family()))
		}
		families[pool.Family()] = name
	}
	return nil
}

// networkOf returns the network of the first pool.
func (p *pools) networkOf(ctx context.Context, names []string) (string, error) {
	all, err := p.all(ctx)
	if err != nil {
		return "", err
	}
	pool, err := find(all, names[0])
	if err != nil {
		return "", err
	}
	return pool.Network, nil
}

// wasShort reports whether a pool was short shortly before now.
func wasShort(o *network.AddressPool, now time.Time) bool {
	c := meta.FindStatusCondition(o.Status.Conditions, network.ConditionShort)
	return c != nil && now.Sub(c.LastTransitionTime.Time) < standbyDelay && c.LastTransitionTime.After(
		o.CreationTimestamp.Add(time.Second))
}

// isShort reports whether nodes must return a pool's addresses that they do not use: the pool has none for another
// node, or it is being deleted.
func isShort(o *network.AddressPool) bool {
	return o.DeletionTimestamp != nil || meta.IsStatusConditionTrue(o.Status.Conditions, network.ConditionShort)
}

func list(set map[string]bool) string {
	names := make([]string, 0, len(set))
	for name := range set {
		names = append(names, name)
	}
	slices.Sort(names)
	return fmt.Sprint(names)
}
