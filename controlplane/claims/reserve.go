package claims

import (
	"encoding/json"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// MaxPods that a claim can be reserved for beside its owner: the API has room
// for resourceapi.ResourceClaimReservedForMaxSize entries.
const MaxPods = resourceapi.ResourceClaimReservedForMaxSize - 1

// Pod is what a reservation depends on of a pod that uses the claim.
type Pod struct {
	Name string
	UID  types.UID
	// Bound to a node.
	Bound bool
	// Terminal: ended for good, and still there (see StaleEntriesChange).
	Terminal bool
	// Terminating is being deleted.
	Terminating bool
	// Gated waits for its reservation.
	Gated bool
	// Unschedulable, as the scheduler said.
	Unschedulable bool
}

func (p Pod) reference() resourceapi.ResourceClaimConsumerReference {
	return resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: p.Name, UID: p.UID}
}

// Change of a claim's status.reservedFor.
type Change struct {
	Add    []resourceapi.ResourceClaimConsumerReference
	Remove []types.UID
	// Deallocate ends the allocation as well. Nobody else may hold the claim.
	Deallocate bool
	// Precondition makes the change fail if the claim has changed since it was read.
	Precondition bool
}

// Empty tells whether there is nothing to do.
func (c Change) Empty() bool { return len(c.Add) == 0 && len(c.Remove) == 0 && !c.Deallocate }

// Patch is the change as a strategic merge patch of the claim's status: entries
// are told apart by UID, so that what others add meanwhile stays.
func (c Change) Patch(claim *resourceapi.ResourceClaim) ([]byte, error) {
	metadata := map[string]any{"uid": claim.UID}
	if c.Precondition || c.Deallocate {
		metadata["resourceVersion"] = claim.ResourceVersion
	}
	status := map[string]any{}
	if c.Deallocate {
		status["allocation"], status["reservedFor"] = nil, nil
	} else {
		var entries []any
		for _, e := range c.Add {
			entries = append(entries, e)
		}
		for _, uid := range c.Remove {
			entries = append(entries, map[string]any{"$patch": "delete", "uid": uid})
		}
		status["reservedFor"] = entries
	}
	return json.Marshal(map[string]any{"metadata": metadata, "status": status})
}

// IsNativePodGroup tells whether a reservation is for a PodGroup of Kubernetes' own.
func IsNativePodGroup(r resourceapi.ResourceClaimConsumerReference) bool {
	return r.APIGroup == "scheduling.k8s.io" && r.Resource == "podgroups"
}

// IsReservedFor tells whether a claim is reserved for the object of that UID.
func IsReservedFor(claim *resourceapi.ResourceClaim, uid types.UID) bool {
	return slices.ContainsFunc(claim.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == uid })
}

