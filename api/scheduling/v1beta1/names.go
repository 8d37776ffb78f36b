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
	// JobClaimsAnnotation (annotation of the pod templates of Jobs) lists the claims that all pods of one Job share: a
	// YAML list of ListedClaim elements, which the page PodGroup describes. The templates may be in a CronJob, or in a
	// replicated job of a JobSet, where each Job has its own claims (KEP-762). The chart value controller.jobClaims
	// enables it.
	JobClaimsAnnotation = GroupName + "/job-claims"
	// ReplicaClaimsAnnotation (annotation of the pod templates of StatefulSets and LeaderWorkerSets) lists the claims
	// that each replica has: each ordinal of a StatefulSet, and the leader and the workers of each replica of a
	// LeaderWorkerSet together. It has the format of JobClaimsAnnotation, without deletionPolicy. The chart value
	// controller.replicaClaims enables it.
	ReplicaClaimsAnnotation = GroupName + "/replica-claims"
	// GroupUIDLabel (label of pods) is the UID of the pod's PodGroup, or of its Job or StatefulSet if that has the
	// annotation job-claims or replica-claims. Admission sets it; users cannot.
	GroupUIDLabel = GroupName + "/pod-group-uid"
	// ReservedForAnnotation (annotation of ResourceClaims) names the object, in the same
	// namespace, that keeps the claim allocated as long as it exists:
	// <API group>/<resource>/<name>, with nothing before the first slash for the core
	// group (KEP-5194).
	ReservedForAnnotation = GroupName + "/reserved-for"
	// HeldAnnotation (annotation of ResourceClaims with the annotation reserved-for) reports whether the object holds
	// the claim, as <reason>: <message>, with the reasons of the condition Held. The controller writes it to claims
	// without devices of this driver, because only the other drivers may write their devices' status.
	HeldAnnotation = GroupName + "/held"
	// ReleaseAnnotation (annotation of PodGroups, and of ResourceClaims with the annotation reserved-for) determines
	// when the claims are released before the PodGroup, or the object that holds the claim, is deleted: OnDeletion, or a
	// list of OnCompletion, OnSuspension, and Unused=<duration>, separated by commas. The default is OnDeletion for
	// PodGroups (KEP-5729), and OnCompletion,OnSuspension for claims (KEP-5194).
	ReleaseAnnotation = GroupName + "/release"
	// WorkloadAnnotation (annotation of PodGroups) names the object, in the same namespace, that creates the PodGroup's
	// pods, in the format of ReservedForAnnotation. OnCompletion and OnSuspension require it.
	WorkloadAnnotation = GroupName + "/workload"
	// ReservedGate (scheduling gate of pods) keeps a pod pending. The controller removes it when the pod's entry is in
	// its claim's status.reservedFor.
	ReservedGate = GroupName + "/reserved"
	// GatesAnnotation (annotation of PodGroups, and of pod templates with the annotation job-claims or replica-claims)
	// controls scheduling gates. With the value GatesDisabled, admission does not add the ReservedGate to pods, and the
	// controller removes it from a PodGroup's pods. Gang schedulers need this: they wait until all pods can be
	// scheduled.
	GatesAnnotation = GroupName + "/gates"
	// GatesDisabled is the only value of GatesAnnotation that has an effect.
	GatesDisabled = "Disabled"
	// AdmittedAnnotation (annotation of pods) is the UID of the request that admitted it. Admission sets it on pods
	// that the controller must count before they are in its cache.
	AdmittedAnnotation = GroupName + "/admitted"
	// ClaimAnnotation (annotation of generated ResourceClaims) is the name of the entry in its PodGroup's
	// spec.resourceClaims, or in the annotation job-claims or replica-claims.
	ClaimAnnotation = GroupName + "/claim"
	// ReplicaAnnotation (annotation of generated ResourceClaims) is the ordinal of the replica that the claim was
	// generated for.
	ReplicaAnnotation = GroupName + "/replica"
	// ShardAnnotation (annotation of generated ResourceClaims) is the number of the claim among an entry's shards. An
	// entry has several shards if more pods use it than one claim's status.reservedFor has room for.
	ShardAnnotation = GroupName + "/shard"
	// PrimaryAnnotation (annotation of generated ResourceClaims) marks the shard with the devices that the other shards
	// use, if that is not shard 0.
	PrimaryAnnotation = GroupName + "/primary"
	// Finalizer (finalizer of PodGroups) keeps a PodGroup until all of its pods are terminal and its claims
	// are released.
	Finalizer = GroupName + "/claims"
)
