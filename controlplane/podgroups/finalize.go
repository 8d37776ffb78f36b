package podgroups

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

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

// end lets go of a PodGroup that is being deleted, once its pods have ended.
func (r *Reconciler) end(ctx context.Context, g *group) error {
	if !controllerutil.ContainsFinalizer(g.PodGroup, scheduling.Finalizer) {
		return nil
	}
	running := g.running()
	if len(running) == 0 {
		// One that was admitted just before may not be in the cache yet.
		pods, err := r.livePods(ctx, g)
		if err != nil {
			return err
		}
		running = (&group{pods: pods}).running()
	}
	if len(running) > 0 {
		return errors.Join(r.serve(ctx, g), r.setStatus(ctx, g, g.Status.ResourceClaimStatuses, metav1.Condition{Type: scheduling.ConditionClaimsReady, Status: metav1.ConditionFalse,
			Reason: "Terminating", Message: waitsFor(running)}))
	}
	for _, e := range g.entries {
		for _, claim := range e.shards {
			if err := r.release(ctx, claim, g.Name, g.UID); err != nil {
				return err
			}
		}
	}
	before := g.DeepCopy()
	controllerutil.RemoveFinalizer(g.PodGroup, scheduling.Finalizer)
	return ignoreBehind(r.Client.Patch(ctx, g.PodGroup, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})))
}

// running are the names of the group's pods that have not ended.
func (g *group) running() (names []string) {
	for _, pod := range g.pods {
		if !podstatus.IsTerminal(pod) {
			names = append(names, pod.Name)
		}
	}
	return names
}

func waitsFor(running []string) string {
	return fmt.Sprintf("the PodGroup is being deleted, and goes when its pods have ended or are deleted; %d have not: %s", len(running), listed(running))
}

// listed are the first names, in their order.
func listed(names []string) string {
	const most = 3
	slices.Sort(names)
	text := strings.Join(names[:min(most, len(names))], ", ")
	if len(names) > most {
		text += ", ..."
	}
	return text
}

// release lets a claim go that the PodGroup of that name and UID had.
func (r *Reconciler) release(ctx context.Context, claim *resourceapi.ResourceClaim, name string, uid types.UID) error {
	writer := claims.ClaimWriter{Client: r.Client}
	owned := claims.IsGeneratedFor(claim, uid)
	if owned {
		if err := writer.Delete(ctx, claim); err != nil {
			return err
		}
	}
	var native []types.UID
	for _, c := range claim.Status.ReservedFor {
		if r.Mode == mode.Bridge && claims.IsNativePodGroup(c) && c.Name == name {
			native = append(native, c.UID) // the gates are off: nobody else takes it away
		}
	}
	return writer.Apply(ctx, claim, claims.ReleaseChange(claim, uid, !owned, native...))
}

// releaseOthers lets go of claims that are held for PodGroups that had this name,
// and are gone without their finalizer having been waited for.
func (r *Reconciler) releaseOthers(ctx context.Context, name types.NamespacedName, uid types.UID) error {
	var held resourceapi.ResourceClaimList
	if err := r.Client.List(ctx, &held, client.InNamespace(name.Namespace), client.MatchingFields{indexHolder: name.Name}); err != nil {
		return err
	}
	for i := range held.Items {
		claim := &held.Items[i]
		for _, holder := range holders(claim) {
			if holder.name != name.Name || holder.uid == uid {
				continue
			}
			// The cache of PodGroups may be behind that of claims.
			var now scheduling.PodGroup
			if err := r.APIReader.Get(ctx, name, &now); client.IgnoreNotFound(err) != nil {
				return err
			}
			if now.UID == holder.uid {
				continue
			}
			if err := r.release(ctx, claim, name.Name, holder.uid); err != nil {
				return err
			}
		}
	}
	return nil
}

// holder is a PodGroup that has a claim.
type holder struct {
	name string
	uid  types.UID
}

// holders of a claim: who is in its reservations, and, where Kubernetes' own entry
// or one of a pod that has ended is, whom it was generated for.
func holders(claim *resourceapi.ResourceClaim) (all []holder) {
	owners := false
	for _, c := range claim.Status.ReservedFor {
		if isHolder(c) {
			all = append(all, holder{c.Name, c.UID})
		}
		owners = owners || claims.IsNativePodGroup(c) || claims.IsTerminalPodEntry(c)
	}
	if owner := metav1.GetControllerOf(claim); owners && owner != nil && owner.Kind == scheduling.Kind && owner.APIVersion == scheduling.GroupVersion.String() {
		if h := (holder{owner.Name, owner.UID}); !slices.Contains(all, h) {
			all = append(all, h)
		}
	}
	return all
}

func isHolder(r resourceapi.ResourceClaimConsumerReference) bool {
	return r.APIGroup == scheduling.GroupName && r.Resource == scheduling.Resource
}
