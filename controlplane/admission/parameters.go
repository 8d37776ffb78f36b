// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/reservedfor"
	"github.com/dra-shared/dra-driver-shared/controlplane/workload"
)

// Parameters is the webhook for ResourceClaims, ResourceClaimTemplates, and DeviceClasses. It denies parameters of the
// driver that the plugin would refuse for every device, by the plugin's own validation, and parameters that do not fit
// the chart's DeviceClass of their request. Only the node validates parameters that depend on the allocated device. The
// webhook also validates the annotations reserved-for and release.
type Parameters struct {
	Driver string
}

// configured has the fields of a ResourceClaim, a ResourceClaimTemplate, and a
// DeviceClass that the webhook reads.
type configured struct {
	Metadata metav1.ObjectMeta `json:"metadata"`
	Spec     struct {
		Devices resourceapi.DeviceClaim `json:"devices"` // of a claim
		// Of a template: the metadata and the spec of its claims.
		Metadata metav1.ObjectMeta `json:"metadata"`
		Spec     struct {
			Devices resourceapi.DeviceClaim `json:"devices"`
		} `json:"spec"`
		Config []resourceapi.DeviceClassConfiguration `json:"config"` // of a class
	} `json:"spec"`
	Status struct {
		ReservedFor []resourceapi.ResourceClaimConsumerReference `json:"reservedFor"`
	} `json:"status"`
}

// Handle implements admission.Handler.
func (p *Parameters) Handle(_ context.Context, req admission.Request) admission.Response {
	var object configured
	if err := json.Unmarshal(req.Object.Raw, &object); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	isTemplate := req.Kind.Kind == "ResourceClaimTemplate"
	var warnings []string
	annotations, path := object.Metadata.Annotations, annotationsPath
	if isTemplate {
		warnings = misplacedInTemplate(annotations)
		annotations, path = object.Spec.Metadata.Annotations, templateAnnotationsPath
	}
	errs := append(validateHolder(annotations, path), p.validate(&object)...)
	if len(req.OldObject.Raw) > 0 {
		var old configured
		if err := json.Unmarshal(req.OldObject.Raw, &old); err != nil {
			return admission.Errored(http.StatusBadRequest, err)
		}
		errs = append(errs, validateHolderUpdate(&old, &object)...)
	}
	if err := errs.ToAggregate(); err != nil {
		return errorResponse(denied(reasonInvalid, "%w", err), warnings)
	}
	return admission.Allowed("").WithWarnings(warnings...)
}

var (
	annotationsPath = field.NewPath("metadata", "annotations")
	// templateAnnotationsPath is the path of the annotations that a template gives its claims.
	templateAnnotationsPath = field.NewPath("spec").Child("metadata", "annotations")
)

func annotation(name string) *field.Path { return annotationsPath.Key(name) }

var holderPath = annotation(scheduling.ReservedForAnnotation)

// misplacedInTemplate returns warnings about the annotations of claims that a template itself has.
func misplacedInTemplate(annotations map[string]string) (warnings []string) {
	for _, key := range []string{scheduling.ReservedForAnnotation, scheduling.ReleaseAnnotation} {
		if _, ok := annotations[key]; ok {
			warnings = append(warnings, fmt.Sprintf("metadata.annotations[%q] has no effect on a ResourceClaimTemplate: "+
				"move it to spec.metadata.annotations, which the claims of the template get", key))
		}
	}
	return warnings
}

// validateHolder validates the annotations reserved-for and release of a claim, which are at the path.
func validateHolder(annotations map[string]string, path *field.Path) (errs field.ErrorList) {
	if value, ok := annotations[scheduling.ReservedForAnnotation]; ok {
		if _, err := workload.Parse(value); err != nil {
			errs = append(errs, field.Invalid(path.Key(scheduling.ReservedForAnnotation), value, err.Error()))
		}
	}
	if value, ok := annotations[scheduling.ReleaseAnnotation]; ok {
		errs = append(errs, validateClaimRelease(annotations, value, path.Key(scheduling.ReleaseAnnotation))...)
	}
	return errs
}

func (p *Parameters) validate(o *configured) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	errs = append(errs, p.validateClaim(o.Spec.Devices, spec.Child("devices", "config"))...)
	errs = append(errs, p.validateClaim(o.Spec.Spec.Devices, spec.Child("spec", "devices", "config"))...)
	for i, c := range o.Spec.Config {
		errs = append(errs, p.validateOpaque(c.Opaque, spec.Child("config").Index(i))...)
	}
	return errs
}

// validateClaimRelease returns the errors of a claim with that value of the annotation release.
func validateClaimRelease(annotations map[string]string, value string, path *field.Path) field.ErrorList {
	if _, ok := annotations[scheduling.ReservedForAnnotation]; !ok {
		return field.ErrorList{field.Forbidden(path, fmt.Sprintf("has an effect only on a claim that an object holds: "+
			"name the object in the annotation %s, or remove this one", scheduling.ReservedForAnnotation))}
	}
	if _, err := scheduling.ParseRelease(value); err != nil {
		return field.ErrorList{field.Invalid(path, value, err.Error())}
	}
	return nil
}

// validateHolderUpdate returns an error if the annotation changes while the claim
// is reserved for the object that it names: the controller would no longer remove
// that object's entry.
func validateHolderUpdate(old, updated *configured) field.ErrorList {
	before := old.Metadata.Annotations[scheduling.ReservedForAnnotation]
	after := updated.Metadata.Annotations[scheduling.ReservedForAnnotation]
	if before == after || !reservedfor.IsHeldBy(before, old.Status.ReservedFor) {
		return nil
	}
	return field.ErrorList{field.Forbidden(holderPath,
		fmt.Sprintf("the claim is reserved for %s: delete that object before you change the annotation", before))}
}

// validateClaim validates the configurations of a claim, which are at the path.
func (p *Parameters) validateClaim(devices resourceapi.DeviceClaim, path *field.Path) (errs field.ErrorList) {
	for i, c := range devices.Config {
		errs = append(errs, p.validateOpaque(c.Opaque, path.Index(i))...)
		errs = append(errs, p.validateTargets(devices.Requests, c, path.Index(i))...)
	}
	return errs
}

func (p *Parameters) validateOpaque(opaque *resourceapi.OpaqueDeviceConfiguration, path *field.Path) field.ErrorList {
	if opaque == nil || opaque.Driver != p.Driver {
		return nil
	}
	if err := v1alpha1.Check(opaque.Parameters.Raw); err != nil {
		// The errors name the field and the value below this path.
		return field.ErrorList{{
			Type:   field.ErrorTypeForbidden,
			Field:  path.Child("opaque", "parameters").String(),
			Detail: strings.TrimSpace(err.Error()),
		}}
	}
	return nil
}
