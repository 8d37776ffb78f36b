package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
	"sigs.k8s.io/yaml"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

const driver = "dra-shared.dev"

// objects that there are: a group with a claim from a template, and one by name.
const objects = `
apiVersion: scheduling.dra-shared.dev/v1beta1
kind: PodGroup
metadata: {namespace: ns, name: group, uid: "1"}
spec:
  schedulingPolicy: {basic: {}}
  resourceClaims: [{name: net, resourceClaimTemplateName: share}, {name: kept, resourceClaimName: team}, {name: rack, resourceClaimTemplateName: fabric}]
---
apiVersion: scheduling.dra-shared.dev/v1beta1
kind: PodGroup
metadata: {namespace: ns, name: early, uid: "3"}
spec:
  schedulingPolicy: {basic: {}}
  resourceClaims: [{name: net, resourceClaimTemplateName: later}, {name: kept, resourceClaimName: nobody}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {namespace: ns, name: team}
spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nic.dra-shared.dev}}]}}
---
apiVersion: scheduling.dra-shared.dev/v1beta1
kind: PodGroup
metadata: {namespace: ns, name: going, uid: "2", deletionTimestamp: "2026-01-01T00:00:00Z", finalizers: [x]}
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
spec: {spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: storage}}, {name: gpu, exactly: {deviceClassName: accelerator.dra-shared.dev}}]}}}
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
      config: [{opaque: {driver: dra-shared.dev, parameters: {apiVersion: dra-shared.dev/v1alpha1, kind: NetworkAttachment}}}]
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: storage}
spec: {selectors: [{cel: {expression: 'device.driver == "dra-shared.dev" && device.attributes["dra-shared.dev"].kind == "nic"'}}]}
`

func newPods(t *testing.T, m mode.Mode) *Pods {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientscheme.AddToScheme, scheduling.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	b := fake.NewClientBuilder().WithScheme(scheme)
	for _, doc := range strings.Split(objects, "---\n") {
		var meta metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(doc), &meta); err != nil {
			t.Fatal(err)
		}
		o, err := scheme.New(meta.GroupVersionKind())
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.UnmarshalStrict([]byte(doc), o); err != nil {
			t.Fatal(err)
		}
		object, ok := o.(client.Object)
		if !ok {
			t.Fatalf("%T", o)
		}
		b = b.WithObjects(object)
	}
	c := b.Build()
	shards := NewShards(testclock.NewFakePassiveClock(time.Now()))
	shards.synced = func() bool { return true }
	return &Pods{Client: c, APIReader: c, Mode: m, Driver: driver, Shards: shards}
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
	return admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{UID: "r", Namespace: "ns", Object: raw(now), OldObject: raw(old)}}
}

