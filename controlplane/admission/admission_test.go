// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
	"sigs.k8s.io/yaml"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

const driver = "dra-shared.dev"

// objects are in the API server of newPods: PodGroups with claims from templates
// and by name, and the templates and DeviceClasses.
const objects = `
apiVersion: scheduling.dra-shared.dev/v1beta1
kind: PodGroup
metadata: {namespace: ns, name: group, uid: "1"}
spec:
  schedulingPolicy: {basic: {}}
  resourceClaims:
  - {name: net, resourceClaimTemplateName: share}
  - {name: kept, resourceClaimName: team}
  - {name: rack, resourceClaimTemplateName: fabric}
---
apiVersion: scheduling.dra-shared.dev/v1beta1
kind: PodGroup
metadata: {namespace: ns, name: early, uid: "3"}
spec:
  schedulingPolicy: {basic: {}}
  resourceClaims: [{name: net, resourceClaimTemplateName: later}, {name: kept, resourceClaimName: missing}]
---
apiVersion: scheduling.dra-shared.dev/v1beta1
kind: PodGroup
metadata: {namespace: ns, name: ungated, uid: "5", annotations: {scheduling.dra-shared.dev/gates: Disabled}}
spec:
  schedulingPolicy: {basic: {}}
  resourceClaims: [{name: rack, resourceClaimTemplateName: fabric}]
---
apiVersion: scheduling.k8s.io/v1beta1
kind: PodGroup
metadata: {namespace: ns, name: native}
spec: {schedulingPolicy: {basic: {}}}
---
apiVersion: scheduling.k8s.io/v1beta1
kind: PodGroup
metadata:
  namespace: ns
  name: group
  ownerReferences:
  - {apiVersion: scheduling.dra-shared.dev/v1beta1, kind: PodGroup, name: group, uid: earlier, controller: true}
spec: {schedulingPolicy: {basic: {}}}
---
apiVersion: scheduling.k8s.io/v1beta1
kind: PodGroup
metadata: {namespace: ns, name: both}
spec: {schedulingPolicy: {basic: {}}}
---
apiVersion: scheduling.dra-shared.dev/v1beta1
kind: PodGroup
metadata: {namespace: ns, name: both, uid: "6"}
spec:
  schedulingPolicy: {basic: {}}
  resourceClaims: [{name: gpu, resourceClaimTemplateName: theirs}, {name: rack, resourceClaimTemplateName: fabric}]
---
apiVersion: scheduling.dra-shared.dev/v1beta1
kind: PodGroup
metadata: {namespace: ns, name: prior, uid: "4"}
spec: {schedulingPolicy: {basic: {}}}
---
apiVersion: scheduling.k8s.io/v1beta1
kind: PodGroup
metadata: {namespace: ns, name: prior}
spec: {schedulingPolicy: {basic: {}}, priorityClassName: high, priority: 1000}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {namespace: ns, name: team}
spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nic.dra-shared.dev}}]}}
---
apiVersion: scheduling.dra-shared.dev/v1beta1
kind: PodGroup
metadata: {namespace: ns, name: terminating, uid: "2", deletionTimestamp: "2026-01-01T00:00:00Z", finalizers: [x]}
spec: {schedulingPolicy: {basic: {}}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {namespace: ns, name: share}
spec: {spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nic.dra-shared.dev}}]}}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {namespace: ns, name: fabric}
spec: {spec: {devices: {requests: [{name: fabric, exactly: {deviceClassName: fabric.dra-shared.dev}}]}}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {namespace: ns, name: both}
spec:
  spec:
    devices:
      requests:
      - {name: nic, exactly: {deviceClassName: storage}}
      - {name: gpu, exactly: {deviceClassName: accelerator.dra-shared.dev}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {namespace: ns, name: gpu}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: accelerator.dra-shared.dev}}]}}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {namespace: ns, name: theirs}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.example.com}}]}}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {namespace: ns, name: configured}
spec:
  spec:
    devices:
      requests: [{name: any, exactly: {deviceClassName: mine}}]
      config:
      - opaque:
          driver: dra-shared.dev
          parameters: {apiVersion: dra-shared.dev/v1alpha1, kind: NetworkAttachment}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {namespace: ns, name: quoted}
spec: {spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: quoted}}]}}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {namespace: ns, name: selecting}
spec:
  spec:
    devices:
      requests:
      - name: dev
        firstAvailable:
        - name: nic
          deviceClassName: any
          selectors: [{cel: {expression: "device.attributes['dra-shared.dev'].kind == 'nic'"}}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {namespace: ns, name: excluding}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly:
          deviceClassName: any
          selectors: [{cel: {expression: "device.driver != 'dra-shared.dev'"}}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {namespace: ns, name: monitor}
spec: {spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nic.dra-shared.dev, adminAccess: true}}]}}}
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: any}
spec: {}
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: quoted}
spec:
  selectors:
  - cel:
      expression: "device.driver == 'dra-shared.dev' && device.attributes['dra-shared.dev'].kind=='nic'"
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: storage}
spec:
  selectors:
  - cel:
      expression: 'device.driver == "dra-shared.dev" && device.attributes["dra-shared.dev"].kind == "nic"'
`

