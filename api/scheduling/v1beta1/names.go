// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1beta1

// Names for PodGroups. They are annotations, a label, a scheduling gate, and a
// finalizer.
const (
	// GroupAnnotation (annotation of pods and pod templates) is the name of the pod's
	// PodGroup in the same namespace. It serves clusters that drop the field
	// spec.schedulingGroup; admission copies that field to the annotation.
	GroupAnnotation = GroupName + "/pod-group"
	// GroupUIDLabel (label of pods) is the UID of its PodGroup. Admission sets it; users
	// cannot.
	GroupUIDLabel = GroupName + "/pod-group-uid"
	// ReservedForAnnotation (annotation of ResourceClaims) names the object, in the same
	// namespace, that keeps the claim allocated as long as it exists:
	// <API group>/<resource>/<name>, with nothing before the first slash for the core
	// group (KEP-5194).
	ReservedForAnnotation = GroupName + "/reserved-for"
	// ReservedGate (scheduling gate of pods) keeps a pod pending. The controller removes it when
	// the pod's entry is in status.reservedFor of its claim.
	ReservedGate = GroupName + "/reserved"
	// AdmittedAnnotation (annotation of pods) is the UID of the request that admitted it.
	// Admission sets it on pods that the controller has to count before they are in
	// its cache.
	AdmittedAnnotation = GroupName + "/admitted"
	// ClaimAnnotation (annotation of generated ResourceClaims) is the name of the entry in
	// spec.resourceClaims of its PodGroup.
	ClaimAnnotation = GroupName + "/claim"
	// ShardAnnotation (annotation of generated ResourceClaims) is the number of the claim among the shards of
	// one entry. An entry has several shards if more pods use it than
	// status.reservedFor of one claim has room for.
	ShardAnnotation = GroupName + "/shard"
	// Finalizer (finalizer of PodGroups) keeps a PodGroup until all of its pods are terminal and its claims
	// are released.
	Finalizer = GroupName + "/claims"
)
