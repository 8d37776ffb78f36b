// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
	"sigs.k8s.io/yaml"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

func TestQueues_Handle(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{scheduling.AddToScheme, resourceapi.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	group := &scheduling.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "team"},
		Spec: scheduling.PodGroupSpec{ResourceClaims: []scheduling.PodGroupResourceClaim{
			{Name: "net", ResourceClaimTemplateName: ptr.To("share")}, {Name: "named", ResourceClaimName: ptr.To("team")},
			{Name: "rack", ResourceClaimTemplateName: ptr.To("rack")},
		}},
	}
	template := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "share"}}
	template.Spec.Spec.Devices.Requests = []resourceapi.DeviceRequest{{
		Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "nic.dra-shared.dev"},
	}}
	rackTemplate := template.DeepCopy()
	rackTemplate.Name = "rack"
	rackTemplate.Spec.Spec.Devices.Requests[0].Exactly.DeviceClassName = "fabric.dra-shared.dev"
	q := &Queues{
		APIReader:     fake.NewClientBuilder().WithScheme(scheme).WithObjects(group, template, rackTemplate).Build(),
		DeviceClasses: []string{"nic.dra-shared.dev"},
	}
	const (
		shared   = "{name: net, resourceClaimTemplateName: share}"
		rack     = "{name: rack, resourceClaimTemplateName: rack}"
		unmapped = `no DeviceClass of ResourceClaimTemplate "rack" is in controller.kueue.deviceClasses`
		own      = "{name: data, resourceClaimTemplateName: share}"
		inTeam   = "metadata: {annotations: {scheduling.dra-shared.dev/pod-group: team}}"
		twice    = `Kueue would charge ResourceClaimTemplate "share" 2 times, once for each pod, but the pods share one claim`
		six      = `Kueue would charge ResourceClaimTemplate "share" 6 times`
		fabric   = `[{name: rack, spec: {devices: {requests: [
			{name: rack, exactly: {deviceClassName: fabric.dra-shared.dev}}]}}}]`
	)
	annotated := func(key, value string) string {
		return `metadata: {annotations: {scheduling.dra-shared.dev/` + key + `: "` + value + `"}}`
	}
	for _, kind := range []string{"Deployment", "StatefulSet", "LeaderWorkerSet"} {
		raw := []byte(`{"metadata":{"labels":{"kueue.x-k8s.io/queue-name":"queue"}},
			"spec":{"template":{"metadata":{"annotations":{"scheduling.dra-shared.dev/pod-group":"team"}}}}}`)
		got := q.Handle(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
			Namespace: "ns", Kind: metav1.GroupVersionKind{Kind: kind}, Object: runtime.RawExtension{Raw: raw},
		}})
		want := "Kueue admits each pod of a " + kind + " separately"
		if got.Allowed || !strings.Contains(got.Result.Message, want) {
			t.Errorf("%s: got allowed %t, %v, want %q", kind, got.Allowed, got.Result, want)
		}
	}
	for _, tc := range []struct{ name, spec, want string }{
		{"one charge for one pod", "parallelism: 1, template: {" + inTeam +
			", spec: {resourceClaims: [" + shared + "]}}", ""},
		{"one charge for no number of pods", "template: {" + inTeam + ", spec: {resourceClaims: [" + shared + "]}}", ""},
		{"two pods", "parallelism: 2, template: {" + inTeam + ", spec: {resourceClaims: [" + shared + "]}}", twice},
		{"a class that Kueue does not charge, two pods", "parallelism: 2, template: {" + inTeam +
			", spec: {resourceClaims: [" + rack + "]}}", unmapped},
		{"a class that Kueue does not charge, one pod", "parallelism: 1, template: {" + inTeam +
			", spec: {resourceClaims: [" + rack + "]}}", unmapped},
		{"a missing template", "parallelism: 2, template: {" + strings.Replace(inTeam, "team", "other", 1) +
			", spec: {resourceClaims: [{name: net, resourceClaimTemplateName: none}]}}",
			`ResourceClaimTemplate "none", to which entry "net" refers, does not exist`},
		{"one charge for one completion", "parallelism: 2, completions: 1, template: {" + inTeam +
			", spec: {resourceClaims: [" + shared + "]}}", ""},
		{"two pods at a time of three", "parallelism: 2, completions: 3, template: {" + inTeam +
			", spec: {resourceClaims: [" + shared + "]}}", twice},
		{"one charge for one completion of a JobSet", "replicatedJobs: [{template: {spec: {parallelism: 2, completions: 1, " +
			"template: {" + inTeam + ", spec: {resourceClaims: [" + shared + "]}}}}}]", ""},
		{"two replicas", "replicas: 2, template: {" + inTeam + ", spec: {resourceClaims: [" + shared + "]}}", twice},
		{"claims of pods", "parallelism: 2, template: {" + inTeam + ", spec: {resourceClaims: [" + own + "]}}", ""},
		{"no group", "parallelism: 2, template: {spec: {resourceClaims: [" + shared + "]}}", ""},
		{"by name", "parallelism: 2, template: {" + inTeam +
			", spec: {resourceClaims: [{name: named, resourceClaimName: team}]}}", ""},
		{"group does not exist", "parallelism: 2, template: {" + strings.Replace(inTeam, "team", "other", 1) +
			", spec: {resourceClaims: [" + own + "]}}", twice},
		{"JobSet", "replicatedJobs: [{replicas: 3, template: {spec: {parallelism: 2, template: {" + inTeam +
			", spec: {resourceClaims: [" + shared + "]}}}}}]", six},
		{"JobSet of two Jobs with one pod", "replicatedJobs: [{template: {spec: {template: {" + inTeam +
			", spec: {resourceClaims: [" + shared + "]}}}}}, {template: {spec: {template: {" + inTeam +
			", spec: {resourceClaims: [" + shared + "]}}}}}]", twice},
		{"one charge for one pod of a JobSet", "replicatedJobs: [{template: {spec: {template: {" + inTeam +
			", spec: {resourceClaims: [" + shared + "]}}}}}, {template: {spec: {template: {" + inTeam +
			", spec: {resourceClaims: [" + own + "]}}}}}, {template: {spec: {template: {" +
			"spec: {resourceClaims: [" + shared + "]}}}}}]", ""},
		{"leaders", "replicas: 2, leaderWorkerTemplate: {size: 3, leaderTemplate: {" + inTeam +
			", spec: {resourceClaims: [" + shared + "]}}, workerTemplate: {}}", twice},
		{"leaders and workers", "replicas: 2, leaderWorkerTemplate: {size: 3, workerTemplate: {" + inTeam +
			", spec: {resourceClaims: [" + shared + "]}}}", six},
		{"charged class in job-claims", "template: {" +
			annotated("job-claims", "[{name: net, resourceClaimTemplateName: share}]") + "}",
			`entry "net" requests DeviceClass "nic.dra-shared.dev", which Kueue charges by its deviceClassMappings`},
		{"missing template in job-claims", "template: {" +
			annotated("job-claims", "[{name: net, resourceClaimTemplateName: none}]") + "}",
			`ResourceClaimTemplate "none", to which entry "net" refers, does not exist`},
		{"other class in job-claims", "parallelism: 2, template: {" + annotated("job-claims", fabric) + "}", ""},
		{"charged class in replica-claims", "replicas: 2, template: {" +
			annotated("replica-claims", "[{name: net, resourceClaimTemplateName: share}]") + "}", "which Kueue charges"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			const metadata = "metadata: {labels: {kueue.x-k8s.io/queue-name: queue}}"
			raw, err := yaml.YAMLToJSON([]byte("{" + metadata + ", spec: {" + tc.spec + "}}"))
			if err != nil {
				t.Fatal(err)
			}
			got := q.Handle(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
				Namespace: "ns", Object: runtime.RawExtension{Raw: raw},
			}})
			refused := !got.Allowed && strings.Contains(got.Result.Message, tc.want)
			if tc.want == "" && !got.Allowed || tc.want != "" && !refused {
				t.Errorf("got allowed %t, %v, want %q", got.Allowed, got.Result, tc.want)
			}
			if warned := len(got.Warnings) > 0; warned != strings.HasPrefix(tc.name, "one charge") {
				t.Errorf("got warnings %q", got.Warnings)
			}
		})
	}
}

