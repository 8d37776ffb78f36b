// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// A user may delete a claim while its PodGroup exists. The scheduler does not bind pods with a claim that is being
// deleted once it has seen the deletion. A pod that it had scheduled earlier may be bound afterwards. The grace periods
// are how long its entry must stay. They begin when the controller first sees the deletion: its clock may differ from
// the API server's, which writes deletionTimestamp.
const (
	// minGracePeriod is for pods that the scheduler rejected: the rejection may
	// precede an attempt that is still in progress.
	minGracePeriod = 10 * time.Second
	// maxGracePeriod is for all pods without a node. The kubelet rejects a pod that is
	// bound later, for example because a volume took longer.
	maxGracePeriod = time.Minute
)

// deletedClaimChange returns the change for shard n, which a user is deleting. The primary shard
// keeps its entries as long as there are others: they use its devices and
// consume none of their capacity.
func (r *Reconciler) deletedClaimChange(ctx context.Context, g *group, s *sharedClaim, n int) (claims.Change, error) {
	claim := s.shards[n]
	if claim.Status.Allocation == nil || n == s.primary && len(s.shards) > 1 {
		return claims.Change{}, nil
	}
	native, err := r.nativeEntries(ctx, g, claim)
	if err != nil {
		return claims.Change{}, err
	}
	age := r.deletions.age(claim.UID, time.Now())
	changeFor := func(pods []*corev1.Pod) claims.Change {
		return claims.DeletedClaimChange(claim, g.owner, waitingEntries(claim, s.Name, pods, native, age)...)
	}
	// Most reconciles do not find anything to remove, and the cached pods suffice.
	if changeFor(g.pods).Empty() {
		return claims.Change{}, nil
	}
	// The cache may not show yet that a pod is bound.
	pods, err := listPods(ctx, r.APIReader, g.PodGroup)
	if err != nil {
		return claims.Change{}, err
	}
	return changeFor(pods), nil
}

// waitingEntries returns the UIDs of the pods that use the claim and can no longer run with it. If
// that applies to all pods that use it, the result includes the native entries, which are for all
// pods of the group.
func waitingEntries(
	claim *resourceapi.ResourceClaim, name string, pods []*corev1.Pod, native []types.UID, age time.Duration,
) []types.UID {
	var waiting []types.UID
	for _, pod := range pods {
		switch {
		case podstatus.IsTerminal(pod) || claimref.Name(pod, name) != claim.Name:
		case mayRun(pod, claim.DeletionTimestamp.Time, age):
			native = nil
		default:
			waiting = append(waiting, pod.UID)
		}
	}
	return append(waiting, native...)
}

// mayRun reports whether the pod runs on a node, or may be bound to one, with a claim
// that was deleted at the given time of the API server. The controller has seen the deletion for age.
func mayRun(pod *corev1.Pod, deleted time.Time, age time.Duration) bool {
	switch {
	case pod.Spec.NodeName != "":
		return true
	case isGated(pod), pod.CreationTimestamp.After(deleted):
		return false
	case podstatus.IsUnschedulable(pod):
		return age < minGracePeriod
	}
	return age < maxGracePeriod
}

// nativeEntries returns the UIDs of the claim's entries for the native PodGroup that corresponds to the group. In
// native mode, a user may have created a PodGroup of that name. Its entry is not the group's.
func (r *Reconciler) nativeEntries(
	ctx context.Context, g *group, claim *resourceapi.ResourceClaim,
) ([]types.UID, error) {
	entries := nativeEntriesNamed(claim, g.Name)
	if len(entries) == 0 || r.Mode != mode.Native {
		return entries, nil
	}
	var existing schedulingapi.PodGroup
	err := r.Client.Get(ctx, client.ObjectKeyFromObject(g.PodGroup), &existing)
	if err != nil || !metav1.IsControlledBy(&existing, g.PodGroup) {
		return nil, client.IgnoreNotFound(err)
	}
	return []types.UID{existing.UID}, nil
}

// nativeEntriesNamed returns the UIDs of the claim's entries for native PodGroups of
// that name.
func nativeEntriesNamed(claim *resourceapi.ResourceClaim, name string) []types.UID {
	var entries []types.UID
	for _, e := range claim.Status.ReservedFor {
		if claims.IsNativePodGroup(e) && e.Name == name {
			entries = append(entries, e.UID)
		}
	}
	return entries
}

// hasDeletedClaim reports whether one of the group's claims is being deleted.
func (g *group) hasDeletedClaim() bool {
	for _, s := range g.sharedClaims {
		if len(s.deletedClaims()) > 0 {
			return true
		}
	}
	return false
}

// deletedClaims returns the names of the shards that are being deleted.
func (s *sharedClaim) deletedClaims() []string {
	var names []string
	for _, claim := range s.shards {
		if claim.DeletionTimestamp != nil {
			names = append(names, claim.Name)
		}
	}
	return names
}
