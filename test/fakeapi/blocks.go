// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/watch"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
)

// blocks stores the AddressBlocks. Unlike the tracker of the fake clientset, it has the features that the
// assignment of addresses depends on: preconditions on resource versions and UIDs, field selectors, times of
// creation in whole seconds, and watches that start at a resource version.
type blocks struct {
	mu      sync.Mutex
	objects map[string]*network.AddressBlock
	log     []blockChange // the change to version i+1 has the index i
	changed chan struct{} // closed at the next change
}

// blockChange is a change of a block. before is nil if it was created, and after if it was deleted.
type blockChange struct{ before, after *network.AddressBlock }

func newBlocks() *blocks {
	return &blocks{objects: map[string]*network.AddressBlock{}, changed: make(chan struct{})}
}

var blockResource = schema.GroupResource{Group: network.GroupName, Resource: network.BlockResource}

// version returns the current resource version. The caller holds b.mu.
func (b *blocks) version() string { return strconv.Itoa(len(b.log)) }

// put stores a change. The caller holds b.mu.
func (b *blocks) put(name string, after *network.AddressBlock) {
	change := blockChange{before: b.objects[name]}
	delete(b.objects, name)
	if after != nil {
		change.after = after.DeepCopy()
		change.after.ResourceVersion = strconv.Itoa(len(b.log) + 1)
		b.objects[name] = change.after
	}
	b.log = append(b.log, change)
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *blocks) list(selector fields.Selector) *network.AddressBlockList {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := &network.AddressBlockList{ListMeta: metav1.ListMeta{ResourceVersion: b.version()}}
	for _, name := range slices.Sorted(maps.Keys(b.objects)) {
		if isSelected(b.objects[name], selector) {
			list.Items = append(list.Items, *b.objects[name].DeepCopy())
		}
	}
	return list
}

func isSelected(b *network.AddressBlock, selector fields.Selector) bool {
	return b != nil && selector.Matches(fields.Set{"spec.node": b.Spec.Node, "spec.network": b.Spec.Network})
}

func (b *blocks) create(object *network.AddressBlock) (*network.AddressBlock, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.objects[object.Name] != nil {
		return nil, apierrors.NewAlreadyExists(blockResource, object.Name)
	}
	created := object.DeepCopy()
	created.UID, created.CreationTimestamp = uuid.NewUUID(), metav1.Now().Rfc3339Copy()
	b.put(object.Name, created)
	return b.objects[object.Name].DeepCopy(), nil
}

func (b *blocks) update(object *network.AddressBlock) (*network.AddressBlock, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	current := b.objects[object.Name]
	if current == nil {
		return nil, apierrors.NewNotFound(blockResource, object.Name)
	}
	if object.UID != current.UID || object.ResourceVersion != current.ResourceVersion {
		return nil, apierrors.NewConflict(blockResource, object.Name, errors.New("the object has been modified"))
	}
	b.put(object.Name, object)
	return b.objects[object.Name].DeepCopy(), nil
}

func (b *blocks) delete(name string, o metav1.DeleteOptions) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	current := b.objects[name]
	if current == nil {
		return apierrors.NewNotFound(blockResource, name)
	}
	if o.Preconditions != nil && o.Preconditions.UID != nil && *o.Preconditions.UID != current.UID {
		return apierrors.NewConflict(blockResource, name, fmt.Errorf("the UID in the record is %s", current.UID))
	}
	b.put(name, nil)
	return nil
}

// deleteWhere deletes the blocks if selected returns true for them.
func (b *blocks) deleteWhere(selected func(*network.AddressBlock) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for name, object := range maps.Clone(b.objects) {
		if selected(object) {
			b.put(name, nil)
		}
	}
}

// move deletes the blocks of a node, and creates blocks of another node with their addresses.
func (b *blocks) move(from, to string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for name, object := range maps.Clone(b.objects) {
		if object.Spec.Node != from {
			continue
		}
		moved := object.DeepCopy()
		moved.Spec.Node, moved.UID = to, uuid.NewUUID()
		b.put(name, nil)
		b.put(name, moved)
	}
}

// events calls send for each change after a version, until ctx ends or send returns an error.
func (b *blocks) events(
	ctx context.Context, version int, selector fields.Selector, send func(watch.EventType, *network.AddressBlock) error,
) {
	for {
		b.mu.Lock()
		changes, changed := slices.Clone(b.log[min(version, len(b.log)):]), b.changed
		b.mu.Unlock()
		for _, c := range changes {
			version++
			kind, object := c.event(version, selector)
			if object == nil {
				continue
			}
			if send(kind, object) != nil {
				return
			}
		}
		if len(changes) > 0 {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// event returns the event that a watch with a selector sends for the change to a
// version, or a nil block.
func (c blockChange) event(version int, selector fields.Selector) (watch.EventType, *network.AddressBlock) {
	before, after := isSelected(c.before, selector), isSelected(c.after, selector)
	switch {
	case before && after:
		return watch.Modified, c.after
	case after:
		return watch.Added, c.after
	case before:
		gone := c.before.DeepCopy()
		gone.ResourceVersion = strconv.Itoa(version)
		return watch.Deleted, gone
	default:
		return "", nil
	}
}

// do performs a request for AddressBlocks other than a watch.
func (b *blocks) do(r *http.Request, name string, body []byte, decode func([]byte) (runtime.Object, error)) (
	runtime.Object, error,
) {
	selector, err := selectorOf(r)
	if err != nil {
		return nil, err
	}
	switch {
	case r.Method == http.MethodGet && name == "":
		return b.list(selector), nil
	case r.Method == http.MethodDelete:
		var o metav1.DeleteOptions
		if err := json.Unmarshal(body, &o); err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		return &metav1.Status{Status: metav1.StatusSuccess}, b.delete(name, o)
	}
	decoded, err := decode(body)
	object, ok := decoded.(*network.AddressBlock)
	switch {
	case err != nil || !ok:
		return nil, apierrors.NewBadRequest(fmt.Sprintf("not an AddressBlock: %v", err))
	case r.Method == http.MethodPost:
		return b.create(object)
	case r.Method == http.MethodPut:
		return b.update(object)
	}
	return nil, apierrors.NewMethodNotSupported(blockResource, r.Method)
}

func selectorOf(r *http.Request) (fields.Selector, error) {
	selector, err := fields.ParseSelector(r.URL.Query().Get("fieldSelector"))
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	return selector, nil
}
