// Package v1beta1 holds the API with which a group of pods shares claims:
// PodGroup, as Kubernetes' own of scheduling.k8s.io/v1beta1 (KEP-5729) has it,
// field for field, as far as it carries something here. The same objects work on
// clusters whose feature gates are off, where Kubernetes has no PodGroup, and
// where they are on, where each becomes one of Kubernetes'.
//
// +kubebuilder:object:generate=true
// +groupName=scheduling.dra-shared.dev
package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupName of the API.
const GroupName = "scheduling.dra-shared.dev"

// GroupVersion of the API.
var GroupVersion = schema.GroupVersion{Group: GroupName, Version: "v1beta1"}

// Resource is what a reservation for a PodGroup names.
const Resource = "podgroups"

// Kind of a PodGroup.
const Kind = "PodGroup"

// MaxClaims of a PodGroup: as many as Kubernetes allows (MaxPodGroupResourceClaims
// of k8s.io/api/scheduling/v1beta1).
const MaxClaims = 4

const (
	// GroupAnnotation on a pod, or on a template of pods, names the PodGroup of
	// the pods, in their namespace. It is for clusters that drop the field
	// spec.schedulingGroup; admission copies the field to it.
	GroupAnnotation = GroupName + "/pod-group"
	// GroupUIDLabel is put on the pods of a PodGroup by admission: which of the
	// PodGroups that had the name is theirs.
	GroupUIDLabel = GroupName + "/pod-group-uid"
	// ReservedForAnnotation on a ResourceClaim names an object of its namespace
	// that holds it as long as the object lives: <API group>/<resource>/<name>,
	// with nothing before the first slash for the core group (KEP-5194).
	ReservedForAnnotation = GroupName + "/reserved-for"
	// ReservedGate is the scheduling gate of pods that wait until their claim is
	// reserved for them, together with others.
	ReservedGate = GroupName + "/reserved"
	// AdmittedAnnotation on a pod is that of the request by which it was admitted,
	// where it matters to count pods that are on their way.
	AdmittedAnnotation = GroupName + "/admitted"
	// ClaimAnnotation on a generated ResourceClaim is the name of the entry of
	// its owner's spec.resourceClaims.
	ClaimAnnotation = GroupName + "/claim"
	// ShardAnnotation on a generated ResourceClaim is its number among those that
	// stand for one entry, where more pods share a device than can be in one
	// claim's status.reservedFor.
	ShardAnnotation = GroupName + "/shard"
	// Finalizer keeps a PodGroup until its pods have ended and its claims are
	// released.
	Finalizer = GroupName + "/claims"
)

// PodGroup is a group of pods that share claims. The pods name it, and name the
// claims, in spec.resourceClaims, as the PodGroup does.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=drapg
// +kubebuilder:metadata:annotations="helm.sh/resource-policy=keep"
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="ClaimsReady")].status`
// +kubebuilder:printcolumn:name="Reserved",type=string,JSONPath=`.status.conditions[?(@.type=="Reserved")].status`
// +kubebuilder:printcolumn:name="Claims",type=string,JSONPath=`.status.resourceClaimStatuses[*].resourceClaimName`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.conditions[?(@.status=="False")].message`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type PodGroup struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec says which claims the group's pods may share.
	// +required
	Spec PodGroupSpec `json:"spec"`

	// status tells of the claims.
	// +optional
	Status PodGroupStatus `json:"status,omitempty"`
}

// PodGroupSpec says which claims the group's pods may share.
//
// +kubebuilder:validation:XValidation:rule="has(self.resourceClaims) == has(oldSelf.resourceClaims) && (!has(self.resourceClaims) || self.resourceClaims == oldSelf.resourceClaims)",message="resourceClaims is immutable: pods may use them; delete the PodGroup and create it anew, or create another"
type PodGroupSpec struct {
	// schedulingPolicy is how the group's pods are scheduled.
	// +required
	SchedulingPolicy SchedulingPolicy `json:"schedulingPolicy"`

	// resourceClaims are the claims that the group's pods may share. A pod shares
	// one if an entry of its own spec.resourceClaims equals the PodGroup's: the
	// same name, and the same ResourceClaim or ResourceClaimTemplate. Immutable.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=4
	ResourceClaims []PodGroupResourceClaim `json:"resourceClaims,omitempty"`
}

// SchedulingPolicy is how a group's pods are scheduled: one by one.
//
// +kubebuilder:validation:XValidation:rule="!has(self.gang)",message="gang scheduling is the scheduler's: it needs a PodGroup of scheduling.k8s.io (Kubernetes 1.36, feature gate GenericWorkload); for shared claims alone say basic: {}"
// +kubebuilder:validation:XValidation:rule="has(self.basic) || has(self.gang)",message="say basic: {}"
type SchedulingPolicy struct {
	// basic is Kubernetes' usual scheduling, pod by pod.
	// +optional
	Basic *BasicSchedulingPolicy `json:"basic,omitempty"`

	// gang is known only to be refused with a reason.
	// +optional
	Gang *GangSchedulingPolicy `json:"gang,omitempty"`
}

// BasicSchedulingPolicy has no fields, as in Kubernetes.
type BasicSchedulingPolicy struct{}

// GangSchedulingPolicy is of Kubernetes' PodGroups only.
type GangSchedulingPolicy struct {
	// minCount is the number of pods that are scheduled together or not at all.
	// +required
	MinCount int32 `json:"minCount"`
}

// PodGroupResourceClaim names a claim that the group's pods share: one that
// exists, or one that is generated for the PodGroup, from a template.
//
// +kubebuilder:validation:XValidation:rule="has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",message="exactly one of resourceClaimName and resourceClaimTemplateName must be set"
type PodGroupResourceClaim struct {
	// name of the entry, a DNS label. The pods' entries are named so.
	// +required
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name"`

	// resourceClaimName names a ResourceClaim in the PodGroup's namespace. It is
	// reserved for the PodGroup, and released with it, and not deleted.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
	ResourceClaimName *string `json:"resourceClaimName,omitempty"`

	// resourceClaimTemplateName names a ResourceClaimTemplate in the PodGroup's
	// namespace. A ResourceClaim is made from it for the PodGroup, and goes with
	// the PodGroup.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
	ResourceClaimTemplateName *string `json:"resourceClaimTemplateName,omitempty"`
}

// PodGroupStatus tells of a PodGroup's claims.
type PodGroupStatus struct {
	// conditions are ClaimsReady and Reserved.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// resourceClaimStatuses are the names of the claims.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=4
	ResourceClaimStatuses []PodGroupResourceClaimStatus `json:"resourceClaimStatuses,omitempty"`
}

// PodGroupResourceClaimStatus is the claim that an entry of
// spec.resourceClaims stands for.
type PodGroupResourceClaimStatus struct {
	// name of the entry.
	// +required
	Name string `json:"name"`

	// resourceClaimName is the ResourceClaim, in the PodGroup's namespace.
	// +optional
	ResourceClaimName *string `json:"resourceClaimName,omitempty"`
}

// PodGroupList is a list of PodGroups.
//
// +kubebuilder:object:root=true
type PodGroupList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []PodGroup `json:"items"`
}

// AddToScheme makes the types known to a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &PodGroup{}, &PodGroupList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
