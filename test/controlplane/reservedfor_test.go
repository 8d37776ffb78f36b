package controlplane

import (
	"context"
	"fmt"
	"slices"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// heldClaim makes a claim with the annotation, and a pod that uses it and runs.
func (e *testEnv) heldClaim(ctx context.Context, t *testing.T, ns, holder string) (*resourceapi.ResourceClaim, *corev1.Pod) {
	t.Helper()
	claim := fabricClaim(ns, "team")
	claim.Annotations = map[string]string{scheduling.ReservedForAnnotation: holder}
	pod := e.pod(ns, "user", 0)
	pod.Annotations = nil
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "fabric", ResourceClaimName: ptr.To("team")}}
	for _, o := range []client.Object{claim, pod} {
		if err := e.client.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	return claim, pod
}

// job is one without pods, to hold claims.
func (e *testEnv) job(ctx context.Context, t *testing.T, ns string) *batchv1.Job {
	t.Helper()
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "train"}, Spec: batchv1.JobSpec{Suspend: ptr.To(true),
		Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "work", Image: "none"}}}}}}
	if err := e.client.Create(ctx, job); err != nil {
		t.Fatal(err)
	}
	return job
}

// held is the condition of the claim's device, and whether the holder is among
// those that the claim is reserved for.
func (e *testEnv) held(ctx context.Context, claim *resourceapi.ResourceClaim) (condition string, reserved bool, err error) {
	if err := e.client.Get(ctx, client.ObjectKeyFromObject(claim), claim); err != nil {
		return "", false, err
	}
	for _, d := range claim.Status.Devices {
		if c := meta.FindStatusCondition(d.Conditions, v1alpha1.ConditionHeld); c != nil {
			condition = fmt.Sprint(c.Status, " ", c.Reason, ": ", c.Message)
		}
	}
	return condition, slices.ContainsFunc(claim.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool { return r.Resource != "pods" }), nil
}

func (e *testEnv) isHeld(ctx context.Context, t *testing.T, claim *resourceapi.ResourceClaim, want string, reserved bool) {
	t.Helper()
	e.eventually(ctx, t, fmt.Sprintf("Held %s, reserved %t", want, reserved), func() error {
		got, r, err := e.held(ctx, claim)
		if err == nil && (got != want || r != reserved) {
			err = fmt.Errorf("it is %q, reserved %t", got, r)
		}
		return err
	})
}

// What holds a claim, and does not, is what its condition says.
func TestTheConditionOfAHeldClaimIsTheTruth(t *testing.T) {
	e := requireTestEnv(t)
	ctx := context.Background()
	e.controller(t, nil)

	ns := e.namespace(t, "singular")
	e.job(ctx, t, ns)
	claim, _ := e.heldClaim(ctx, t, ns, "batch/job/train")
	e.isHeld(ctx, t, claim, "False HolderUnknown: not held by batch/job/train: the name of the resource is jobs: use batch/jobs/train", false)

	ns = e.namespace(t, "missing")
	claim, _ = e.heldClaim(ctx, t, ns, "batch/jobs/train")
	e.isHeld(ctx, t, claim, "False HolderMissing: not held by batch/jobs/train: it does not exist in namespace "+ns, false)
	job := e.job(ctx, t, ns)
	e.isHeld(ctx, t, claim, "True HolderFound: allocated as long as batch/jobs/train exists", true)
	if err := e.client.Delete(ctx, job, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
		t.Fatal(err)
	}
	e.isHeld(ctx, t, claim, "False HolderMissing: not held by batch/jobs/train: it does not exist in namespace "+ns, false)
}

// A claim that is deleted while the controller may not see its holder any more
// goes when its pods do: nobody else would ever let go of it.
func TestAHolderThatNobodySeesKeepsNoClaim(t *testing.T) {
	e := requireTestEnv(t)
	ctx := context.Background()
	e.controller(t, nil)
	ns := e.namespace(t, "unseen")
	e.job(ctx, t, ns)
	claim, pod := e.heldClaim(ctx, t, ns, "batch/jobs/train")
	e.isHeld(ctx, t, claim, "True HolderFound: allocated as long as batch/jobs/train exists", true)

	role, err := e.cluster.RbacV1().ClusterRoles().Get(ctx, "dra-shared-controller", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	rules := slices.Clone(role.Rules)
	setRules := func(rules []rbacv1.PolicyRule) {
		t.Helper()
		if role, err = e.cluster.RbacV1().ClusterRoles().Get(ctx, role.Name, metav1.GetOptions{}); err != nil {
			t.Fatal(err)
		}
		role.Rules = rules
		if role, err = e.cluster.RbacV1().ClusterRoles().Update(ctx, role, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { setRules(rules) })
	setRules(slices.DeleteFunc(slices.Clone(rules), func(r rbacv1.PolicyRule) bool { return slices.Contains(r.Resources, "jobs") }))
	for _, o := range []client.Object{claim, pod} {
		if err := e.client.Delete(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	e.eventually(ctx, t, "the claim goes", func() error {
		err := e.client.Get(ctx, client.ObjectKeyFromObject(claim), claim)
		if err == nil {
			return fmt.Errorf("it is there, reserved for %v", claim.Status.ReservedFor)
		}
		return client.IgnoreNotFound(err)
	})
}
