// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package endpoints

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/events"
	testingclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/trim"
)

const driverName = "dra-shared.dev"

func service(change func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "team", Name: "web", UID: "service",
			Annotations: map[string]string{
				network.ServiceNetworkAnnotation: "storage", network.ServiceSelectorAnnotation: "app=web",
			},
		},
		Spec: corev1.ServiceSpec{
			ClusterIP: corev1.ClusterIPNone,
			Ports: []corev1.ServicePort{{
				Name: "http", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolTCP,
			}},
		},
	}
	if change != nil {
		change(s)
	}
	return s
}

func pod(namespace, name string, ready bool, claims ...string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{"app": "web"},
		},
		Spec: corev1.PodSpec{NodeName: "n1"},
	}
	if ready {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	}
	for i := range claims { // Kubernetes has created them from a template
		entry := fmt.Sprint("claim", i)
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{
			Name: entry, ResourceClaimTemplateName: ptr.To("web"),
		})
		p.Status.ResourceClaimStatuses = append(p.Status.ResourceClaimStatuses, corev1.PodResourceClaimStatus{
			Name: entry, ResourceClaimName: &claims[i],
		})
	}
	return p
}

// sharing makes a pod use a claim by its name.
func sharing(p *corev1.Pod, claim string) *corev1.Pod {
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "nic", ResourceClaimName: &claim}}
	return p
}

// claim returns a claim with data, which is reserved for pods.
func claim(namespace, name string, data any, pods ...string) *resourceapi.ResourceClaim {
	raw, err := json.Marshal(data)
	if err != nil {
		panic(err)
	}
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	for _, p := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{
			Resource: "pods", Name: p, UID: types.UID("uid-" + p),
		})
	}
	c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
		Driver: driverName, Data: &runtime.RawExtension{Raw: raw},
		Conditions: []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue}},
	}}
	return c
}

func status(networkName, pod string, addresses ...string) *v1alpha1.NetworkStatus {
	s := &v1alpha1.NetworkStatus{
		TypeMeta: v1alpha1.TypeMeta(v1alpha1.NetworkStatusKind), Network: networkName, Pod: pod,
		Interfaces: []v1alpha1.CNIInterface{{Name: "net1", MAC: "02:00:00:00:00:01", MTU: 9000}},
		DNS:        &v1alpha1.CNIDNS{Nameservers: []string{"10.20.0.2"}},
	}
	for _, a := range addresses {
		s.IPs = append(s.IPs, v1alpha1.CNIIP{Address: a})
	}
	return s
}

func summary(truncated bool, links ...v1alpha1.PodNetworkStatus) *v1alpha1.NetworkStatusSummary {
	return &v1alpha1.NetworkStatusSummary{
		TypeMeta: v1alpha1.TypeMeta(v1alpha1.NetworkStatusSummaryKind), Network: "storage", First: links,
		Truncated: truncated,
	}
}

type testEnv struct {
	*Reconciler
	t        *testing.T
	clock    *testingclock.FakeClock
	recorder *events.FakeRecorder
}