// admitted is the object after admission.
func admitted(t *testing.T, h admission.Handler, req admission.Request, into any) admission.Response {
	t.Helper()
	response := h.Handle(context.Background(), req)
	if !response.Allowed {
		t.Logf("refused: %v", response.Result)
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
  resourceClaims: [{name: net, resourceClaimTemplateName: share}, {name: kept, resourceClaimName: team}, {name: own, resourceClaimTemplateName: theirs}]
  fieldOfALaterVersion: {kept: true}
  containers: [{name: c, image: i, resources: {}, anotherOne: [1]}]
`

func TestAPodOfAGroupGetsTheGroupsClaims(t *testing.T) {
	for _, m := range []mode.Mode{mode.Bridge, mode.Native} {
		var pod corev1.Pod
		response := admitted(t, newPods(t, m), review(t, "", podOfGroup), &pod)
		if !response.Allowed || len(response.Warnings) > 0 {
			t.Fatalf("%+v", response)
		}
		claims := pod.Spec.ResourceClaims
		if name := ptr.Deref(claims[0].ResourceClaimName, ""); claims[0].ResourceClaimTemplateName != nil || !strings.HasPrefix(name, "group-net-") {
			t.Errorf("%s: %+v", m, claims[0])
		}
		if *claims[1].ResourceClaimName != "team" || *claims[2].ResourceClaimTemplateName != "theirs" {
			t.Errorf("%s: %+v", m, claims)
		}
		if pod.Labels[scheduling.GroupUIDLabel] != "1" || (pod.Spec.SchedulingGroup != nil) != (m == mode.Native) || len(pod.Spec.SchedulingGates) > 0 {
			t.Errorf("%s: %+v", m, pod)
		}
		var all map[string]any
		admitted(t, newPods(t, m), review(t, "", podOfGroup), &all)
		if fmt.Sprint(all["spec"].(map[string]any)["fieldOfALaterVersion"]) != "map[kept:true]" { //nolint:forcetypeassert // of a pod
			t.Errorf("%s: a field that the types do not have is lost: %v", m, all)
		}
	}
}

// Others may change the pod after us; then it is seen again.
func TestASecondLookChangesNothing(t *testing.T) {
	pods := newPods(t, mode.Bridge)
	text := strings.Replace(podOfGroup, "{name: own, resourceClaimTemplateName: theirs}", "{name: rack, resourceClaimTemplateName: fabric}", 1)
	var first, second corev1.Pod
	admitted(t, pods, review(t, "", text), &first)
	raw, err := json.Marshal(first)
	if err != nil {
		t.Fatal(err)
	}
	admitted(t, pods, review(t, "", string(raw)), &second)
	if diff := cmp.Diff(first, second); diff != "" {
		t.Error(diff)
	}
	if len(first.Spec.SchedulingGates) != 1 || first.Spec.SchedulingGates[0].Name != scheduling.ReservedGate {
		t.Errorf("a pod on a fabric waits for its reservation: %v", first.Spec.SchedulingGates)
	}
}

func TestWhoMayNotJoinIsTold(t *testing.T) {
	for pod, want := range map[string]string{
		`{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: nobody}}}`:                                                `PodGroup "nobody" does not exist in namespace "ns": create it first`,
		`{spec: {schedulingGroup: {podGroupName: nobody}}}`:                                                                       `PodGroup "nobody" does not exist`,
		`{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: going}}}`:                                                 `PodGroup "going" is being deleted: it takes no more pods`,
		`{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: ""}}}`:                                                    `is empty: name a PodGroup`,
		`{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: group}}, spec: {schedulingGroup: {podGroupName: other}}}`: `a pod is in one`,
		`{metadata: {annotations: {dra-shared.dev/claim-references: all}}}`:                                                       `Unsupported value: "all": must be All or Explicit`,
	} {
		response := newPods(t, mode.Bridge).Handle(context.Background(), review(t, "", pod))
		if response.Allowed || !strings.Contains(response.Result.Message, want) {
			t.Errorf("%s: got %v, want %s", pod, response.Result, want)
		}
	}
	if r := newPods(t, mode.Native).Handle(context.Background(), review(t, "", `{spec: {schedulingGroup: {podGroupName: nobody}}}`)); !r.Allowed || len(r.Patches) > 0 {
		t.Errorf("native: one of Kubernetes' own groups: %+v", r)
	}
}

func TestANearMissIsWarnedOf(t *testing.T) {
	for claims, want := range map[string]string{
		`[{name: net, resourceClaimTemplateName: other}]`:  `spec.resourceClaims[0] "net" is not shared with PodGroup "group": it is of ResourceClaimTemplate "other", and the PodGroup's of ResourceClaimTemplate "share"`,
		`[{name: nett, resourceClaimTemplateName: share}]`: `the PodGroup names that claim "net"`,
		`[{name: kept, resourceClaimName: teem}]`:          `it is of ResourceClaim "teem", and the PodGroup's of ResourceClaim "team"`,
		`[{name: mine, resourceClaimTemplateName: mine}]`:  `the pod shares no claim with PodGroup "group", which has "net" (ResourceClaimTemplate "share"), "kept" (ResourceClaim "team")`,
		`[]`: `the pod shares no claim with PodGroup "group"`,
	} {
		r := newPods(t, mode.Bridge).Handle(context.Background(), review(t, "", `{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: group}}, spec: {resourceClaims: `+claims+`}}`))
		if !r.Allowed || len(r.Warnings) == 0 || !strings.Contains(r.Warnings[0], want) {
			t.Errorf("%s: got %q, want %s", claims, r.Warnings, want)
		}
	}
}