func newPods(t *testing.T, m mode.Mode) *Pods {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientscheme.AddToScheme, scheduling.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	b := fake.NewClientBuilder().WithScheme(scheme).WithIndex(&schedulingapi.PodGroup{}, metav1.ObjectNameField,
		func(o client.Object) []string { return []string{o.GetName()} })
	mapper := meta.NewDefaultRESTMapper([]schema.GroupVersion{schedulingapi.SchemeGroupVersion})
	mapper.Add(schedulingapi.SchemeGroupVersion.WithKind("PodGroup"), meta.RESTScopeNamespace)
	for _, doc := range strings.Split(objects, "---\n") {
		var kind metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(doc), &kind); err != nil {
			t.Fatal(err)
		}
		o, err := scheme.New(kind.GroupVersionKind())
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.UnmarshalStrict([]byte(doc), o); err != nil {
			t.Fatal(err)
		}
		object, ok := o.(client.Object)
		if !ok {
			t.Fatalf("%T is not a client.Object", o)
		}
		b = b.WithObjects(object)
	}
	c := b.Build()
	shards := NewShards(testclock.NewFakePassiveClock(time.Now()))
	shards.synced = func() bool { return true }
	return &Pods{Client: c, APIReader: c, Mapper: mapper, Mode: m, Driver: driver, Shards: shards}
}

func review(t *testing.T, old, now string) admission.Request {
	t.Helper()
	raw := func(text string) (e runtime.RawExtension) {
		if text == "" {
			return e
		}
		j, err := yaml.YAMLToJSON([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return runtime.RawExtension{Raw: j}
	}
	return admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		UID: "r", Namespace: "ns", Object: raw(now), OldObject: raw(old),
	}}
}

// create returns the response to the creation of a pod.
func create(t *testing.T, m mode.Mode, pod string) admission.Response {
	t.Helper()
	return newPods(t, m).Handle(t.Context(), review(t, "", pod))
}

// admit calls the handler, applies its patch to the object of the request, and
// decodes the result into into.
func admit(t *testing.T, h admission.Handler, req admission.Request, into any) admission.Response {
	t.Helper()
	response := h.Handle(t.Context(), req)
	if !response.Allowed {
		t.Logf("denied: %v", response.Result)
		return response
	}
	raw := req.Object.Raw
	if len(response.Patches) > 0 {
		operations, err := json.Marshal(response.Patches)
		if err != nil {
			t.Fatal(err)
		}
		p, err := jsonpatch.DecodePatch(operations)
		if err != nil {
			t.Fatal(err)
		}
		if raw, err = p.Apply(raw); err != nil {
			t.Fatalf("%s: %v", operations, err)
		}
	}
	if err := json.Unmarshal(raw, into); err != nil {
		t.Fatal(err)
	}
	return response
}

const podOfGroup = `
metadata: {name: p, annotations: {scheduling.dra-shared.dev/pod-group: group}}
spec:
  resourceClaims:
  - {name: net, resourceClaimTemplateName: share}
  - {name: kept, resourceClaimName: team}
  - {name: own, resourceClaimTemplateName: theirs}
  fieldOfALaterVersion: {kept: true}
  containers: [{name: c, image: i, resources: {}, anotherOne: [1]}]
`

