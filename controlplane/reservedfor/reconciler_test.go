// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reservedfor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clusterfake "k8s.io/client-go/kubernetes/fake"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/trim"
	"github.com/dra-shared/dra-driver-shared/controlplane/workload"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
)

// These tests run the Reconciler against controller-runtime's fake client, and apply
// the status of claims to client-go's fake clientset. They call Reconcile where the
// manager would, and play the roles of the user and the scheduler.

const (
	testNamespace = "ns"
	testDriver    = "dra-shared.dev"
	testFinalizer = "resource.kubernetes.io/delete-protection"
)

// testEnv is a Reconciler for the claim "team" with its fake API server.
type testEnv struct {
	*testing.T
	client     client.Client
	cluster    *clusterfake.Clientset
	reconciler *Reconciler
	recorder   *events.FakeRecorder
	// holderError is the error for reads of holders.
	holderError error
	// watches has the resources that the Reconciler watches.
	watches []string
	pods    *fakeWatcher
	clock   *clocktesting.FakePassiveClock
}

// fakeWatcher is a podWatcher that reads the pods from the API server.
type fakeWatcher struct {
	client client.Reader
	// watched are the claims that were not forgotten.
	watched map[types.NamespacedName]bool
}

func (w *fakeWatcher) Pods(ctx context.Context, claim types.NamespacedName) (pods []*corev1.Pod, err error) {
	w.watched[claim] = true
	var list corev1.PodList
	err = w.client.List(ctx, &list, client.InNamespace(claim.Namespace))
	for i := range list.Items {
		trimmed, trimErr := trim.PodWithClaims(&list.Items[i])
		pod, ok := trimmed.(*corev1.Pod)
		if trimErr == nil && ok && slices.Contains(claimref.AllNames(pod), claim.Name) {
			pods = append(pods, pod)
		}
	}
	return pods, err
}

func (w *fakeWatcher) Forget(claim types.NamespacedName) { delete(w.watched, claim) }

func newTestEnv(t *testing.T, claim *resourceapi.ResourceClaim, objects ...client.Object) *testEnv {
	t.Helper()
	e := &testEnv{
		T: t, recorder: events.NewFakeRecorder(100), cluster: clusterfake.NewClientset(claim.DeepCopy()),
		clock: clocktesting.NewFakePassiveClock(time.Now()),
	}
	e.client = fake.NewClientBuilder().WithScheme(clientscheme.Scheme).WithObjects(append(objects, claim)...).
		WithStatusSubresource(&resourceapi.ResourceClaim{}, &corev1.Pod{}).
		WithIndex(&resourceapi.ResourceClaim{}, indexHolder, holderIndex).
		WithInterceptorFuncs(interceptor.Funcs{Get: e.get, List: e.list}).Build()
	e.pods = &fakeWatcher{client: e.client, watched: map[types.NamespacedName]bool{}}
	mapper := meta.NewDefaultRESTMapper([]schema.GroupVersion{batchv1.SchemeGroupVersion})
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Node"), meta.RESTScopeRoot)
	mapper.Add(batchv1.SchemeGroupVersion.WithKind("Job"), meta.RESTScopeNamespace)
	e.reconciler = &Reconciler{
		Client: e.client, APIReader: e.client, Cluster: e.cluster, Driver: testDriver, Events: e.recorder, pods: e.pods,
		Lookup: &workload.Lookup{
			APIReader: e.client, Mapper: mapper,
			StartWatch: func(_ schema.GroupVersionKind, resource schema.GroupResource) error {
				e.watches = append(e.watches, resource.String())
				return nil
			},
		},
		Unused: workload.NewTimer(e.clock),
	}
	return e
}

func (e *testEnv) get(
	ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, options ...client.GetOption,
) error {
	if _, ok := o.(*unstructured.Unstructured); ok && e.holderError != nil {
		return e.holderError
	}
	return c.Get(ctx, key, o, options...)
}

// list fails for holders with holderError.
func (e *testEnv) list(
	ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption,
) error {
	if _, ok := list.(*metav1.PartialObjectMetadataList); ok && e.holderError != nil {
		return e.holderError
	}
	return c.List(ctx, list, options...)
}

