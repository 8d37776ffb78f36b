// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package addresspools

import (
	"context"

	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
)

// poolsOfStatefulSet returns requests for the pools with addresses that a StatefulSet's pods keep.
func (r *Reconciler) poolsOfStatefulSet(ctx context.Context, o client.Object) (requests []reconcile.Request) {
	var blocks network.AddressBlockList
	if err := r.Client.List(ctx, &blocks); err != nil {
		return nil // the cache is shutting down
	}
	for i := range blocks.Items {
		spec := &blocks.Items[i].Spec
		name, isPod := addresspool.StatefulSetOf(spec.Pod)
		if isPod && spec.Namespace == o.GetNamespace() && name == o.GetName() {
			requests = append(requests, request(spec.Pool))
		}
	}
	return requests
}

// takeFromNode removes the name of a lost node from the block that a pod keeps. Another node can then take the block.
func (r *Reconciler) takeFromNode(ctx context.Context, b *network.AddressBlock) error {
	updated := b.DeepCopy()
	updated.Spec.Node = ""
	delete(updated.Annotations, network.NodeLostAnnotation)
	patch := client.MergeFromWithOptions(b, client.MergeFromWithOptimisticLock{})
	if err := r.Client.Patch(ctx, updated, patch); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Released the kept address of a pod from its lost node", "block", b.Name,
		"node", b.Spec.Node, "addressPool", b.Spec.Pool, "pod", klog.KRef(b.Spec.Namespace, b.Spec.Pod))
	return nil
}

// returnKept deletes the blocks that pods keep and no node has if the StatefulSet no longer exists.
func (r *Reconciler) returnKept(ctx context.Context, blocks []network.AddressBlock) error {
	for i := range blocks {
		b := &blocks[i]
		if b.Spec.Node != "" {
			continue // the event of its return calls again
		}
		if exists, err := r.statefulSetExists(ctx, b); err != nil || exists {
			if err != nil {
				return err
			}
			continue
		}
		// A node may have taken the block since.
		unchanged := client.Preconditions{UID: &b.UID, ResourceVersion: &b.ResourceVersion}
		err := r.Client.Delete(ctx, b, unchanged)
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return err
		}
		klog.FromContext(ctx).Info("Deleted the address block of a deleted StatefulSet", "block", b.Name,
			"pod", klog.KRef(b.Spec.Namespace, b.Spec.Pod), "addressPool", b.Spec.Pool)
	}
	return nil
}

// statefulSetExists reports whether the StatefulSet of the pod that keeps a block exists.
func (r *Reconciler) statefulSetExists(ctx context.Context, b *network.AddressBlock) (bool, error) {
	name, isPod := addresspool.StatefulSetOf(b.Spec.Pod)
	if !isPod {
		return false, nil
	}
	var set metav1.PartialObjectMetadata
	set.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind("StatefulSet"))
	err := r.Client.Get(ctx, types.NamespacedName{Namespace: b.Spec.Namespace, Name: name}, &set)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}