// Kueue ignores the label of a pod if it manages an object that owns it. It adds its gate to the pods that it admits
// themselves, also to those in a queue by default.
func TestPods_inQueues(t *testing.T) {
	pods := newPods(t, mode.Bridge)
	pods.Kueue = true
	const (
		label = "labels: {kueue.x-k8s.io/queue-name: queue}, "
		gate  = "schedulingGates: [{name: kueue.x-k8s.io/admission}], "
		share = "annotations: {scheduling.dra-shared.dev/pod-group: group}"
	)
	for _, tc := range []struct {
		name, metadata, spec string
		allowed              bool
	}{
		{"the label, and an owner that Kueue manages", label + share, "", true},
		{"the label and the gate", label + share, gate, false},
		{"the gate", share, gate, false},
		{"the gate of another project", share, "schedulingGates: [{name: example.com/admission}], ", true},
		{"the gate, and no shared claim", "", gate, true},
	} {
		r := pods.Handle(t.Context(), review(t, "", "{metadata: {"+tc.metadata+"}, spec: {"+tc.spec+
			"resourceClaims: [{name: net, resourceClaimTemplateName: share}], containers: [{name: c}]}}"))
		const want = "Kueue never admits a pod that references a claim by name"
		refused := !r.Allowed && strings.Contains(r.Result.Message, want)
		if r.Allowed != tc.allowed || refused == tc.allowed {
			t.Errorf("%s: got allowed %t, %v, want %t", tc.name, r.Allowed, r.Result, tc.allowed)
		}
	}
}

