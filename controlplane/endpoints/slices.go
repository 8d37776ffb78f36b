// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package endpoints

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// maxEndpoints is the API's limit for one EndpointSlice.
const maxEndpoints = 1000

// podLink is a link of a pod on the network of a Service.
type podLink struct {
	pod *corev1.Pod
	link
}

// slicesOf returns the EndpointSlices of a Service: one for each IP family, or more if it has more
// than maxEndpoints pods. Their names and the order of the endpoints depend on the names of the
// pods only.
func slicesOf(service *corev1.Service, links []podLink) (all []*discoveryv1.EndpointSlice, err error) {
	ports, err := portsOf(service)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(links, func(a, b podLink) int {
		return cmp.Or(cmp.Compare(a.pod.Name, b.pod.Name), cmp.Compare(a.name, b.name))
	})
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		var endpoints []discoveryv1.Endpoint
		for _, l := range links {
			i := slices.IndexFunc(l.addresses, func(a netip.Addr) bool {
				return a.Is4() == (family == discoveryv1.AddressTypeIPv4)
			})
			if i >= 0 {
				endpoints = append(endpoints, endpointOf(service, l, l.addresses[i]))
			}
		}
		for n := 0; n*maxEndpoints < len(endpoints); n++ {
			part := endpoints[n*maxEndpoints : min(len(endpoints), (n+1)*maxEndpoints)]
			all = append(all, sliceOf(service, family, n, part, ports))
		}
	}
	return all, nil
}

// managedLabels returns the labels that the controller finds its slices of a Service by.
func managedLabels(service *corev1.Service) map[string]string {
	return map[string]string{
		discoveryv1.LabelServiceName: service.Name, discoveryv1.LabelManagedBy: v1alpha1.ManagedByController,
	}
}

func sliceOf(
	service *corev1.Service, family discoveryv1.AddressType, n int, endpoints []discoveryv1.Endpoint,
	ports []discoveryv1.EndpointPort,
) *discoveryv1.EndpointSlice {
	suffix := map[discoveryv1.AddressType]string{discoveryv1.AddressTypeIPv4: "4", discoveryv1.AddressTypeIPv6: "6"}
	labels := managedLabels(service)
	if service.Spec.ClusterIP == corev1.ClusterIPNone {
		labels[corev1.IsHeadlessService] = ""
	}
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: service.Namespace, Name: fmt.Sprintf("%s-shared-%s-%d", service.Name, suffix[family], n), Labels: labels,
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Service", Name: service.Name, UID: service.UID, Controller: ptr.To(true),
			}},
		},
		AddressType: family, Endpoints: endpoints, Ports: ports,
	}
}

// sliceVerb is a kind of writes of EndpointSlices.
type sliceVerb string

const (
	createSlice sliceVerb = "create"
	updateSlice sliceVerb = "update"
	deleteSlice sliceVerb = "delete"
)

// sliceWrite is a write of an EndpointSlice.
type sliceWrite struct {
	verb  sliceVerb
	slice *discoveryv1.EndpointSlice
}

// diffSlices returns the writes that turn the current slices of a Service into the wanted ones. Deletions come last.
func diffSlices(present, wanted []*discoveryv1.EndpointSlice) (writes []sliceWrite) {
	unwanted := slices.Clone(present)
	for _, w := range wanted {
		i := slices.IndexFunc(unwanted, func(s *discoveryv1.EndpointSlice) bool { return s.Name == w.Name })
		if i < 0 {
			writes = append(writes, sliceWrite{createSlice, w})
			continue
		}
		current := unwanted[i]
		unwanted = slices.Delete(unwanted, i, i+1)
		if equality.Semantic.DeepEqual(current.Endpoints, w.Endpoints) &&
			equality.Semantic.DeepEqual(current.Ports, w.Ports) && equality.Semantic.DeepEqual(current.Labels, w.Labels) {
			continue
		}
		updated := current.DeepCopy()
		updated.Endpoints, updated.Ports, updated.Labels = w.Endpoints, w.Ports, w.Labels
		writes = append(writes, sliceWrite{updateSlice, updated})
	}
	for _, s := range unwanted {
		writes = append(writes, sliceWrite{deleteSlice, s})
	}
	return writes
}

func endpointOf(service *corev1.Service, l podLink, address netip.Addr) discoveryv1.Endpoint {
	serving := l.ready && isReady(l.pod)
	terminating := l.pod.DeletionTimestamp != nil
	e := discoveryv1.Endpoint{
		Addresses: []string{address.String()},
		Conditions: discoveryv1.EndpointConditions{
			Ready:   ptr.To(service.Spec.PublishNotReadyAddresses || serving && !terminating),
			Serving: ptr.To(serving), Terminating: ptr.To(terminating),
		},
		TargetRef: &corev1.ObjectReference{
			Kind: "Pod", Namespace: l.pod.Namespace, Name: l.pod.Name, UID: l.pod.UID,
		},
	}
	if l.pod.Spec.NodeName != "" {
		e.NodeName = ptr.To(l.pod.Spec.NodeName)
	}
	if l.pod.Spec.Hostname != "" && l.pod.Spec.Subdomain == service.Name { // DNS names of a StatefulSet's pods
		e.Hostname = ptr.To(l.pod.Spec.Hostname)
	}
	return e
}

func isReady(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// portsOf returns the ports of a Service. The names of container ports are not supported.
func portsOf(service *corev1.Service) (ports []discoveryv1.EndpointPort, err error) {
	for i, p := range service.Spec.Ports {
		number := p.Port
		switch {
		case p.TargetPort.Type == intstr.String:
			return nil, fmt.Errorf("spec.ports[%d].targetPort: %q: must be a number", i, p.TargetPort.StrVal)
		case p.TargetPort.IntVal != 0:
			number = p.TargetPort.IntVal
		}
		ports = append(ports, discoveryv1.EndpointPort{
			Name: ptr.To(p.Name), Port: ptr.To(number), Protocol: ptr.To(p.Protocol), AppProtocol: p.AppProtocol,
		})
	}
	return ports, nil
}