func TestPods_replacesTemplatesWithClaimsOfPodGroup(t *testing.T) {
	for _, m := range []mode.Mode{mode.Bridge, mode.Native} {
		var pod corev1.Pod
		response := admit(t, newPods(t, m), review(t, "", podOfGroup), &pod)
		if !response.Allowed || len(response.Warnings) > 0 {
			t.Fatalf("%s: response %+v", m, response)
		}
		claims := pod.Spec.ResourceClaims
		generated := strings.HasPrefix(ptr.Deref(claims[0].ResourceClaimName, ""), "group-net-")
		if !generated || claims[0].ResourceClaimTemplateName != nil {
			t.Errorf("%s: claim from a template: %+v", m, claims[0])
		}
		if *claims[1].ResourceClaimName != "team" || *claims[2].ResourceClaimTemplateName != "theirs" {
			t.Errorf("%s: claims by name, and of another driver: %+v", m, claims)
		}
		if pod.Labels[scheduling.GroupUIDLabel] != "1" || (pod.Spec.SchedulingGroup != nil) != (m == mode.Native) ||
			len(pod.Spec.SchedulingGates) > 0 {
			t.Errorf("%s: label, scheduling group, or gates of the pod: %+v", m, pod)
		}
		var raw struct{ Spec map[string]any }
		admit(t, newPods(t, m), review(t, "", podOfGroup), &raw)
		if fmt.Sprint(raw.Spec["fieldOfALaterVersion"]) != "map[kept:true]" {
			t.Errorf("%s: the patch drops a field that the API types lack: %v", m, raw)
		}
	}
}

// The API server calls the webhook again if another webhook changes the pod.
func TestPods_isIdempotent(t *testing.T) {
	pods := newPods(t, mode.Bridge)
	text := strings.Replace(podOfGroup,
		"{name: own, resourceClaimTemplateName: theirs}", "{name: rack, resourceClaimTemplateName: fabric}", 1)
	var first, second corev1.Pod
	admit(t, pods, review(t, "", text), &first)
	raw, err := json.Marshal(first)
	if err != nil {
		t.Fatal(err)
	}
	admit(t, pods, review(t, "", string(raw)), &second)
	if diff := cmp.Diff(first, second); diff != "" {
		t.Errorf("the second call changed the pod (-first +second):\n%s", diff)
	}
	if len(first.Spec.SchedulingGates) != 1 || first.Spec.SchedulingGates[0].Name != scheduling.ReservedGate {
		t.Errorf("a pod with a share of a fabric has the gates %v, want one", first.Spec.SchedulingGates)
	}
}

func TestPods_gates(t *testing.T) {
	for _, tc := range []struct {
		name, group, scheduler string
		want                   int
	}{
		{"the scheduler of Kubernetes", "group", "default-scheduler", 1},
		{"another scheduler", "group", "gang-scheduler", 0},
		{"gates are disabled", "ungated", "default-scheduler", 0},
	} {
		var pod corev1.Pod
		admit(t, newPods(t, mode.Bridge), review(t, "", fmt.Sprintf(`{metadata: {annotations: {
			scheduling.dra-shared.dev/pod-group: %s}}, spec: {schedulerName: %s,
			resourceClaims: [{name: rack, resourceClaimTemplateName: fabric}], containers: [{name: c, resources: {}}]}}`,
			tc.group, tc.scheduler)), &pod)
		if got := len(pod.Spec.SchedulingGates); got != tc.want || pod.Annotations[scheduling.AdmittedAnnotation] != "r" {
			t.Errorf("%s: %d gates, annotations %v, want %d gates and the request", tc.name, got, pod.Annotations, tc.want)
		}
	}
}

