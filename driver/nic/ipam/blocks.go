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
	"sync"
	"time"

	"go4.org/netipx"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/klog/v2"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

const (
	// maintenanceInterval is the interval at which the plugin looks for blocks that it
	// can return.
	maintenanceInterval = 30 * time.Second
	// apiTimeout limits how long other attachments wait for a block.
	apiTimeout = 10 * time.Second
	// retryInterval is how long a plugin waits before it looks for free addresses again.
	retryInterval = 500 * time.Millisecond
	// maxConflicts limits how often a plugin chooses another block at once.
	maxConflicts = 10
	// spareDelay is how long a node takes no further block without need after a pool was
	// short. If all nodes took one at once, the pool would be short again.
	spareDelay = 2 * time.Minute
	// namedNodes is the number of nodes that an error names.
	namedNodes = 3
)

var (
	errExhausted = errors.New("all addresses are assigned")
	// errElsewhere means that a block of another node has a reserved address.
	errElsewhere = errors.New("another node has the reserved address")
	// errKeptInUse means that another link uses the address that a pod keeps.
	errKeptInUse = errors.New("the address that the pod keeps is in use")
	// errLimit means that the namespace of the pod has as many addresses as the pool permits.
	errLimit = errors.New("the namespace has all addresses that it can have")
	// errConflict means that another node took overlapping addresses at the same time.
	errConflict = errors.New("other nodes took the addresses at the same time")
)

// takeOrWait takes a block for an item. If no address is free, it waits for other nodes to
// return some, as long as Options.Wait.
func (a *Allocator) takeOrWait(ctx context.Context, i item, used func() (Used, error)) error {
	ctx, cancel := context.WithTimeout(ctx, a.options.Wait)
	defer cancel()
	again := time.NewTicker(retryInterval)
	defer again.Stop()
	var last error // of a try that reached the API server
	for {
		err := a.take(ctx, i, used)
		switch {
		case errors.Is(err, errExhausted), errors.Is(err, errConflict), errors.Is(err, errElsewhere),
			errors.Is(err, errKeptInUse), errors.Is(err, errLimit):
			last = err
		case err != nil && last != nil: // most likely the time is over
			return last
		default:
			return err
		}
		select {
		case <-ctx.Done():
			return last
		case <-again.C:
		}
	}
}