// Whose devices a claim asks for is known from its template, also before it is
// generated, and not at all before that is there.
func TestAPodOfAGroupWaitsForWhatSaysWhatItGets(t *testing.T) {
	const early = `{metadata: {annotations: {scheduling.dra-shared.dev/pod-group: early}}, spec: {resourceClaims: [%s], containers: [{name: c, resources: {%s}}]}}`
	for claim, want := range map[string]string{
		"{name: net, resourceClaimTemplateName: later}": `spec.resourceClaims[0] "net": there is no ResourceClaimTemplate "later" in namespace "ns": create it first`,
		"{name: kept, resourceClaimName: nobody}":       `spec.resourceClaims[0] "kept": there is no ResourceClaim "nobody" in namespace "ns": create it first`,
	} {
		name, _, _ := strings.Cut(strings.TrimPrefix(claim, "{name: "), ",")
		r := newPods(t, mode.Bridge).Handle(context.Background(), review(t, "", fmt.Sprintf(early, claim, "")))
		if r.Allowed || !strings.Contains(r.Result.Message, want) {
			t.Errorf("%s: %v", claim, r.Result)
		}
		r = newPods(t, mode.Bridge).Handle(context.Background(), review(t, "", fmt.Sprintf(early, claim, "claims: [{name: "+name+"}]")))
		if !r.Allowed {
			t.Errorf("%s, named by a container: %v", claim, r.Result)
		}
	}
	var pod corev1.Pod
	admitted(t, newPods(t, mode.Bridge), review(t, "", podOfGroup), &pod)
	if got := pod.Spec.Containers[0].Resources.Claims; len(got) != 2 || got[0].Name != "net" || got[1].Name != "kept" {
		t.Errorf("before the claim is generated: %v", got)
	}
	r := newPods(t, mode.Bridge).Handle(context.Background(), review(t, "", `{spec: {resourceClaims: [{name: a, resourceClaimTemplateName: later}], containers: [{name: c}]}}`))
	if !r.Allowed || len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], `there is no ResourceClaimTemplate "later" yet`) {
		t.Errorf("a pod alone: %v", r.Warnings)
	}
	r = newPods(t, mode.Bridge).Handle(context.Background(), review(t, "", `{metadata: {annotations: {scheduling.dra-shared.dev/podgroup: group}}, spec: {containers: [{name: c}]}}`))
	if !r.Allowed || len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], `"scheduling.dra-shared.dev/podgroup"] means nothing: a pod's are scheduling.dra-shared.dev/pod-group`) {
		t.Errorf("a misspelt annotation: %v", r.Warnings)
	}
}

func TestAnUpdateIsGivenBackWhatItWas(t *testing.T) {
	var created, updated corev1.Pod
	pods := newPods(t, mode.Native)
	admitted(t, pods, review(t, "", podOfGroup), &created)
	old, err := json.Marshal(created)
	if err != nil {
		t.Fatal(err)
	}
	admitted(t, pods, review(t, string(old), podOfGroup), &updated)
	if diff := cmp.Diff(created.Spec, updated.Spec); diff != "" || updated.Labels[scheduling.GroupUIDLabel] != "1" {
		t.Errorf("%s %v", diff, updated.Labels)
	}
}

func TestReferences(t *testing.T) {
	for _, tc := range []struct{ name, pod, want string }{
		{"a NIC: every container", `{resourceClaims: [{name: dev, resourceClaimTemplateName: share}], initContainers: [{name: i, resources: {}}], containers: [{name: a, resources: {}}, {name: b, resources: {claims: [{name: dev}]}}]}`, "i:dev a:dev b:dev"},
		{"by a class of one's own", `{resourceClaims: [{name: dev, resourceClaimTemplateName: both}], containers: [{name: a, resources: {}}]}`, "a:dev"},
		{"an accelerator that one has chosen is its own; the NIC is everybody's", `{resourceClaims: [{name: dev, resourceClaimTemplateName: both}], containers: [{name: a, resources: {}}, {name: b, resources: {claims: [{name: dev, request: gpu}]}}]}`, "a:dev/nic b:dev/gpu b:dev/nic"},
		{"an accelerator that nobody names", `{resourceClaims: [{name: dev, resourceClaimTemplateName: gpu}], containers: [{name: a, resources: {}}, {name: b, resources: {}}]}`, "a:dev b:dev"},
		{"an accelerator that one names", `{resourceClaims: [{name: dev, resourceClaimTemplateName: gpu}], containers: [{name: a, resources: {}}, {name: b, resources: {claims: [{name: dev}]}}]}`, "b:dev"},
		{"by the driver's parameters", `{resourceClaims: [{name: dev, resourceClaimTemplateName: configured}], containers: [{name: a, resources: {}}]}`, "a:dev"},
		{"another driver's", `{resourceClaims: [{name: dev, resourceClaimTemplateName: theirs}], containers: [{name: a, resources: {}}]}`, ""},
		{"not there yet", `{resourceClaims: [{name: dev, resourceClaimTemplateName: later}], containers: [{name: a, resources: {}}]}`, ""},
	} {
		var pod corev1.Pod
		admitted(t, newPods(t, mode.Bridge), review(t, "", "spec: "+tc.pod), &pod)
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
			t.Errorf("%s: got %v, want %s", tc.name, got, tc.want)
		}
	}
}