func TestPods_denies(t *testing.T) {
	for _, tc := range []struct{ name, pod, want string }{
		{
			"the annotation names a missing PodGroup",
			`{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: missing}}}`,
			`PodGroup "missing" does not exist in namespace "ns": create it first`,
		},
		{
			"the PodGroup is being deleted",
			`{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: terminating}}}`,
			`PodGroup "terminating" is being deleted and accepts no more pods`,
		},
		{
			"the annotation is empty",
			`{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: ""}}}`,
			`must not be empty: name a PodGroup`,
		},
		{
			"the annotation and the field differ",
			`{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: group}},
			spec: {schedulingGroup: {podGroupName: other}}}`,
			`a pod can be in only one PodGroup`,
		},
		{
			"the annotation for references has an unknown value",
			`{metadata: {annotations: {dra-shared.dev/claim-references: all}}}`,
			`Unsupported value: "all": must be All or Explicit`,
		},
	} {
		response := create(t, mode.Bridge, tc.pod)
		if response.Allowed || !strings.Contains(response.Result.Message, tc.want) {
			t.Errorf("%s: response %v, want %s", tc.name, response.Result, tc.want)
		}
	}
}

// A pod that names a PodGroup by the field may be a pod of one of Kubernetes' own
// PodGroups, even if the controller is in bridge mode: the cluster may support
// PodGroups without claims.
func TestPods_ignoresPodsOfOtherPodGroups(t *testing.T) {
	for _, tc := range []struct {
		name, group string
		mode        mode.Mode
		warnings    int
	}{
		{"one of Kubernetes' own", "native", mode.Native, 0},
		{"one of Kubernetes' own", "native", mode.Bridge, 0},
		{"one that does not exist yet", "missing", mode.Native, 1},
		{"one that does not exist yet", "missing", mode.Bridge, 1},
		{"one with the name of one of the driver's", "both", mode.Bridge, 1},
		{"one with the name of one of the driver's", "both", mode.Native, 1},
		{"one of the driver's that is being deleted", "terminating", mode.Bridge, 1},
		{"one of the driver's that is being deleted", "terminating", mode.Native, 1},
	} {
		r := create(t, tc.mode, `{spec: {schedulingGroup: {podGroupName: `+tc.group+`},
			resourceClaims: [{name: gpu, resourceClaimTemplateName: theirs}], containers: [{name: c}]}}`)
		if !r.Allowed || len(r.Patches) > 0 || len(r.Warnings) != tc.warnings {
			t.Errorf("%s mode, PodGroup %s, %s: response %+v, want %d warnings and no patch",
				tc.mode, tc.group, tc.name, r, tc.warnings)
		}
	}
}

// A pod of another project costs at most one request to the API server, and does not get a warning if the answer is an
// error.
func TestPods_limitsRequestsForPodsOfOtherPodGroups(t *testing.T) {
	for _, tc := range []struct {
		name, group string
		unreadable  bool
		requests    int
		warnings    int
	}{
		{"one of Kubernetes' own", "native", false, 1, 0},
		{"none", "missing", false, 2, 1},
		{"none, and Kubernetes' cannot be read", "missing", true, 2, 0},
	} {
		pods, requests := newPods(t, mode.Bridge), 0
		cached, ok := pods.APIReader.(client.WithWatch)
		if !ok {
			t.Fatalf("%T cannot be intercepted", pods.APIReader)
		}
		pods.APIReader = interceptor.NewClient(cached, interceptor.Funcs{
			Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object,
				opts ...client.GetOption,
			) error {
				if _, ok := o.(*scheduling.PodGroup); ok {
					requests++
				}
				return c.Get(ctx, key, o, opts...)
			},
			List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
				requests++
				if tc.unreadable {
					return errors.New("forbidden")
				}
				return c.List(ctx, list, opts...)
			},
		})
		r := pods.Handle(t.Context(), review(t, "", `{spec: {schedulingGroup: {podGroupName: `+tc.group+`},
			resourceClaims: [{name: gpu, resourceClaimTemplateName: theirs}], containers: [{name: c}]}}`))
		if !r.Allowed || len(r.Warnings) != tc.warnings || requests != tc.requests {
			t.Errorf("%s: response %+v after %d requests, want %d warnings after %d",
				tc.name, r, requests, tc.warnings, tc.requests)
		}
	}
}

