// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"encoding/json"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// MaxPods is the number of pods that a claim can be reserved for in addition to its owner. The API limits
// status.reservedFor to ResourceClaimReservedForMaxSize entries.
const MaxPods = resourceapi.ResourceClaimReservedForMaxSize - 1

// PodState is the state of a pod that determines its entry in the claims that it uses.
type PodState struct {
	Name string
	UID  types.UID
	// Bound pods have a node.
	Bound bool
	// Terminal pods have ended, but still exist (see StaleEntriesChange).
	Terminal bool
	// Terminating pods are being deleted.
	Terminating bool
	// Gated pods wait behind a scheduling gate, the driver's or another controller's.
	Gated bool
	// AwaitsEntry is true if a gated pod has only the driver's scheduling gate, which it keeps
	// until it has its entry.
	AwaitsEntry bool
	// Unschedulable pods were rejected by the scheduler.
	Unschedulable bool
}

// PodStateOf returns the state of a pod.
func PodStateOf(pod *corev1.Pod) PodState {
	gates := pod.Spec.SchedulingGates
	hasForeignGate := slices.ContainsFunc(gates, func(g corev1.PodSchedulingGate) bool {
		return g.Name != scheduling.ReservedGate
	})
	return PodState{
		Name: pod.Name, UID: pod.UID, Bound: pod.Spec.NodeName != "",
		Terminal: podstatus.IsTerminal(pod), Terminating: pod.DeletionTimestamp != nil,
		Gated: len(gates) > 0, AwaitsEntry: len(gates) > 0 && !hasForeignGate,
		Unschedulable: podstatus.IsUnschedulable(pod),
	}
}

func (p PodState) reference() resourceapi.ResourceClaimConsumerReference {
	return resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: p.Name, UID: p.UID}
}

// Change is a change of a claim's status.reservedFor.
type Change struct {
	Add    []resourceapi.ResourceClaimConsumerReference
	Remove []types.UID
	// Deallocate removes all entries and the allocation. It implies Precondition.
	Deallocate bool
	// Precondition makes the change fail if the claim has changed since it was read.
	Precondition bool
}

// Empty reports whether the change does not have an effect.
func (c Change) Empty() bool { return len(c.Add) == 0 && len(c.Remove) == 0 && !c.Deallocate }

// Patch returns the change as a strategic merge patch of the claim's status. The merge key of the entries is their UID,
// so the patch keeps entries that other clients add concurrently.
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

// IsPodGroupEntry reports whether the entry is for a PodGroup of the driver.
func IsPodGroupEntry(entry resourceapi.ResourceClaimConsumerReference) bool {
	return entry.APIGroup == scheduling.GroupName && entry.Resource == scheduling.Resource
}

// IsNativePodGroup reports whether the entry is for a PodGroup of scheduling.k8s.io.
func IsNativePodGroup(entry resourceapi.ResourceClaimConsumerReference) bool {
	return entry.APIGroup == "scheduling.k8s.io" && entry.Resource == "podgroups"
}

// IsReservedFor reports whether the claim has an entry with that UID.
func IsReservedFor(claim *resourceapi.ResourceClaim, uid types.UID) bool {
	return containsUID(claim.Status.ReservedFor, uid)
}

func containsUID(entries []resourceapi.ResourceClaimConsumerReference, uid types.UID) bool {
	return slices.ContainsFunc(entries, func(e resourceapi.ResourceClaimConsumerReference) bool { return e.UID == uid })
}

// ReservationOptions are the circumstances that ReservationChange depends on.
type ReservationOptions struct {
	// Native reports whether the cluster is in native mode.
	Native bool
	// Pinned keeps the owner's entry and the entries of waiting pods, even if the scheduler does not find a node for the
	// pods: bound pods use the same devices through other claims of the owner.
	Pinned bool
}

