// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package addresspools validates AddressPools, reports their use, and returns the blocks
// of lost nodes and the addresses that deleted StatefulSets kept. Nodes do not need it to
// take addresses from the pools.
package addresspools

import (
	"context"
	"fmt"
	"math/big"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/retry"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
	"github.com/dra-shared/dra-driver-shared/internal/requeue"
)

// Reconciler writes the status of AddressPools, and deletes AddressBlocks of lost nodes. A node
// is lost if it no longer exists, or if an administrator has declared it out of service.
type Reconciler struct {
	Client client.Client
	Driver string
	Clock  clock.PassiveClock
	// Quarantine is the time from the loss of a node to the return of its blocks. The
	// machine may still be running, with pods that use the addresses.
	Quarantine time.Duration
}

// indexLost indexes AddressBlocks by lostKeys.
const indexLost = "dra-shared.lost"

// lostKeys returns one key for a block of a lost node, and none for others.
func lostKeys(o client.Object) []string {
	if _, lost := o.GetAnnotations()[network.NodeLostAnnotation]; lost {
		return []string{"true"}
	}
	return nil
}

// SetupWithManager registers the reconciler.
func (r *Reconciler) SetupWithManager(ctx context.Context, m ctrl.Manager) error {
	if err := m.GetFieldIndexer().IndexField(ctx, &network.AddressBlock{}, indexLost, lostKeys); err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(m).Named("addresspools").
		For(&network.AddressPool{}).
		Watches(&network.AddressPool{}, handler.EnqueueRequestsFromMapFunc(r.poolsOfNetwork)).
		Watches(&network.AddressBlock{}, handler.EnqueueRequestsFromMapFunc(poolOfBlock)).
		Watches(&corev1.Node{}, handler.EnqueueRequestsFromMapFunc(r.poolsOfNode),
			builder.WithPredicates(predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
				return isOutOfService(e.ObjectOld) != isOutOfService(e.ObjectNew)
			}})).
		Watches(&resourceapi.ResourceClaim{}, handler.EnqueueRequestsFromMapFunc(r.poolsOfLostNodes),
			builder.WithPredicates(predicate.Funcs{
				CreateFunc: func(event.CreateEvent) bool { return false },
				UpdateFunc: func(e event.UpdateEvent) bool { return isAllocated(e.ObjectOld) && !isAllocated(e.ObjectNew) },
			})).
		WatchesMetadata(&appsv1.StatefulSet{}, handler.EnqueueRequestsFromMapFunc(r.poolsOfStatefulSet),
			builder.WithPredicates(predicate.Funcs{
				CreateFunc: func(event.CreateEvent) bool { return false },
				UpdateFunc: func(event.UpdateEvent) bool { return false },
			})).
		WithOptions(retry.Options()).
		Complete(r)
}

func request(pool string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: pool}}
}

// poolOfBlock returns a request for the pool of a block.
func poolOfBlock(_ context.Context, o client.Object) []reconcile.Request {
	block, ok := o.(*network.AddressBlock)
	if !ok {
		return nil
	}
	return []reconcile.Request{request(block.Spec.Pool)}
}

// poolsOfNetwork returns requests for all pools of a pool's network: whether they
// overlap may have changed.
func (r *Reconciler) poolsOfNetwork(ctx context.Context, o client.Object) (requests []reconcile.Request) {
	pool, ok := o.(*network.AddressPool)
	if !ok {
		return nil
	}
	var all network.AddressPoolList
	if err := r.Client.List(ctx, &all); err != nil {
		return nil // the cache is shutting down
	}
	for i := range all.Items {
		if all.Items[i].Spec.Network == pool.Spec.Network {
			requests = append(requests, request(all.Items[i].Name))
		}
	}
	return requests
}

// poolsOfNode returns requests for the pools with blocks on a node.
func (r *Reconciler) poolsOfNode(ctx context.Context, o client.Object) (requests []reconcile.Request) {
	var blocks network.AddressBlockList
	if err := r.Client.List(ctx, &blocks); err != nil {
		return nil // the cache is shutting down
	}
	for i := range blocks.Items {
		if blocks.Items[i].Spec.Node == o.GetName() {
			requests = append(requests, request(blocks.Items[i].Spec.Pool))
		}
	}
	return requests
}

// poolsOfLostNodes returns requests for the pools with blocks on lost nodes. A claim has lost its devices, which may
// have been on such a node.
func (r *Reconciler) poolsOfLostNodes(ctx context.Context, _ client.Object) (requests []reconcile.Request) {
	var blocks network.AddressBlockList
	if err := r.Client.List(ctx, &blocks, client.MatchingFields{indexLost: "true"}); err != nil {
		return nil // the cache is shutting down
	}
	for i := range blocks.Items {
		requests = append(requests, request(blocks.Items[i].Spec.Pool))
	}
	return requests
}