func newEnv(t *testing.T, objects ...client.Object) *testEnv {
	t.Helper()
	for i := range objects {
		trimmed, err := trim.PodWithLinks(objects[i])
		if err != nil {
			t.Fatal(err)
		}
		objects[i] = trimmed.(client.Object) //nolint:forcetypeassert // of the type of the argument
	}
	c := fake.NewClientBuilder().WithObjects(objects...).Build()
	e := &testEnv{t: t, clock: testingclock.NewFakeClock(time.Now()), recorder: events.NewFakeRecorder(10)}
	writes, err := NewWrites(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	e.Reconciler = &Reconciler{
		Client: c, Pods: c, Driver: driverName, Networks: []string{"storage"}, Events: e.recorder,
		Clock: e.clock, Writes: writes,
		written: map[types.NamespacedName]time.Time{},
	}
	return e
}

func (e *testEnv) reconcile() ctrl.Result {
	e.t.Helper()
	result, err := e.Reconcile(e.t.Context(), ctrl.Request{NamespacedName: types.NamespacedName{
		Namespace: "team", Name: "web",
	}})
	if err != nil {
		e.t.Fatal(err)
	}
	return result
}

// endpoints returns the endpoints as SLICE: POD ADDRESS, and ready if it is.
func (e *testEnv) endpoints() (all []string) {
	e.t.Helper()
	var list discoveryv1.EndpointSliceList
	if err := e.Client.List(e.t.Context(), &list); err != nil {
		e.t.Fatal(err)
	}
	for _, s := range list.Items {
		for _, p := range s.Endpoints {
			text := fmt.Sprintf("%s: %s %s", s.Name, p.TargetRef.Name, p.Addresses[0])
			if *p.Conditions.Ready {
				text += " ready"
			}
			all = append(all, text)
		}
	}
	return all
}

func (e *testEnv) expect(want ...string) {
	e.t.Helper()
	if diff := cmp.Diff(want, e.endpoints()); diff != "" {
		e.t.Errorf("endpoints (-want +got):\n%s", diff)
	}
}

// Kubernetes generates a claim for the extended resources of a pod (KEP-5004). The pod's spec does not name it.
func TestReconcile_publishesLinksOfExtendedResources(t *testing.T) {
	p := pod("team", "a", true)
	p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "a-extended"}
	e := newEnv(t, service(nil), p, claim("team", "a-extended", status("storage", "team/a", "10.20.0.1/16"), "a"))
	if got := e.servicesOf(t.Context(), p); len(got) != 1 {
		t.Errorf("a change of the pod requests %v, want the Service", got)
	}
	e.reconcile()
	e.expect("web-shared-4-0: a 10.20.0.1 ready")
}

func TestReconcile_publishesLinksOfClaims(t *testing.T) {
	e := newEnv(t, service(nil),
		pod("team", "a", true, "a"), claim("team", "a", status("storage", "team/a", "10.20.0.1/16", "fd00:20::1/64"), "a"),
		pod("team", "b", false, "b"), claim("team", "b", status("storage", "team/b", "10.20.0.2/16"), "b"),
		// These must not be published: another network, another namespace, a claim of another pod, and a
		// pod that the selector does not select.
		pod("team", "c", true, "c"), claim("team", "c", status("backup", "team/c", "10.20.0.3/16"), "c"),
		pod("other", "d", true, "d"), claim("other", "d", status("storage", "other/d", "10.20.0.4/16"), "d"),
		pod("team", "e", true, "e"), claim("team", "e", status("storage", "team/e", "10.20.0.5/16"), "f"),
		pod("team", "g", true, "g"), claim("team", "g", status("storage", "team/a", "10.20.0.6/16"), "g"),
	)
	e.reconcile()
	e.expect("web-shared-4-0: a 10.20.0.1 ready", "web-shared-4-0: b 10.20.0.2", "web-shared-6-0: a fd00:20::1 ready")
	var slice discoveryv1.EndpointSlice
	key := types.NamespacedName{Namespace: "team", Name: "web-shared-4-0"}
	if err := e.Client.Get(t.Context(), key, &slice); err != nil {
		t.Fatal(err)
	}
	if len(slice.Ports) != 1 || *slice.Ports[0].Port != 8080 || slice.Labels[discoveryv1.LabelServiceName] != "web" {
		t.Errorf("got %+v, want port 8080 and the label of Service web", slice)
	}
	e.clock.Step(minWriteInterval)
	e.reconcile()
	if got := testutil.ToFloat64(e.Writes.WithLabelValues(objectSlice)); got != 2 {
		t.Errorf("after a Reconcile without a change: got %v writes, want 2", got)
	}

	if err := e.Client.Delete(t.Context(), pod("team", "a", true)); err != nil {
		t.Fatal(err)
	}
	e.clock.Step(minWriteInterval)
	e.reconcile()
	e.expect("web-shared-4-0: b 10.20.0.2")
	if result := e.reconcile(); result.RequeueAfter == 0 {
		t.Error("directly after a write: got no RequeueAfter, want the next write later")
	}
}

