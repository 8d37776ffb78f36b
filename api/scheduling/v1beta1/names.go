package v1beta1

// Annotations, labels, finalizers, and scheduling gates.
const (
	// GroupAnnotation on a pod, or on a pod template, is the name of the pod's
	// PodGroup in the same namespace. It serves clusters that drop the field
	// spec.schedulingGroup; admission copies that field to the annotation.
	GroupAnnotation = GroupName + "/pod-group"
	// GroupUIDLabel on a pod is the UID of its PodGroup. Admission sets it; users
	// cannot.
	GroupUIDLabel = GroupName + "/pod-group-uid"
	// ReservedForAnnotation on a ResourceClaim names the object, in the same
	// namespace, that keeps the claim allocated as long as it exists:
	// <API group>/<resource>/<name>, with nothing before the first slash for the core
	// group (KEP-5194).
	ReservedForAnnotation = GroupName + "/reserved-for"
	// ReservedGate is the scheduling gate of a pod. The controller removes it when
	// the pod's entry is in status.reservedFor of its claim.
	ReservedGate = GroupName + "/reserved"
	// AdmittedAnnotation on a pod is the UID of the request that admitted it.
	// Admission sets it on pods that the controller has to count before they are in
	// its cache.
	AdmittedAnnotation = GroupName + "/admitted"
	// ClaimAnnotation on a generated ResourceClaim is the name of the entry in
	// spec.resourceClaims of its PodGroup.
	ClaimAnnotation = GroupName + "/claim"
	// ShardAnnotation on a generated ResourceClaim is its number among the shards of
	// one entry. An entry has several shards if more pods use it than
	// status.reservedFor of one claim has room for.
	ShardAnnotation = GroupName + "/shard"
	// Finalizer keeps a PodGroup until all of its pods are terminal and its claims
	// are released.
	Finalizer = GroupName + "/claims"
)