// testClaim returns the allocated claim "team" with that annotation and those entries.
func testClaim(annotation string, entries ...resourceapi.ResourceClaimConsumerReference) *resourceapi.ResourceClaim {
	result := resourceapi.DeviceRequestAllocationResult{Request: "nic", Driver: testDriver, Pool: "node", Device: "nic0"}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: testNamespace, Name: "team", UID: "team-uid",
			Annotations: map[string]string{scheduling.ReservedForAnnotation: annotation},
			Finalizers:  []string{testFinalizer},
		},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
				Results: []resourceapi.DeviceRequestAllocationResult{result},
			}},
			ReservedFor: entries,
		},
	}
}

func testJob(uid types.UID) *batchv1.Job {
	return &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: testNamespace, Name: "train", UID: uid}}
}

// testPod returns the pod of podEntry, which uses the claim "team".
func testPod(node string) *corev1.Pod {
	claim := "team"
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: testNamespace, Name: podEntry.Name, UID: podEntry.UID},
		Spec: corev1.PodSpec{
			NodeName: node, ResourceClaims: []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: &claim}},
		},
	}
}

func (e *testEnv) reconcile() ctrl.Result {
	e.Helper()
	request := ctrl.Request{NamespacedName: types.NamespacedName{Namespace: testNamespace, Name: "team"}}
	result, err := e.reconciler.Reconcile(e.Context(), request)
	if err != nil {
		e.Fatalf("reconcile claim team: %v", err)
	}
	return result
}

// reconcileOnce reconciles the claim, and expects that an event announces what happens next.
func (e *testEnv) reconcileOnce(condition string) {
	e.Helper()
	if result := e.reconcile(); result != (ctrl.Result{}) {
		e.Errorf("result when %s: got %+v, want none", condition, result)
	}
}

// expectWatched checks whether events of the claim's pods cause reconciles.
func (e *testEnv) expectWatched(condition string, want bool) {
	e.Helper()
	if got := len(e.pods.watched) > 0; got != want {
		e.Errorf("the pods of the claim are watched when %s: got %t, want %t", condition, got, want)
	}
}

func (e *testEnv) claim() *resourceapi.ResourceClaim {
	e.Helper()
	var claim resourceapi.ResourceClaim
	if err := e.client.Get(e.Context(), types.NamespacedName{Namespace: testNamespace, Name: "team"}, &claim); err != nil {
		e.Fatalf("get claim team: %v", err)
	}
	return &claim
}

func (e *testEnv) delete(o client.Object) {
	e.Helper()
	if err := e.client.Delete(e.Context(), o); err != nil {
		e.Fatalf("delete %T %s: %v", o, o.GetName(), err)
	}
}

// expectReservedFor checks the UIDs of the claim's entries.
func (e *testEnv) expectReservedFor(condition string, want ...string) {
	e.Helper()
	var got []string
	for _, entry := range e.claim().Status.ReservedFor {
		got = append(got, string(entry.UID))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		e.Errorf("entries of the claim when %s: got %q, want %q", condition, got, want)
	}
}

func (e *testEnv) expectAllocated(condition string, want bool) {
	e.Helper()
	if got := e.claim().Status.Allocation != nil; got != want {
		e.Errorf("the claim is allocated when %s: got %t, want %t", condition, got, want)
	}
}

// expectHeld checks the condition Held of the claim's device.
func (e *testEnv) expectHeld(status metav1.ConditionStatus, reason, message string) {
	e.Helper()
	claim := e.reportedClaim()
	if len(claim.Status.Devices) != 1 {
		e.Fatalf("devices in the status of the claim: got %+v, want one", claim.Status.Devices)
	}
	c := meta.FindStatusCondition(claim.Status.Devices[0].Conditions, v1alpha1.ConditionHeld)
	if c == nil || c.Status != status || c.Reason != reason || !strings.HasPrefix(c.Message, message) {
		e.Errorf("condition Held of the claim's device: got %+v, want %s, reason %s, message %q...",
			c, status, reason, message)
	}
}

// expectEvents checks the reasons of the warnings since the last call.
func (e *testEnv) expectEvents(want ...string) {
	e.Helper()
	var got []string
	for len(e.recorder.Events) > 0 {
		text := strings.TrimPrefix(<-e.recorder.Events, "Warning ")
		reason, _, _ := strings.Cut(text, " ")
		got = append(got, reason)
	}
	if !slices.Equal(got, want) {
		e.Errorf("warnings on the claim: got %q, want %q", got, want)
	}
}