func TestReconcile_publishesLinksOfSharedClaims(t *testing.T) {
	shared := summary(true,
		v1alpha1.PodNetworkStatus{Pod: "team/a", Interface: "net1", IPs: []string{"10.20.0.1/16"}},
		v1alpha1.PodNetworkStatus{Pod: "other/b", Interface: "net1", IPs: []string{"10.20.0.2/16"}})
	e := newEnv(t, service(nil), claim("team", "all", shared, "a", "b"),
		sharing(pod("team", "a", true), "all"), sharing(pod("team", "b", true), "all"))
	e.reconcile()
	e.expect("web-shared-4-0: a 10.20.0.1 ready")
	select {
	case event := <-e.recorder.Events:
		if !strings.Contains(event, network.EventReasonIncompleteEndpoints) ||
			!strings.Contains(event, "pods b lists only some") {
			t.Errorf("got event %s, want one that names pod b", event)
		}
	default:
		t.Error("got no event for a pod that the status of its claim omits")
	}
}

// One pod with a blocked link, or a pod that could not be attached, makes the claim's condition Ready False. The links
// of the claim's other pods work.
func TestReconcile_sharedClaimWithPodThatIsNotReady(t *testing.T) {
	var pods []string
	var links []v1alpha1.PodNetworkStatus
	objects := []client.Object{service(nil)}
	want := ""
	for i := range 20 {
		name, ip, ready := fmt.Sprintf("p%02d", i), fmt.Sprintf("10.20.0.%d", i+1), " ready"
		link := v1alpha1.PodNetworkStatus{Pod: "team/" + name, Interface: "net1", IPs: []string{ip + "/16"}}
		if i == 3 {
			link.NotReady, ready = true, ""
		}
		pods, links = append(pods, name), append(links, link)
		objects = append(objects, sharing(pod("team", name, true), "all"))
		want += fmt.Sprintf("web-shared-4-0: %s %s%s\n", name, ip, ready)
	}
	c := claim("team", "all", summary(false, links...), pods...)
	c.Status.Devices[0].Conditions[0].Status = metav1.ConditionFalse
	e := newEnv(t, append(objects, c)...)
	e.reconcile()
	e.expect(strings.Split(strings.TrimSpace(want), "\n")...)
}

func TestReconcile_refusesInvalidServices(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*corev1.Service)
		want   string
	}{
		"selector": {
			func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "web"} }, "spec.selector: Forbidden",
		},
		"no annotation for pods": {
			func(s *corev1.Service) { delete(s.Annotations, network.ServiceSelectorAnnotation) }, "must be a label",
		},
		"named port": {
			func(s *corev1.Service) { s.Spec.Ports[0].TargetPort = intstr.FromString("http") },
			`spec.ports[0].targetPort: "http": must be a number`,
		},
		"unknown network": {
			func(s *corev1.Service) { s.Annotations[network.ServiceNetworkAnnotation] = "backup" },
			`"backup": must be a network of the driver's configuration, one of ["storage"]`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, service(tc.change), pod("team", "a", true, "a"),
				claim("team", "a", status("storage", "team/a", "10.20.0.1/16"), "a"))
			e.reconcile()
			e.expect()
			select {
			case event := <-e.recorder.Events:
				if !strings.Contains(event, tc.want) {
					t.Errorf("got event %s, want %s", event, tc.want)
				}
			default:
				t.Error("got no event")
			}
		})
	}
}