func isAllocated(o client.Object) bool {
	claim, ok := o.(*resourceapi.ResourceClaim)
	return ok && claim.Status.Allocation != nil
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (result ctrl.Result, err error) {
	var blocks network.AddressBlockList
	if err := r.Client.List(ctx, &blocks); err != nil {
		return result, err
	}
	own := slices.DeleteFunc(blocks.Items, func(b network.AddressBlock) bool { return b.Spec.Pool != req.Name })
	if result.RequeueAfter, err = r.returnLost(ctx, own); err != nil {
		return result, err
	}
	if err := r.returnKept(ctx, own); err != nil {
		return result, err
	}
	var pool network.AddressPool
	if err := r.Client.Get(ctx, req.NamespacedName, &pool); err != nil {
		return result, client.IgnoreNotFound(err)
	}
	var others network.AddressPoolList
	if err := r.Client.List(ctx, &others); err != nil {
		return result, err
	}
	status := Status(&pool, others.Items, own, r.Clock.Now())
	if equality.Semantic.DeepEqual(status, pool.Status) {
		return result, nil
	}
	updated := pool.DeepCopy()
	updated.Status = status
	patch := client.MergeFromWithOptions(&pool, client.MergeFromWithOptimisticLock{})
	return result, r.Client.Status().Patch(ctx, updated, patch)
}

// Status returns the status of a pool with the blocks. others are the pools of the
// cluster.
func Status(
	object *network.AddressPool, others []network.AddressPool, blocks []network.AddressBlock, now time.Time,
) network.AddressPoolStatus {
	status := *object.Status.DeepCopy()
	assigned, kept := new(big.Int), new(big.Int)
	for i := range blocks {
		set, _ := addresspool.ParseRanges(blocks[i].Spec.Ranges)
		assigned.Add(assigned, addresspool.Count(set))
		if blocks[i].Spec.Pod != "" {
			kept.Add(kept, addresspool.Count(set))
		}
	}
	status.Assigned, status.Kept, status.Blocks = assigned.Int64(), kept.Int64(), int64(len(blocks))
	pool, err := addresspool.Parse(object)
	if err != nil {
		setCondition(&status, network.ConditionReady, false, network.ReasonInvalid, err.Error(), now)
		return status
	}
	total := addresspool.Count(pool.Addresses)
	status.Addresses = total.String()
	if other, common := overlapping(object, pool, others); other != "" {
		setCondition(&status, network.ConditionReady, false, network.ReasonOverlaps, fmt.Sprintf(
			"AddressPool %s of network %s has %s too: delete one of the pools, or create this one again without the addresses",
			other, pool.Network, common), now)
	} else {
		setCondition(&status, network.ConditionReady, true, network.ReasonValid, "the pool is valid", now)
	}
	if pool.IsShort(unassigned(pool, blocks)) {
		setCondition(&status, network.ConditionShort, true, network.ReasonAssigned, fmt.Sprintf(
			"%s of %s addresses are assigned to nodes, including addresses that they do not use", assigned, total), now)
	} else {
		setCondition(&status, network.ConditionShort, false, network.ReasonAvailable,
			"the pool has addresses for further blocks", now)
	}
	return status
}

// unassigned returns the number of addresses that nodes can take for any pod.
func unassigned(pool *addresspool.Pool, blocks []network.AddressBlock) *big.Int {
	var ranges []string
	for i := range blocks {
		ranges = append(ranges, blocks[i].Spec.Ranges...)
	}
	assigned, _ := addresspool.ParseRanges(ranges)
	return addresspool.Count(addresspool.Difference(addresspool.Difference(pool.Addresses, pool.Reserved), assigned))
}

func setCondition(s *network.AddressPoolStatus, kind string, holds bool, reason, message string, now time.Time) {
	c := metav1.Condition{
		Type: kind, Status: metav1.ConditionFalse, Reason: reason, Message: message, LastTransitionTime: metav1.NewTime(now),
	}
	if holds {
		c.Status = metav1.ConditionTrue
	}
	meta.SetStatusCondition(&s.Conditions, c)
}

// overlapping returns the name of an older pool of the network that has some of the
// addresses, or "", and the first range that both have.
func overlapping(
	object *network.AddressPool, pool *addresspool.Pool, others []network.AddressPool,
) (name, common string) {
	for i := range others {
		other := &others[i]
		if other.UID == object.UID || other.Spec.Network != pool.Network || !isOlder(other, object) {
			continue
		}
		if p, err := addresspool.Parse(other); err == nil && p.Addresses.Overlaps(pool.Addresses) {
			only := addresspool.Difference(pool.Addresses, p.Addresses)
			return other.Name, addresspool.FormatRanges(addresspool.Difference(pool.Addresses, only))[0]
		}
	}
	return "", ""
}

func isOlder(a, b *network.AddressPool) bool {
	if a.CreationTimestamp.Equal(&b.CreationTimestamp) {
		return a.Name < b.Name
	}
	return a.CreationTimestamp.Before(&b.CreationTimestamp)
}

// returnLost marks blocks of lost nodes, and deletes them after the quarantine if no
// allocated claim names the node. It returns the requeue interval; 0 means that events suffice.
func (r *Reconciler) returnLost(ctx context.Context, blocks []network.AddressBlock) (again time.Duration, err error) {
	for i := range blocks {
		b := &blocks[i]
		if b.Spec.Node == "" {
			continue // a pod that is on no node keeps the address
		}
		lost, err := r.isLost(ctx, b.Spec.Node)
		if err != nil {
			return 0, err
		}
		since, marked := b.Annotations[network.NodeLostAnnotation]
		switch {
		case !lost && marked:
			err = r.annotate(ctx, b, "")
		case lost && !marked:
			err = r.annotate(ctx, b, r.Clock.Now().UTC().Format(time.RFC3339))
			again = requeue.Soonest(again, r.Quarantine)
		case lost:
			var wait time.Duration
			wait, err = r.returnBlock(ctx, b, since)
			again = requeue.Soonest(again, wait)
		}
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) { // an event of the block follows
			return 0, err
		}
	}
	return again, nil
}