func TestReconciler_holdsClaimWhenPodIsBound(t *testing.T) {
	e := newTestEnv(t, testClaim(train.String(), podEntry), testJob("1"), testPod(""))
	e.reconcileOnce("the pod is not bound")
	e.expectWatched("the pod is not bound", true)
	e.expectReservedFor("the pod is not bound", "p")
	if want := []string{"jobs.batch"}; !slices.Equal(e.watches, want) {
		t.Errorf("watched resources: got %q, want %q", e.watches, want)
	}

	pod := testPod("")
	if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(pod), pod); err != nil {
		t.Fatalf("get the pod: %v", err)
	}
	pod.Spec.NodeName = "node"
	if err := e.client.Update(t.Context(), pod); err != nil {
		t.Fatalf("bind the pod: %v", err)
	}
	e.reconcile()
	e.expectReservedFor("the pod is bound", "p", "1")
	e.reconcile()
	e.expectHeld(metav1.ConditionTrue, "HolderFound", "allocated as long as batch/jobs/train exists")
	e.expectEvents()
	if len(e.watches) != 1 {
		t.Errorf("watches after three reconciles: got %q, want one", e.watches)
	}
}

func TestReconciler_deallocatesWhenHolderIsDeleted(t *testing.T) {
	e := newTestEnv(t, testClaim(train.String(), trainWith("1").Reference()), testJob("1"))
	e.reconcile()
	e.expectAllocated("the holder exists", true)
	e.expectWatched("the holder exists", true)
	e.delete(testJob("1"))
	e.reconcileOnce("the holder is deleted")
	e.expectReservedFor("the holder is deleted")
	e.expectAllocated("the holder is deleted", false)
	e.expectWatched("the holder is deleted", false)
}

func TestReconciler_keepsAllocationForPodsWhenHolderIsDeleted(t *testing.T) {
	e := newTestEnv(t, testClaim(train.String(), podEntry, trainWith("1").Reference()), testPod("node"))
	e.reconcile()
	e.expectReservedFor("the holder is deleted and a pod runs", "p")
	e.expectAllocated("the holder is deleted and a pod runs", true)
}

func TestReconciler_replacesEntryOfPredecessor(t *testing.T) {
	e := newTestEnv(t, testClaim(train.String(), podEntry, trainWith("1").Reference()), testJob("2"), testPod("node"))
	e.reconcile()
	e.expectReservedFor("an object of the same name replaced the holder", "p", "2")
}

func TestReconciler_reportsReasonForUnheldClaim(t *testing.T) {
	resource := schema.GroupResource{Group: "batch", Resource: "jobs"}
	unserved := apierrors.NewGenericServerResponse(404, "get", resource, "train", "", 0, true)
	for _, tc := range []struct {
		name        string
		annotation  string
		holderError error
		requeue     bool
		reason      string
		message     string
	}{
		{"the annotation is invalid", "jobs/train", nil, false, "HolderInvalid",
			`annotation scheduling.dra-shared.dev/reserved-for: "jobs/train" must be <API group>/<resource>/<name>`},
		{"the holder is in no namespace", "/nodes/n1", nil, false, "HolderInvalid",
			`annotation scheduling.dra-shared.dev/reserved-for: "/nodes/n1" names an object that cannot hold a claim: ` +
				"/nodes/n1 is not in a namespace"},
		{"the holder is a claim", "resource.k8s.io/resourceclaims/team", nil, false, "HolderInvalid",
			`annotation scheduling.dra-shared.dev/reserved-for: "resource.k8s.io/resourceclaims/team" ` +
				"resourceclaims.resource.k8s.io cannot hold claims"},
		{"the holder does not exist", "batch/jobs/train", nil, false, "HolderMissing",
			"not held by batch/jobs/train: it does not exist in namespace ns"},
		{"the resource does not exist", "batch/trains/train", nil, true, "HolderUnknown",
			"not held by batch/trains/train: the cluster does not serve resource trains.batch"},
		{"the resource is a singular", "batch/job/train", nil, true, "HolderUnknown",
			"not held by batch/job/train: the name of the resource is jobs: use batch/jobs/train"},
		{"the API is not served any more", "batch/jobs/train", unserved, true, "HolderUnknown",
			"not held by batch/jobs/train: the API server no longer serves batch/v1, Kind=Job"},
		{"the controller lacks permission", "batch/jobs/train",
			apierrors.NewForbidden(resource, "train", errors.New("no RBAC rule")), true, "HolderForbidden",
			"not held by batch/jobs/train: the controller is not permitted to get, list, and watch jobs.batch"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newTestEnv(t, testClaim(tc.annotation, podEntry), testPod("node"))
			e.holderError = tc.holderError
			result := e.reconcile()
			if requeue := result.RequeueAfter == workload.RetryInterval; requeue != tc.requeue {
				t.Errorf("requeue after %v: got %t, want %t (%v)",
					workload.RetryInterval, requeue, tc.requeue, result.RequeueAfter)
			}
			e.expectHeld(metav1.ConditionFalse, tc.reason, tc.message)
			e.expectEvents(tc.reason)
			e.expectReservedFor(tc.name, "p")
		})
	}
}

