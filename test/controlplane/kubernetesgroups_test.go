// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// If Kubernetes has PodGroups without their claims (GenericWorkload without DRAWorkloadResourceClaims), the
// controller is in bridge mode. It does not change pods of Kubernetes' PodGroups, regardless of their claims.
func TestAdmission_podsOfKubernetesGroups(t *testing.T) {
	e := requireTestEnv(t)
	e.requireWorkloadGates(t)
	e.startController(t, nil)
	if versions, err := mode.Versions(e.kube.Discovery()); err != nil || !slices.Contains(versions, "v1beta1") {
		t.Fatalf("versions of PodGroups of Kubernetes: got %v, %v, want v1beta1", versions, err)
	}
	if detected, err := mode.Detect(t.Context(), e.kube, "default"); err != nil || detected != mode.Bridge {
		t.Fatalf("detected mode: got %q, %v, want %q", detected, err, mode.Bridge)
	}
	ns := e.createNamespace(t, "gang")
	gang := func(name string) *schedulingapi.PodGroup {
		basic := schedulingapi.PodGroupSchedulingPolicy{Basic: &schedulingapi.BasicSchedulingPolicy{}}
		return &schedulingapi.PodGroup{
			ObjectMeta: objectMeta(ns, name), Spec: schedulingapi.PodGroupSpec{SchedulingPolicy: basic},
		}
	}
	gpu := &resourceapi.ResourceClaimTemplate{ObjectMeta: objectMeta(ns, "gpu")}
	gpu.Spec.Spec.Devices.Requests = []resourceapi.DeviceRequest{{
		Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.example.com"},
	}}
	e.create(t, gpu, gang("theirs"), gang("both"))
	e.mustCreateGroup(t, ns, "both")
	e.mustCreateGroup(t, ns, "drivers")
	ending := e.mustCreateGroup(t, ns, "ending")
	keep := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":["example.com/keep"]}}`))
	if err := e.client.Patch(t.Context(), ending, keep); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // the namespace is deleted afterwards
		release := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		_ = e.client.Patch(context.Background(), ending, release)
	})
	e.delete(t, ending)

	pod := func(group, template string) *corev1.Pod {
		p := newPod(ns, "of-"+group+"-"+template, 0)
		p.Annotations = nil
		p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: ptr.To(group)}
		p.Spec.ResourceClaims[0].ResourceClaimTemplateName = ptr.To(template)
		reference := corev1.ResourceClaim{Name: p.Spec.ResourceClaims[0].Name}
		p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{reference}
		return p
	}
	var warnings []string
	warned, err := e.clientWithWarnings(func(text string) { warnings = append(warnings, text) })
	if err != nil {
		t.Fatal(err)
	}
	for _, theirs := range []*corev1.Pod{
		pod("theirs", "gpu"), pod("theirs", "fabric"), pod("both", "gpu"), pod("both", "fabric"), pod("ending", "fabric"),
		pod("missing", "gpu"),
	} {
		created := theirs.DeepCopy()
		warnings = nil
		if err := warned.Create(t.Context(), created); err != nil {
			t.Errorf("pod %s is refused: %v", theirs.Name, err)
			continue
		}
		if got, want := len(warnings) > 0, *theirs.Spec.SchedulingGroup.PodGroupName != "theirs"; got != want {
			t.Errorf("pod %s: got warnings %q, want some: %t", theirs.Name, warnings, want)
		}
		if !equality.Semantic.DeepEqual(created.Spec.SchedulingGroup, theirs.Spec.SchedulingGroup) ||
			!equality.Semantic.DeepEqual(created.Spec.ResourceClaims, theirs.Spec.ResourceClaims) ||
			created.Annotations[scheduling.GroupAnnotation] != "" || created.Labels[scheduling.GroupUIDLabel] != "" ||
			len(created.Spec.SchedulingGates) > 0 {
			t.Errorf("pod %s is changed: labels %v, annotations %v, spec %+v",
				theirs.Name, created.Labels, created.Annotations, created.Spec)
		}
	}
	joins := pod("drivers", "fabric")
	e.create(t, joins)
	if joins.Spec.SchedulingGroup != nil || joins.Labels[scheduling.GroupUIDLabel] == "" {
		t.Errorf("a pod of the driver's PodGroup: got labels %v, field %v, want that the pod joins it",
			joins.Labels, joins.Spec.SchedulingGroup)
	}
	for group, want := range map[string]string{"theirs": "", "both": "", "drivers": "drivers"} {
		template := pod(group, "fabric")
		deployment := &appsv1.Deployment{ObjectMeta: objectMeta(ns, group), Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To[int32](0), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": group}},
			Template: corev1.PodTemplateSpec{Spec: template.Spec},
		}}
		deployment.Spec.Template.Labels = map[string]string{"app": group}
		e.create(t, deployment)
		if got := deployment.Spec.Template.Annotations[scheduling.GroupAnnotation]; got != want {
			t.Errorf("annotation of a template that names PodGroup %s by the field: got %q, want %q", group, got, want)
		}
	}
}

