// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/dra-shared/dra-driver-shared/device/addresspool"
	"github.com/dra-shared/dra-driver-shared/driver/lock"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
)

// Options configures an Allocator.
type Options struct {
	// Node is the name of the node.
	Node string
	// Instance distinguishes plugins that run at the same time.
	Instance string
	API      API
	// NodeLabels returns the labels of the node.
	NodeLabels func(context.Context) (map[string]string, error)
	// Locks is the directory of the locks that the node's plugins share.
	Locks lock.Dir
	// LastPluginFile names the plugin that last assigned addresses. It is on a filesystem that a reboot clears; see
	// lockAllocation.
	LastPluginFile string
	// Failpoints wraps operations that change state outside the process. Default: none.
	Failpoints failpoint.Injector
	// Wait is how long Assign waits for other nodes to return addresses. Default: 10 s.
	Wait time.Duration
	// OnLost is called with the addresses that the node has lost, first when they are known and then whenever they
	// change. It must not call the Allocator. Default: none.
	OnLost func(Lost)
}

// Allocator assigns addresses. It is safe for concurrent use.
type Allocator struct {
	options Options
	pools   *pools
	// maintain asks Run to take or return blocks.
	maintain chan struct{}

	blockLock nodeLock
	// allocation protects the fields up to released.
	allocation nodeLock
	// blocks are the address blocks of this node.
	blocks []*block
	// used maps each address in use to its attachment. If it is nil, blocks and records must be reread before an
	// address is assigned.
	used map[Address]Owner
	// unreadable are the records that could not be read; withheld are the addresses that they may contain. See
	// withhold.
	unreadable map[string]bool
	withheld   map[Address]bool
	// namedByClaims are the addresses that prepared claims name; see Used.
	namedByClaims map[Address]bool
	// lost are the used addresses that none of this node's blocks has; see findLost.
	lost Lost
	// released maps addresses to when they were last released: the ones that have been free longest are assigned first.
	// It does not survive a restart.
	released map[Address]time.Time

	// blocksStale means that the node's blocks may differ from what the Allocator knows, such as after a failed
	// request to change a block. The Allocator does not assign addresses that the request may have returned, and reads
	// the blocks before it takes or returns others.
	blocksStale atomic.Bool
	// recordsStale means that the records must be reread before an address is assigned or a block is returned.
	recordsStale atomic.Bool

	// mu protects the fields below, so that Release and Avoid do not wait for a node lock.
	mu    sync.Mutex
	ended []endedAddress
	// deleted are the UIDs of this node's blocks that were deleted since forgetUnlessCurrent was called.
	deleted map[types.UID]bool
	// requested counts the requests in progress for a reserved address or for a consumer.
	requested map[requestKey]int
	// avoided maps addresses to when they can be assigned again; see Avoid.
	avoided map[Address]time.Time
}

// requestKey identifies what a request in progress asks for: a reserved address, or an address for a
// consumer.
type requestKey struct {
	address  Address
	consumer poolConsumer
}

// endedAddress is an address from an attachment that has ended.
type endedAddress struct {
	owner   Owner
	address Address
	at      time.Time
}

// Owner identifies an attachment.
type Owner struct {
	Claim, Share string
	// Namespace is the cookie of the pod's network namespace.
	Namespace uint64
	// Pod names the pod in messages, as namespace/name.
	Pod string
}

// Address is an address on a network. Networks may have the same addresses.
type Address struct {
	Network string
	IP      netip.Addr
}

// Used describes which addresses are in use according to the node's records.
type Used struct {
	// Owners maps each recorded address to its attachment.
	Owners map[Address]Owner
	// Unreadable lists the paths of records that cannot be read. Their links may exist, with
	// unknown addresses.
	Unreadable []string
	// NamedByClaims are the addresses that prepared claims name. If the node has them, it keeps them even while no
	// attachment uses them. If an address's network is unknown, Network is empty, and the node keeps the address on
	// each network.
	NamedByClaims map[Address]bool
}