func TestReconciler_keepsEntryOfUnverifiableHolder(t *testing.T) {
	e := newTestEnv(t, testClaim(train.String(), trainWith("1").Reference()), testJob("1"))
	e.holderError = apierrors.NewForbidden(train.GroupResource, "train", errors.New("no RBAC rule"))
	e.reconcile()
	e.expectReservedFor("the controller lost its permission", "1")
	e.expectHeld(metav1.ConditionFalse, "HolderForbidden",
		"still reserved for batch/jobs/train, whose existence cannot be verified: ")

	e.delete(testClaim(""))
	e.reconcile()
	e.expectReservedFor("the controller lost its permission and the claim is being deleted")
	e.expectAllocated("the claim is being deleted, which Kubernetes completes", true)
}

// Earlier releases accepted objects that keep a claim, and its namespace, for ever.
func TestReconciler_releasesClaimOfInvalidHolder(t *testing.T) {
	for _, annotation := range []string{
		"resource.k8s.io/deviceclasses/nic", "resource.k8s.io/resourceclaims/team", "/nodes/n1",
	} {
		parts := strings.Split(annotation, "/")
		entry := resourceapi.ResourceClaimConsumerReference{APIGroup: parts[0], Resource: parts[1], Name: parts[2], UID: "1"}
		e := newTestEnv(t, testClaim(annotation, entry))
		e.reconcile()
		e.expectReservedFor("the holder is " + annotation)
		e.expectAllocated("the holder is "+annotation, false)
	}
}

// The namespace of the claim is being deleted, or a user replaces the claim.
func TestReconciler_releasesDeletedClaim(t *testing.T) {
	e := newTestEnv(t, testClaim(train.String(), podEntry, trainWith("1").Reference()), testJob("1"), testPod("node"))
	e.delete(testClaim(""))
	e.reconcile()
	e.expectReservedFor("the claim is being deleted and its holder exists", "p")
}

func TestReconciler_releasesClaimOfIdleJob(t *testing.T) {
	for _, condition := range []batchv1.JobConditionType{batchv1.JobComplete, batchv1.JobFailed, batchv1.JobSuspended} {
		job := testJob("1")
		job.Status.Conditions = []batchv1.JobCondition{{Type: condition, Status: corev1.ConditionTrue}}
		e := newTestEnv(t, testClaim(train.String(), podEntry, trainWith("1").Reference()), job, testPod("node"))
		e.reconcile()
		e.expectReservedFor(string(condition)+" and a pod uses the claim", "p", "1")

		e = newTestEnv(t, testClaim(train.String(), trainWith("1").Reference()), job)
		e.reconcile()
		e.expectReservedFor(string(condition) + " and no pod uses the claim")
		e.expectAllocated(string(condition)+" and no pod uses the claim", false)
		e.reconcile()
		e.expectReservedFor(string(condition) + " and the claim was released")
	}
}

