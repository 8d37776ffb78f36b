// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// The Node owns the ResourceSlices of its plugin. The helper reads the owner's UID once. If the Node is deleted and
// registered again while the plugin runs, the Kubernetes garbage collector deletes the slices, again and again,
// because the helper creates them with the deleted Node's UID. The scheduler then does not find any devices on the
// node. The helper does not have a function to set another owner, so the plugin exits, and the kubelet restarts it.
// Pods keep their shares.

// errNodeReplaced means that the Node is not the one that owns the plugin's ResourceSlices: its UID differs.
var errNodeReplaced = errors.New("the plugin must start again to publish its devices for the new Node")

// Time between two watches of the Node. Up to as much again is added at random, because an API server that stops ends
// all nodes' watches at the same time. It ends each watch after about an hour in any case.
const (
	minNodeDelay = time.Second
	maxNodeDelay = 30 * time.Second
	// nodeDelayReset is how long it takes until the delay is reset to the minimum.
	nodeDelayReset = 2 * time.Minute
)

// nodeWatch notices a new UID of the Node. It does not make requests while the watch is open.
type nodeWatch struct {
	client       metadata.Interface // nil if the plugin does not watch the Node
	name         string
	degradations *degradations
	// uid is the owner of the ResourceSlices. If it could not be read when the plugin started, it is "" until the first
	// event, and then the first UID that the watch saw.
	uid types.UID
}

// nodeReadTimeout limits how long a starting plugin waits for the Node. The helper reads the Node later, too.
const nodeReadTimeout = 5 * time.Second

// readOwner returns the UID of the Node, which the helper makes the owner of the ResourceSlices, or "" if it cannot be
// read or the plugin does not watch the Node.
func (w *nodeWatch) readOwner(ctx context.Context) types.UID {
	if w.client == nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, nodeReadTimeout)
	defer cancel()
	uid, err := w.readUID(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to read the Node; retrying when devices are published")
	}
	return uid
}

// readUID returns the Node's current UID. Unlike watch events, it is not from a cache.
func (w *nodeWatch) readUID(ctx context.Context) (types.UID, error) {
	nodes := w.client.Resource(corev1.SchemeGroupVersion.WithResource("nodes"))
	node, err := nodes.Get(ctx, w.name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	return node.UID, nil
}

// run watches the Node until ctx ends. It returns an error if the Node was registered again. It
// waits for a Node that does not exist. uid is the owner of the ResourceSlices, or "" if it is not known.
func (w *nodeWatch) run(ctx context.Context, uid types.UID) error {
	if w.client == nil {
		return nil
	}
	w.uid = uid
	backoff := wait.Backoff{Duration: minNodeDelay, Factor: 2, Jitter: 1, Steps: 6, Cap: maxNodeDelay}
	delay := backoff.DelayWithReset(clock.RealClock{}, nodeDelayReset)
	err := delay.Until(ctx, true, true, func(ctx context.Context) (done bool, err error) {
		err = w.follow(ctx)
		if errors.Is(err, errNodeReplaced) {
			return true, err
		}
		if err != nil && ctx.Err() == nil {
			w.report(ctx, err)
		}
		return false, nil
	})
	if errors.Is(err, errNodeReplaced) {
		return err
	}
	return nil // ctx ended
}

// follow watches the Node until the API server ends the watch.
func (w *nodeWatch) follow(ctx context.Context) error {
	nodes := w.client.Resource(corev1.SchemeGroupVersion.WithResource("nodes"))
	// With this resource version, the watch begins with the current Node, without requiring permission to list Nodes,
	// and the API server answers from its cache.
	stream, err := nodes.Watch(ctx, metav1.ListOptions{
		ResourceVersion: "0",
		FieldSelector:   fields.OneTermEqualSelector(metav1.ObjectNameField, w.name).String(),
	})
	if err != nil {
		return fmt.Errorf("watch Node %s: %w", w.name, err)
	}
	defer stream.Stop()
	w.degradations.end(v1alpha1.DegradedNodeNotWatched)
	for {
		select {
		case <-ctx.Done():
			return nil
		case event, open := <-stream.ResultChan():
			if !open {
				return nil
			}
			if err := w.handle(ctx, event); err != nil {
				return err
			}
		}
	}
}

// handle returns an error if the watch failed, or if the Node has a new UID.
func (w *nodeWatch) handle(ctx context.Context, event watch.Event) error {
	switch event.Type {
	case watch.Error:
		return fmt.Errorf("watch Node %s: %w", w.name, apierrors.FromObject(event.Object))
	case watch.Added, watch.Modified:
	default: // a deleted Node has no new UID yet
		return nil
	}
	node, err := meta.Accessor(event.Object)
	if err != nil {
		return fmt.Errorf("watch Node %s: %w", w.name, err)
	}
	uid := node.GetUID()
	if w.uid == "" {
		w.uid = uid
	}
	if uid == "" || uid == w.uid {
		return nil
	}
	// The event may come from the cache of an API server that lags behind.
	uid, err = w.readUID(ctx)
	switch {
	case apierrors.IsNotFound(err): // it is being registered again
		return nil
	case err != nil:
		return fmt.Errorf("read Node %s: %w", w.name, err)
	case uid == "" || uid == w.uid:
		return nil
	}
	return fmt.Errorf("the Node %s was deleted and registered again: its UID is %s, and was %s: %w", w.name, uid, w.uid,
		errNodeReplaced)
}

// report reports that the Node is not watched.
func (w *nodeWatch) report(ctx context.Context, err error) {
	if apierrors.IsForbidden(err) {
		w.degradations.report(ctx, v1alpha1.DegradedNodeNotWatched, "if the Node is deleted and registered again, the "+
			"scheduler finds no devices on it until the plugin restarts; grant the plugin the right to watch Nodes, as "+
			"the chart does", err)
		return
	}
	klog.FromContext(ctx).Error(err, "Failed to watch the Node; retrying")
}
