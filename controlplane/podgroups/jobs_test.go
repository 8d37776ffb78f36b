// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

// testJob returns a Job with two claims from testTemplate: net, and kept, which is deleted with the Job.
func testJob() *batchv1.Job {
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: testNamespace, Name: "train", UID: "job-uid"},
		Spec: batchv1.JobSpec{Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{
			Annotations: map[string]string{scheduling.JobClaimsAnnotation: `[{name: net, resourceClaimTemplateName: template},
				{name: kept, resourceClaimTemplateName: template, deletionPolicy: OnDeletion}]`},
		}}},
	}
}

// jobClaimNamed returns the claim for an entry of testJob, allocated and reserved for the Job.
func jobClaimNamed(entry string) *resourceapi.ResourceClaim {
	owner := JobOwner(testNamespace, "train", "job-uid")
	claim := claims.Generate(owner, entry, 0, testTemplate("class"))
	claim.Finalizers = []string{deleteProtection}
	claim.Status.Allocation = &resourceapi.AllocationResult{}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{owner.Reference()}
	return claim
}

// reconcileJob reconciles testJob once, and returns the events.
func reconcileJob(t *testing.T, objects ...client.Object) (client.Client, *events.FakeRecorder) {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientscheme.AddToScheme, scheduling.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	builder := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithStatusSubresource(&resourceapi.ResourceClaim{}, &batchv1.Job{}).
		WithInterceptorFuncs(interceptor.Funcs{Create: createWithUID, List: listWithPhaseSelector})
	for _, i := range append(indexes(), jobIndexes()...) {
		builder = builder.WithIndex(i.object, i.field, i.keys)
	}
	c := builder.Build()
	recorder := events.NewFakeRecorder(10)
	r := &JobReconciler{Reconciler: Reconciler{
		Client: cached(c), APIReader: c, Mode: mode.Bridge, Driver: testDriver, Events: recorder,
	}}
	request := ctrl.Request{NamespacedName: client.ObjectKeyFromObject(testJob())}
	if _, err := r.Reconcile(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	return c, recorder
}

// describe returns the state of a claim: absent, present, allocated, or released, which is being deleted without
// entries.
func describe(t *testing.T, c client.Client, name string) string {
	t.Helper()
	var claim resourceapi.ResourceClaim
	err := c.Get(t.Context(), client.ObjectKey{Namespace: testNamespace, Name: name}, &claim)
	switch {
	case apierrors.IsNotFound(err):
		return "absent"
	case err != nil:
		t.Fatal(err)
	case claim.DeletionTimestamp != nil && len(claim.Status.ReservedFor) == 0:
		return "released"
	case claim.DeletionTimestamp != nil:
		return "being deleted"
	case claim.Status.Allocation != nil && len(claim.Status.ReservedFor) > 0:
		return "held"
	}
	return "present"
}

func TestJobReconciler_states(t *testing.T) {
	ended := func(condition batchv1.JobConditionType) func(*batchv1.Job) {
		return func(j *batchv1.Job) {
			j.Status.Conditions = []batchv1.JobCondition{{Type: condition, Status: corev1.ConditionTrue}}
		}
	}
	for _, tc := range []struct {
		name       string
		change     func(*batchv1.Job)
		exist      bool
		net, kept  string
		withoutJob bool
	}{
		{name: "starts", change: func(*batchv1.Job) {}, net: "present", kept: "present"},
		{name: "is created suspended", change: func(j *batchv1.Job) { j.Spec.Suspend = ptr.To(true) },
			net: "absent", kept: "absent"},
		{name: "starts in another cluster", change: func(j *batchv1.Job) { j.Spec.ManagedBy = ptr.To("example.com/remote") },
			net: "absent", kept: "absent"},
		{name: "is managed by Kubernetes", change: func(j *batchv1.Job) {
			j.Spec.ManagedBy = ptr.To(batchv1.JobControllerName)
		}, net: "present", kept: "present"},
		{name: "is managed by another controller and had pods here", change: func(j *batchv1.Job) {
			j.Spec.ManagedBy = ptr.To("example.com/remote")
		}, exist: true, net: "held", kept: "held"},
		{name: "runs", change: func(*batchv1.Job) {}, exist: true, net: "held", kept: "held"},
		{name: "is suspended", change: func(j *batchv1.Job) { j.Spec.Suspend = ptr.To(true) }, exist: true,
			net: "present", kept: "present"},
		{name: "is complete", change: ended(batchv1.JobComplete), exist: true, net: "released", kept: "held"},
		{name: "has failed", change: ended(batchv1.JobFailed), exist: true, net: "released", kept: "held"},
		{name: "is about to fail", change: ended(batchv1.JobFailureTarget), exist: true, net: "held", kept: "held"},
		{name: "is being deleted", change: func(j *batchv1.Job) {
			j.DeletionTimestamp, j.Finalizers = ptr.To(metav1.Now()), []string{metav1.FinalizerDeleteDependents}
		}, exist: true, net: "released", kept: "released"},
		{name: "is another of that name", change: func(j *batchv1.Job) { j.UID, j.Spec.Suspend = "next", ptr.To(true) },
			exist: true, net: "released", kept: "released"},
		{name: "no longer exists", withoutJob: true, exist: true, net: "released", kept: "released"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			objects := []client.Object{testTemplate("class")}
			if !tc.withoutJob {
				job := testJob()
				tc.change(job)
				objects = append(objects, job)
			}
			net, kept := jobClaimNamed("net"), jobClaimNamed("kept")
			if tc.exist {
				objects = append(objects, net, kept)
			}
			c, _ := reconcileJob(t, objects...)
			if got := describe(t, c, net.Name); got != tc.net {
				t.Errorf("claim net is %s, want %s", got, tc.net)
			}
			if got := describe(t, c, kept.Name); got != tc.kept {
				t.Errorf("claim kept is %s, want %s", got, tc.kept)
			}
		})
	}
}