// The annotation release chooses which states of the holder release the claim.
func TestReconciler_annotationRelease(t *testing.T) {
	complete, suspended := testJob("1"), testJob("1")
	complete.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobComplete, Status: corev1.ConditionTrue}}
	suspended.Spec.Suspend = ptr.To(true)
	const released = "allocated as long as batch/jobs/train exists; released earlier if no pod uses the claim and "
	for _, tc := range []struct {
		release                      string
		running, complete, suspended bool // whether the claim stays allocated
		afterTenMinutes              bool
		wantRequeue                  time.Duration
		heldMessage                  string
	}{
		{"OnDeletion", true, true, true, true, 0, "allocated as long as batch/jobs/train exists"},
		{"OnCompletion", true, false, true, true, 0,
			released + "batch/jobs/train is complete"},
		{"OnSuspension", true, true, false, true, 0,
			released + "batch/jobs/train is suspended"},
		{"Unused=10m", true, true, true, false, 10 * time.Minute,
			released + "10m0s have passed"},
		{"never", true, true, true, true, 0,
			"allocated as long as batch/jobs/train exists; " +
				`the annotation scheduling.dra-shared.dev/release is ignored: it "never" is unknown`},
	} {
		t.Run(tc.release, func(t *testing.T) {
			newEnv := func(job *batchv1.Job) *testEnv {
				claim := testClaim(train.String(), trainWith("1").Reference())
				claim.Annotations[scheduling.ReleaseAnnotation] = tc.release
				return newTestEnv(t, claim, job)
			}
			for job, want := range map[*batchv1.Job]bool{complete: tc.complete, suspended: tc.suspended} {
				e := newEnv(job.DeepCopy())
				e.reconcile()
				e.expectAllocated("the Job is complete or suspended", want)
			}
			e := newEnv(testJob("1"))
			if result := e.reconcile(); result.RequeueAfter != tc.wantRequeue {
				t.Errorf("requeue: got %v, want %v", result.RequeueAfter, tc.wantRequeue)
			}
			e.expectHeld(metav1.ConditionTrue, "HolderFound", tc.heldMessage)
			e.clock.SetTime(e.clock.Now().Add(10*time.Minute - time.Second))
			e.reconcile()
			e.expectAllocated("the Job runs without pods", tc.running)
			e.clock.SetTime(e.clock.Now().Add(time.Second))
			e.reconcile()
			e.expectAllocated("the Job has run ten minutes without pods", tc.afterTenMinutes)
		})
	}
}

func TestReconciler_podResetsReleaseTimer(t *testing.T) {
	claim := testClaim(train.String(), trainWith("1").Reference())
	claim.Annotations[scheduling.ReleaseAnnotation] = "Unused=10m"
	e := newTestEnv(t, claim, testJob("1"), testPod("node"))
	setEntries := func(entries ...resourceapi.ResourceClaimConsumerReference) {
		claim := e.claim()
		claim.Status.ReservedFor = entries
		if err := e.client.Status().Update(t.Context(), claim); err != nil {
			t.Fatal(err)
		}
	}
	e.reconcile()
	e.clock.SetTime(e.clock.Now().Add(9 * time.Minute))
	setEntries(trainWith("1").Reference(), podEntry)
	e.reconcile()
	setEntries(trainWith("1").Reference())
	e.clock.SetTime(e.clock.Now().Add(9 * time.Minute))
	if result := e.reconcile(); result.RequeueAfter != 10*time.Minute {
		t.Errorf("requeue after the pod has ended: got %v, want 10m", result.RequeueAfter)
	}
	e.expectAllocated("a pod used the claim a moment ago", true)
}

func TestReconciler_maintainsEntriesOfTerminalPods(t *testing.T) {
	pod := testPod("node")
	pod.Status.Phase = corev1.PodSucceeded
	e := newTestEnv(t, testClaim(train.String(), podEntry, trainWith("1").Reference()), testJob("1"), pod)
	e.reconcileOnce("the pod is terminal")
	e.expectWatched("the pod is terminal", true)
	if entries := e.claim().Status.ReservedFor; !slices.ContainsFunc(entries, claims.IsTerminalPodEntry) {
		t.Errorf("entries of the claim when the pod is terminal: got %v, want the controller's entry", entries)
	}
	e.delete(testPod("node"))
	e.reconcile()
	e.expectReservedFor("the terminal pod is deleted", "1")
}

func TestReconciler_ignoresClaimsWithoutAnnotation(t *testing.T) {
	claim := testClaim("", podEntry)
	claim.Annotations = nil
	e := newTestEnv(t, claim, testPod("node"))
	e.reconcileOnce("it has no annotation")
	e.expectWatched("it has no annotation", false)
	e.expectEvents()
	e.expectReservedFor("it has no annotation", "p")
}

func TestReconciler_claimsHeldBy(t *testing.T) {
	e := newTestEnv(t, testClaim(train.String()))
	requests := e.reconciler.claimsHeldBy(t.Context(), testNamespace, train.Reference)
	if len(requests) != 1 || requests[0].Name != "team" {
		t.Errorf("claims whose annotation names %s: got %v, want team", train, requests)
	}
	other := workload.Reference{GroupResource: train.GroupResource, Name: "other"}
	if requests := e.reconciler.claimsHeldBy(t.Context(), testNamespace, other); len(requests) > 0 {
		t.Errorf("claims whose annotation names %s: got %v, want none", other, requests)
	}
}

