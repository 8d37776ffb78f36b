// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go4.org/netipx"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
)

const (
	// apiTimeout limits how long other attachments wait for a block.
	apiTimeout = 10 * time.Second
	// retryInterval is how long a plugin waits before it looks for free addresses again.
	retryInterval = 500 * time.Millisecond
	// maxConflicts limits how often a plugin immediately chooses another block.
	maxConflicts = 10
	// namedNodes is the number of nodes that an error names.
	namedNodes = 3
)

// retryableError is an error that may go away if the same request is retried, such as when an address becomes free.
type retryableError string

func (e retryableError) Error() string { return string(e) }

const (
	errExhausted retryableError = "all addresses are assigned"
	// errElsewhere means that another node's block has a reserved address.
	errElsewhere retryableError = "another node has the reserved address"
	// errInUse means that a pod on this node uses a reserved address.
	errInUse retryableError = "the reserved address is in use"
	// errKeptInUse means that another link uses the address that a pod keeps.
	errKeptInUse retryableError = "the address that the pod keeps is in use"
	// errLimit means that the pod's namespace has as many addresses as the pool permits.
	errLimit retryableError = "the namespace has all addresses that it can have"
	// errConflict means that another node took overlapping addresses at the same time.
	errConflict retryableError = "other nodes took the addresses at the same time"
)

// takeOrWait takes a block for an item. If no address is free, it waits up to Options.Wait for other nodes to return
// some.
func (a *Allocator) takeOrWait(ctx context.Context, i item, used func() (Used, error)) error {
	ctx, cancel := context.WithTimeout(ctx, a.options.Wait)
	defer cancel()
	return retry(ctx, func() error { return a.take(ctx, i, used) })
}

// retry calls try until an address that it asks for becomes free or ctx ends.
func retry(ctx context.Context, try func() error) error {
	ticker := time.NewTicker(retryInterval)
	defer ticker.Stop()
	var last error // of a try that reached the API server
	for {
		err := try()
		var again retryableError
		switch {
		case errors.As(err, &again):
			last = err
		case err != nil && last != nil: // most likely the time is over
			return last
		default:
			return err
		}
		select {
		case <-ctx.Done():
			return last
		case <-ticker.C:
		}
	}
}

// take takes a block for an item unless the node has a free address for it. The block has the
// reserved address, the address that the pod keeps, or as many addresses as the pool's blockSize, or
// fewer if that many are not free.
func (a *Allocator) take(ctx context.Context, i item, used func() (Used, error)) error {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	unlockBlocks, err := a.blockLock.lock(ctx)
	if err != nil {
		return err
	}
	defer unlockBlocks()
	for range maxConflicts {
		has, inUse, err := a.loadAndHasFree(ctx, i, used)
		if err != nil || has {
			return err
		}
		assigned, blocks, err := a.assignedSet(ctx, i.pool)
		if err != nil {
			return err
		}
		if kept := keptBlock(i, a.options.Node, blocks); kept != nil {
			err = a.takeKept(ctx, i, kept, blocks)
		} else {
			err = a.takeNew(ctx, i, assigned, inUse, blocks)
		}
		if err != nil && !errors.Is(err, errConflict) {
			return err
		}
	}
	return fmt.Errorf("take a block from AddressPool %s: %w", i.pool.Name, errConflict)
}

// loadAndHasFree reads the node's blocks if the Allocator's list may be old. It reports whether the node has a free
// address for an item, and which of the network's addresses are in use. The caller must have the block lock.
func (a *Allocator) loadAndHasFree(
	ctx context.Context, i item, used func() (Used, error),
) (has bool, inUse *netipx.IPSet, err error) {
	unlock, err := a.lockAllocationUnderBlockLock(ctx, used)
	if err != nil {
		return false, nil, err
	}
	defer unlock()
	var set netipx.IPSetBuilder
	for address := range a.used {
		if address.Network == i.pool.Network {
			set.Add(address.IP)
		}
	}
	inUse, _ = set.IPSet() // fails only if an invalid address was added
	if i.reserved.IsValid() {
		return a.has(Address{i.pool.Network, i.reserved}), inUse, nil
	}
	return a.free(i) > 0, inUse, nil
}

// takeNew creates a block for an item. assigned are the addresses in the network's blocks, and inUse are the
// addresses that attachments on this node use.
func (a *Allocator) takeNew(
	ctx context.Context, i item, assigned, inUse *netipx.IPSet, blocks []network.AddressBlock,
) error {
	addresses, err := a.chooseBlock(i, assigned, inUse, blocks)
	if err != nil {
		return err
	}
	taken, err := a.create(ctx, i, addresses, blocks, false)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).V(2).Info("Took address block", "addressPool", i.pool.Name, "block", taken.object.Name,
		"ranges", taken.object.Spec.Ranges)
	return a.add(ctx, taken)
}

// add makes a taken block's addresses available. The caller must have the block lock.
func (a *Allocator) add(ctx context.Context, taken *block) error {
	unlock, err := a.allocation.lock(ctx)
	if err != nil {
		a.blocksStale.Store(true) // the next read of the blocks finds this one
		return err
	}
	defer unlock()
	a.blocks = append(a.blocks, taken)
	return nil
}