func TestTemplatesKeepTheirGroup(t *testing.T) {
	pods := newPods(t, mode.Bridge)
	for _, tc := range []struct{ object, path string }{
		{`{spec: {template: {spec: {schedulingGroup: {podGroupName: group}}}}}`, "/spec/template/metadata"},
		{`{spec: {template: {metadata: {labels: {a: b}}, spec: {schedulingGroup: {podGroupName: group}}}}}`, "/spec/template/metadata/annotations"},
		{`{spec: {template: {metadata: {annotations: {a: b}}, spec: {schedulingGroup: {podGroupName: group}}}}}`, "/spec/template/metadata/annotations/scheduling.dra-shared.dev~1pod-group"},
		{`{spec: {jobTemplate: {spec: {template: {metadata: {}, spec: {schedulingGroup: {podGroupName: group}}}}}}}`, "/spec/jobTemplate/spec/template/metadata/annotations"},
		{`{template: {metadata: {}, spec: {schedulingGroup: {podGroupName: group}}}}`, "/template/metadata/annotations"},
		{`{spec: {template: {spec: {}}}}`, ""},
	} {
		var into map[string]any
		r := admitted(t, &Templates{APIReader: pods.APIReader, Mode: mode.Bridge}, review(t, "", tc.object), &into)
		if !r.Allowed || tc.path == "" && len(r.Patches) > 0 || tc.path != "" && (len(r.Patches) == 0 || r.Patches[len(r.Patches)-1].Path != tc.path) {
			t.Errorf("%s: %+v", tc.object, r)
		}
	}
	r := (&Templates{APIReader: pods.APIReader, Mode: mode.Bridge}).Handle(context.Background(), review(t, "", `{spec: {template: {spec: {schedulingGroup: {podGroupName: later}}}}}`))
	if !r.Allowed || len(r.Patches) == 0 || len(r.Warnings) != 1 {
		t.Errorf("a group that is not there yet: %+v", r)
	}
	if r := (&Templates{APIReader: pods.APIReader, Mode: mode.Native}).Handle(context.Background(), review(t, "", `{spec: {template: {spec: {schedulingGroup: {podGroupName: later}}}}}`)); len(r.Patches) > 0 {
		t.Errorf("native: one of Kubernetes' own: %+v", r)
	}
}

// What is wrong by itself is refused as the node would, from one corpus.
func TestParametersAreHeldAgainstTheNodesCode(t *testing.T) {
	raw, err := os.ReadFile("../../api/v1alpha1/testdata/wrong.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name, Kind, Parameters, Want string
		OnDevice                     bool
	}
	if err := yaml.UnmarshalStrict(raw, &cases); err != nil {
		t.Fatal(err)
	}
	for _, tc := range cases {
		opaque := &resourceapi.OpaqueDeviceConfiguration{Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(tc.Parameters)}}
		claim := resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Config: []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: opaque}}}}}
		for at, o := range map[string]any{
			"spec.devices.config[0].opaque.parameters":      &resourceapi.ResourceClaim{Spec: claim},
			"spec.spec.devices.config[0].opaque.parameters": &resourceapi.ResourceClaimTemplate{Spec: resourceapi.ResourceClaimTemplateSpec{Spec: claim}},
			"spec.config[0].opaque.parameters": &resourceapi.DeviceClass{Spec: resourceapi.DeviceClassSpec{Config: []resourceapi.DeviceClassConfiguration{
				{DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: opaque}}}}},
		} {
			object, err := json.Marshal(o)
			if err != nil {
				continue // what is no JSON does not come this far
			}
			r := (&Parameters{Driver: driver}).Handle(context.Background(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Object: runtime.RawExtension{Raw: object}}})
			switch {
			case tc.OnDevice && !r.Allowed:
				t.Errorf("%s: refused without the device: %v", tc.Name, r.Result)
			case !tc.OnDevice && (r.Allowed || !strings.Contains(r.Result.Message, at) || !strings.Contains(r.Result.Message, tc.Want)):
				t.Errorf("%s:\ngot  %v\nwant %s, at %s", tc.Name, r.Result, tc.Want, at)
			}
		}
	}
}

