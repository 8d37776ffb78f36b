// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

// addClaimReferences adds references to the pod's claims of the driver to the
// resources.claims of its containers. The hook runs only for containers that
// reference a claim, so a container without a reference starts without the device.
//
// A NIC's link is in the network namespace that all containers of the pod share, so all of them get a reference to it.
// Other devices are visible only in the containers that reference them. If one container already references such a
// device, the others do not get a reference, because the pod's author has chosen the containers.
//
// The driver of a claim is unknown until the claim, or its template, exists. A pod that would share
// such a claim with its PodGroup is denied, because it would run without the device for its whole
// life. For other claims the user gets a warning.
//
// The annotation of a Job or replica may list the containers for a claim; then only these get a reference.
func (p *Pods) addClaimReferences(
	ctx context.Context, pod *corev1.Pod, group *scheduling.PodGroup, listed map[string]listedClaim,
) (warnings []string, err error) {
	switch value := pod.Annotations[v1alpha1.ClaimReferencesAnnotation]; value {
	case v1alpha1.ClaimReferencesExplicit:
		return nil, nil
	case "", v1alpha1.ClaimReferencesAll:
	default:
		return nil, denied(reasonInvalid, "metadata.annotations[%q]: Unsupported value: %q: must be %s or %s",
			v1alpha1.ClaimReferencesAnnotation, value, v1alpha1.ClaimReferencesAll, v1alpha1.ClaimReferencesExplicit)
	}
	for i, c := range pod.Spec.ResourceClaims {
		entry := sharedEntry(group, &c)
		spec := listed[c.Name].spec
		if spec == nil {
			if spec, err = p.podClaimSpec(ctx, pod.Namespace, group, entry, c); err != nil {
				return warnings, err
			}
		}
		if len(listed[c.Name].Containers) > 0 {
			continue
		}
		if spec == nil {
			warning, err := p.checkUnknownClaim(pod, i, entry)
			if err != nil {
				return warnings, err
			}
			if warning != "" {
				warnings = append(warnings, warning)
			}
			continue
		}
		requests, err := p.driverRequests(ctx, spec)
		if err != nil {
			return warnings, err
		}
		if err := checkHostNetwork(pod, i, requests); err != nil {
			return warnings, err
		}
		addReferences(&pod.Spec, c.Name, requests, len(spec.Devices.Requests))
	}
	return warnings, nil
}

// checkHostNetwork denies a pod on the node's network if its claim with that index has a share of a NIC: with the
// references, its containers would never start.
func checkHostNetwork(pod *corev1.Pod, index int, requests []driverRequest) error {
	if !pod.Spec.HostNetwork || !slices.ContainsFunc(requests, func(r driverRequest) bool { return r.needsLink }) {
		return nil
	}
	return denied(reasonInvalid, "spec.hostNetwork: Forbidden: true: spec.resourceClaims[%d] %q has a share of a NIC, "+
		"which cannot be attached to the node's network: set hostNetwork: false, or remove the claim",
		index, pod.Spec.ResourceClaims[index].Name)
}

// checkUnknownClaim returns a warning or a denial for the pod's claim with that
// index, which does not exist yet, unless a container references it already.
func (p *Pods) checkUnknownClaim(
	pod *corev1.Pod, index int, entry *scheduling.PodGroupResourceClaim,
) (warning string, err error) {
	c := pod.Spec.ResourceClaims[index]
	if isReferenced(&pod.Spec, c.Name) {
		return "", nil
	}
	if entry != nil {
		return "", denied(reasonClaimMissing, "spec.resourceClaims[%d] %q: %s does not exist in namespace %q: create it "+
			"first (a Deployment or Job retries its pods), or reference the claim in resources.claims of the "+
			"containers that need it",
			index, c.Name, describeSource(entry.ResourceClaimName, entry.ResourceClaimTemplateName), pod.Namespace)
	}
	return fmt.Sprintf("spec.resourceClaims[%d] %q: %s does not exist yet, and no container references the claim: "+
		"if it is for a device of %s, create it before the pod, "+
		"or reference the claim in resources.claims of the containers that need it",
		index, c.Name, describeSource(c.ResourceClaimName, c.ResourceClaimTemplateName), p.Driver), nil
}

// sharedEntry returns the PodGroup's entry that a pod's claim refers to, or nil.
func sharedEntry(group *scheduling.PodGroup, c *corev1.PodResourceClaim) *scheduling.PodGroupResourceClaim {
	if group == nil {
		return nil
	}
	entry, _ := (&joiner{group: group}).matchEntry(c)
	return entry
}

// podClaimSpec returns the spec of a pod's claim, or nil if the claim and its template do not exist. A claim that is
// generated for the PodGroup's entry may not exist yet, but its template does.
func (p *Pods) podClaimSpec(
	ctx context.Context, namespace string, group *scheduling.PodGroup, entry *scheduling.PodGroupResourceClaim,
	c corev1.PodResourceClaim,
) (*resourceapi.ResourceClaimSpec, error) {
	switch {
	case entry != nil && entry.ResourceClaimTemplateName != nil:
		return p.entrySpec(ctx, group, entry.Name)
	case c.ResourceClaimTemplateName != nil:
		return p.templateSpec(ctx, namespace, *c.ResourceClaimTemplateName)
	case c.ResourceClaimName != nil:
		return p.claimSpec(ctx, namespace, *c.ResourceClaimName)
	}
	return nil, nil
}

// driverRequest is a claim's request for a device of the driver.
type driverRequest struct {
	name  string
	isNIC bool
	// needsLink reports whether the pod certainly gets a link: the request does not have alternatives or adminAccess.
	needsLink bool
}