// Lost maps lost addresses, which attachments use although none of this node's blocks contains them, to the node that
// has them in a block now; "" if there is none.
type Lost map[Address]string

const defaultWait = 10 * time.Second

// New builds an Allocator. It learns about pools only while Run runs.
func New(o Options) *Allocator {
	if o.Wait == 0 {
		o.Wait = defaultWait
	}
	return &Allocator{
		options: o, pools: newPools(o.API, o.Node, o.NodeLabels), maintain: make(chan struct{}, 1),
		released: map[Address]time.Time{}, avoided: map[Address]time.Time{}, deleted: map[types.UID]bool{},
		requested: map[requestKey]int{}, blockLock: newNodeLock(o.Locks, blockLock),
		allocation: newNodeLock(o.Locks, allocationLock),
	}
}

// Request asks for addresses for one link.
type Request struct {
	// Pools are names of AddressPools with different IP families. The link gets an address from each.
	Pools []string
	// Reserved lists the addresses on Network that the claim names. If a pool contains one, the pool must reserve it.
	// Addresses outside all pools are ignored.
	Network  string
	Reserved []netip.Addr
	// PodNamespace is the namespace of the pod.
	PodNamespace string
	// Keep asks for the addresses of Pools that this pod of a StatefulSet keeps for a link.
	// Interface distinguishes several such links.
	Keep           bool
	Pod, Interface string
	Owner          Owner
}

// Assignment is the result of a request for a link.
type Assignment struct {
	// Addresses have their pool subnet's prefix length.
	Addresses []netip.Prefix
	Routes    []Route
	// Nameservers are the DNS servers of the pools, each once.
	Nameservers []netip.Addr
}

// Route is a route of a pool.
type Route struct {
	Destination netip.Prefix
	Gateway     netip.Addr // invalid if the destination is on the link
}

// item is one address that a request asks for: any that the pool has for the consumer, or a
// reserved one.
type item struct {
	pool     *addresspool.Pool
	consumer consumer
	// reserved is invalid if the item asks for any address.
	reserved netip.Addr
}

// noFreeAddressError is returned by choose if the node does not have an address for an item.
type noFreeAddressError struct{ item item }

func (e noFreeAddressError) Error() string {
	return "the node has no free address of pool " + e.item.pool.Name
}

// Assign assigns addresses, and calls record before another attachment can get them. It does not call record if the
// request asks for nothing. used returns the addresses in the node's records. If record fails, the addresses are free
// again. If the owner already has addresses, it keeps them.
//
// If the node has no free address, Assign takes a block from the pool; if other nodes' blocks have all addresses, it
// waits some seconds for them to return unused ones.
func (a *Allocator) Assign(
	ctx context.Context, r Request, used func() (Used, error), record func(Assignment) error,
) error {
	items, err := a.pools.items(ctx, r)
	if err != nil || len(items) == 0 {
		return err
	}
	defer a.keepRequested(items)()
	for {
		err := a.assign(ctx, items, r.Owner, used, record)
		var empty noFreeAddressError
		if !errors.As(err, &empty) {
			return err
		}
		if err := a.takeOrWait(ctx, empty.item, used); err != nil {
			return err
		}
	}
}

// keepRequested keeps maintenance from returning the addresses that items are about to get, until the caller calls
// end. Blocks for any pod do not need this protection, because nodes keep a standby block.
func (a *Allocator) keepRequested(items []item) (end func()) {
	add := func(n int) {
		a.mu.Lock()
		defer a.mu.Unlock()
		for _, i := range items {
			if i.reserved.IsValid() {
				a.requested[requestKey{address: Address{i.pool.Network, i.reserved}}] += n
			} else if i.consumer.kind != anyPod {
				a.requested[requestKey{consumer: poolConsumer{i.pool.Name, i.consumer}}] += n
			}
		}
		maps.DeleteFunc(a.requested, func(_ requestKey, n int) bool { return n == 0 })
	}
	add(1)
	return func() { add(-1) }
}