// With the label only in the template of its pods, Kueue admits the pods of a workload one by one.
func TestQueues_labelOfTemplates(t *testing.T) {
	const (
		label = "labels: {kueue.x-k8s.io/queue-name: queue}"
		share = "annotations: {scheduling.dra-shared.dev/job-claims: \"[{name: rack, spec: {}}]\"}"
		both  = "template: {metadata: {" + label + ", " + share + "}}"
	)
	owner := func(kind string) string {
		return "ownerReferences: [{apiVersion: v1, kind: " + kind + ", name: o, uid: o, controller: true}]"
	}
	for _, tc := range []struct{ name, kind, metadata, spec, want string }{
		{"Job", "Job", "", both, "spec.template.metadata.labels[kueue.x-k8s.io/queue-name]: without the label on the Job"},
		{"Job with the label", "Job", label, both, ""},
		{"Job of a CronJob", "Job", owner("CronJob"), both, "without the label on the Job"},
		{"Job of a JobSet, which Kueue may manage", "Job", owner("JobSet"), both, ""},
		{"Job that shares no claims", "Job", "", "template: {metadata: {" + label + "}}", ""},
		{"Deployment", "Deployment", "", both, "without the label on the Deployment"},
		{"JobSet", "JobSet", "", "replicatedJobs: [{template: {spec: {" + both + "}}}]",
			"spec.replicatedJobs[0].template.spec.template.metadata.labels[kueue.x-k8s.io/queue-name]: without the label"},
		{"JobSet with the label", "JobSet", label, "replicatedJobs: [{template: {spec: {" + both + "}}}]", ""},
		{"JobSet with the label on its Jobs", "JobSet", "",
			"replicatedJobs: [{template: {metadata: {" + label + "}, spec: {" + both + "}}}]", ""},
	} {
		request := review(t, "", "{metadata: {"+tc.metadata+"}, spec: {"+tc.spec+"}}")
		request.Kind.Kind = tc.kind
		got := (&Queues{APIReader: fake.NewClientBuilder().Build()}).Handle(t.Context(), request)
		refused := !got.Allowed && strings.Contains(got.Result.Message, tc.want)
		if tc.want == "" && !got.Allowed || tc.want != "" && !refused {
			t.Errorf("%s: got allowed %t, %v, want %q", tc.name, got.Allowed, got.Result, tc.want)
		}
	}
}
