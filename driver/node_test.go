// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2/ktesting"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// nodeWatches is an API server that answers each watch of the Node with the next item of streams.
type nodeWatches struct {
	streams  chan nodeStream
	requests atomic.Int32
	refuse   atomic.Bool
	uid      atomic.Value // of the Node, which does not exist with ""
}

// watchNode restarts the plugin, which then watches the Node with the UID. ended receives the result of the plugin.
func (p *plugin) watchNode(uid string) (api *nodeWatches, ended <-chan error) {
	p.t.Helper()
	p.stop()
	api = &nodeWatches{streams: make(chan nodeStream, 2)}
	client := metadatafake.NewSimpleMetadataClient(metadatafake.NewTestScheme())
	client.PrependWatchReactor("nodes", func(a clienttesting.Action) (bool, watch.Interface, error) {
		api.requests.Add(1)
		action, ok := a.(clienttesting.WatchAction)
		if !ok || action.GetWatchRestrictions().Fields.String() != "metadata.name="+nodeName {
			return true, nil, errors.New("the plugin does not select its own Node")
		}
		if api.refuse.Load() {
			return true, nil, apierrors.NewForbidden(a.GetResource().GroupResource(), "", nil)
		}
		return true, <-api.streams, nil
	})
	client.PrependReactor("get", "nodes", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if uid := api.uid.Load(); uid != "" {
			return true, nodeWithUID(types.UID(fmt.Sprint(uid))), nil
		}
		return true, nil, apierrors.NewNotFound(a.GetResource().GroupResource(), nodeName)
	})
	api.uid.Store(uid)
	p.options.Metadata = client
	node := p.build(oneNetwork)
	_, ctx := ktesting.NewTestContext(p.t)
	ctx, cancel := context.WithCancel(ctx)
	wait, err := p.Start(ctx)
	if err != nil {
		cancel()
		p.t.Fatal(err)
	}
	result, stopped := make(chan error, 1), make(chan struct{})
	go func() {
		result <- wait()
		close(stopped)
	}()
	p.stop = func() {
		cancel()
		<-stopped
		_ = node.Close()
	}
	return api, result
}

// nodeStream is an open watch. It is unbuffered: the plugin has handled an event when it receives the next one.
type nodeStream chan watch.Event

func (s nodeStream) ResultChan() <-chan watch.Event { return s }

func (s nodeStream) Stop() {}

// open answers the next watch.
func (w *nodeWatches) open() nodeStream {
	stream := make(nodeStream)
	w.streams <- stream
	return stream
}

func (s nodeStream) send(t *testing.T, kind watch.EventType, object runtime.Object) {
	t.Helper()
	select {
	case s <- watch.Event{Type: kind, Object: object}:
	case <-time.After(timeout):
		t.Fatalf("the plugin does not watch the Node: it has not received the event %s", kind)
	}
}

func nodeWithUID(uid types.UID) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: corev1.SchemeGroupVersion.String(), Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: uid},
	}
}

// wantEnd fails the test unless the plugin ends with an error that names the Node and both UIDs.
func wantEnd(t *testing.T, ended <-chan error) {
	t.Helper()
	select {
	case err := <-ended:
		for _, text := range []string{"Node " + nodeName + " was deleted and registered again", "old", "new"} {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("the plugin ended with %v, want an error with %q", err, text)
			}
		}
	case <-time.After(timeout):
		t.Error("the plugin runs, and the garbage collector deletes its ResourceSlices")
	}
}

func TestWatchNode(t *testing.T) {
	for name, c := range map[string]struct {
		first    string // UID of the Node when the plugin starts
		events   []watch.Event
		last     string // UID of the Node when the plugin reads it again
		wantEnds bool
	}{
		"registered again": {"", []watch.Event{
			{Type: watch.Added, Object: nodeWithUID("old")},
			{Type: watch.Deleted, Object: nodeWithUID("old")},
			{Type: watch.Added, Object: nodeWithUID("new")},
		}, "new", true},
		"changed to another Node between two events": {"", []watch.Event{
			{Type: watch.Added, Object: nodeWithUID("old")},
			{Type: watch.Modified, Object: nodeWithUID("new")},
		}, "new", true},
		"registered again before the first event": {"old", []watch.Event{
			{Type: watch.Added, Object: nodeWithUID("new")},
		}, "new", true},
		"an API server sends a former Node from its cache": {"old", []watch.Event{
			{Type: watch.Added, Object: nodeWithUID("former")},
		}, "old", false},
		"deleted before the plugin reads it again": {"old", []watch.Event{
			{Type: watch.Added, Object: nodeWithUID("new")},
		}, "", false},
		"changed": {"old", []watch.Event{
			{Type: watch.Added, Object: nodeWithUID("old")},
			{Type: watch.Modified, Object: nodeWithUID("old")},
		}, "old", false},
		"deleted": {"old", []watch.Event{
			{Type: watch.Added, Object: nodeWithUID("old")},
			{Type: watch.Deleted, Object: nodeWithUID("old")},
		}, "", false},
		"registered after the plugin started": {"", []watch.Event{
			{Type: watch.Deleted, Object: nodeWithUID("old")},
			{Type: watch.Added, Object: nodeWithUID("new")},
		}, "new", false},
		"without a UID": {"", []watch.Event{
			{Type: watch.Added, Object: nodeWithUID("")},
			{Type: watch.Modified, Object: nodeWithUID("new")},
			{Type: watch.Modified, Object: nodeWithUID("")},
		}, "new", false},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlugin(t)
			api, ended := p.watchNode(c.first)
			api.uid.Store(c.last)
			stream := api.open()
			for _, e := range c.events {
				stream.send(t, e.Type, e.Object)
			}
			if c.wantEnds {
				wantEnd(t, ended)
				return
			}
			stream.send(t, watch.Bookmark, nodeWithUID("")) // received after the plugin has handled the others
			p.stop()
			if err := <-ended; err != nil {
				t.Errorf("the plugin ended: %v", err)
			}
			if n := api.requests.Load(); n != 1 {
				t.Errorf("the plugin made %d requests, want 1", n)
			}
		})
	}
}

// The API server ends each watch after some time.
func TestWatchNode_registeredAgainBetweenTwoWatches(t *testing.T) {
	p := newPlugin(t)
	api, ended := p.watchNode("old")
	first := api.open()
	first.send(t, watch.Added, nodeWithUID("old"))
	api.uid.Store("new")
	close(first)
	api.open().send(t, watch.Added, nodeWithUID("new"))
	wantEnd(t, ended)
}

func TestWatchNode_forbidden(t *testing.T) {
	p := newPlugin(t)
	registry := prometheus.NewRegistry()
	p.options.Metrics = registry
	api, ended := p.watchNode("old")
	stream := api.open()
	stream.send(t, watch.Added, nodeWithUID("old"))
	api.refuse.Store(true)
	stream.send(t, watch.Error, &metav1.Status{Status: metav1.StatusFailure, Message: "the API server stops"})
	eventually.Eventually(t, timeout, "the metric shows that the Node is not watched", func() error {
		return wantDegraded(t, registry, v1alpha1.DegradedNodeNotWatched, 1)
	})
	api.refuse.Store(false)
	api.open().send(t, watch.Added, nodeWithUID("old"))
	if err := wantDegraded(t, registry, v1alpha1.DegradedNodeNotWatched, 0); err != nil {
		t.Error(err)
	}
	p.stop()
	if err := <-ended; err != nil {
		t.Errorf("the plugin ended: %v", err)
	}
}