// ReservationChange returns the change that gives an allocated claim the entries of
// its owner and of the owner's pods.
//
// The owner's entry keeps the claim allocated. It is therefore added only when a pod of the owner is bound: before
// that, the scheduler must be able to deallocate a claim if no pod can use its devices. For the same reason, pods
// behind the gate get their entries only when another pod is bound. The owner's entry and the entries of waiting pods
// are removed when none of the pods is bound anymore and the scheduler does not find a node for the pods that it may
// schedule.
func ReservationChange(claim *resourceapi.ResourceClaim, owner Owner, pods []PodState, o ReservationOptions) Change {
	if claim.Status.Allocation == nil || claim.DeletionTimestamp != nil {
		return Change{}
	}
	r := reservation{claim: claim, owner: owner, bound: slices.ContainsFunc(pods, PodState.IsRunning)}
	r.goal = r.chooseGoal(pods, o)
	desired := r.desiredOwnerEntries()
	own := IsReservedFor(claim, owner.UID) || IsGeneratedFor(claim, owner.UID)
	if r.goal == allowReallocation && own {
		desired = slices.DeleteFunc(desired, func(e resourceapi.ResourceClaimConsumerReference) bool {
			return slices.ContainsFunc(pods, func(p PodState) bool { return p.UID == e.UID && p.Waits() })
		})
	}
	if r.goal != allowReallocation {
		desired = append(desired, r.missingPodEntries(pods, r.room(desired))...)
	}
	change := diff(claim.Status.ReservedFor, desired)
	if r.goal == deferToNative || r.goal == allowReallocation {
		// The owner's entry is removed only if the state that permits the removal is still current.
		change.Precondition = len(change.Remove) > 0
	}
	return change
}

// goal is the state of the owner's entry that a change aims at.
type goal int

const (
	// keepOwnerEntry does not add or remove the owner's entry.
	keepOwnerEntry goal = iota
	// holdClaim adds the owner's entry.
	holdClaim
	// deferToNative removes the owner's entry, because the entry of Kubernetes' PodGroup already
	// holds the claim.
	deferToNative
	// replaceNativeEntry replaces the entry of Kubernetes' PodGroup with the owner's,
	// because the cluster has left native mode. Kubernetes does not remove its entry
	// then, and the kubelet no longer accepts it in place of the pods' own entries.
	replaceNativeEntry
	// allowReallocation removes the owner's entry and the entries of waiting pods. The scheduler can then deallocate the
	// claim and choose other devices.
	allowReallocation
)

// reservation computes the entries that one claim should have.
type reservation struct {
	claim *resourceapi.ResourceClaim
	owner Owner
	goal  goal
	bound bool // a pod of the owner that uses the claim is bound
}

func (r reservation) chooseGoal(pods []PodState, o ReservationOptions) goal {
	heldByNative := r.isHeldByNative()
	switch {
	case heldByNative && o.Native:
		return deferToNative
	case heldByNative:
		return replaceNativeEntry
	case r.bound:
		return holdClaim
	case !o.Pinned && IsStuck(pods):
		return allowReallocation
	}
	return keepOwnerEntry
}

func (r reservation) isHeldByNative() bool {
	return slices.ContainsFunc(r.claim.Status.ReservedFor, r.isNativeEntryOfOwner)
}

// IsStuck reports whether there are pods that the scheduler may schedule, but it does not find a node for any of them.
// A pod that it has not tried looks the same as a pod that it is about to find a node for: the claim must not change
// for either.
func IsStuck(pods []PodState) bool {
	rejected := false
	for _, p := range pods {
		switch {
		case p.Terminal || p.Terminating:
		case !p.Waits():
			return false
		case p.Unschedulable:
			rejected = true
		}
	}
	return rejected
}

// IsRunning reports whether the pod has a node and has not ended.
func (p PodState) IsRunning() bool { return p.Bound && !p.Terminal }

// Waits reports whether the pod does not have a node, and the scheduler is not about to choose one.
func (p PodState) Waits() bool { return !p.Bound && !p.Terminal && (p.Gated || p.Unschedulable) }

// isNativeEntryOfOwner reports whether the entry is for Kubernetes' PodGroup that
// corresponds to the owner.
func (r reservation) isNativeEntryOfOwner(entry resourceapi.ResourceClaimConsumerReference) bool {
	return IsNativePodGroup(entry) && entry.Name == r.owner.Name
}

// desiredOwnerEntries returns the current entries with the owner's entry added or
// removed according to the goal.
func (r reservation) desiredOwnerEntries() []resourceapi.ResourceClaimConsumerReference {
	desired := slices.Clone(r.claim.Status.ReservedFor)
	switch r.goal {
	case deferToNative, allowReallocation:
		removed := EntriesToRemove(r.claim, func(e resourceapi.ResourceClaimConsumerReference) bool {
			return e.UID == r.owner.UID
		})
		return slices.DeleteFunc(desired, func(e resourceapi.ResourceClaimConsumerReference) bool {
			return slices.Contains(removed, e.UID)
		})
	case replaceNativeEntry:
		desired = slices.DeleteFunc(desired, r.isNativeEntryOfOwner)
	case keepOwnerEntry:
		return desired
	case holdClaim:
	}
	if !containsUID(desired, r.owner.UID) {
		desired = append(desired, r.owner.Reference())
	}
	return desired
}