// isLost reports whether a node does not exist or is out of service.
func (r *Reconciler) isLost(ctx context.Context, name string) (bool, error) {
	var node corev1.Node
	err := r.Client.Get(ctx, types.NamespacedName{Name: name}, &node)
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	return isOutOfService(&node), err
}

// isOutOfService reports whether an administrator has declared that a node's machine no longer runs (KEP-2268,
// non-graceful node shutdown).
func isOutOfService(o client.Object) bool {
	node, ok := o.(*corev1.Node)
	return ok && slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool {
		return t.Key == corev1.TaintNodeOutOfService
	})
}

// annotate writes or, if the value is empty, removes the annotation of a lost node.
func (r *Reconciler) annotate(ctx context.Context, b *network.AddressBlock, value string) error {
	updated := b.DeepCopy()
	delete(updated.Annotations, network.NodeLostAnnotation)
	if value != "" {
		if updated.Annotations == nil {
			updated.Annotations = map[string]string{}
		}
		updated.Annotations[network.NodeLostAnnotation] = value
	}
	return r.Client.Patch(ctx, updated, client.MergeFrom(b))
}

// returnBlock deletes the block of a node that was lost at the given time, if it may. It returns the requeue interval;
// 0 means that events suffice.
func (r *Reconciler) returnBlock(ctx context.Context, b *network.AddressBlock, since string) (time.Duration, error) {
	lost, err := time.Parse(time.RFC3339, since)
	if err != nil {
		return 0, r.annotate(ctx, b, "") // the next event marks the block again
	}
	if passed := r.Clock.Since(lost); passed < r.Quarantine {
		return r.Quarantine - passed, nil
	}
	if inUse, err := r.isNamed(ctx, b.Spec.Node); err != nil || inUse {
		return 0, err
	}
	if b.Spec.Pod != "" {
		return 0, r.takeFromNode(ctx, b)
	}
	// The node may have returned since, which another controller has seen: it has removed the annotation.
	unchanged := client.Preconditions{UID: &b.UID, ResourceVersion: &b.ResourceVersion}
	if err := r.Client.Delete(ctx, b, unchanged); err != nil {
		return 0, err
	}
	klog.FromContext(ctx).Info("Deleted the address block of a lost node", "block", b.Name, "node", b.Spec.Node,
		"addressPool", b.Spec.Pool)
	return 0, nil
}

// isNamed reports whether an allocated claim has a device of the node.
func (r *Reconciler) isNamed(ctx context.Context, node string) (bool, error) {
	var claims resourceapi.ResourceClaimList
	if err := r.Client.List(ctx, &claims); err != nil {
		return false, err
	}
	return slices.ContainsFunc(claims.Items, func(c resourceapi.ResourceClaim) bool {
		return c.Status.Allocation != nil && slices.ContainsFunc(c.Status.Allocation.Devices.Results,
			func(d resourceapi.DeviceRequestAllocationResult) bool { return d.Driver == r.Driver && d.Pool == node })
	}), nil
}
