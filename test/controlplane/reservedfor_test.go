// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// createHeldClaim creates a claim with the annotation reserved-for, and a pod
// that uses the claim.
func (e *testEnv) createHeldClaim(t *testing.T, ns, holder string) (*resourceapi.ResourceClaim, *corev1.Pod) {
	t.Helper()
	claim := fabricClaim(ns, "team")
	claim.Annotations = map[string]string{scheduling.ReservedForAnnotation: holder}
	pod := newPodWithClaim(ns, "user", 0, claim.Name)
	e.create(t, claim, pod)
	return claim, pod
}

// createJob creates a Job without pods, which can be a holder.
func (e *testEnv) createJob(t *testing.T, ns string) *batchv1.Job {
	t.Helper()
	pods := corev1.PodSpec{
		RestartPolicy: corev1.RestartPolicyNever,
		Containers:    []corev1.Container{{Name: "work", Image: "none"}},
	}
	job := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "train"},
		Spec:       batchv1.JobSpec{Parallelism: ptr.To[int32](0), Template: corev1.PodTemplateSpec{Spec: pods}},
	}
	e.create(t, job)
	return job
}

// heldState returns the Held condition of the claim's device, and whether the
// claim has an entry of its holder.
func (e *testEnv) heldState(
	ctx context.Context, claim *resourceapi.ResourceClaim,
) (condition string, reserved bool, err error) {
	if err := e.client.Get(ctx, client.ObjectKeyFromObject(claim), claim); err != nil {
		return "", false, err
	}
	for _, d := range claim.Status.Devices {
		if c := meta.FindStatusCondition(d.Conditions, v1alpha1.ConditionHeld); c != nil {
			condition = fmt.Sprint(c.Status, " ", c.Reason, ": ", c.Message)
		}
	}
	isHolder := func(r resourceapi.ResourceClaimConsumerReference) bool { return r.Resource != "pods" }
	return condition, slices.ContainsFunc(claim.Status.ReservedFor, isHolder), nil
}

// awaitHeldState waits for the claim's Held condition, and for the presence or
// absence of its holder's entry.
func (e *testEnv) awaitHeldState(t *testing.T, claim *resourceapi.ResourceClaim, want string, wantReserved bool) {
	t.Helper()
	condition := fmt.Sprintf("claim %s has condition Held %q, holder's entry: %t", claim.Name, want, wantReserved)
	eventually.Eventually(t, timeout, condition, func() error {
		got, reserved, err := e.heldState(t.Context(), claim)
		if err == nil && (got != want || reserved != wantReserved) {
			err = fmt.Errorf("got %q, holder's entry: %t", got, reserved)
		}
		return err
	})
}

const (
	holderFound = "True HolderFound: allocated as long as batch/jobs/train exists; " +
		"released earlier if no pod uses the claim and batch/jobs/train is complete or suspended"
	holderUnknown = "False HolderUnknown: not held by batch/job/train: " +
		"the name of the resource is jobs: use batch/jobs/train"
	// holderMissing is followed by the namespace.
	holderMissing = "False HolderMissing: not held by batch/jobs/train: it does not exist in namespace "
)

func TestReservedFor_condition(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)

	ns := e.createNamespace(t, "singular")
	e.createJob(t, ns)
	claim, _ := e.createHeldClaim(t, ns, "batch/job/train")
	e.awaitHeldState(t, claim, holderUnknown, false)

	ns = e.createNamespace(t, "missing")
	claim, _ = e.createHeldClaim(t, ns, "batch/jobs/train")
	e.awaitHeldState(t, claim, holderMissing+ns, false)
	job := e.createJob(t, ns)
	e.awaitHeldState(t, claim, holderFound, true)
	e.delete(t, job)
	e.awaitHeldState(t, claim, holderMissing+ns, false)
}