// take takes a block for an item unless the node has a free address for it: the reserved
// address, the one that the pod keeps, or as many addresses as blockSize, or fewer if that many
// are not free.
func (a *Allocator) take(ctx context.Context, i item, used func() (Used, error)) error {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	unlockBlocks, err := a.blockLock.lock(ctx)
	if err != nil {
		return err
	}
	defer unlockBlocks()
	for range maxConflicts {
		has, inUse, err := a.hasFree(ctx, i, used)
		if err != nil || has {
			return err
		}
		assigned, blocks, err := a.assigned(ctx, i.pool)
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

// hasFree reports whether the node has a free address for an item, and which addresses of the network
// are in use. The caller must have the block lock.
func (a *Allocator) hasFree(
	ctx context.Context, i item, used func() (Used, error),
) (has bool, inUse *netipx.IPSet, err error) {
	unlock, err := a.lockAllocationToo(ctx, used)
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

// takeNew creates a block for an item. assigned are the addresses in the blocks of the network, and inUse
// those that attachments on this node use.
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
	klog.FromContext(ctx).Info("Took address block", "addressPool", i.pool.Name, "block", taken.object.Name,
		"ranges", taken.object.Spec.Ranges)
	return a.add(ctx, taken)
}

// add makes the addresses of a block that was taken available. The caller must have the block lock.
func (a *Allocator) add(ctx context.Context, taken *block) error {
	unlock, err := a.allocation.lock(ctx)
	if err != nil {
		a.uncertain.Store(true) // the next one that reads the blocks finds it
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
	start := rand.Uint32() //nolint:gosec // nodes only have to choose different blocks most of the time
	if chosen := addresspool.ChooseBlock(i.pool, unusable, i.blockSize(), start); chosen != nil {
		return chosen, nil
	}
	return nil, exhausted(i.pool, blocks, avoided)
}

// listBlocks returns the blocks that have a value in a field, as of now.
func (a *Allocator) listBlocks(ctx context.Context, field, value string) ([]network.AddressBlock, error) {
	list, err := a.options.API.ListBlocks(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(field, value).String(),
	})
	if err != nil {
		return nil, err
	}
	for i := range list.Items {
		if _, invalid := addresspool.ParseRanges(list.Items[i].Spec.Ranges); len(invalid) > 0 {
			klog.FromContext(ctx).Error(nil, "AddressBlock has invalid ranges, which a person has written; taking no address "+
				"that they may mean", "block", list.Items[i].Name, "ranges", invalid)
		}
	}
	return list.Items, nil
}

// addressesOf returns the addresses of a block, and those that invalid ranges may mean.
func addressesOf(b *network.AddressBlock) *netipx.IPSet {
	addresses, _ := addresspool.ParseRanges(b.Spec.Ranges) // listBlocks logs the others
	return addresses
}

// assigned returns the addresses in all blocks of the pool's network, and the blocks.
func (a *Allocator) assigned(
	ctx context.Context, pool *addresspool.Pool,
) (*netipx.IPSet, []network.AddressBlock, error) {
	blocks, err := a.listBlocks(ctx, fieldNetwork, pool.Network)
	if err != nil {
		return nil, nil, fmt.Errorf("list the AddressBlocks of network %s: %w", pool.Network, err)
	}
	var ranges []string
	for i := range blocks {
		ranges = append(ranges, blocks[i].Spec.Ranges...)
	}
	set, _ := addresspool.ParseRanges(ranges)
	return set, blocks, nil
}

// create creates a block for an item, and deletes it again if another block overlaps it, or if
// the item's namespace has too many addresses then. others are the blocks of the network. If
// attachments use the addresses already, the block is marked as unchecked until then.
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
		a.uncertain.Store(true)
		return nil, fmt.Errorf("create AddressBlock %s: %w", object.Name, err)
	}
	_, blocks, err := a.assigned(ctx, pool)
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

// blockName returns the name for a block. A block that has returned its first address
// keeps its name; the block that takes this address later gets a suffix.
func blockName(pool *addresspool.Pool, addresses *netipx.IPSet, others []network.AddressBlock) string {
	name := addresspool.BlockName(pool.Network, addresses.Ranges()[0].From())
	taken := func(name string) bool {
		return slices.ContainsFunc(others, func(b network.AddressBlock) bool { return b.Name == name })
	}
	if !taken(name) {
		return name
	}
	for i := 2; ; i++ {
		if next := fmt.Sprintf("%s-%d", name, i); !taken(next) {
			return next
		}
	}
}

// overlaps reports whether one of the blocks has an address of another block.
func overlaps(of *network.AddressBlock, blocks []network.AddressBlock) bool {
	addresses := addressesOf(of)
	return slices.ContainsFunc(blocks, func(b network.AddressBlock) bool {
		return b.UID != of.UID && addressesOf(&b).Overlaps(addresses)
	})
}

// exhausted returns an error that names the nodes with most addresses, and the addresses
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

// describeNodes names the nodes with most addresses of the selected blocks for an error, and says how
// many of the addresses StatefulSets keep for pods that do not run.
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

// Start watches the pools, and takes and returns blocks, until ctx ends. used returns
// the addresses in the records of the node.
func (a *Allocator) Start(ctx context.Context, used func() (Used, error)) {
	var watches sync.WaitGroup
	defer watches.Wait()
	watches.Go(func() { a.pools.watch(ctx, a.askMaintenance) })
	watches.Go(func() { a.watchBlocks(ctx) })
	tick := time.NewTicker(maintenanceInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			a.forgetUsed(ctx)
		case <-a.maintain:
		}
		if err := a.maintainBlocks(ctx, used); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Failed to maintain address blocks; retrying")
		}
	}
}

// Cleanup removes LastPluginFile. Start must have returned, and no other plugin of the
// node may run. The node's blocks stay: the controller deletes them with their node, and
// the next plugin uses them again.
func (a *Allocator) Cleanup() error {
	return files.Remove(a.options.Failpoints, "last address plugin", a.options.LastPluginFile, false)
}

