// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// maxListedNames is the number of names that a message lists.
const maxListedNames = 3

// finalize releases the claims of a PodGroup that is being deleted, and removes the
// finalizer, when all pods of the group are terminal. Until then it serves the group.
func (r *Reconciler) finalize(ctx context.Context, g *group) error {
	if !controllerutil.ContainsFinalizer(g.PodGroup, scheduling.Finalizer) {
		return nil
	}
	active, err := r.activePods(ctx, g)
	if err != nil {
		return err
	}
	if len(active) > 0 {
		terminating := metav1.Condition{
			Type: scheduling.ConditionClaimsReady, Status: metav1.ConditionFalse,
			Reason: scheduling.ReasonTerminating, Message: terminatingMessage(active),
		}
		return errors.Join(r.serve(ctx, g), r.setStatus(ctx, g, g.Status.ResourceClaimStatuses, terminating))
	}
	for _, s := range g.sharedClaims {
		for _, claim := range s.shards {
			if err := r.release(ctx, claim, holder{g.Name, g.UID}); err != nil {
				return err
			}
		}
	}
	before := g.DeepCopy()
	controllerutil.RemoveFinalizer(g.PodGroup, scheduling.Finalizer)
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	return ignoreStaleCache(r.Client.Patch(ctx, g.PodGroup, patch))
}

// activePods returns the names of the group's pods that are not terminal. It asks the API server if the cache does not
// have any: the cache may lack a pod that was admitted just before the deletion of the PodGroup.
func (r *Reconciler) activePods(ctx context.Context, g *group) ([]string, error) {
	if active := activeNames(g.pods); len(active) > 0 {
		return active, nil
	}
	pods, err := listPods(ctx, r.APIReader, g.PodGroup)
	return activeNames(pods), err
}

func activeNames(pods []*corev1.Pod) []string {
	var names []string
	for _, pod := range pods {
		if !podstatus.IsTerminal(pod) {
			names = append(names, pod.Name)
		}
	}
	return names
}

func terminatingMessage(active []string) string {
	return fmt.Sprintf("the PodGroup is being deleted; its deletion completes when all of its pods have ended "+
		"or are deleted; waiting for %d: %s", len(active), abbreviate(active))
}

// abbreviate returns the first names in alphabetical order. It sorts its argument.
func abbreviate(names []string) string {
	slices.Sort(names)
	text := strings.Join(names[:min(maxListedNames, len(names))], ", ")
	if len(names) > maxListedNames {
		text += ", ..."
	}
	return text
}

// release releases a claim that the PodGroup h holds or held. A claim that was
// generated for it is deleted.
func (r *Reconciler) release(ctx context.Context, claim *resourceapi.ResourceClaim, h holder) error {
	generated := claims.IsGeneratedFor(claim, h.uid)
	if generated {
		if err := r.writer().Delete(ctx, claim); err != nil {
			return err
		}
	}
	var native []types.UID
	if r.Mode == mode.Bridge {
		// The feature gates are off, so Kubernetes does not remove its entries.
		native = nativeEntriesNamed(claim, h.name)
	}
	return r.writer().Apply(ctx, claim, claims.ReleaseChange(claim, h.uid, !generated, native...))
}

// releasePredecessors releases claims that are held for earlier PodGroups of this name that were deleted without the
// finalizer. uid is the UID of the PodGroup that has the name in the cache, if there is one.
func (r *Reconciler) releasePredecessors(ctx context.Context, name types.NamespacedName, uid types.UID) error {
	var held resourceapi.ResourceClaimList
	if err := r.Client.List(ctx, &held, client.InNamespace(name.Namespace),
		client.MatchingFields{indexHolder: name.Name}); err != nil {
		return err
	}
	for i := range held.Items {
		claim := &held.Items[i]
		for _, h := range holders(claim) {
			if h.name != name.Name || h.uid == uid {
				continue
			}
			// The cache of PodGroups may be older than the cache of claims.
			var current scheduling.PodGroup
			if err := r.APIReader.Get(ctx, name, &current); client.IgnoreNotFound(err) != nil {
				return err
			}
			if current.UID == h.uid {
				continue
			}
			if err := r.release(ctx, claim, h); err != nil {
				return err
			}
		}
	}
	return nil
}

// holder identifies a PodGroup that holds a claim.
type holder struct {
	name string
	uid  types.UID
}

// holders returns the PodGroups that hold the claim: the PodGroups in status.reservedFor, and the PodGroup that the
// claim was generated for if status.reservedFor has an entry that does not name this PodGroup but is removed with it.
// That is Kubernetes' entry for a PodGroup, or the driver's for a terminal pod.
func holders(claim *resourceapi.ResourceClaim) []holder {
	var all []holder
	hasIndirectEntry := false
	for _, e := range claim.Status.ReservedFor {
		if claims.IsPodGroupEntry(e) {
			all = append(all, holder{e.Name, e.UID})
		}
		if claims.IsNativePodGroup(e) || claims.IsTerminalPodEntry(e) {
			hasIndirectEntry = true
		}
	}
	owner := podGroupOwner(claim)
	if !hasIndirectEntry || owner == nil {
		return all
	}
	if h := (holder{owner.Name, owner.UID}); !slices.Contains(all, h) {
		all = append(all, h)
	}
	return all
}

// podGroupOwner returns the reference to the PodGroup that the object was generated for, or nil.
func podGroupOwner(o metav1.Object) *metav1.OwnerReference {
	owner := metav1.GetControllerOf(o)
	if owner == nil || owner.Kind != scheduling.Kind || owner.APIVersion != scheduling.GroupVersion.String() {
		return nil
	}
	return owner
}