// The controller may not write the status of another driver's devices, so it writes an annotation.
func TestReservedFor_claimOfAnotherDriver(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "other-driver")
	claim := e.allocatedClaim(t, ns, ownNode, nil, result("gpu", otherDriver, "pool"))
	name := client.RawPatch(types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"batch/jobs/train"}}}`, scheduling.ReservedForAnnotation))
	if err := e.client.Patch(t.Context(), claim, name); err != nil {
		t.Fatalf("name the holder: %v", err)
	}
	await := func(want string) {
		t.Helper()
		eventually.Eventually(t, timeout, fmt.Sprintf("claim %s has annotation held %q", claim.Name, want), func() error {
			err := e.client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim)
			if got := claim.Annotations[scheduling.HeldAnnotation]; err == nil && got != want {
				err = fmt.Errorf("got %q", got)
			}
			return err
		})
	}
	await(strings.TrimPrefix(holderMissing, "False ") + ns)
	e.createJob(t, ns)
	await(strings.TrimPrefix(holderFound, "True "))
}

// An object without a namespace cannot hold a claim: the claim would keep its namespace from being deleted.
func TestReservedFor_holderWithoutNamespace(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "cluster-scoped")
	const holder = "/nodes/sim-000"
	claim, pod := e.createHeldClaim(t, ns, holder)
	e.awaitHeldState(t, claim, fmt.Sprintf("False HolderInvalid: annotation %s: %q names an object that cannot hold a "+
		"claim: %s is not in a namespace, and would keep the claim and its namespace from being deleted: name an object "+
		"in the namespace of the claim", scheduling.ReservedForAnnotation, holder, holder), false)
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}
	e.delete(t, namespace, pod)
	e.awaitDeleted(t, claim)
}

// The controller loses the right to read a holder, and then the claim and its
// pod are deleted. The claim must not keep its finalizer: no other component
// would remove the holder's entry.
func TestReservedFor_deletedClaimWithoutReadAccessToHolder(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "unreadable")
	e.createJob(t, ns)
	claim, pod := e.createHeldClaim(t, ns, "batch/jobs/train")
	e.awaitHeldState(t, claim, holderFound, true)

	e.revokeJobs(t)
	e.delete(t, claim, pod)
	e.awaitDeleted(t, claim)
}

// revokeJobs removes the controller's rights to Jobs until the test ends.
func (e *testEnv) revokeJobs(t *testing.T) {
	t.Helper()
	roles := e.kube.RbacV1().ClusterRoles()
	setRules := func(change func([]rbacv1.PolicyRule) []rbacv1.PolicyRule) (before []rbacv1.PolicyRule) {
		role, err := roles.Get(context.Background(), "dra-shared-controller", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		before = slices.Clone(role.Rules)
		role.Rules = change(role.Rules)
		if _, err := roles.Update(context.Background(), role, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		return before
	}
	all := setRules(func(rules []rbacv1.PolicyRule) []rbacv1.PolicyRule {
		isForJobs := func(r rbacv1.PolicyRule) bool { return slices.Contains(r.Resources, "jobs") }
		withoutJobs := slices.DeleteFunc(slices.Clone(rules), isForJobs)
		if len(withoutJobs) == len(rules) {
			t.Fatal("ClusterRole dra-shared-controller has no rule for jobs")
		}
		return withoutJobs
	})
	t.Cleanup(func() { setRules(func([]rbacv1.PolicyRule) []rbacv1.PolicyRule { return all }) })
}

// The node of a held claim fails while its holder lives. The claim keeps the device until its owner permits the release
// of unused claims. Then the next pod runs on another node, although the holder never stopped.
func TestReservedFor_claimLeavesFailedNode(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "failed-node")
	for i := range 2 {
		e.createNIC(t, fmt.Sprintf("sim-%03d", i))
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: objectMeta(ns, "team"), Spec: nicSpec()}
	claim.Annotations = map[string]string{scheduling.ReservedForAnnotation: "apps/statefulsets/web"}
	set := statefulSet(ns, 1)
	set.Spec.Template.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: &claim.Name}}
	e.create(t, claim, set)
	e.awaitRunning(t, ns, 1)
	const held = "True HolderFound: allocated as long as apps/statefulsets/web exists; released earlier if no pod uses " +
		"the claim and "
	e.awaitHeldState(t, claim, held+"apps/statefulsets/web is complete or suspended", true)
	pod := &corev1.Pod{ObjectMeta: objectMeta(ns, "web-0")}
	if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(pod), pod); err != nil {
		t.Fatal(err)
	}
	var failed int
	if _, err := fmt.Sscanf(pod.Spec.NodeName, "sim-%03d", &failed); err != nil {
		t.Fatalf("node %q of the pod: %v", pod.Spec.NodeName, err)
	}
	e.cordon(t, failed, failed+1)
	if err := e.client.Delete(t.Context(), pod, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	e.awaitUnschedulable(t, pod)
	e.awaitHeldState(t, claim, held+"apps/statefulsets/web is complete or suspended", true)

	e.annotate(t, claim, map[string]string{
		scheduling.ReservedForAnnotation: "apps/statefulsets/web", scheduling.ReleaseAnnotation: "Unused=1s",
	})
	e.awaitRunning(t, ns, 1)
	if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(pod), pod); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("sim-%03d", 1-failed); pod.Spec.NodeName != want {
		t.Errorf("the pod runs on node %s, want %s", pod.Spec.NodeName, want)
	}
	e.awaitHeldState(t, claim, held+"1s have passed", true)
}

// awaitUnschedulable waits until the next pod of that name has found no node.
func (e *testEnv) awaitUnschedulable(t *testing.T, former *corev1.Pod) {
	t.Helper()
	eventually.Eventually(t, timeout, "the scheduler finds no node for pod "+former.Name, func() error {
		var pod corev1.Pod
		if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(former), &pod); err != nil {
			return err
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable && pod.UID != former.UID {
				return nil
			}
		}
		return fmt.Errorf("it has the conditions %v", pod.Status.Conditions)
	})
}