// The status of another driver's devices is not the controller's to write.
func TestReconciler_reportsOnClaimsOfOtherDrivers(t *testing.T) {
	claim := testClaim(train.String(), podEntry)
	claim.Status.Allocation.Devices.Results[0].Driver = "gpu.example.com"
	e := newTestEnv(t, claim, testPod("node"))
	expect := func(condition, want string) {
		t.Helper()
		if got := e.claim().Annotations[scheduling.HeldAnnotation]; got != want {
			t.Errorf("annotation %s when %s: got %q, want %q", scheduling.HeldAnnotation, condition, got, want)
		}
	}
	for range 2 { // the second call changes nothing
		e.reconcile()
		expect("the holder does not exist",
			"HolderMissing: not held by batch/jobs/train: it does not exist in namespace ns")
	}
	e.expectEvents("HolderMissing")

	if err := e.client.Create(t.Context(), testJob("1")); err != nil {
		t.Fatalf("create the holder: %v", err)
	}
	e.reconcile() // adds the entry
	e.reconcile()
	expect("the holder exists", "HolderFound: allocated as long as batch/jobs/train exists; released earlier if no "+
		"pod uses the claim and batch/jobs/train is complete or suspended")
	e.expectEvents()
	if len(e.claim().Status.Devices) != 0 {
		t.Errorf("status of devices: got %+v, want none", e.claim().Status.Devices)
	}

	e.removeAnnotation()
	e.reconcile()
	expect("no holder is named", "")
}

// removeAnnotation removes the annotation reserved-for from the claim.
func (e *testEnv) removeAnnotation() {
	e.Helper()
	claim := e.claim()
	delete(claim.Annotations, scheduling.ReservedForAnnotation)
	if err := e.client.Update(e.Context(), claim); err != nil {
		e.Fatalf("remove the annotation reserved-for: %v", err)
	}
}

// reportedClaim returns the claim as the cluster has it. The Reconciler writes conditions there.
func (e *testEnv) reportedClaim() *resourceapi.ResourceClaim {
	e.Helper()
	claim, err := e.cluster.ResourceV1().ResourceClaims(testNamespace).Get(e.Context(), "team", metav1.GetOptions{})
	if err != nil {
		e.Fatalf("get the status of claim team: %v", err)
	}
	return claim
}

// observeConditions makes the Reconciler see the conditions that it has written.
func (e *testEnv) observeConditions() {
	e.Helper()
	claim := e.claim()
	claim.Status.Devices = e.reportedClaim().Status.Devices
	if err := e.client.Status().Update(e.Context(), claim); err != nil {
		e.Fatalf("update the status of claim team: %v", err)
	}
}

// expectNoHeld checks that no device of the claim has the condition Held.
func (e *testEnv) expectNoHeld(condition string) {
	e.Helper()
	for _, d := range e.reportedClaim().Status.Devices {
		if c := meta.FindStatusCondition(d.Conditions, v1alpha1.ConditionHeld); c != nil {
			e.Errorf("condition Held when %s: got %+v, want none", condition, c)
		}
	}
}

// A condition that no longer applies is removed: it would stay until the claim is deallocated.
func TestReconciler_removesOutdatedCondition(t *testing.T) {
	for condition, change := range map[string]func(e *testEnv){
		"no holder is named": (*testEnv).removeAnnotation,
		"the holder appears and no pod is bound": func(e *testEnv) {
			if err := e.client.Create(e.Context(), testJob("1")); err != nil {
				e.Fatalf("create the holder: %v", err)
			}
		},
	} {
		e := newTestEnv(t, testClaim(train.String(), podEntry), testPod(""))
		e.reconcile()
		e.expectHeld(metav1.ConditionFalse, "HolderMissing", "not held by batch/jobs/train: it does not exist")
		e.expectEvents("HolderMissing")
		e.observeConditions()
		change(e)
		if !e.reconciler.isRelevant(e.claim()) {
			t.Errorf("after a restart of the controller, the claim is not reconciled when %s", condition)
		}
		e.reconcile()
		e.expectNoHeld(condition)
		e.expectEvents()
		e.observeConditions()
		e.cluster.ClearActions()
		e.reconcile()
		if writes := e.cluster.Actions(); len(writes) > 0 {
			t.Errorf("writes of a second reconcile when %s: got %v, want none", condition, writes)
		}
	}
}