// target describes the devices that a request is for.
type target struct {
	ownDriver bool // a device of the driver
	isNIC     bool
}

func (t target) or(other target) target {
	return target{ownDriver: t.ownDriver || other.ownDriver, isNIC: t.isNIC || other.isNIC}
}

// driverRequests returns the requests of a claim for devices of the driver. It
// recognizes them by the names of the chart's DeviceClasses, by the selectors of
// other DeviceClasses and of the request, and by the driver's parameters in the class or the claim.
func (p *Pods) driverRequests(
	ctx context.Context, spec *resourceapi.ResourceClaimSpec,
) (requests []driverRequest, err error) {
	for _, r := range spec.Devices.Requests {
		t := targetOfSelectors(claims.Selectors(r), p.Driver)
		for _, name := range claims.ClassNames(r) {
			class, err := p.deviceClass(ctx)(name)
			if err != nil {
				return nil, err
			}
			if class == nil {
				class = &resourceapi.DeviceClass{}
			}
			t = t.or(targetOfClass(name, class, p.Driver))
		}
		needsLink := t.isNIC && r.Exactly != nil && !ptr.Deref(r.Exactly.AdminAccess, false)
		// The parameters do not show that the request is for a NIC: they may be for other requests, too.
		if t = t.or(targetOfConfig(spec.Devices.Config, r.Name, p.Driver)); t.ownDriver {
			requests = append(requests, driverRequest{name: r.Name, isNIC: t.isNIC, needsLink: needsLink})
		}
	}
	return requests, nil
}

// targetOfClass returns what a request of a DeviceClass is for. The class may be
// empty if it does not exist.
func targetOfClass(name string, class *resourceapi.DeviceClass, driver string) target {
	t := target{
		ownDriver: strings.HasSuffix(name, "."+driver),
		isNIC:     name == v1alpha1.DeviceClassName(v1alpha1.DeviceKindNIC, driver),
	}
	for _, c := range class.Spec.Config {
		if c.Opaque != nil && c.Opaque.Driver == driver {
			t = t.or(target{ownDriver: true, isNIC: isNetworkAttachment(c.Opaque.Parameters.Raw)})
		}
	}
	return t.or(targetOfSelectors(class.Spec.Selectors, driver))
}

// targetOfSelectors returns what the selectors of a DeviceClass or of a request select.
func targetOfSelectors(selectors []resourceapi.DeviceSelector, driver string) target {
	return target{
		ownDriver: claims.AnySelectsDriver(selectors, driver), isNIC: claims.AnySelectsNIC(selectors, driver),
	}
}

// targetOfConfig returns what a request is for, by the driver's parameters that a
// claim has for it.
func targetOfConfig(config []resourceapi.DeviceClaimConfiguration, request, driver string) (t target) {
	for _, c := range config {
		if c.Opaque != nil && c.Opaque.Driver == driver && appliesTo(c.Requests, request) {
			t = t.or(target{ownDriver: true, isNIC: isNetworkAttachment(c.Opaque.Parameters.Raw)})
		}
	}
	return t
}

// appliesTo reports whether a configuration for these requests, or for all if
// there are none, is for a request or one of its alternatives.
func appliesTo(requests []string, request string) bool {
	return len(requests) == 0 || slices.ContainsFunc(requests, func(name string) bool {
		main, _, _ := strings.Cut(name, "/")
		return main == request
	})
}

func isNetworkAttachment(raw []byte) bool {
	decoded, err := v1alpha1.Decode(raw)
	if err != nil {
		return false
	}
	_, ok := decoded.(*v1alpha1.NetworkAttachment)
	return ok
}

// addReferences adds references to a claim to containers. total is the number of
// the claim's requests: unless the containers need all of them, the references
// name each request.
func addReferences(spec *corev1.PodSpec, claim string, requests []driverRequest, total int) {
	chosen := isReferenced(spec, claim)
	var needed []driverRequest
	for _, r := range requests {
		if r.isNIC || !chosen {
			needed = append(needed, r)
		}
	}
	if len(needed) == 0 {
		return
	}
	for _, c := range containersByName(spec) {
		if len(needed) == total && !references(c, claim, "") {
			c.Resources.Claims = append(c.Resources.Claims, corev1.ResourceClaim{Name: claim})
			continue
		}
		for _, r := range needed {
			if !references(c, claim, r.name) {
				c.Resources.Claims = append(c.Resources.Claims, corev1.ResourceClaim{Name: claim, Request: r.name})
			}
		}
	}
}

// isReferenced reports whether a container references a claim.
func isReferenced(spec *corev1.PodSpec, claim string) bool {
	for c := range maps.Values(containersByName(spec)) {
		if references(c, claim, "") {
			return true
		}
	}
	return false
}

// references reports whether a container references a request of a claim, or, if
// request is empty, any part of the claim.
func references(c *corev1.Container, claim, request string) bool {
	return slices.ContainsFunc(c.Resources.Claims, func(r corev1.ResourceClaim) bool {
		return r.Name == claim && (request == "" || r.Request == "" || r.Request == request)
	})
}

// containersByName returns the containers that can reference claims: the containers and
// init containers of a pod.
func containersByName(spec *corev1.PodSpec) map[string]*corev1.Container {
	all := map[string]*corev1.Container{}
	for i := range spec.InitContainers {
		all[spec.InitContainers[i].Name] = &spec.InitContainers[i]
	}
	for i := range spec.Containers {
		all[spec.Containers[i].Name] = &spec.Containers[i]
	}
	return all
}