// clientWithWarnings returns a client that calls warn with the warnings of the API server.
func (e *testEnv) clientWithWarnings(warn func(text string)) (client.Client, error) {
	c := rest.CopyConfig(e.config)
	c.WarningHandler = warningFunc(warn)
	return client.New(c, client.Options{Scheme: e.client.Scheme(), Mapper: e.client.RESTMapper()})
}

// warningFunc implements rest.WarningHandler.
type warningFunc func(text string)

func (f warningFunc) HandleWarningHeader(_ int, _, text string) { f(text) }

// Kubernetes' scheduler schedules the pods of a gang together, and the driver's gate lets one of them go first: with
// the gate, the gang would wait forever. Pods of a gang do not get the gate. The annotation gates removes the gate from
// pods that have one, such as pods that an earlier release admitted.
func TestGates_gangOfKubernetes(t *testing.T) {
	e := requireTestEnv(t)
	e.requireWorkloadGates(t)
	e.startController(t, nil)
	const size, name = 5, "gang"
	createGang := func(prefix string) (*scheduling.PodGroup, func(i int) *corev1.Pod) {
		ns := e.createNamespace(t, prefix)
		e.create(t, &schedulingapi.PodGroup{ObjectMeta: objectMeta(ns, name), Spec: schedulingapi.PodGroupSpec{
			SchedulingPolicy: schedulingapi.PodGroupSchedulingPolicy{Gang: &schedulingapi.GangSchedulingPolicy{MinCount: size}},
		}})
		return e.mustCreateGroup(t, ns, name), func(i int) *corev1.Pod {
			pod := newPod(ns, name, i)
			pod.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: ptr.To(name)}
			return pod
		}
	}

	group, newGangPod := createGang("free")
	for i := range size {
		pod := newGangPod(i)
		e.create(t, pod)
		if pod.Spec.SchedulingGroup == nil || len(pod.Spec.SchedulingGates) > 0 {
			t.Errorf("pod %s of a gang: got field %v and gates %v, want the field and no gate",
				pod.Name, pod.Spec.SchedulingGroup, pod.Spec.SchedulingGates)
		}
	}
	e.awaitRunning(t, group.Namespace, size)
	e.expectOneClaim(t, group)

	group, newGangPod = createGang("gated")
	for i := range size {
		pod := newGangPod(i)
		pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: scheduling.ReservedGate}}
		e.create(t, pod)
	}
	e.awaitStuckGang(t, group.Namespace, size)
	disable := client.RawPatch("application/merge-patch+json",
		fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, scheduling.GatesAnnotation, scheduling.GatesDisabled))
	if err := e.client.Patch(t.Context(), group, disable); err != nil {
		t.Fatalf("disable gates: %v", err)
	}
	e.awaitRunning(t, group.Namespace, size)
	e.expectOneClaim(t, group)
}

