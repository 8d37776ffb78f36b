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

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// After its deletion the scheduler sends no pod to a node with a claim, once it has
// seen it. Pods that it had sent before may still be on their way.
const (
	// settling is how long at the least.
	settling = 10 * time.Second
	// settled is when there are none any more, whatever their conditions say. (One
	// that comes later, with a volume that took longer, the kubelet refuses.)
	settled = time.Minute
)

// giveUp lets go of a claim that somebody deletes while the group lives. The first
// claim of a fabric stays as long as there are further ones: they are on its
// devices, and do not count.
func (r *Reconciler) giveUp(ctx context.Context, g *group, e *entry, n int, claim *resourceapi.ResourceClaim) (claims.Change, error) {
	if claim.Status.Allocation == nil || n == 0 && len(e.shards) > 1 {
		return claims.Change{}, nil
	}
	change, err := r.givenUp(ctx, g, g.pods, e, claim)
	if err != nil || change.Empty() {
		return change, err
	}
	// The cache may not know yet that a pod has a node.
	pods, err := r.livePods(ctx, g)
	if err != nil {
		return claims.Change{}, err
	}
	return r.givenUp(ctx, g, pods, e, claim)
}

func (r *Reconciler) givenUp(ctx context.Context, g *group, pods []*corev1.Pod, e *entry, claim *resourceapi.ResourceClaim) (claims.Change, error) {
	var waiting []types.UID
	all := true
	for _, pod := range pods {
		switch {
		case podstatus.IsTerminal(pod) || claimref.Name(pod, e.Name) != claim.Name:
		case mayRun(pod, claim.DeletionTimestamp.Time, time.Now()):
			all = false
		default:
			waiting = append(waiting, pod.UID)
		}
	}
	if all {
		native, err := r.native(ctx, g, claim)
		if err != nil {
			return claims.Change{}, err
		}
		waiting = append(waiting, native...)
	}
	return claims.DeletedClaimChange(claim, g.owner, waiting...), nil
}

// mayRun tells whether a pod has a claim on a node, or may be on its way there,
// that was deleted at a time. It is pure.
func mayRun(pod *corev1.Pod, deleted, now time.Time) bool {
	switch {
	case pod.Spec.NodeName != "":
		return true
	case gated(pod), pod.CreationTimestamp.After(deleted):
		return false
	case podstatus.IsUnschedulable(pod):
		return now.Sub(deleted) < settling
	}
	return now.Sub(deleted) < settled
}

// native are Kubernetes' own entries for the group. In native mode there may be a
// PodGroup of that name that is somebody else's.
func (r *Reconciler) native(ctx context.Context, g *group, claim *resourceapi.ResourceClaim) (entries []types.UID, err error) {
	for _, c := range claim.Status.ReservedFor {
		if claims.IsNativePodGroup(c) && c.Name == g.Name {
			entries = append(entries, c.UID)
		}
	}
	if len(entries) == 0 || r.Mode != mode.Native {
		return entries, nil
	}
	var there schedulingapi.PodGroup
	if err := r.Client.Get(ctx, client.ObjectKeyFromObject(g.PodGroup), &there); err != nil || !metav1.IsControlledBy(&there, g.PodGroup) {
		return nil, client.IgnoreNotFound(err)
	}
	return []types.UID{there.UID}, nil
}

// livePods are the group's pods, as they are now.
func (r *Reconciler) livePods(ctx context.Context, g *group) (all []*corev1.Pod, err error) {
	var pods corev1.PodList
	if err := r.APIReader.List(ctx, &pods, client.InNamespace(g.Namespace), client.MatchingLabels{scheduling.GroupUIDLabel: string(g.UID)}); err != nil {
		return nil, err
	}
	for i := range pods.Items {
		all = append(all, &pods.Items[i])
	}
	return all, nil
}

// deletes tells whether somebody deletes a claim of the group.
func (g *group) deletes() bool {
	for _, e := range g.entries {
		for _, claim := range e.shards {
			if claim.DeletionTimestamp != nil {
				return true
			}
		}
	}
	return false
}
