// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1beta1

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/dra-shared/dra-driver-shared/api/internal/strict"
)

// MaxListedClaims is the largest number of entries in JobClaimsAnnotation and ReplicaClaimsAnnotation.
const MaxListedClaims = 16

// JobClaimDeletionPolicy selects when a Job's claims are deleted.
type JobClaimDeletionPolicy string

const (
	// DeleteOnCompletion deletes the claim when the Job is complete or has failed, or is deleted.
	DeleteOnCompletion JobClaimDeletionPolicy = "OnCompletion"
	// DeleteOnDeletion deletes the claim when the Job is deleted.
	DeleteOnDeletion JobClaimDeletionPolicy = "OnDeletion"
)

// ListedClaim is an entry of JobClaimsAnnotation or ReplicaClaimsAnnotation. The controller generates one claim for
// each entry and each Job or replica.
type ListedClaim struct {
	// name is the name of the entry in the pods' spec.resourceClaims, a DNS label. The claim is called
	// `<job>-<name>-<hash>` or `<set>-<ordinal>-<name>-<hash>`.
	Name string `json:"name"`

	// resourceClaimTemplateName is the name of a ResourceClaimTemplate in the workload's namespace. Exactly one of
	// resourceClaimTemplateName and spec must be set.
	// +optional
	ResourceClaimTemplateName *string `json:"resourceClaimTemplateName,omitempty"`

	// spec is the spec of the claim, as in a ResourceClaim. The user who creates the workload must be permitted to create
	// ResourceClaims. adminAccess is refused.
	// +optional
	Spec *resourceapi.ResourceClaimSpec `json:"spec,omitempty"`

	// containers lists the containers, including init containers, that get a reference to the claim; others do not. If
	// it is empty, the pod's annotation claim-references decides for the driver's devices, as for other claims, and no
	// container gets a reference to a claim for other drivers' devices.
	// +optional
	Containers []string `json:"containers,omitempty"`

	// deletionPolicy selects when a Job's claim is deleted. The default is OnCompletion. It must not be set in
	// ReplicaClaimsAnnotation.
	// +optional
	DeletionPolicy JobClaimDeletionPolicy `json:"deletionPolicy,omitempty"`
}

// Template returns the ResourceClaimTemplate of an entry with a spec, and nil for an entry that names a template.
func (c *ListedClaim) Template() *resourceapi.ResourceClaimTemplate {
	if c.Spec == nil {
		return nil
	}
	return &resourceapi.ResourceClaimTemplate{Spec: resourceapi.ResourceClaimTemplateSpec{Spec: *c.Spec.DeepCopy()}}
}

// listedClaimFields are the fields of a ListedClaim.
var listedClaimFields = []string{"name", "resourceClaimTemplateName", "spec", "containers", "deletionPolicy"}

// ParseReplicaClaims decodes and validates the value of ReplicaClaimsAnnotation, as ParseJobClaims does.
func ParseReplicaClaims(value string, path *field.Path) ([]ListedClaim, field.ErrorList) {
	claims, errs := parseClaims(value, path)
	for i := range claims {
		if claims[i].DeletionPolicy != "" {
			errs = append(errs, field.Forbidden(path.Index(i).Child("deletionPolicy"),
				"the claims of a replica are deleted when it is scaled away or its owner is deleted: remove the field"))
		}
	}
	return claims, errs
}

// ParseJobClaims decodes and validates the value of JobClaimsAnnotation, and sets default deletion policies. Errors
// name the entry, its field, the value, and what is expected; path is the path of the annotation.
func ParseJobClaims(value string, path *field.Path) ([]ListedClaim, field.ErrorList) {
	claims, errs := parseClaims(value, path)
	for i := range claims {
		if claims[i].DeletionPolicy == "" {
			claims[i].DeletionPolicy = DeleteOnCompletion
		}
	}
	return claims, errs
}