// forgetUsed makes the plugin read the records before it assigns an address again: another plugin
// of this node may have detached pods. If the node has lost addresses, it also reads the blocks
// before it maintains them: another node may have returned the addresses.
func (a *Allocator) forgetUsed(ctx context.Context) {
	unlock, err := a.allocation.lock(ctx)
	if err != nil {
		return // another plugin has the lock, or ctx has ended: the next tick does it
	}
	defer unlock()
	a.rereadRecords = len(a.blocks) > 0 // without blocks, no address is in use that is not lost
	if len(a.lost) > 0 {
		a.uncertain.Store(true)
	}
}

// maintainBlocks returns unused blocks, and takes one more from each pool whose addresses
// the node has all assigned.
func (a *Allocator) maintainBlocks(ctx context.Context, used func() (Used, error)) (failed error) {
	if a.pools.watched.Load() == nil {
		return nil // the pools are not known yet; the watch asks again
	}
	objects, err := a.pools.all(ctx)
	if err != nil {
		return err
	}
	deleted, err := a.deletedPools(ctx, objects, used)
	if err != nil {
		return err
	}
	for _, object := range append(objects, deleted...) {
		needsBlock, err := a.returnUnused(ctx, object, used)
		if err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		pool, err := find(objects, object.Name)
		if err != nil || !needsBlock || isShort(object) || wasShort(object, time.Now()) {
			continue // the condition of an unready pool says why it is not ready
		}
		err = a.take(ctx, item{pool: pool}, used) // for any pod
		if err != nil && !errors.Is(err, errExhausted) && !errors.Is(err, errConflict) {
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// deletedPools returns the pools of the node's blocks that do not exist, as pools that
// are being deleted.
func (a *Allocator) deletedPools(
	ctx context.Context, existing []*network.AddressPool, used func() (Used, error),
) (deleted []*network.AddressPool, err error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	unlockBlocks, err := a.blockLock.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlockBlocks()
	unlock, err := a.lockAllocationToo(ctx, used)
	if err != nil {
		return nil, err
	}
	defer unlock()
	for _, b := range a.blocks {
		named := func(o *network.AddressPool) bool { return o.Name == b.object.Spec.Pool }
		if slices.ContainsFunc(existing, named) || slices.ContainsFunc(deleted, named) {
			continue
		}
		now := metav1.Now()
		deleted = append(deleted, &network.AddressPool{
			ObjectMeta: metav1.ObjectMeta{Name: b.object.Spec.Pool, DeletionTimestamp: &now},
		})
	}
	return deleted, nil
}

// returnUnused returns unused addresses of a pool. If the pool is short, it returns all of
// them; otherwise it returns unused blocks, and keeps one if the node uses another. It
// reports whether the node uses all addresses of the pool that it has.
func (a *Allocator) returnUnused(
	ctx context.Context, object *network.AddressPool, used func() (Used, error),
) (needsBlock bool, failed error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	unlockBlocks, err := a.blockLock.lock(ctx)
	if err != nil {
		return false, err
	}
	defer unlockBlocks()
	shrunk, needsBlock, err := a.giveUpUnused(ctx, object, used)
	if err != nil {
		return false, err
	}
	for _, b := range shrunk {
		failed = errors.Join(failed, a.returnExcept(ctx, b))
	}
	return needsBlock && failed == nil, failed
}

// giveUpUnused makes unused addresses of a pool unavailable, and returns the blocks that the caller must
// write; see returnUnused.
func (a *Allocator) giveUpUnused(
	ctx context.Context, object *network.AddressPool, used func() (Used, error),
) (shrunk []*block, needsBlock bool, err error) {
	unlock, err := a.lockAllocationToo(ctx, used)
	if err != nil {
		return nil, false, err
	}
	defer unlock()
	pool, err := addresspool.Parse(object)
	if err != nil {
		pool = &addresspool.Pool{Name: object.Name, Reserved: &netipx.IPSet{}} // it was valid when the node took the blocks
	}
	spares := 0
	if a.usesPool(pool) && !isShort(object) {
		spares = 1
	}
	var kept []*block
	for _, b := range a.blocks {
		keep := b.addresses
		if b.object.Spec.Pool == object.Name {
			needed := a.needed(b)
			isSingle := pool.NamespaceLimit > 0 || consumerOf(b.object) != (consumer{})
			keep, spares = toKeep(addresspool.Difference(b.addresses, pool.Reserved),
				addresspool.Difference(needed, pool.Reserved), isSingle || isShort(object), spares)
			keep = addresspool.Union(keep, needed)
		}
		if !keep.Equal(b.addresses) {
			a.forgetReleased(b, keep)
			b.addresses = keep
			shrunk = append(shrunk, b)
		}
		if len(keep.Ranges()) > 0 {
			kept = append(kept, b)
		}
	}
	a.blocks = kept
	return shrunk, pool.NamespaceLimit == 0 && a.usesPool(pool) && a.free(item{pool: pool}) == 0, nil
}

// usesPool reports whether attachments use addresses of a pool that are for any pod.
func (a *Allocator) usesPool(pool *addresspool.Pool) bool {
	return slices.ContainsFunc(a.blocks, func(b *block) bool {
		return b.object.Spec.Pool == pool.Name && consumerOf(b.object) == (consumer{}) &&
			len(addresspool.Difference(a.needed(b), pool.Reserved).Ranges()) > 0
	})
}

// toKeep returns which addresses of a block the node keeps, and how many unused blocks it may
// keep besides this one. addresses and used do not contain reserved addresses.
func toKeep(addresses, used *netipx.IPSet, short bool, spares int) (*netipx.IPSet, int) {
	switch {
	case short || len(addresses.Ranges()) == 0:
		return used, spares
	case len(used.Ranges()) > 0:
		return addresses, spares
	case spares > 0:
		return addresses, spares - 1
	default:
		return used, spares
	}
}

// needed returns the addresses of a block that attachments use or are about to use.
func (a *Allocator) needed(b *block) *netipx.IPSet {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.requested[requestKey{consumer: poolConsumer{b.object.Spec.Pool, consumerOf(b.object)}}] > 0 {
		return b.addresses
	}
	var set netipx.IPSetBuilder
	b.each(func(address Address) {
		if _, inUse := a.used[address]; inUse || a.requested[requestKey{address: address}] > 0 {
			set.Add(address.IP)
		}
	})
	result, _ := set.IPSet() // fails only if an invalid address was added
	return result
}

// forgetReleased forgets when the addresses of a block were released that the node returns.
func (a *Allocator) forgetReleased(b *block, kept *netipx.IPSet) {
	b.each(func(address Address) {
		if !kept.Contains(address.IP) {
			delete(a.released, address)
		}
	})
}

// returnExcept returns all addresses of a block but those that it has here. What a pod keeps stays assigned
// to the pod.
func (a *Allocator) returnExcept(ctx context.Context, b *block) error {
	if len(b.addresses.Ranges()) == 0 && b.object.Spec.Pod != "" {
		return a.returnKept(ctx, b)
	}
	updated, err := a.write(ctx, b, b.addresses)
	if err == nil && updated != nil {
		b.version = updated.ResourceVersion
	}
	return err
}

// write writes the addresses of a block, which are known to be in no other block, or deletes the
// block if there are none. It returns the block, or nil if it was deleted. The caller must have the
// block lock.
func (a *Allocator) write(
	ctx context.Context, b *block, addresses *netipx.IPSet,
) (updated *network.AddressBlock, err error) {
	object := b.object.DeepCopy()
	object.ResourceVersion = b.version
	object.Spec.Ranges = addresspool.FormatRanges(addresses)
	delete(object.Annotations, network.UncheckedAnnotation)
	logger := klog.FromContext(ctx).WithValues("addressPool", object.Spec.Pool, "block", object.Name)
	if len(object.Spec.Ranges) == 0 {
		if err := a.options.API.DeleteBlock(ctx, object); err != nil {
			a.uncertain.Store(true)
			return nil, fmt.Errorf("delete AddressBlock %s: %w", object.Name, err)
		}
		logger.Info("Returned address block")
		return nil, nil
	}
	if updated, err = a.options.API.UpdateBlock(ctx, object); err != nil {
		a.uncertain.Store(true)
		return nil, fmt.Errorf("write the addresses of AddressBlock %s: %w", object.Name, err)
	}
	logger.Info("Wrote the addresses of a block", "ranges", object.Spec.Ranges)
	return updated, nil
}