func TestParametersOfOthersAreTheirs(t *testing.T) {
	r := (&Parameters{Driver: driver}).Handle(context.Background(), review(t, "", `{spec: {devices: {config: [{opaque: {driver: example.com, parameters: {kind: x}}}]}}}`))
	if !r.Allowed {
		t.Errorf("%+v", r)
	}
	held := `{metadata: {annotations: {scheduling.dra-shared.dev/reserved-for: batch/jobs/a}}, status: {reservedFor: [{apiGroup: batch, resource: jobs, name: a, uid: x}]}}`
	for _, now := range []string{`{}`, `{metadata: {annotations: {scheduling.dra-shared.dev/reserved-for: batch/jobs/b}}}`} {
		if r := (&Parameters{Driver: driver}).Handle(context.Background(), review(t, held, now)); r.Allowed || !strings.Contains(r.Result.Message, "batch/jobs/a holds the claim: the annotation can be changed when that is deleted") {
			t.Errorf("%s: %+v", now, r)
		}
	}
	if r := (&Parameters{Driver: driver}).Handle(context.Background(), review(t, held, held)); !r.Allowed {
		t.Errorf("no change: %+v", r)
	}
	r = (&Parameters{Driver: driver}).Handle(context.Background(), review(t, "", `{metadata: {annotations: {scheduling.dra-shared.dev/reserved-for: jobs}}}`))
	if r.Allowed || !strings.Contains(r.Result.Message, `metadata.annotations[scheduling.dra-shared.dev/reserved-for]: Invalid value: "jobs"`) {
		t.Errorf("%+v", r)
	}
}

func TestShardsAreFilledOneAfterTheOther(t *testing.T) {
	clock := testclock.NewFakePassiveClock(time.Now())
	s := NewShards(clock)
	if _, err := s.next("ns", "r", func(int) string { return "" }); err == nil {
		t.Error("pods are counted that nobody has seen yet")
	}
	s.synced = func() bool { return true }
	requests := 0
	name := func(n int) string { return fmt.Sprintf("claim-%d", n) }
	next := func() int {
		t.Helper()
		requests++
		n, err := s.next("ns", fmt.Sprint(requests), name)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	pod := func(i, shard int) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", UID: types.UID(fmt.Sprint(i)), Labels: map[string]string{scheduling.GroupUIDLabel: "1"},
			Annotations: map[string]string{scheduling.AdmittedAnnotation: fmt.Sprint(i + 1)}},
			Spec: corev1.PodSpec{ResourceClaims: []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: ptr.To(name(shard))}}}}
	}
	for i := range shardPods {
		if n := next(); n != 0 {
			t.Fatalf("pod %d is in shard %d", i, n)
		}
	}
	// Some are in the cache now: they do not count twice.
	for i := range 100 {
		s.seen(pod(i, 0))
		s.seen(pod(i, 0))
	}
	if n := next(); n != 1 {
		t.Errorf("a full claim got a pod more: shard %d", n)
	}
	// One that another replica has admitted counts beside those on their way here.
	s.seen(pod(10000, 1))
	if s.count(pod(10000, 1), false); len(s.unseen[types.NamespacedName{Namespace: "ns", Name: name(1)}]) != 1 {
		t.Error("another's pod was taken for one of ours")
	}
	// One goes: there is room for one.
	s.count(pod(7, 0), false)
	if a, b := next(), next(); a != 0 || b != 1 {
		t.Errorf("shards %d and %d", a, b)
	}
	// Pods that were admitted and never came are forgotten.
	clock.SetTime(clock.Now().Add(time.Minute))
	if n := next(); n != 0 {
		t.Errorf("shard %d", n)
	}
}
