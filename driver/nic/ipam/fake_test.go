// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
)

// fakeAPI is an API server in memory. Like a real one, it orders all requests.
type fakeAPI struct {
	mu       sync.Mutex
	pools    map[string]*network.AddressPool
	blocks   map[string]*network.AddressBlock
	watchers []*watch.RaceFreeFakeWatcher
	// blockWatchers are the watches of blocks.
	blockWatchers []blockWatch
	version       int
	written       int
	// reportShort makes it report, as the controller does, that a pool is short.
	reportShort bool
	// faults lets requests fail before or after they are carried out.
	faults *rand.Rand
	// gate is called with "list", "create", "update", or "delete" before each request for blocks, which
	// fails with its error.
	gate func(operation string) error
	// requests counts the requests of plugins that may be killed.
	requests atomic.Int64
}

func newFakeAPI(pools ...network.AddressPool) *fakeAPI {
	f := &fakeAPI{pools: map[string]*network.AddressPool{}, blocks: map[string]*network.AddressBlock{}}
	for i := range pools {
		f.pools[pools[i].Name] = &pools[i]
	}
	return f
}

var errInjected = errors.New("injected failure")

// request carries out a request that changes something, unless a fault is due.
func (f *fakeAPI) request(do func() error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	before, after := f.fault(), f.fault()
	if before {
		return errInjected
	}
	f.version++
	f.written++
	err := do()
	f.updateShort()
	if after && err == nil {
		return errInjected
	}
	return err
}

func (f *fakeAPI) fault() bool { return f.faults != nil && f.faults.IntN(20) == 0 }

// setIntercept sets what is called before each request for blocks.
func (f *fakeAPI) setIntercept(gate func(operation string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gate = gate
}

func (f *fakeAPI) pass(operation string) error {
	f.mu.Lock()
	gate := f.gate
	f.mu.Unlock()
	if gate == nil {
		return nil
	}
	return gate(operation)
}

// setFaults sets when requests fail.
func (f *fakeAPI) setFaults(faults *rand.Rand) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults = faults
}

// updateShort does what the controller does. The caller holds f.mu.
func (f *fakeAPI) updateShort() {
	if !f.reportShort {
		return
	}
	for name, object := range f.pools {
		pool, err := addresspool.Parse(object)
		if err != nil {
			continue
		}
		assigned := int64(0)
		for _, b := range f.blocks {
			if set, err := addresspool.ParseRanges(b.Spec.Ranges); err == nil && b.Spec.Pool == name {
				assigned += addresspool.Count(set).Int64()
			}
		}
		status := metav1.ConditionFalse
		if pool.IsShort(new(big.Int).Sub(addresspool.Count(pool.Addresses), big.NewInt(assigned))) {
			status = metav1.ConditionTrue
		}
		updated := object.DeepCopy()
		updated.Status.Conditions = []metav1.Condition{{Type: network.ConditionShort, Status: status}}
		updated.ResourceVersion = fmt.Sprint(f.version)
		f.pools[name] = updated
		for _, w := range f.watchers {
			w.Modify(updated)
		}
	}
}

// changePool does what an administrator does.
func (f *fakeAPI) changePool(name string, change func(*network.AddressPoolSpec)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	updated := f.pools[name].DeepCopy()
	change(&updated.Spec)
	updated.ResourceVersion = fmt.Sprint(f.version)
	f.pools[name] = updated
	for _, w := range f.watchers {
		w.Modify(updated)
	}
}

func (f *fakeAPI) ListPools(context.Context, metav1.ListOptions) (*network.AddressPoolList, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := &network.AddressPoolList{ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(f.version + 1)}}
	for _, name := range slices.Sorted(maps.Keys(f.pools)) {
		list.Items = append(list.Items, *f.pools[name])
	}
	return list, nil
}

func (f *fakeAPI) WatchPools(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := watch.NewRaceFreeFake()
	for _, p := range f.pools {
		w.Modify(p)
	}
	if o.SendInitialEvents != nil && *o.SendInitialEvents {
		w.Action(watch.Bookmark, &network.AddressPool{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: fmt.Sprint(f.version + 1),
			Annotations:     map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}})
	}
	f.watchers = append(f.watchers, w)
	return w, nil
}

func (f *fakeAPI) ListBlocks(_ context.Context, o metav1.ListOptions) (*network.AddressBlockList, error) {
	if err := f.pass("list"); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fault() {
		return nil, errInjected
	}
	list := &network.AddressBlockList{ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(f.version + 1)}}
	for _, b := range f.blocks {
		if isSelected(b, o) {
			list.Items = append(list.Items, *b.DeepCopy())
		}
	}
	return list, nil
}

func isSelected(b *network.AddressBlock, o metav1.ListOptions) bool {
	selector, err := fields.ParseSelector(o.FieldSelector)
	return err == nil && selector.Matches(fields.Set{"spec.node": b.Spec.Node, "spec.network": b.Spec.Network})
}

// blockWatch is a watch of blocks that were deleted.
type blockWatch struct {
	*watch.RaceFreeFakeWatcher
	options metav1.ListOptions
}

func (f *fakeAPI) WatchBlocks(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := blockWatch{watch.NewRaceFreeFake(), o}
	for _, b := range f.blocks {
		if isSelected(b, o) {
			w.Modify(b.DeepCopy())
		}
	}
	if o.SendInitialEvents != nil && *o.SendInitialEvents {
		w.Action(watch.Bookmark, &network.AddressBlock{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: fmt.Sprint(f.version + 1),
			Annotations:     map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}})
	}
	f.blockWatchers = append(f.blockWatchers, w)
	return w, nil
}