// A cluster may store the field without supporting claims. The scheduler would wait for its own
// PodGroup.
func TestPods_bridgeModeRemovesField(t *testing.T) {
	text := strings.Replace(podOfGroup, "\nspec:\n", "\nspec:\n  schedulingGroup: {podGroupName: group}\n", 1)
	text = strings.Replace(text, ", annotations: {scheduling.dra-shared.dev/pod-group: group}", "", 1)
	var created, updated corev1.Pod
	pods := newPods(t, mode.Bridge)
	admit(t, pods, review(t, "", text), &created)
	if created.Spec.SchedulingGroup != nil || created.Annotations[scheduling.GroupAnnotation] != "group" {
		t.Errorf("field %v, annotations %v, want the annotation only", created.Spec.SchedulingGroup, created.Annotations)
	}
	old, err := json.Marshal(created)
	if err != nil {
		t.Fatal(err)
	}
	r := admit(t, pods, review(t, string(old), text), &updated)
	if diff := cmp.Diff(created.Spec, updated.Spec); diff != "" || len(r.Warnings) > 0 {
		t.Errorf("updated pod (-created +updated):\n%s\nwarnings %v", diff, r.Warnings)
	}
}

// A user who names the driver's PodGroup in the annotation and Kubernetes' of the same name in the field
// wants both: the pod stays in its gang, and waits behind no gate.
func TestPods_podGroupsWithSameName(t *testing.T) {
	var pod corev1.Pod
	admit(t, newPods(t, mode.Bridge), review(t, "", `{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: both}},
		spec: {schedulingGroup: {podGroupName: both}, containers: [{name: c, resources: {}}],
		resourceClaims: [{name: rack, resourceClaimTemplateName: fabric}]}}`), &pod)
	if pod.Spec.SchedulingGroup == nil || pod.Labels[scheduling.GroupUIDLabel] != "6" ||
		pod.Spec.ResourceClaims[0].ResourceClaimName == nil || len(pod.Spec.SchedulingGates) > 0 {
		t.Errorf("got labels %v and spec %+v, want the field, the driver's claim, and no gate", pod.Labels, pod.Spec)
	}
}

func TestPods_deniesPriorityDifferentFromNativePodGroup(t *testing.T) {
	for priority, want := range map[int]string{
		1000: "",
		0: `spec.priorityClassName: "" has priority 0, but the pods of PodGroup "prior" have priority 1000, ` +
			`from the class "high"`,
	} {
		r := create(t, mode.Native, fmt.Sprintf(`{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: prior}},
			spec: {priority: %d, containers: [{name: c}]}}`, priority))
		message := ""
		if r.Result != nil {
			message = r.Result.Message
		}
		if r.Allowed != (want == "") || !strings.Contains(message, want) {
			t.Errorf("pod of priority %d: response %v, want %q", priority, r.Result, want)
		}
	}
}

func TestPods_warnsAboutClaimsThatAreNotShared(t *testing.T) {
	for _, tc := range []struct{ name, claims, want string }{
		{
			"another template",
			`[{name: net, resourceClaimTemplateName: other}]`,
			`spec.resourceClaims[0] "net" is not shared with PodGroup "group": ` +
				`it refers to ResourceClaimTemplate "other", and the PodGroup's entry to ResourceClaimTemplate "share"`,
		},
		{
			"another name",
			`[{name: nett, resourceClaimTemplateName: share}]`,
			`the PodGroup calls that claim "net"`,
		},
		{
			"another claim",
			`[{name: kept, resourceClaimName: teem}]`,
			`it refers to ResourceClaim "teem", and the PodGroup's entry to ResourceClaim "team"`,
		},
		{
			"no similar entry",
			`[{name: mine, resourceClaimTemplateName: mine}]`,
			`the pod shares no claim with PodGroup "group", ` +
				`which has "net" (ResourceClaimTemplate "share"), "kept" (ResourceClaim "team")`,
		},
		{"no claims", `[]`, `the pod shares no claim with PodGroup "group"`},
	} {
		r := create(t, mode.Bridge, `{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: group}},
			spec: {resourceClaims: `+tc.claims+`}}`)
		if !r.Allowed || len(r.Warnings) == 0 || !strings.Contains(r.Warnings[0], tc.want) {
			t.Errorf("%s: warnings %q, want %s", tc.name, r.Warnings, tc.want)
		}
	}
}