// room returns the number of entries that can be added to the desired ones so far. It keeps one for an owner's entry
// that follows later.
func (r reservation) room(desired []resourceapi.ResourceClaimConsumerReference) int {
	room := resourceapi.ResourceClaimReservedForMaxSize - len(desired)
	if !containsUID(desired, r.owner.UID) && !IsReservedFor(r.claim, r.owner.UID) {
		room--
	}
	return room
}

// missingPodEntries returns at most room entries for pods that need one: pods behind
// the driver's gate, and pods that run without an entry because Kubernetes' PodGroup had one.
func (r reservation) missingPodEntries(pods []PodState, room int) []resourceapi.ResourceClaimConsumerReference {
	var missing []resourceapi.ResourceClaimConsumerReference
	for _, p := range pods {
		needsEntry := p.AwaitsEntry && (r.bound || r.isHeldByNative()) || p.Bound && r.goal == replaceNativeEntry
		if p.Terminal || !needsEntry || IsReservedFor(r.claim, p.UID) {
			continue
		}
		if len(missing) >= room {
			break
		}
		missing = append(missing, p.reference())
	}
	return missing
}

// diff returns the change from the current to the desired entries.
func diff(current, desired []resourceapi.ResourceClaimConsumerReference) Change {
	var change Change
	for _, e := range desired {
		if !containsUID(current, e.UID) {
			change.Add = append(change.Add, e)
		}
	}
	for _, e := range current {
		if !containsUID(desired, e.UID) {
			change.Remove = append(change.Remove, e.UID)
		}
	}
	return change
}

// DeletedClaimChange returns the change for a claim that a user deletes while its owner exists. New pods cannot use
// such a claim, so its deletion must be able to complete: the owner's entry is removed, because pods that run with the
// claim have separate entries. The entries of pods that still wait for a node are also removed; the caller passes their
// UIDs. The caller also passes the UID of an entry for all pods of the owner if all of them wait.
func DeletedClaimChange(claim *resourceapi.ResourceClaim, owner Owner, waiting ...types.UID) Change {
	remove := EntriesToRemove(claim, func(e resourceapi.ResourceClaimConsumerReference) bool {
		return e.UID == owner.UID || slices.Contains(waiting, e.UID)
	})
	return Change{Remove: remove, Precondition: true}
}

// EntriesToRemove returns the UIDs of the entries to remove when a holder releases the claim: the entries that isHolder
// selects, and the controller's entries for terminal pods. The entries for terminal pods stay if another PodGroup, or
// the object that the annotation reserved-for names, holds the claim: that holder's controller maintains them.
func EntriesToRemove(
	claim *resourceapi.ResourceClaim, isHolder func(resourceapi.ResourceClaimConsumerReference) bool,
) []types.UID {
	var holders, terminal []types.UID
	heldByOther := false
	for _, e := range claim.Status.ReservedFor {
		switch {
		case isHolder(e):
			holders = append(holders, e.UID)
		case IsTerminalPodEntry(e):
			terminal = append(terminal, e.UID)
		case IsPodGroupEntry(e),
			claim.Annotations[scheduling.ReservedForAnnotation] == e.APIGroup+"/"+e.Resource+"/"+e.Name:
			heldByOther = true
		}
	}
	if heldByOther {
		return holders
	}
	return append(holders, terminal...)
}

// ReleaseChange returns the change that releases a claim after its holder has ceased to exist. The caller passes the
// UIDs of Kubernetes' entries for the holder if Kubernetes does not remove them because its feature gates are off.
//
// The caller deletes a generated claim first, and Kubernetes deallocates a claim that is being
// deleted when its last entry is removed. Kubernetes deallocates a claim that remains (keepsClaim)
// only when a pod is deleted. If the holder has the last entry, this change therefore deallocates
// the claim. It has a precondition in either case: if the last pod were deleted concurrently,
// removing the holder's entry would leave the claim allocated forever.
func ReleaseChange(claim *resourceapi.ResourceClaim, holder types.UID, keepsClaim bool, native ...types.UID) Change {
	remove := EntriesToRemove(claim, func(e resourceapi.ResourceClaimConsumerReference) bool {
		return e.UID == holder || slices.Contains(native, e.UID)
	})
	allocated := claim.Status.Allocation != nil && claim.DeletionTimestamp == nil
	if keepsClaim && allocated && len(remove) == len(claim.Status.ReservedFor) {
		return Change{Deallocate: true}
	}
	if len(remove) == 0 {
		return Change{}
	}
	return Change{Remove: remove, Precondition: keepsClaim}
}