// A failed read does not change the endpoints of the Service.
func TestReconcile_keepsEndpointsAfterReadError(t *testing.T) {
	e := newEnv(t, service(nil), pod("team", "a", true, "a"),
		claim("team", "a", status("storage", "team/a", "10.20.0.1/16"), "a"))
	e.reconcile()
	e.clock.Step(minWriteInterval)
	failed := errors.New("the connection is lost")
	e.Pods = interceptor.NewClient(fake.NewClientBuilder().Build(), interceptor.Funcs{
		List: func(context.Context, client.WithWatch, client.ObjectList, ...client.ListOption) error { return failed },
	})
	key := types.NamespacedName{Namespace: "team", Name: "web"}
	if _, err := e.Reconcile(t.Context(), ctrl.Request{NamespacedName: key}); !errors.Is(err, failed) {
		t.Errorf("Reconcile without pods: got error %v, want %v", err, failed)
	}
	e.expect("web-shared-4-0: a 10.20.0.1 ready")
	if len(e.recorder.Events) > 0 {
		t.Errorf("got event %s, want none about the Service", <-e.recorder.Events)
	}
}

func TestSlicesOf_dividesManyEndpoints(t *testing.T) {
	var links []podLink
	for i := range 2*maxEndpoints + 1 {
		l := podLink{pod: pod("team", fmt.Sprintf("p%04d", i), true)}
		l.add(fmt.Sprintf("10.20.%d.%d/16", i/250, i%250+1))
		links = append(links, l)
	}
	all, err := slicesOf(service(nil), links)
	if err != nil || len(all) != 3 || len(all[2].Endpoints) != 1 {
		t.Errorf("2001 pods: got %d slices, %v, want 3, of which the last has one endpoint", len(all), err)
	}
}

func TestAnnotationOf(t *testing.T) {
	const cluster = `{"name":"cbr0","interface":"eth0","ips":["10.244.0.5"],"default":true,"dns":{}}`
	links := []link{{network: "storage", name: "net1", mac: "02:00:00:00:00:01", mtu: 9000}}
	links[0].add("10.20.0.1/16")
	own := `{"name":"dra-shared.dev/storage","interface":"net1","ips":["10.20.0.1"],"mac":"02:00:00:00:00:01",` +
		`"mtu":9000,"dns":{}}`
	for name, tc := range map[string]struct {
		present string
		links   []link
		want    string
	}{
		"none":                 {"", nil, ""},
		"first":                {"", links, "[" + own + "]"},
		"besides Multus":       {"[" + cluster + "]", links, "[" + cluster + "," + own + "]"},
		"again":                {"[" + cluster + "," + own + "]", links, "[" + cluster + "," + own + "]"},
		"link is gone":         {"[" + cluster + "," + own + "]", nil, "[" + cluster + "]"},
		"of Multus, unchanged": {"[ " + cluster + " ]", nil, "[ " + cluster + " ]"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := annotationOf(tc.present, tc.links, driverName)
			if err != nil || got != tc.want {
				t.Errorf("got %s, %v, want %s", got, err, tc.want)
			}
		})
	}
	if _, err := annotationOf("{", links, driverName); err == nil {
		t.Error("an annotation that is not a list: got no error")
	}
}

func TestStatusReconciler_writesAnnotationOnce(t *testing.T) {
	e := newEnv(t, pod("team", "a", true, "a"), claim("team", "a", status("storage", "team/a", "10.20.0.1/16"), "a"))
	r := &StatusReconciler{Client: e.Client, Pods: e.Client, Driver: driverName, Writes: e.Writes}
	key := types.NamespacedName{Namespace: "team", Name: "a"}
	for range 2 {
		if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: key}); err != nil {
			t.Fatal(err)
		}
	}
	var got corev1.Pod
	if err := e.Client.Get(t.Context(), key, &got); err != nil {
		t.Fatal(err)
	}
	const want = `[{"name":"dra-shared.dev/storage","interface":"net1","ips":["10.20.0.1"],"mac":"02:00:00:00:00:01",` +
		`"mtu":9000,"dns":{"nameservers":["10.20.0.2"]}}]`
	if diff := cmp.Diff(want, got.Annotations[network.NetworkStatusAnnotation]); diff != "" {
		t.Errorf("annotation (-want +got):\n%s", diff)
	}
	if got := testutil.ToFloat64(e.Writes.WithLabelValues(objectPod)); got != 1 {
		t.Errorf("got %v writes, want 1", got)
	}
}
