// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// alternative is a request, or one of its alternatives.
type alternative struct {
	name, class string
	adminAccess bool
}

// validateTargets denies a configuration's parameters if the node would refuse them for one of the configuration's
// requests. It knows only the devices of the chart's DeviceClasses. A request with alternatives may get a device that
// takes the parameters, so all alternatives must refuse them.
func (p *Parameters) validateTargets(
	requests []resourceapi.DeviceRequest, c resourceapi.DeviceClaimConfiguration, path *field.Path,
) (errs field.ErrorList) {
	if c.Opaque == nil || c.Opaque.Driver != p.Driver {
		return nil
	}
	parameters, err := v1alpha1.Decode(c.Opaque.Parameters.Raw)
	if err != nil {
		return nil // validateOpaque reports it
	}
	for _, r := range requests {
		var refusals field.ErrorList
		alternatives := alternativesOf(r, c.Requests)
		for _, a := range alternatives {
			if err := p.refusal(a, parameters, path.Child("opaque", "parameters")); err != nil {
				refusals = append(refusals, err)
			}
		}
		if len(refusals) > 0 && len(refusals) == len(alternatives) {
			errs = append(errs, refusals[0])
		}
	}
	return errs
}

// alternativesOf returns the alternatives of a request that a configuration applies to. names are the requests that the
// configuration names; without names, it applies to all requests.
func alternativesOf(r resourceapi.DeviceRequest, names []string) (alternatives []alternative) {
	all := len(names) == 0 || slices.Contains(names, r.Name)
	if e := r.Exactly; e != nil && all {
		a := alternative{name: r.Name, class: e.DeviceClassName, adminAccess: ptr.Deref(e.AdminAccess, false)}
		alternatives = append(alternatives, a)
	}
	for _, s := range r.FirstAvailable {
		if name := r.Name + "/" + s.Name; all || slices.Contains(names, name) {
			alternatives = append(alternatives, alternative{name: name, class: s.DeviceClassName})
		}
	}
	return alternatives
}

// refusal returns the error that the node returns when it refuses the parameters for a device of the chart's
// DeviceClass; nil if it does not refuse them, or if the DeviceClass is another one.
func (p *Parameters) refusal(a alternative, parameters v1alpha1.Parameters, path *field.Path) *field.Error {
	attachment, isNetwork := parameters.(*v1alpha1.NetworkAttachment)
	takes := map[string]string{
		v1alpha1.DeviceClassName(v1alpha1.DeviceKindNIC, p.Driver):         v1alpha1.NetworkAttachmentKind,
		v1alpha1.DeviceClassName(v1alpha1.DeviceKindAccelerator, p.Driver): v1alpha1.AcceleratorShareKind,
		v1alpha1.DeviceClassName(v1alpha1.DeviceKindFabric, p.Driver):      "no parameters",
	}
	want, known := takes[a.class]
	kind := v1alpha1.AcceleratorShareKind
	if isNetwork {
		kind = v1alpha1.NetworkAttachmentKind
	}
	switch {
	case !known:
		return nil
	case kind != want:
		return field.Forbidden(path.Child("kind"), fmt.Sprintf("%s: request %q has the DeviceClass %s, whose devices take "+
			"%s: list the matching requests in the field `requests` of each configuration",
			kind, a.name, a.class, want))
	case isNetwork && attachment.AdminLink && !a.adminAccess:
		return field.Forbidden(path.Child("adminLink"), fmt.Sprintf("true: request %q does not have adminAccess and gets a "+
			"link without this field: remove it", a.name))
	}
	return nil
}
