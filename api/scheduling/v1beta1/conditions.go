// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1beta1

// Types of conditions. They appear in status.conditions of a PodGroup.
const (
	// ConditionClaimsReady reports whether every claim of the PodGroup exists.
	ConditionClaimsReady = "ClaimsReady"
	// ConditionReserved reports whether the claims are reserved for the PodGroup: they stay allocated even while the
	// group has no pods.
	ConditionReserved = "Reserved"
)

// Reasons of the condition ClaimsReady.
const (
	// ReasonGenerated (True) means that every claim of the PodGroup exists.
	ReasonGenerated = "Generated"
	// ReasonClaimShared (True) means that every claim exists, but another PodGroup also holds one of them.
	ReasonClaimShared = "ClaimShared"
	// ReasonClaimMissing (False) means that a claim, or the template to generate
	// it from, does not exist.
	ReasonClaimMissing = "ClaimMissing"
	// ReasonTerminating (False) means that the PodGroup is being deleted, and some
	// of its pods are not terminal yet.
	ReasonTerminating = "Terminating"
)

// Reasons of the condition Reserved.
const (
	// ReasonHeld (True) means that the claims stay allocated as long as the
	// PodGroup exists.
	ReasonHeld = "Held"
	// ReasonNotAllocated (False) means that a claim will be allocated when the group's first pod is scheduled.
	ReasonNotAllocated = "NotAllocated"
	// ReasonNotShared (False) means that no claim is allocated, and running pods in the PodGroup do not use any of its
	// claims.
	ReasonNotShared = "NotShared"
	// ReasonReleased (False) means that the claims have been released, as the PodGroup's annotation release requires.
	// They are allocated again for the group's next pod.
	ReasonReleased = "Released"
	// ReasonNoRoom (False) means that the PodGroup cannot be added to a claim's status.reservedFor because the list is
	// full.
	ReasonNoRoom = "NoRoom"
	// ReasonUnschedulable (False) means that the scheduler does not find a node for the pods that it may schedule. The
	// group's other pods wait behind the scheduling gate; one more of them tries each minute.
	ReasonUnschedulable = "Unschedulable"
	// ReasonWriteRefused (False) means that the API server refuses to reserve a claim, or to remove a pod's scheduling
	// gate. The message has its error, which names the admission webhook or the policy.
	ReasonWriteRefused = "WriteRefused"
)

// Reasons of both conditions.
const (
	// ReasonClaimDeleted (False) means that a claim was deleted while the
	// PodGroup uses it. New pods wait until the deletion completes.
	ReasonClaimDeleted = "ClaimDeleted"
)

// Actions of events. The controller emits a Warning event on a PodGroup when a condition becomes False, except for
// the reasons NotAllocated and Released, and when a condition's reason becomes ClaimShared. The event has the
// condition's reason.
const (
	// EventActionClaims is the action of events about a PodGroup's claims.
	EventActionClaims = "Claims"
)
