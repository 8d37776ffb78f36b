// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Identification of the kind in this package.
const (
	GroupName = "scheduling.dra-shared.dev"
	Version   = "v1beta1"
	// Kind is the kind of a PodGroup.
	Kind = "PodGroup"
	// Resource is the resource of PodGroups in URLs and in status.reservedFor entries.
	Resource = "podgroups"
)

// GroupVersion identifies the API in this package.
var GroupVersion = schema.GroupVersion{Group: GroupName, Version: Version}

// PodGroup is a group of pods that share ResourceClaims. A pod belongs to the PodGroup that its annotation
// scheduling.dra-shared.dev/pod-group names. It shares a claim with the group if an entry in its spec.resourceClaims
// equals one of the PodGroup's.
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

	// spec lists the claims that the group's pods can share.
	// +required
	Spec PodGroupSpec `json:"spec"`

	// status is the observed state of the claims.
	// +optional
	Status PodGroupStatus `json:"status,omitempty"`
}

// PodGroupSpec lists the claims that a group's pods can share.
//
// +kubebuilder:validation:XValidation:rule="has(self.resourceClaims) == has(oldSelf.resourceClaims) && (!has(self.resourceClaims) || self.resourceClaims == oldSelf.resourceClaims)",message="resourceClaims is immutable because pods may use the claims: delete and recreate the PodGroup, or create another"
type PodGroupSpec struct {
	// schedulingPolicy selects how the group's pods are scheduled. The only valid value is basic: {}.
	// +required
	SchedulingPolicy SchedulingPolicy `json:"schedulingPolicy"`

	// resourceClaims lists the claims that the group's pods can share, at most 4. A pod shares a claim if an entry in
	// its own spec.resourceClaims has the same name and the same ResourceClaim or ResourceClaimTemplate. The field is
	// immutable.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=4
	ResourceClaims []PodGroupResourceClaim `json:"resourceClaims,omitempty"`
}

// SchedulingPolicy selects how a group's pods are scheduled.
//
// +kubebuilder:validation:XValidation:rule="!has(self.gang)",message="gang scheduling requires a PodGroup of scheduling.k8s.io (Kubernetes 1.36, feature gate GenericWorkload): to share claims only, set basic: {}"
// +kubebuilder:validation:XValidation:rule="has(self.basic) || has(self.gang)",message="set basic: {}"
type SchedulingPolicy struct {
	// basic makes the scheduler schedule each pod individually.
	// +optional
	Basic *BasicSchedulingPolicy `json:"basic,omitempty"`

	// gang is refused: only a Kubernetes PodGroup supports gang scheduling.
	// +optional
	Gang *GangSchedulingPolicy `json:"gang,omitempty"`
}

// BasicSchedulingPolicy has no fields, as in Kubernetes.
type BasicSchedulingPolicy struct{}

// GangSchedulingPolicy exists so that validation can refuse it with an explanation.
type GangSchedulingPolicy struct {
	// minCount is the number of pods that must be scheduled together.
	// +required
	MinCount int32 `json:"minCount"`
}

// PodGroupResourceClaim names a claim that a group's pods share: an existing claim, or one that the controller
// generates from a template. Exactly one of resourceClaimName and resourceClaimTemplateName must be set.
//
// +kubebuilder:validation:XValidation:rule="has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",message="exactly one of resourceClaimName and resourceClaimTemplateName must be set"
type PodGroupResourceClaim struct {
	// name is the name of the entry, a DNS label. The pods' entries have the same name.
	// +required
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name"`

	// resourceClaimName is the name of a ResourceClaim in the PodGroup's namespace. The controller reserves the claim
	// for the PodGroup and releases it when the PodGroup is deleted. It does not delete the claim.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
	ResourceClaimName *string `json:"resourceClaimName,omitempty"`

	// resourceClaimTemplateName is the name of a ResourceClaimTemplate in the PodGroup's namespace. The controller
	// generates a ResourceClaim from it, and deletes the claim when the PodGroup is deleted.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
	ResourceClaimTemplateName *string `json:"resourceClaimTemplateName,omitempty"`
}

// PodGroupStatus is the observed state of a PodGroup's claims.
type PodGroupStatus struct {
	// conditions holds the conditions ClaimsReady and Reserved.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// resourceClaimStatuses lists the names of the claims, at most 4.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=4
	ResourceClaimStatuses []PodGroupResourceClaimStatus `json:"resourceClaimStatuses,omitempty"`
}

// PodGroupResourceClaimStatus names the claim for an entry of spec.resourceClaims.
type PodGroupResourceClaimStatus struct {
	// name is the name of the entry.
	// +required
	Name string `json:"name"`

	// resourceClaimName is the name of the ResourceClaim in the PodGroup's namespace. For an entry with several shards,
	// it is the primary one.
	// +optional
	ResourceClaimName *string `json:"resourceClaimName,omitempty"`
}

// PodGroupList is a list of PodGroups.
//
// +kubebuilder:object:root=true
type PodGroupList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	// items lists the PodGroups.
	Items []PodGroup `json:"items"`
}

// AddToScheme registers this package's kinds with a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &PodGroup{}, &PodGroupList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