// chooseBlock returns the addresses of the next block for an item. It must not contain an address that
// the node uses and has lost; see validate.
func (a *Allocator) chooseBlock(
	i item, assigned, inUse *netipx.IPSet, blocks []network.AddressBlock,
) (*netipx.IPSet, error) {
	if i.reserved.IsValid() && assigned.Contains(i.reserved) {
		return nil, fmt.Errorf("AddressPool %s: %w: %s has %s: does a pod on that node use it?",
			i.pool.Name, errElsewhere, nodeOf(i.reserved, blocks), i.reserved)
	}
	if err := i.checkLimit(blocks); err != nil {
		return nil, err
	}
	if i.reserved.IsValid() {
		return addresspool.SetOf(i.reserved), nil
	}
	avoided := a.avoidedIn(i.pool)
	unusable := addresspool.Union(addresspool.Union(assigned, inUse), addresspool.SetOf(avoided...))
	choose := addresspool.ChooseAddress
	if i.consumer.kind == anyPod {
		choose = addresspool.ChooseBlock
	}
	start := rand.Uint32() //nolint:gosec // nodes only have to choose different blocks most of the time
	if chosen := choose(i.pool, unusable, start); chosen != nil {
		return chosen, nil
	}
	return nil, exhausted(i.pool, blocks, avoided)
}

// create creates a block for an item, and deletes it again if another block overlaps it or the item's namespace then
// has too many addresses. others are the network's blocks. If attachments already use the addresses, the block is
// marked as unchecked until these checks pass.
func (a *Allocator) create(
	ctx context.Context, i item, addresses *netipx.IPSet, others []network.AddressBlock, inUse bool,
) (*block, error) {
	pool := i.pool
	object := &network.AddressBlock{
		TypeMeta:   metav1.TypeMeta{APIVersion: network.GroupVersion.String(), Kind: "AddressBlock"},
		ObjectMeta: metav1.ObjectMeta{Name: blockName(pool, addresses, others)},
		Spec: network.AddressBlockSpec{
			Network: pool.Network, Pool: pool.Name, Node: a.options.Node, Ranges: addresspool.FormatRanges(addresses),
			Namespace: i.consumer.namespace, Pod: i.consumer.pod, Interface: i.consumer.link,
		},
	}
	if inUse {
		object.Annotations = map[string]string{network.UncheckedAnnotation: "true"}
	}
	created, err := a.options.API.CreateBlock(ctx, object)
	if apierrors.IsAlreadyExists(err) {
		return nil, errConflict
	}
	if err != nil {
		a.blocksStale.Store(true)
		return nil, fmt.Errorf("create AddressBlock %s: %w", object.Name, err)
	}
	_, blocks, err := a.assignedSet(ctx, pool)
	if err == nil && (overlaps(created, blocks) || i.exceedsLimit(blocks)) {
		err = errConflict // other nodes may have created blocks at the same time; take looks again
	}
	taken := newBlock(created)
	if err != nil {
		if _, deleteErr := a.write(context.WithoutCancel(ctx), taken, &netipx.IPSet{}); deleteErr != nil {
			// The next load deletes the block, or uses it if it no longer overlaps another.
			return nil, fmt.Errorf("%s; %w", err.Error(), deleteErr)
		}
		return nil, err
	}
	if !inUse {
		return taken, nil
	}
	if created, err = a.write(ctx, taken, addresses); err != nil {
		return nil, err
	}
	return newBlock(created), nil
}

// exhausted returns an error that names the nodes with the most addresses, and the addresses
// that are avoided.
func exhausted(pool *addresspool.Pool, blocks []network.AddressBlock, avoided []netip.Addr) error {
	others := describeNodes(blocks, func(b *network.AddressBlock) bool { return b.Spec.Pool == pool.Name })
	if len(avoided) > 0 {
		others += fmt.Sprintf(", and other hosts on the network have %s", avoided)
	}
	if reserved := addresspool.Count(pool.Reserved); reserved.Sign() > 0 {
		others += fmt.Sprintf(", and %s are reserved", reserved)
	}
	return fmt.Errorf("AddressPool %s: %w: it has %s%s: add ranges to the pool, or delete pods",
		pool.Name, errExhausted, addresspool.Count(pool.Addresses), others)
}

// describeNodes names, for an error, the nodes with the most addresses in the selected blocks, and how many of these
// StatefulSets keep for pods that are not running.
func describeNodes(blocks []network.AddressBlock, selects func(*network.AddressBlock) bool) (text string) {
	counts := map[string]int{}
	for i := range blocks {
		if selects(&blocks[i]) {
			counts[blocks[i].Spec.Node] += count(&blocks[i])
		}
	}
	kept := counts[""]
	delete(counts, "")
	nodes := slices.SortedFunc(maps.Keys(counts), func(x, y string) int {
		return cmp.Or(-cmp.Compare(counts[x], counts[y]), cmp.Compare(x, y))
	})
	var named []string
	for _, node := range nodes[:min(len(nodes), namedNodes)] {
		named = append(named, fmt.Sprintf("%s with %d", node, counts[node]))
	}
	if len(named) > 0 {
		text = ", most of them on " + strings.Join(named, ", ")
	}
	if kept > 0 {
		text += fmt.Sprintf(", and StatefulSets keep %d for pods that do not run", kept)
	}
	return text
}