// The webhook learns from the template which driver a claim is for, even before
// the claim is generated. Without the template it denies the pod.
func TestPods_requiresTemplateOfSharedClaim(t *testing.T) {
	const pod = `{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: early}},
		spec: {resourceClaims: [%s], containers: [{name: c, resources: {%s}}]}}`
	for _, tc := range []struct{ entry, claim, want string }{
		{
			"net", "{name: net, resourceClaimTemplateName: later}",
			`spec.resourceClaims[0] "net": ResourceClaimTemplate "later" does not exist in namespace "ns": create it first`,
		},
		{
			"kept", "{name: kept, resourceClaimName: missing}",
			`spec.resourceClaims[0] "kept": ResourceClaim "missing" does not exist in namespace "ns": create it first`,
		},
	} {
		r := create(t, mode.Bridge, fmt.Sprintf(pod, tc.claim, ""))
		if r.Allowed || !strings.Contains(r.Result.Message, tc.want) {
			t.Errorf("%s: response %v, want %s", tc.claim, r.Result, tc.want)
		}
		r = create(t, mode.Bridge, fmt.Sprintf(pod, tc.claim, "claims: [{name: "+tc.entry+"}]"))
		if !r.Allowed {
			t.Errorf("%s, referenced by a container: %v", tc.claim, r.Result)
		}
	}
	var joined corev1.Pod
	admit(t, newPods(t, mode.Bridge), review(t, "", podOfGroup), &joined)
	if got := joined.Spec.Containers[0].Resources.Claims; len(got) != 2 || got[0].Name != "net" || got[1].Name != "kept" {
		t.Errorf("references before the claim is generated: %v", got)
	}
}

func TestPods_warnsAboutUnknownClaimsAndAnnotations(t *testing.T) {
	for _, tc := range []struct{ name, pod, want string }{
		{
			"a pod without a PodGroup, and a template that does not exist",
			`{spec: {resourceClaims: [{name: a, resourceClaimTemplateName: later}], containers: [{name: c}]}}`,
			`ResourceClaimTemplate "later" does not exist yet`,
		},
		{
			"a misspelled annotation",
			`{metadata: {annotations: {scheduling.dra-shared.dev/podgroup: group}}, spec: {containers: [{name: c}]}}`,
			`"scheduling.dra-shared.dev/podgroup"] has no effect: ` +
				`the driver's annotations for pods are scheduling.dra-shared.dev/pod-group`,
		},
	} {
		r := create(t, mode.Bridge, tc.pod)
		if !r.Allowed || len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], tc.want) {
			t.Errorf("%s: warnings %q, want %s", tc.name, r.Warnings, tc.want)
		}
	}
}

func TestPods_restoresClaimsAndPodGroupInUpdates(t *testing.T) {
	var created, updated corev1.Pod
	pods := newPods(t, mode.Native)
	admit(t, pods, review(t, "", podOfGroup), &created)
	old, err := json.Marshal(created)
	if err != nil {
		t.Fatal(err)
	}
	admit(t, pods, review(t, string(old), podOfGroup), &updated)
	if diff := cmp.Diff(created.Spec, updated.Spec); diff != "" || updated.Labels[scheduling.GroupUIDLabel] != "1" {
		t.Errorf("updated pod (-created +updated):\n%s\nlabels %v", diff, updated.Labels)
	}
}