// Only a claim that was generated for a Job is deleted with it: a user may forge the annotation, or let a Job hold a
// claim by the annotation reserved-for.
func TestJobReconciler_ignoresOtherClaims(t *testing.T) {
	byUser := jobClaimNamed("net")
	byUser.Name, byUser.OwnerReferences = "by-user", nil
	c, _ := reconcileJob(t, byUser)
	if got := describe(t, c, byUser.Name); got != "held" {
		t.Errorf("the claim is %s, want held", got)
	}
	// A user has deleted the Job without its dependents, so its claim lost the owner.
	orphan := jobClaimNamed("net")
	orphan.OwnerReferences = nil
	c, _ = reconcileJob(t, orphan)
	if got := describe(t, c, orphan.Name); got != "released" {
		t.Errorf("the orphan is %s, want released", got)
	}
}

// expectEvent checks that the next event contains a text.
func expectEvent(t *testing.T, recorder *events.FakeRecorder, want string) {
	t.Helper()
	select {
	case event := <-recorder.Events:
		if !strings.Contains(event, want) {
			t.Errorf("got event %q, want %q", event, want)
		}
	default:
		t.Error("got no event")
	}
}

func TestJobReconciler_reportsMissingTemplate(t *testing.T) {
	_, recorder := reconcileJob(t, testJob())
	want := `ClaimMissing resourceClaims["net"].resourceClaimTemplateName: ResourceClaimTemplate template does not exist`
	expectEvent(t, recorder, want)
}

// The new pods of a Job wait for the end of those that run with a claim that a user has deleted.
func TestJobReconciler_reportsDeletedClaim(t *testing.T) {
	deleted := jobClaimNamed("net")
	deleted.DeletionTimestamp = ptr.To(metav1.Now())
	_, recorder := reconcileJob(t, testJob(), testTemplate("class"), deleted)
	want := "ClaimDeleted claim " + deleted.Name + " was deleted, and new pods wait until the deletion completes"
	expectEvent(t, recorder, want)
}