// assign assigns addresses from the node's existing blocks, and calls record; see Assign. If they do not have a free
// address for an item, it returns noFreeAddressError.
func (a *Allocator) assign(
	ctx context.Context, items []item, owner Owner, used func() (Used, error), record func(Assignment) error,
) error {
	unlock, err := a.lockAllocation(ctx, used)
	if err != nil {
		return err
	}
	defer unlock()
	var assignment Assignment
	var added []Address
	for _, item := range items {
		address, isNew, err := a.choose(item, owner)
		if err != nil {
			return err
		}
		if isNew {
			added = append(added, Address{item.pool.Network, address})
		}
		assignment.add(item.pool, address)
	}
	for _, address := range added {
		a.used[address] = owner
	}
	if err := record(assignment); err != nil {
		for _, address := range added {
			delete(a.used, address)
		}
		return err
	}
	for _, item := range items {
		if !item.reserved.IsValid() && item.consumer.kind == anyPod && a.free(item) == 0 {
			a.askMaintenance() // take the next block before a pod waits for it
		}
	}
	return nil
}

func (r *Assignment) add(pool *addresspool.Pool, address netip.Addr) {
	r.Addresses = append(r.Addresses, netip.PrefixFrom(address, pool.Subnet.Bits()))
	for _, destination := range pool.Routes {
		r.Routes = append(r.Routes, Route{destination, pool.Gateway})
	}
	for _, server := range pool.Nameservers {
		if !slices.Contains(r.Nameservers, server) {
			r.Nameservers = append(r.Nameservers, server)
		}
	}
}

// choose returns the address that the owner already has, or a free one in the node's blocks for the consumer: the
// reserved one, or the earliest released one.
func (a *Allocator) choose(i item, owner Owner) (chosen netip.Addr, isNew bool, err error) {
	for address, o := range a.used {
		if o != owner || !i.accepts(address) || i.mayAvoid() && a.avoids(address) {
			continue
		}
		if node, lost := a.lost[address]; lost {
			return chosen, false, fmt.Errorf("the link of the pod has address %s: %s: delete the pod to get another",
				address.IP, LostReason(node))
		}
		return address.IP, false, nil
	}
	if i.reserved.IsValid() {
		return a.chooseReserved(i)
	}
	var since time.Time
	a.eachFree(i, func(address Address) {
		if at := a.released[address]; !chosen.IsValid() || at.Before(since) {
			chosen, since = address.IP, at
		}
	})
	if !chosen.IsValid() {
		return chosen, false, noFreeAddressError{i}
	}
	return chosen, true, nil
}

// accepts reports whether an address satisfies the item.
func (i item) accepts(address Address) bool {
	if address.Network != i.pool.Network || !i.pool.Addresses.Contains(address.IP) {
		return false
	}
	return !i.reserved.IsValid() || address.IP == i.reserved
}

// mayAvoid reports whether the item can get another address instead of an avoided one.
func (i item) mayAvoid() bool { return !i.reserved.IsValid() && i.consumer.kind != keepingPod }

// chooseReserved returns the reserved address if it is free and in one of the node's blocks.
func (a *Allocator) chooseReserved(i item) (chosen netip.Addr, isNew bool, err error) {
	address := Address{i.pool.Network, i.reserved}
	if other, inUse := a.used[address]; inUse {
		return chosen, false, fmt.Errorf("AddressPool %s: %w: pod %s on this node has %s: delete that pod or "+
			"change the claim", i.pool.Name, errInUse, other.Pod, i.reserved)
	}
	if a.withheld[address] {
		return chosen, false, fmt.Errorf("AddressPool %s: a link on this node may have address %s: its record cannot be "+
			"read: delete the pods of the claim that %s names", i.pool.Name, i.reserved, a.unreadableText())
	}
	if !a.has(address) {
		return chosen, false, noFreeAddressError{i}
	}
	return i.reserved, true, nil
}