func TestPods_addsReferencesToContainers(t *testing.T) {
	for _, tc := range []struct{ name, template, containers, want string }{
		{
			"a NIC is referenced by every container", "share",
			`initContainers: [{name: i, resources: {}}],
			containers: [{name: a, resources: {}}, {name: b, resources: {claims: [{name: dev}]}}]`,
			"i:dev a:dev b:dev",
		},
		{"a DeviceClass of the cluster", "both", `containers: [{name: a, resources: {}}]`, "a:dev"},
		{
			"one container references the accelerator; all get the NIC", "both",
			`containers: [{name: a, resources: {}}, {name: b, resources: {claims: [{name: dev, request: gpu}]}}]`,
			"a:dev/nic b:dev/gpu b:dev/nic",
		},
		{
			"no container references the accelerator", "gpu",
			`containers: [{name: a, resources: {}}, {name: b, resources: {}}]`, "a:dev b:dev",
		},
		{
			"one container references the accelerator", "gpu",
			`containers: [{name: a, resources: {}}, {name: b, resources: {claims: [{name: dev}]}}]`, "b:dev",
		},
		{"the claim has parameters of the driver", "configured", `containers: [{name: a, resources: {}}]`, "a:dev"},
		{
			"a DeviceClass with single quotes in its selector", "quoted",
			`containers: [{name: a, resources: {}}, {name: b, resources: {claims: [{name: dev}]}}]`, "a:dev b:dev",
		},
		{
			"a selector of an alternative", "selecting",
			`containers: [{name: a, resources: {}}, {name: b, resources: {claims: [{name: dev}]}}]`, "a:dev b:dev",
		},
		{"a selector that excludes the driver", "excluding", `containers: [{name: a, resources: {}}]`, ""},
		{"another driver's device", "theirs", `containers: [{name: a, resources: {}}]`, ""},
		{"the template does not exist yet", "later", `containers: [{name: a, resources: {}}]`, ""},
	} {
		var pod corev1.Pod
		text := "spec: {resourceClaims: [{name: dev, resourceClaimTemplateName: " + tc.template + "}], " + tc.containers + "}"
		admit(t, newPods(t, mode.Bridge), review(t, "", text), &pod)
		var got []string
		for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
			for _, c := range list {
				for _, r := range c.Resources.Claims {
					text := c.Name + ":" + r.Name
					if r.Request != "" {
						text += "/" + r.Request
					}
					got = append(got, text)
				}
			}
		}
		if strings.Join(got, " ") != tc.want {
			t.Errorf("%s: references %v, want %s", tc.name, got, tc.want)
		}
	}
}

func TestPods_hostNetwork(t *testing.T) {
	const denial = `spec.hostNetwork: Forbidden: true: spec.resourceClaims[0] "dev" has a share of a NIC`
	for _, tc := range []struct{ name, annotations, template, want string }{
		{"share of a NIC", "", "share", denial},
		{"NIC by a DeviceClass of the cluster, and an accelerator", "", "both", denial},
		{"the driver adds no references", "dra-shared.dev/claim-references: Explicit", "share", ""},
		{"NIC with adminAccess", "", "monitor", ""},
		{"NIC as an alternative", "", "selecting", ""},
		{"parameters of a NIC for a device that may be another driver's", "", "configured", ""},
		{"accelerator", "", "gpu", ""},
		{"another driver's device", "", "theirs", ""},
	} {
		r := create(t, mode.Bridge, `{metadata: {annotations: {`+tc.annotations+`}}, spec: {hostNetwork: true,
			resourceClaims: [{name: dev, resourceClaimTemplateName: `+tc.template+`}], containers: [{name: a, resources: {}}]}}`)
		if r.Allowed != (tc.want == "") || !r.Allowed && !strings.Contains(r.Result.Message, tc.want) {
			t.Errorf("%s: response %+v, want denial %q", tc.name, r, tc.want)
		}
	}
}

// brokenReader returns an error for each object.
type brokenReader struct{ client.Reader }

func (brokenReader) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return apierrors.NewInternalError(errors.New("etcd has no leader"))
}

// A pod that does not need the driver starts even if the API server does not answer the webhook.
func TestPods_Handle_internalError(t *testing.T) {
	const pod = `
metadata: {name: p, annotations: {%s: x}}
spec:
  resourceClaims: [{name: net, resourceClaimTemplateName: theirs}]
  containers: [{name: c, image: i}]
`
	for annotation, allowed := range map[string]bool{
		"example.com/a":                            true,
		"scheduling.dra-shared.dev/pod-group":      false,
		"scheduling.dra-shared.dev/job-claims":     false,
		"scheduling.dra-shared.dev/replica-claims": true, // not enabled, so the annotation does not have an effect
	} {
		pods := newPods(t, mode.Bridge)
		pods.JobClaims, pods.Client, pods.APIReader = true, brokenReader{}, brokenReader{}
		response := pods.Handle(t.Context(), review(t, "", fmt.Sprintf(pod, annotation)))
		warned := slices.ContainsFunc(response.Warnings, func(w string) bool {
			return strings.Contains(w, "admission could not check the pod") && strings.Contains(w, "etcd has no leader")
		})
		if response.Allowed != allowed || warned != allowed {
			t.Errorf("pod with the annotation %s: got %+v, want allowed %t, with a warning then", annotation, response, allowed)
		}
	}
}
