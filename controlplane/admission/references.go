package admission

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// ReferencesAnnotation on a pod says which containers get the pod's claims of the
// driver: All (the default), or Explicit, those that name them.
const ReferencesAnnotation = "dra-shared.dev/claim-references"

// Values of ReferencesAnnotation.
const (
	ReferencesAll      = "All"
	ReferencesExplicit = "Explicit"
)

// refer puts the pod's claims of the driver into its containers: one that does
// not name a claim starts without waiting for it.
//
// A NIC is in the pod's network namespace, which all containers have in common:
// all name it. Other devices are their containers' own: where one of them names
// the claim, the pod's author has chosen.
//
// Of a claim that does not exist yet nobody knows whose devices it asks for. A pod
// that shares one with its group is refused: without its claim in a container it
// would run without the device, for good.
func (p *Pods) refer(ctx context.Context, pod *corev1.Pod, group *scheduling.PodGroup) (warnings []string, err error) {
	switch value := pod.Annotations[ReferencesAnnotation]; value {
	case ReferencesExplicit:
		return nil, nil
	case "", ReferencesAll:
	default:
		return nil, denied("metadata.annotations[%q]: Unsupported value: %q: must be %s or %s", ReferencesAnnotation, value, ReferencesAll, ReferencesExplicit)
	}
	for i, c := range pod.Spec.ResourceClaims {
		shared := sharedEntry(group, &c)
		spec, err := p.podClaim(ctx, pod.Namespace, group, shared, c)
		if err != nil {
			return warnings, err
		}
		if spec != nil {
			requests, err := p.ours(ctx, spec)
			if err != nil {
				return warnings, err
			}
			addReferences(&pod.Spec, c.Name, requests, len(spec.Devices.Requests))
			continue
		}
		if isNamed(&pod.Spec, c.Name) {
			continue // its author knows who is to have it
		}
		what := source(c.ResourceClaimName, c.ResourceClaimTemplateName)
		if shared != nil {
			what = source(shared.ResourceClaimName, shared.ResourceClaimTemplateName)
			return warnings, denied("spec.resourceClaims[%d] %q: there is no %s in namespace %q: create it first (a Deployment or Job tries its pods again by itself), or name the claim in resources.claims of the containers that are to have it", i, c.Name, what, pod.Namespace)
		}
		warnings = append(warnings, fmt.Sprintf("spec.resourceClaims[%d] %q: there is no %s yet, and no container names the claim: if it is for a device of %s, create the pod after it, or name it in resources.claims of the containers that are to have it", i, c.Name, what, p.Driver))
	}
	return warnings, nil
}

// sharedEntry is the group's entry that a pod's stands for, which has joined it.
func sharedEntry(group *scheduling.PodGroup, c *corev1.PodResourceClaim) *scheduling.PodGroupResourceClaim {
	if group == nil {
		return nil
	}
	entry, _ := (&joining{group: group}).match(c)
	return entry
}

// isNamed tells whether a container names a claim.
func isNamed(spec *corev1.PodSpec, claim string) bool {
	return slices.ContainsFunc(names(spec), func(name string) bool { return hasReference(containers(spec)[name], claim, "") })
}

// podClaim is what a pod's claim asks for; nil if nobody knows yet. One that is
// generated for the pod's group may not exist yet; its template does.
func (p *Pods) podClaim(ctx context.Context, namespace string, group *scheduling.PodGroup, shared *scheduling.PodGroupResourceClaim, c corev1.PodResourceClaim) (*resourceapi.ResourceClaimSpec, error) {
	if shared != nil && shared.ResourceClaimTemplateName != nil {
		return p.specOf(ctx, group, shared.Name)
	}
	if c.ResourceClaimTemplateName != nil {
		return p.template(ctx, namespace, *c.ResourceClaimTemplateName)
	}
	if c.ResourceClaimName == nil {
		return nil, nil
	}
	var claim resourceapi.ResourceClaim
	err := p.get(ctx, types.NamespacedName{Namespace: namespace, Name: *c.ResourceClaimName}, &claim)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return &claim.Spec, err
}