// notify sends an event of a block to the watches that select it. The caller holds f.mu.
func (f *fakeAPI) notify(b *network.AddressBlock, send func(*watch.RaceFreeFakeWatcher, runtime.Object)) {
	for _, w := range f.blockWatchers {
		if isSelected(b, w.options) && !w.IsStopped() {
			send(w.RaceFreeFakeWatcher, b.DeepCopy())
		}
	}
}

var blocks = schema.GroupResource{Group: network.GroupName, Resource: network.BlockResource}

func (f *fakeAPI) CreateBlock(_ context.Context, b *network.AddressBlock) (*network.AddressBlock, error) {
	if err := f.pass("create"); err != nil {
		return nil, err
	}
	created := b.DeepCopy()
	return created, f.request(func() error {
		if f.blocks[b.Name] != nil {
			return apierrors.NewAlreadyExists(blocks, b.Name)
		}
		created.UID, created.ResourceVersion = types.UID(fmt.Sprint("uid-", f.version)), fmt.Sprint(f.version)
		created.CreationTimestamp = metav1.Now().Rfc3339Copy() // whole seconds
		f.blocks[b.Name] = created.DeepCopy()
		f.notify(created, (*watch.RaceFreeFakeWatcher).Add)
		return nil
	})
}

func (f *fakeAPI) UpdateBlock(_ context.Context, b *network.AddressBlock) (*network.AddressBlock, error) {
	if err := f.pass("update"); err != nil {
		return nil, err
	}
	updated := b.DeepCopy()
	return updated, f.request(func() error {
		current := f.blocks[b.Name]
		if current == nil || current.UID != b.UID {
			return apierrors.NewNotFound(blocks, b.Name)
		}
		if current.ResourceVersion != b.ResourceVersion {
			return apierrors.NewConflict(blocks, b.Name, errors.New("the object has been modified"))
		}
		updated.ResourceVersion = fmt.Sprint(f.version)
		f.blocks[b.Name] = updated.DeepCopy()
		if updated.Spec.Node != current.Spec.Node { // it leaves and enters the watches of a node
			f.notify(current, (*watch.RaceFreeFakeWatcher).Delete)
			f.notify(updated, (*watch.RaceFreeFakeWatcher).Add)
		}
		return nil
	})
}

// mustCreate creates a block.
func (f *fakeAPI) mustCreate(t *testing.T, name string, spec network.AddressBlockSpec) {
	t.Helper()
	object := &network.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}
	if _, err := f.CreateBlock(t.Context(), object); err != nil {
		t.Fatal(err)
	}
}

// change changes a block.
func (f *fakeAPI) change(name string, change func(*network.AddressBlock)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	changed := f.blocks[name].DeepCopy()
	change(changed)
	changed.ResourceVersion = fmt.Sprint(f.version)
	f.blocks[name] = changed
}

// returnKept does what the controller does with the addresses that pods on a lost node keep.
func (f *fakeAPI) returnKept(node string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, b := range maps.Clone(f.blocks) {
		if b.Spec.Node != node || b.Spec.Pod == "" {
			continue
		}
		f.version++
		returned := b.DeepCopy()
		returned.Spec.Node, returned.ResourceVersion = "", fmt.Sprint(f.version)
		f.blocks[name] = returned
		f.notify(b, (*watch.RaceFreeFakeWatcher).Delete)
	}
}

// deleteReturned does what the controller does when a StatefulSet is deleted.
func (f *fakeAPI) deleteReturned() {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.blocks, func(_ string, b *network.AddressBlock) bool { return b.Spec.Node == "" })
	f.version++
	f.updateShort()
}

func (f *fakeAPI) DeleteBlock(_ context.Context, b *network.AddressBlock) error {
	if err := f.pass("delete"); err != nil {
		return err
	}
	return f.request(func() error {
		if current := f.blocks[b.Name]; current != nil && current.UID == b.UID {
			delete(f.blocks, b.Name)
			f.notify(current, (*watch.RaceFreeFakeWatcher).Delete)
		}
		return nil
	})
}

// deleteBlocksOf deletes the blocks of a node, as the controller does when the node is gone.
func (f *fakeAPI) deleteBlocksOf(node string) { f.moveBlocks(node, "") }

// moveBlocks deletes the blocks of a node and, in the same instant, creates blocks of
// another node with their addresses, unless its name is "".
func (f *fakeAPI) moveBlocks(from, to string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, b := range maps.Clone(f.blocks) {
		if b.Spec.Node != from {
			continue
		}
		delete(f.blocks, name)
		f.version++
		if to != "" {
			moved := b.DeepCopy()
			moved.Spec.Node, moved.ResourceVersion = to, fmt.Sprint(f.version)
			moved.UID = types.UID(fmt.Sprint("uid-", f.version))
			f.blocks[name] = moved
			f.notify(moved, (*watch.RaceFreeFakeWatcher).Add)
		}
		f.notify(b, (*watch.RaceFreeFakeWatcher).Delete)
	}
}

func (f *fakeAPI) writes() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.written
}

func (f *fakeAPI) allBlocks() (all []network.AddressBlock) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, b := range f.blocks {
		all = append(all, *b.DeepCopy())
	}
	return all
}

func (f *fakeAPI) nodeBlocks(node string) (names []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, b := range f.blocks {
		if b.Spec.Node == node {
			names = append(names, name)
		}
	}
	return names
}