// Other users have filled status.reservedFor, and the API server would reject the holder's entry.
func TestReconciler_reportsFullClaim(t *testing.T) {
	entries := []resourceapi.ResourceClaimConsumerReference{podEntry}
	for i := range resourceapi.ResourceClaimReservedForMaxSize - 1 {
		uid := types.UID(fmt.Sprintf("other-%d", i))
		entries = append(entries, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: string(uid), UID: uid})
	}
	e := newTestEnv(t, testClaim(train.String(), entries...), testJob("1"), testPod("node"))
	e.reconcileOnce("the claim is full")
	e.expectHeld(metav1.ConditionFalse, "NoRoom", "not held by batch/jobs/train: the claim is reserved for "+
		"256 consumers, which leaves no room for the holder: delete pods that use it")
	e.expectEvents("NoRoom")

	claim := e.claim()
	claim.Status.ReservedFor = entries[:1]
	if err := e.client.Status().Update(t.Context(), claim); err != nil {
		t.Fatalf("remove entries: %v", err)
	}
	e.reconcile()
	e.expectReservedFor("other pods were deleted", "p", "1")

	entries[1] = trainWith("0").Reference()
	e = newTestEnv(t, testClaim(train.String(), entries...), testJob("1"), testPod("node"))
	e.reconcile()
	if !claims.IsReservedFor(e.claim(), "1") {
		t.Error("the entry of an earlier object of that name leaves no room for that of the holder")
	}
}

// A user annotates the claim that was generated for a Job to be held by that Job. The Job's own controller releases the
// claim of a suspended Job while pods still end: this one must not add the entry again, or remove it.
func TestReconciler_claimGeneratedForHolder(t *testing.T) {
	owner := claims.Owner{
		GroupVersionKind: batchv1.SchemeGroupVersion.WithKind("Job"), Resource: "jobs", Namespace: testNamespace,
		Name: "train", UID: "job-uid",
	}
	generated := claims.Generate(owner, "net", 0, &resourceapi.ResourceClaimTemplate{})
	claim := testClaim("batch/jobs/train", podEntry)
	claim.Name, claim.OwnerReferences = generated.Name, generated.OwnerReferences
	claim.Annotations[scheduling.ClaimAnnotation] = "net"
	pod := testPod("node")
	pod.Spec.ResourceClaims[0].ResourceClaimName = &claim.Name
	held := claim.DeepCopy()
	held.Status.ReservedFor = append(held.Status.ReservedFor, owner.Reference())
	held.DeletionTimestamp = ptr.To(metav1.Now())
	for name, claim := range map[string]*resourceapi.ResourceClaim{"released": claim, "deleted": held} {
		e := newTestEnv(t, claim, testJob("job-uid"), pod)
		want := slices.Clone(claim.Status.ReservedFor)
		request := ctrl.Request{NamespacedName: client.ObjectKeyFromObject(claim)}
		if _, err := e.reconciler.Reconcile(t.Context(), request); err != nil {
			t.Fatal(err)
		}
		var after resourceapi.ResourceClaim
		if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(claim), &after); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(after.Status.ReservedFor, want) {
			t.Errorf("entries of the %s claim: got %v, want %v", name, after.Status.ReservedFor, want)
		}
	}
}

// Other admission of the cluster may refuse the controller's entry.
func TestReconciler_reportsRefusedEntry(t *testing.T) {
	e := newTestEnv(t, testClaim(train.String(), podEntry), testJob("1"), testPod("node"))
	c, ok := e.client.(client.WithWatch)
	if !ok {
		t.Fatalf("client of the tests: got %T, want a client.WithWatch", e.client)
	}
	denial := apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "team", errors.New("no changes today"))
	e.reconciler.Client = interceptor.NewClient(c, interceptor.Funcs{SubResourcePatch: func(
		context.Context, client.Client, string, client.Object, client.Patch, ...client.SubResourcePatchOption,
	) error {
		return denial
	}})
	request := ctrl.Request{NamespacedName: client.ObjectKeyFromObject(e.claim())}
	if _, err := e.reconciler.Reconcile(t.Context(), request); !apierrors.IsForbidden(err) {
		t.Errorf("reconcile the claim: got error %v, want %v", err, denial)
	}
	e.expectEvents("WriteRefused")
}