// request is one for a device of the driver.
type request struct {
	name string
	nic  bool
}

// ours are the requests of a claim that are for devices of the driver: by the
// class's name, where it is one that the chart makes, by its selectors, or by the
// driver's parameters in the class or the claim.
func (p *Pods) ours(ctx context.Context, spec *resourceapi.ResourceClaimSpec) (requests []request, err error) {
	for _, r := range spec.Devices.Requests {
		var classes []string
		if r.Exactly != nil {
			classes = append(classes, r.Exactly.DeviceClassName)
		}
		for _, s := range r.FirstAvailable {
			classes = append(classes, s.DeviceClassName)
		}
		ours, nic := parameters(spec.Devices.Config, r.Name, p.Driver)
		for _, name := range classes {
			var class resourceapi.DeviceClass
			if err := p.get(ctx, types.NamespacedName{Name: name}, &class); err != nil {
				if !apierrors.IsNotFound(err) {
					return nil, err
				}
			}
			o, n := ofClass(name, &class, p.Driver)
			ours, nic = ours || o, nic || n
		}
		if ours {
			requests = append(requests, request{name: r.Name, nic: nic})
		}
	}
	return requests, nil
}

func ofClass(name string, class *resourceapi.DeviceClass, driver string) (ours, nic bool) {
	for _, c := range class.Spec.Config {
		if c.Opaque != nil && c.Opaque.Driver == driver {
			ours, nic = true, nic || isNetwork(c.Opaque.Parameters.Raw)
		}
	}
	for _, s := range class.Spec.Selectors {
		if s.CEL != nil && strings.Contains(s.CEL.Expression, `"`+driver+`"`) {
			ours = true
			nic = nic || strings.Contains(s.CEL.Expression, `kind == "nic"`)
		}
	}
	return ours || strings.HasSuffix(name, "."+driver), nic || name == "nic."+driver
}

// parameters tells whether a claim has parameters of the driver for a request.
func parameters(config []resourceapi.DeviceClaimConfiguration, request, driver string) (ours, nic bool) {
	for _, c := range config {
		if c.Opaque == nil || c.Opaque.Driver != driver {
			continue
		}
		if len(c.Requests) == 0 || slices.ContainsFunc(c.Requests, func(name string) bool {
			main, _, _ := strings.Cut(name, "/")
			return main == request
		}) {
			ours, nic = true, nic || isNetwork(c.Opaque.Parameters.Raw)
		}
	}
	return ours, nic
}

func isNetwork(raw []byte) bool {
	decoded, err := v1alpha1.Decode(raw)
	_, network := decoded.(*v1alpha1.NetworkAttachment)
	return err == nil && network
}

// addReferences makes containers name a claim. all is how many requests the
// claim has: where not all of them are meant, they are named one by one.
func addReferences(spec *corev1.PodSpec, claim string, requests []request, all int) {
	if len(requests) == 0 {
		return
	}
	chosen := isNamed(spec, claim)
	var add []request
	for _, r := range requests {
		if r.nic || !chosen {
			add = append(add, r)
		}
	}
	for _, c := range containers(spec) {
		if len(add) == all && !hasReference(c, claim, "") {
			c.Resources.Claims = append(c.Resources.Claims, corev1.ResourceClaim{Name: claim})
			continue
		}
		for _, r := range add {
			if !hasReference(c, claim, r.name) {
				c.Resources.Claims = append(c.Resources.Claims, corev1.ResourceClaim{Name: claim, Request: r.name})
			}
		}
	}
}

// hasReference tells whether a container names a request of a claim, or, without
// a request, anything of it.
func hasReference(c *corev1.Container, claim, request string) bool {
	return slices.ContainsFunc(c.Resources.Claims, func(r corev1.ResourceClaim) bool {
		return r.Name == claim && (request == "" || r.Request == "" || r.Request == request)
	})
}