// eachFree calls f for each free, unreserved address in the node's blocks for an item's consumer.
func (a *Allocator) eachFree(i item, f func(Address)) {
	for _, b := range a.blocks {
		if b.object.Spec.Pool != i.pool.Name || consumerOf(b.object) != i.consumer {
			continue
		}
		b.each(func(address Address) {
			avoided := i.mayAvoid() && a.avoids(address)
			if !a.isInUse(address) && !avoided && !i.pool.Reserved.Contains(address.IP) {
				f(address)
			}
		})
	}
}

// free returns the number of free, unreserved addresses in the node's blocks for an item's consumer.
func (a *Allocator) free(i item) (n int) {
	a.eachFree(i, func(Address) { n++ })
	return n
}

// Release frees an attachment's addresses. The attachment's record must no longer exist, or the caller must call
// Assign next, which replaces the addresses in the record. Addresses that were assigned to another attachment in the
// meantime are not affected.
func (a *Allocator) Release(owner Owner, addresses ...Address) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, address := range addresses {
		a.ended = append(a.ended, endedAddress{owner, address, time.Now()})
		a.askMaintenance()
	}
}

// avoidTime is how long an address that another host has is not assigned. The driver asks
// the network again before, or after, it assigns the address the next time.
const avoidTime = 10 * time.Minute

// Avoid keeps an address from being assigned for some minutes, because another host on the network has it. An
// attachment with the address keeps it unless Assign is called for it again.
func (a *Allocator) Avoid(address Address) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(a.avoided, func(_ Address, until time.Time) bool { return now.After(until) })
	a.avoided[address] = now.Add(avoidTime)
}

// avoids reports whether an address must currently not be assigned.
func (a *Allocator) avoids(address Address) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	until, avoided := a.avoided[address]
	return avoided && !time.Now().After(until)
}

// avoidedIn returns the addresses of a pool that must currently not be assigned.
func (a *Allocator) avoidedIn(pool *addresspool.Pool) (avoided []netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	for address, until := range a.avoided {
		if address.Network == pool.Network && pool.Addresses.Contains(address.IP) && now.Before(until) {
			avoided = append(avoided, address.IP)
		}
	}
	slices.SortFunc(avoided, netip.Addr.Compare)
	return avoided
}

func (a *Allocator) askMaintenance() {
	select {
	case a.maintain <- struct{}{}:
	default: // one request is pending
	}
}

// Defaults returns the names of a network's default pools for a namespace's pods.
func (a *Allocator) Defaults(ctx context.Context, networkName, namespace string) ([]string, error) {
	return a.pools.defaults(ctx, networkName, namespace)
}

// Gateways returns the gateways of a network's pools. known is false until Run has received the pools.
func (a *Allocator) Gateways(networkName string) (gateways []netip.Addr, known bool) {
	return a.pools.gateways(networkName)
}

// NetworkOf returns the network of pools, which must all belong to the same one.
func (a *Allocator) NetworkOf(ctx context.Context, pools []string) (string, error) {
	return a.pools.networkOf(ctx, pools)
}

// HasPool reports whether one of the network's pools has one of the addresses.
func (a *Allocator) HasPool(ctx context.Context, networkName string, addresses []netip.Addr) (bool, error) {
	for _, address := range addresses {
		if pool, err := a.pools.containing(ctx, networkName, address); err != nil || pool != nil {
			return err == nil, err
		}
	}
	return false, nil
}

// CheckStatic returns an error if one of the network's pools may assign one of the addresses to another pod.
func (a *Allocator) CheckStatic(ctx context.Context, networkName string, addresses []netip.Prefix) error {
	return a.pools.checkStatic(ctx, networkName, addresses)
}

// Check returns an error unless the pools exist, belong to the network, serve the namespace and the node,
// and differ in their IP family.
func (a *Allocator) Check(ctx context.Context, networkName, namespace string, names []string) error {
	return a.pools.check(ctx, networkName, namespace, names)
}