// parseClaims decodes and validates a list of claims.
func parseClaims(value string, path *field.Path) ([]ListedClaim, field.ErrorList) {
	raw, err := yaml.YAMLToJSONStrict([]byte(value))
	if err != nil {
		return nil, field.ErrorList{field.Invalid(path, value, "must be a YAML list: "+err.Error())}
	}
	var entries []json.RawMessage
	if err := json.Unmarshal(raw, &entries); err != nil {
		return nil, field.ErrorList{field.Invalid(path, value,
			"must be a YAML list of entries, such as `- {name: net, resourceClaimTemplateName: share}`")}
	}
	switch {
	case len(entries) == 0:
		return nil, field.ErrorList{field.Required(path, "must have at least one entry: add one, or omit the annotation")}
	case len(entries) > MaxListedClaims:
		return nil, field.ErrorList{field.TooMany(path, len(entries), MaxListedClaims)}
	}
	var errs field.ErrorList
	claims := make([]ListedClaim, len(entries))
	for i, entry := range entries {
		problems, err := kjson.UnmarshalStrict(entry, &claims[i])
		if err == nil && len(problems) > 0 {
			err = runtime.NewStrictDecodingError(problems)
		}
		if err != nil {
			errs = append(errs, field.Invalid(path.Index(i), string(entry), strict.Explain(err, listedClaimFields...).Error()))
			continue
		}
		errs = append(errs, claims[i].validate(path.Index(i))...)
		if j := slices.IndexFunc(claims[:i], func(c ListedClaim) bool { return c.Name == claims[i].Name }); j >= 0 {
			errs = append(errs, field.Duplicate(path.Index(i).Child("name"), claims[i].Name))
		}
	}
	if len(errs) > 0 {
		return nil, errs
	}
	return claims, nil
}

// validate returns an entry's errors that do not depend on other entries.
func (c *ListedClaim) validate(path *field.Path) (errs field.ErrorList) {
	for _, problem := range validation.IsDNS1123Label(c.Name) {
		errs = append(errs, field.Invalid(path.Child("name"), c.Name, problem))
	}
	switch {
	case c.ResourceClaimTemplateName == nil && c.Spec == nil:
		errs = append(errs, field.Required(path, "set resourceClaimTemplateName, to use a ResourceClaimTemplate, or spec"))
	case c.ResourceClaimTemplateName != nil && c.Spec != nil:
		errs = append(errs, field.Invalid(path.Child("resourceClaimTemplateName"), *c.ResourceClaimTemplateName,
			"must not be set together with spec: remove one of them"))
	case c.Spec != nil && len(c.Spec.Devices.Requests) == 0:
		errs = append(errs, field.Required(path.Child("spec", "devices", "requests"),
			"the claim would have no device: add a request"))
	}
	if c.ResourceClaimTemplateName != nil {
		for _, problem := range validation.IsDNS1123Subdomain(*c.ResourceClaimTemplateName) {
			errs = append(errs, field.Invalid(path.Child("resourceClaimTemplateName"), *c.ResourceClaimTemplateName, problem))
		}
	}
	switch c.DeletionPolicy {
	case "", DeleteOnCompletion, DeleteOnDeletion:
	default:
		errs = append(errs, field.NotSupported(path.Child("deletionPolicy"), c.DeletionPolicy,
			[]JobClaimDeletionPolicy{DeleteOnCompletion, DeleteOnDeletion}))
	}
	for i, name := range c.Containers {
		for _, problem := range validation.IsDNS1123Label(name) {
			errs = append(errs, field.Invalid(path.Child("containers").Index(i), name, problem))
		}
		if slices.Contains(c.Containers[:i], name) {
			errs = append(errs, field.Duplicate(path.Child("containers").Index(i), name))
		}
	}
	return append(errs, c.validateAccess(path.Child("spec", "devices", "requests"))...)
}

// validateAccess returns an error for each request with adminAccess, which Kubernetes permits only in namespaces for
// administrators, and for each request for 0 groups, which would let a user's claim use a fabric without counting.
func (c *ListedClaim) validateAccess(path *field.Path) (errs field.ErrorList) {
	if c.Spec == nil {
		return nil
	}
	checkCapacity := func(path *field.Path, capacity *resourceapi.CapacityRequirements) {
		if capacity == nil {
			return
		}
		for name, quantity := range capacity.Requests {
			isGroups := name == "groups" || strings.HasSuffix(string(name), "/groups")
			if isGroups && quantity.Sign() <= 0 {
				errs = append(errs, field.Invalid(path.Child("capacity", "requests").Key(string(name)), quantity.String(),
					"would use a fabric without counting as a group: request 1, or omit it"))
			}
		}
	}
	for i, r := range c.Spec.Devices.Requests {
		if exactly := path.Index(i).Child("exactly"); r.Exactly != nil {
			if ptr.Deref(r.Exactly.AdminAccess, false) {
				errs = append(errs, field.Forbidden(exactly.Child("adminAccess"), fmt.Sprintf(
					"claims of Jobs cannot have administrative access (request %q): remove it", r.Name)))
			}
			checkCapacity(exactly, r.Exactly.Capacity)
		}
		for j, s := range r.FirstAvailable {
			checkCapacity(path.Index(i).Child("firstAvailable").Index(j), s.Capacity)
		}
	}
	return errs
}