// ReservationChange says how a claim's reservations must change for its owner to hold
// it. native tells that the cluster reserves claims for PodGroups itself.
//
// The owner's entry is there from when a pod of its is bound: a claim that is
// held cannot be allocated elsewhere, and the scheduler must be able to give up
// an allocation that no pod fits. The entry goes again if no pod is bound and the
// scheduler has none that fits.
func ReservationChange(claim *resourceapi.ResourceClaim, owner Owner, pods []Pod, native bool) Change {
	var c Change
	if claim.Status.Allocation == nil || claim.DeletionTimestamp != nil {
		return c
	}
	reserved := map[types.UID]bool{}
	var cluster []types.UID // Kubernetes' own entry for the group
	for _, r := range claim.Status.ReservedFor {
		reserved[r.UID] = true
		if IsNativePodGroup(r) && r.Name == owner.Name {
			cluster = append(cluster, r.UID)
		}
	}
	bound, stuck := false, false
	for _, p := range pods {
		if p.Terminal {
			continue
		}
		bound = bound || p.Bound
		stuck = stuck || p.Unschedulable && !reserved[p.UID]
	}
	held := reserved[owner.UID]
	mine := EntriesToRemove(claim, func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == owner.UID })
	switch {
	case native && len(cluster) > 0:
		c.Remove = mine
		c.Precondition = len(mine) > 0
	case len(cluster) > 0:
		// The gates are off now, and nobody will take Kubernetes' entry away. With
		// that entry the kubelet starts no pod any more: it wants the pods' own.
		c.Remove = cluster
		if !held {
			c.Add = append(c.Add, owner.Reference())
		}
	case bound && !held:
		c.Add = append(c.Add, owner.Reference())
	case held && !bound && stuck:
		return Change{Remove: mine, Precondition: true}
	}
	room := resourceapi.ResourceClaimReservedForMaxSize - len(claim.Status.ReservedFor) - len(c.Add) + len(c.Remove)
	if !held && len(c.Add) == 0 {
		room-- // the owner's entry comes
	}
	for _, p := range pods {
		returns := p.Bound && !native && len(cluster) > 0
		if p.Terminal || reserved[p.UID] || !p.Gated && !returns {
			continue
		}
		if room <= 0 {
			break
		}
		room--
		c.Add = append(c.Add, p.reference())
	}
	return c
}

// DeletedClaimChange says how the reservations of a claim must change that somebody deletes
// while its owner lives: no pod that comes can use it, and it must be able to go.
// The owner lets go at once: the pods that have it hold it by entries of their own.
// With it go those of pods that wait for it, and those for all of the owner's pods
// together, which are given only if all wait.
func DeletedClaimChange(claim *resourceapi.ResourceClaim, owner Owner, waiting ...types.UID) Change {
	return Change{Precondition: true, Remove: EntriesToRemove(claim, func(r resourceapi.ResourceClaimConsumerReference) bool {
		return r.UID == owner.UID || slices.Contains(waiting, r.UID)
	})}
}

// EntriesToRemove are those of a claim's entries that go when certain holders let go of
// it: theirs, and those of pods that have ended if nobody else holds it who sees to
// them: another PodGroup, or whom the claim's annotation names.
func EntriesToRemove(claim *resourceapi.ResourceClaim, theirs func(resourceapi.ResourceClaimConsumerReference) bool) (gone []types.UID) {
	var ended []types.UID
	others := false
	for _, r := range claim.Status.ReservedFor {
		switch {
		case theirs(r):
			gone = append(gone, r.UID)
		case IsTerminalPodEntry(r):
			ended = append(ended, r.UID)
		case r.APIGroup == scheduling.GroupName && r.Resource == scheduling.Resource,
			claim.Annotations[scheduling.ReservedForAnnotation] == r.APIGroup+"/"+r.Resource+"/"+r.Name:
			others = true
		}
	}
	if others {
		return gone
	}
	return append(gone, ended...)
}

// ReleaseChange says how a claim's reservations must change when its holder is gone;
// native are Kubernetes' own entries for it, which nobody takes away where the
// gates are off. A generated claim is deleted first: the cluster deallocates what
// is being deleted once nobody holds it. One that stays is deallocated here if
// nobody else holds it, for the cluster does that only when a pod goes. Who else
// holds it must be known for sure: if the last pod has gone meanwhile, taking the
// holder away would leave a claim that is allocated for nobody, for good.
func ReleaseChange(claim *resourceapi.ResourceClaim, holder types.UID, stays bool, native ...types.UID) Change {
	gone := EntriesToRemove(claim, func(r resourceapi.ResourceClaimConsumerReference) bool {
		return r.UID == holder || slices.Contains(native, r.UID)
	})
	if stays && claim.DeletionTimestamp == nil && claim.Status.Allocation != nil && len(claim.Status.ReservedFor) == len(gone) {
		return Change{Deallocate: true}
	}
	if len(gone) == 0 {
		return Change{}
	}
	return Change{Remove: gone, Precondition: stays}
}