// awaitStuckGang waits until one of the pods has passed the driver's gate, and none is bound for a while.
func (e *testEnv) awaitStuckGang(t *testing.T, ns string, size int) {
	t.Helper()
	var since time.Time
	condition := fmt.Sprintf("one of %d pods has passed the gate, and none is bound for %s", size, quietPeriod)
	eventually.Eventually(t, timeout, condition, func() error {
		var pods corev1.PodList
		if err := e.client.List(t.Context(), &pods, client.InNamespace(ns)); err != nil {
			return err
		}
		gated := 0
		for i := range pods.Items {
			gated += len(pods.Items[i].Spec.SchedulingGates)
			if pods.Items[i].Spec.NodeName != "" {
				t.Fatalf("pod %s is bound while other pods of its gang are behind the gate", pods.Items[i].Name)
			}
		}
		if gated != size-1 {
			return fmt.Errorf("%d of %d pods are behind the gate", gated, len(pods.Items))
		}
		if since.IsZero() {
			since = time.Now()
		}
		if left := quietPeriod - time.Since(since); left > 0 {
			return fmt.Errorf("%s are left", left)
		}
		return nil
	})
}

// expectOneClaim checks that the pods of a group share one claim.
func (e *testEnv) expectOneClaim(t *testing.T, group *scheduling.PodGroup) {
	t.Helper()
	pods, used, err := e.claimsInUse(t.Context(), group.Namespace)
	if err != nil || len(used) != 1 {
		t.Errorf("the %d pods of PodGroup %s use the claims %v (error %v), want one", pods, group.Name, used, err)
	}
}

// requireWorkloadGates runs the API server with the feature gates "workload" until the test ends, and skips the
// test if the API server does not have these gates.
func (e *testEnv) requireWorkloadGates(t *testing.T) {
	t.Helper()
	const gates = "workload"
	if os.Getenv(envGates) == gates {
		return
	}
	if version := os.Getenv(envVersion); version != "" && version < "v1.37" {
		t.Skip("the API server of " + version + " has no PodGroups of scheduling.k8s.io/v1beta1")
	}
	if e.native {
		t.Skip("in native mode, Kubernetes has the claims of PodGroups")
	}
	t.Cleanup(func() { e.setGates(t, cmp.Or(os.Getenv(envGates), "default")) })
	e.setGates(t, gates)
	eventually.Eventually(t, timeout, "the API server has PodGroups of Kubernetes", func() error {
		_, err := e.kube.SchedulingV1beta1().PodGroups("default").List(t.Context(), metav1.ListOptions{})
		return err
	})
}

// In native mode, one pod with another scheduler would keep Kubernetes' scheduler from scheduling its whole PodGroup.
func TestAdmission_otherSchedulerInNativeMode(t *testing.T) {
	e := requireTestEnv(t)
	if !e.native {
		t.Skip("in bridge mode, Kubernetes schedules the pods one by one")
	}
	e.startController(t, nil)
	ns := e.createNamespace(t, "schedulers")
	group := e.mustCreateGroup(t, ns, "group")
	e.create(t, newPod(ns, group.Name, 0))
	other := newPod(ns, group.Name, 1)
	other.Spec.SchedulerName = "gang"
	// The controller learns about the first pod from its watch.
	eventually.Eventually(t, timeout, "admission refuses a pod with another scheduler", func() error {
		err := e.client.Create(t.Context(), other.DeepCopy(), client.DryRunAll)
		if want := `spec.schedulerName: "gang" differs from "default-scheduler"`; err == nil ||
			!strings.Contains(err.Error(), want) {
			return fmt.Errorf("got error %v, want %q", err, want) //nolint:errorlint // err may be nil
		}
		return nil
	})
	e.create(t, newPod(ns, group.Name, 2))
	e.awaitRunning(t, ns, 2)
}
