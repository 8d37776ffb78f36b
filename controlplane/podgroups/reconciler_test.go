// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/controlplane/trim"
	"github.com/dra-shared/dra-driver-shared/controlplane/workload"
)

// These tests run the Reconciler against controller-runtime's fake client. They call
// Reconcile where the manager would, and play the roles of the user, the scheduler, and
// Kubernetes' resource claim controller.

const (
	testNamespace = "ns"
	testDriver    = "dra-shared.dev"
	// deleteProtection is the finalizer that the scheduler adds to claims that it
	// allocates, and that Kubernetes removes when their last entry is removed.
	deleteProtection = "resource.kubernetes.io/delete-protection"
)

// testEnv is a Reconciler for the PodGroup "group" with its fake API server.
type testEnv struct {
	*testing.T
	client     client.Client
	reconciler *Reconciler
	recorder   *events.FakeRecorder
	clock      *clocktesting.FakePassiveClock
}

func newTestEnv(t *testing.T, objects ...client.Object) *testEnv {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientscheme.AddToScheme, scheduling.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatalf("build the scheme: %v", err)
		}
	}
	builder := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithStatusSubresource(&scheduling.PodGroup{}, &resourceapi.ResourceClaim{}, &corev1.Pod{}).
		WithInterceptorFuncs(interceptor.Funcs{Create: createWithUID, List: listWithPhaseSelector})
	for _, i := range indexes() {
		builder = builder.WithIndex(i.object, i.field, i.keys)
	}
	c := builder.Build()
	recorder := events.NewFakeRecorder(100)
	mapper := meta.NewDefaultRESTMapper([]schema.GroupVersion{batchv1.SchemeGroupVersion})
	mapper.Add(batchv1.SchemeGroupVersion.WithKind("Job"), meta.RESTScopeNamespace)
	testClock := clocktesting.NewFakePassiveClock(time.Now())
	return &testEnv{T: t, client: c, recorder: recorder, clock: testClock, reconciler: &Reconciler{
		Client: cached(c), APIReader: c, Mode: mode.Bridge, Driver: testDriver, Events: recorder,
		Lookup: &workload.Lookup{
			APIReader: c, Mapper: mapper,
			StartWatch: func(schema.GroupVersionKind, schema.GroupResource) error { return nil },
		},
		Unused: workload.NewTimer(testClock),
	}}
}

// cached returns a client that reads what the controller's cache has: some fields of pods, Jobs, and
// claims, and no claims of other drivers.
func cached(c client.WithWatch) client.Client {
	return interceptor.NewClient(c, interceptor.Funcs{
		Get: func(
			ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption,
		) error {
			err := c.Get(ctx, key, o, opts...)
			switch o := o.(type) {
			case *corev1.Pod:
				err = errors.Join(err, trimmed(o, trim.Pod))
			case *batchv1.Job:
				err = errors.Join(err, trimmed(o, trim.Job))
			case *resourceapi.ResourceClaim:
				if err == nil && trim.IsForeign(o, testDriver) {
					return apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), key.Name)
				}
				err = errors.Join(err, trimmed(o, trim.Claim(testDriver)))
			}
			return err
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			err := c.List(ctx, list, opts...)
			switch list := list.(type) {
			case *corev1.PodList:
				for i := range list.Items {
					err = errors.Join(err, trimmed(&list.Items[i], trim.Pod))
				}
			case *resourceapi.ResourceClaimList:
				list.Items = slices.DeleteFunc(list.Items, func(claim resourceapi.ResourceClaim) bool {
					return trim.IsForeign(&claim, testDriver)
				})
				for i := range list.Items {
					err = errors.Join(err, trimmed(&list.Items[i], trim.Claim(testDriver)))
				}
			case *batchv1.JobList:
				for i := range list.Items {
					err = errors.Join(err, trimmed(&list.Items[i], trim.Job))
				}
			}
			return err
		},
	})
}

// trimmed replaces an object by what a transform of the cache leaves of it.
func trimmed[T any](o *T, transform func(any) (any, error)) error {
	kept, err := transform(o)
	if t, ok := kept.(*T); ok {
		*o = *t
	}
	return err
}

// createWithUID sets the UID of created objects, as the API server does.
func createWithUID(
	ctx context.Context, c client.WithWatch, o client.Object, options ...client.CreateOption,
) error {
	if o.GetUID() == "" {
		o.SetUID(types.UID("uid-of-" + o.GetName()))
	}
	return c.Create(ctx, o, options...)
}

// listWithPhaseSelector lists pods by status.phase. The fake client rejects field
// selectors with "!=".
func listWithPhaseSelector(
	ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption,
) error {
	o := (&client.ListOptions{}).ApplyOptions(options)
	pods, ok := list.(*corev1.PodList)
	if !ok || o.FieldSelector == nil {
		return c.List(ctx, list, options...)
	}
	selector := o.FieldSelector
	o.FieldSelector = nil
	if err := c.List(ctx, list, o); err != nil {
		return err
	}
	pods.Items = slices.DeleteFunc(pods.Items, func(pod corev1.Pod) bool {
		return !selector.Matches(fields.Set{"status.phase": string(pod.Status.Phase)})
	})
	return nil
}

// testPodGroup returns the PodGroup "group" with the entry "net", which refers to the
// template or, if there is none, to the claim.
func testPodGroup(template, claim string) *scheduling.PodGroup {
	entry := scheduling.PodGroupResourceClaim{Name: "net"}
	if template != "" {
		entry.ResourceClaimTemplateName = &template
	} else {
		entry.ResourceClaimName = &claim
	}
	return &scheduling.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: testNamespace, Name: "group", UID: "group-uid"},
		Spec:       scheduling.PodGroupSpec{ResourceClaims: []scheduling.PodGroupResourceClaim{entry}},
	}
}

// generatedName is the name of the first claim that is generated for testPodGroup.
func generatedName() string { return claims.Name(Owner(testPodGroup("template", "")), "net", 0) }

func testTemplate(deviceClass string) *resourceapi.ResourceClaimTemplate {
	request := resourceapi.DeviceRequest{
		Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: deviceClass},
	}
	return &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Namespace: testNamespace, Name: "template"},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{
			Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{request}},
		}},
	}
}

func testClaim(name string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: testNamespace, Name: name, UID: types.UID(name + "-uid")},
	}
}

// testPod returns a pod of the PodGroup "group" that uses the claim.
func testPod(name, claim string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: testNamespace, Name: name, UID: types.UID(name),
			Labels: map[string]string{scheduling.GroupUIDLabel: "group-uid"},
		},
		Spec: corev1.PodSpec{ResourceClaims: []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: &claim}}},
	}
}

func (e *testEnv) reconcile() ctrl.Result {
	e.Helper()
	request := ctrl.Request{NamespacedName: types.NamespacedName{Namespace: testNamespace, Name: "group"}}
	result, err := e.reconciler.Reconcile(e.Context(), request)
	if err != nil {
		e.Fatalf("reconcile PodGroup group: %v", err)
	}
	return result
}

func (e *testEnv) create(objects ...client.Object) {
	e.Helper()
	for _, o := range objects {
		if err := e.client.Create(e.Context(), o); err != nil {
			e.Fatalf("create %s: %v", o.GetName(), err)
		}
	}
}

func (e *testEnv) delete(o client.Object) {
	e.Helper()
	if err := e.client.Delete(e.Context(), o); err != nil {
		e.Fatalf("delete %s: %v", o.GetName(), err)
	}
}

func (e *testEnv) podGroup() *scheduling.PodGroup {
	e.Helper()
	var pg scheduling.PodGroup
	if err := e.client.Get(e.Context(), types.NamespacedName{Namespace: testNamespace, Name: "group"}, &pg); err != nil {
		e.Fatalf("get PodGroup group: %v", err)
	}
	return &pg
}

func (e *testEnv) claim(name string) *resourceapi.ResourceClaim {
	e.Helper()
	var claim resourceapi.ResourceClaim
	if err := e.client.Get(e.Context(), types.NamespacedName{Namespace: testNamespace, Name: name}, &claim); err != nil {
		e.Fatalf("get claim %s: %v", name, err)
	}
	return &claim
}

// allocate allocates a claim and reserves it for pods, as the scheduler does.
func (e *testEnv) allocate(name string, pods ...string) {
	e.Helper()
	claim := e.claim(name)
	claim.Finalizers = append(claim.Finalizers, deleteProtection)
	if err := e.client.Update(e.Context(), claim); err != nil {
		e.Fatalf("add the finalizer to claim %s: %v", name, err)
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{}
	for _, pod := range pods {
		claim.Status.ReservedFor = append(claim.Status.ReservedFor,
			resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod, UID: types.UID(pod)})
	}
	if err := e.client.Status().Update(e.Context(), claim); err != nil {
		e.Fatalf("allocate claim %s: %v", name, err)
	}
}

// updatePod changes a pod and its status.
func (e *testEnv) updatePod(name string, change func(*corev1.Pod)) {
	e.Helper()
	pod := e.pod(name)
	change(pod)
	status := pod.Status
	if err := e.client.Update(e.Context(), pod); err != nil {
		e.Fatalf("update pod %s: %v", name, err)
	}
	pod.Status = status
	if err := e.client.Status().Update(e.Context(), pod); err != nil {
		e.Fatalf("update the status of pod %s: %v", name, err)
	}
}

func (e *testEnv) pod(name string) *corev1.Pod {
	e.Helper()
	var pod corev1.Pod
	if err := e.client.Get(e.Context(), types.NamespacedName{Namespace: testNamespace, Name: name}, &pod); err != nil {
		e.Fatalf("get pod %s: %v", name, err)
	}
	return &pod
}

func bind(pod *corev1.Pod) { pod.Spec.NodeName = "node" }

func succeed(pod *corev1.Pod) { pod.Status.Phase = corev1.PodSucceeded }

func reject(pod *corev1.Pod) {
	pod.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
	}}
}

func gate(pod *corev1.Pod) {
	pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: scheduling.ReservedGate}}
}

// expectReservedFor checks the UIDs of the claim's entries.
func (e *testEnv) expectReservedFor(condition, claim string, want ...string) {
	e.Helper()
	var got []string
	for _, entry := range e.claim(claim).Status.ReservedFor {
		got = append(got, string(entry.UID))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		e.Errorf("entries of claim %s when %s: got %q, want %q", claim, condition, got, want)
	}
}

// expectCondition checks the reason of a condition of the PodGroup and the beginning of
// its message.
func (e *testEnv) expectCondition(kind string, status metav1.ConditionStatus, reason, message string) {
	e.Helper()
	c := meta.FindStatusCondition(e.podGroup().Status.Conditions, kind)
	if c == nil || c.Status != status || c.Reason != reason || !strings.HasPrefix(c.Message, message) {
		e.Errorf("condition %s of the PodGroup: got %+v, want %s, reason %s, message %q...",
			kind, c, status, reason, message)
	}
}

// expectEvent checks that one of the events since the last call has the reason.
func (e *testEnv) expectEvent(reason string) {
	e.Helper()
	var got []string
	for len(e.recorder.Events) > 0 {
		got = append(got, <-e.recorder.Events)
	}
	if !slices.ContainsFunc(got, func(text string) bool { return strings.HasPrefix(text, "Warning "+reason+" ") }) {
		e.Errorf("events on the PodGroup: got %q, want a warning with reason %s", got, reason)
	}
}

func (e *testEnv) expectGone(o client.Object) {
	e.Helper()
	err := e.client.Get(e.Context(), client.ObjectKeyFromObject(o), o)
	if !apierrors.IsNotFound(err) {
		e.Errorf("%T %s: got error %v, finalizers %q, want that it does not exist", o, o.GetName(), err, o.GetFinalizers())
	}
}

func TestReconciler_generatesClaim(t *testing.T) {
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"))
	e.reconcile()
	if pg := e.podGroup(); !slices.Contains(pg.Finalizers, scheduling.Finalizer) {
		t.Errorf("finalizers of the PodGroup: got %q, want %s among them", pg.Finalizers, scheduling.Finalizer)
	}
	claim := e.claim(generatedName())
	if !claims.IsGeneratedFor(claim, "group-uid") || claim.Spec.Devices.Requests[0].Exactly.DeviceClassName != "nic" {
		t.Errorf("the generated claim does not have the template's spec and the PodGroup as controller: %+v", claim)
	}
	statuses := e.podGroup().Status.ResourceClaimStatuses
	if len(statuses) != 1 || statuses[0].Name != "net" || *statuses[0].ResourceClaimName != claim.Name {
		t.Errorf("status.resourceClaimStatuses: got %+v, want claim %s for the shared claim net", statuses, claim.Name)
	}
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionTrue, "Generated", "all claims exist (1)")
	e.expectCondition(scheduling.ConditionReserved, metav1.ConditionFalse, "NotAllocated", "claim "+claim.Name)
}

func TestReconciler_reportsMissingTemplate(t *testing.T) {
	e := newTestEnv(t, testPodGroup("template", ""))
	if result := e.reconcile(); result.RequeueAfter != problemRetryInterval {
		t.Errorf("requeue when the template does not exist: got %v, want %v", result.RequeueAfter, problemRetryInterval)
	}
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionFalse, "ClaimMissing",
		`resourceClaims["net"].resourceClaimTemplateName: ResourceClaimTemplate template does not exist in namespace ns`)
	e.expectEvent("ClaimMissing")

	e.create(testTemplate("nic"))
	e.reconcile()
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionTrue, "Generated", "all claims exist (1)")
}

func TestReconciler_reportsNameConflict(t *testing.T) {
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"), testClaim(generatedName()))
	e.reconcile()
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionFalse, "ClaimMissing",
		`resourceClaims["net"]: ResourceClaim `+generatedName()+" exists already and was not generated")
}

func TestReconciler_holdsClaimWhenPodIsBound(t *testing.T) {
	name := generatedName()
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"), testPod("a", name))
	e.reconcile()
	e.allocate(name, "a")
	e.reconcile()
	e.expectReservedFor("pod a is not bound yet", name, "a")

	e.updatePod("a", bind)
	e.reconcile()
	e.expectReservedFor("pod a is bound", name, "a", "group-uid")
	e.reconcile()
	e.expectCondition(scheduling.ConditionReserved, metav1.ConditionTrue, "Held", "the claims stay allocated")
}

func TestReconciler_letsSchedulerReallocateWhenPodIsUnschedulable(t *testing.T) {
	name := generatedName()
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"), testPod("a", name))
	e.reconcile()
	e.updatePod("a", bind)
	e.allocate(name, "a")
	e.reconcile()
	e.expectReservedFor("pod a is bound", name, "a", "group-uid")

	// The resource claim controller removes the entry of a deleted pod.
	claim := e.claim(name)
	claim.Status.ReservedFor = slices.DeleteFunc(claim.Status.ReservedFor,
		func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == "a" })
	if err := e.client.Status().Update(t.Context(), claim); err != nil {
		t.Fatalf("remove the entry of pod a: %v", err)
	}
	e.delete(testPod("a", name))
	e.create(testPod("b", name))
	e.reconcile()
	e.expectReservedFor("pod b is pending", name, "group-uid")
	e.updatePod("b", reject)
	e.reconcile()
	e.expectReservedFor("pod b is unschedulable", name)
}

func TestReconciler_releasesGeneratedClaim(t *testing.T) {
	name := generatedName()
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"), testPod("a", name))
	e.reconcile()
	e.updatePod("a", bind)
	e.allocate(name, "a")
	e.reconcile()

	e.delete(testPodGroup("template", ""))
	e.reconcile()
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionFalse, "Terminating",
		"the PodGroup is being deleted; its deletion completes when all of its pods have ended or are deleted; "+
			"waiting for 1: a")
	e.expectReservedFor("the PodGroup is being deleted and pod a runs", name, "a", "group-uid")
	if claim := e.claim(name); claim.DeletionTimestamp != nil {
		t.Error("claim of a terminating PodGroup with a running pod: got a deletion timestamp, want none")
	}

	e.updatePod("a", succeed)
	e.reconcile()
	e.expectReservedFor("the PodGroup is being deleted and pod a is terminal", name, "a")
	if claim := e.claim(name); claim.DeletionTimestamp == nil {
		t.Error("claim of a PodGroup whose pods are terminal: got no deletion timestamp")
	}
	e.expectGone(testPodGroup("template", ""))
}

func TestReconciler_finalizerWaitsForPodsMissingFromCache(t *testing.T) {
	name := generatedName()
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"))
	e.reconcile()
	e.delete(testPodGroup("template", ""))
	ahead := newTestEnv(t, testPod("new", name))
	e.reconciler.APIReader = ahead.client
	e.reconcile()
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionFalse, "Terminating", "the PodGroup is being")
	if claim := e.claim(name); claim.DeletionTimestamp != nil {
		t.Error("claim when only the API server has an active pod: got a deletion timestamp, want none")
	}
}

func TestReconciler_holdsAndDeallocatesClaimByName(t *testing.T) {
	e := newTestEnv(t, testPodGroup("", "team"), testPod("a", "team"))
	if result := e.reconcile(); result.RequeueAfter != problemRetryInterval {
		t.Errorf("requeue when the claim does not exist: got %v, want %v", result.RequeueAfter, problemRetryInterval)
	}
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionFalse, "ClaimMissing",
		`resourceClaims["net"].resourceClaimName: ResourceClaim team does not exist in namespace ns: create it`)

	e.create(testClaim("team"))
	e.updatePod("a", bind)
	e.allocate("team", "a")
	e.reconcile()
	e.expectReservedFor("pod a is bound", "team", "a", "group-uid")
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionTrue, "Generated", "all claims exist (1)")

	// The resource claim controller removes the entry of a terminal pod.
	claim := e.claim("team")
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{Owner(testPodGroup("", "team")).Reference()}
	if err := e.client.Status().Update(t.Context(), claim); err != nil {
		t.Fatalf("remove the entry of pod a: %v", err)
	}
	e.updatePod("a", succeed)
	e.delete(testPodGroup("", "team"))
	e.reconcile()
	e.expectReservedFor("the PodGroup is deleted", "team")
	claim = e.claim("team")
	if claim.Status.Allocation != nil || claim.DeletionTimestamp != nil {
		t.Errorf("claim by name of a deleted PodGroup: got allocation %v, deletion timestamp %v, want neither",
			claim.Status.Allocation, claim.DeletionTimestamp)
	}
	e.expectGone(testPodGroup("", "team"))
}

func TestReconciler_releasesClaimOfPredecessor(t *testing.T) {
	e := newTestEnv(t, testClaim("team"))
	e.allocate("team")
	claim := e.claim("team")
	former := claims.Owner{Resource: scheduling.Resource, Name: "group", UID: "former-uid"}
	former.Group = scheduling.GroupName
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{former.Reference()}
	if err := e.client.Status().Update(t.Context(), claim); err != nil {
		t.Fatalf("reserve claim team for the former PodGroup: %v", err)
	}
	e.reconcile()
	e.expectReservedFor("the PodGroup was deleted without its finalizer", "team")
	if e.claim("team").Status.Allocation != nil {
		t.Error("claim by name of a former PodGroup: got an allocation, want none")
	}
}

func TestReconciler_terminalPodGetsEntry(t *testing.T) {
	name := generatedName()
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"), testPod("a", name))
	e.reconcile()
	e.updatePod("a", bind)
	e.allocate(name, "a")
	e.reconcile()
	e.updatePod("a", succeed)
	e.reconcile()
	isOurs := func(r resourceapi.ResourceClaimConsumerReference) bool {
		return r.UID == "a" && claims.IsTerminalPodEntry(r)
	}
	if entries := e.claim(name).Status.ReservedFor; !slices.ContainsFunc(entries, isOurs) {
		t.Errorf("entries of the claim when pod a is terminal: got %v, want the controller's entry for a", entries)
	}
	e.delete(testPod("a", name))
	e.reconcile()
	e.expectReservedFor("terminal pod a is deleted", name, "group-uid")
}

func TestReconciler_completesDeletionOfClaim(t *testing.T) {
	name := generatedName()
	bound, waiting := testPod("a", name), testPod("b", name)
	gate(waiting)
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"), bound, waiting)
	e.reconcile()
	e.updatePod("a", bind)
	e.allocate(name, "a", "b")
	e.reconcile()
	e.updatePod("b", gate) // the controller has just ungated it
	e.delete(testClaim(name))
	if result := e.reconcile(); result.RequeueAfter != minGracePeriod {
		t.Errorf("requeue when a claim is being deleted: got %v, want %v", result.RequeueAfter, minGracePeriod)
	}
	e.expectReservedFor("the claim is being deleted, a is bound, and b is gated", name, "a")
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionFalse, "ClaimDeleted",
		"claim "+name+" was deleted, and new pods wait until the deletion completes; "+
			"the controller then generates a new one; delete the pods that run with it (1): a")
	e.expectEvent("ClaimDeleted")
}

func TestReconciler_deletedClaimKeepsEntryWhenCacheIsStale(t *testing.T) {
	name := generatedName()
	pending := testPod("a", name)
	pending.CreationTimestamp = metav1.NewTime(time.Now().Add(-time.Hour))
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"), pending)
	e.reconcile()
	e.allocate(name, "a")
	e.updatePod("a", gate)
	e.delete(testClaim(name))
	bound := testPod("a", name)
	bind(bound)
	e.reconciler.APIReader = newTestEnv(t, bound).client
	e.reconcile()
	e.expectReservedFor("the claim is being deleted and only the API server shows that a is bound", name, "a")
}

// The clock of the controller is five minutes ahead of the API server's: the scheduler may still bind a pod
// with a claim that has just been deleted.
func TestReconciler_deletedClaimKeepsEntriesWhenClocksDiffer(t *testing.T) {
	name := generatedName()
	pending := testPod("a", name)
	pending.CreationTimestamp = metav1.NewTime(time.Now().Add(-time.Hour))
	deleted := claims.Generate(Owner(testPodGroup("template", "")), "net", 0, testTemplate("nic"))
	deleted.UID, deleted.Finalizers = "claim-uid", []string{deleteProtection}
	deleted.DeletionTimestamp = ptr.To(metav1.NewTime(time.Now().Add(-5 * time.Minute)))
	deleted.Status.Allocation = &resourceapi.AllocationResult{}
	deleted.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "a", UID: "a"}}
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"), pending, deleted)
	e.reconcile()
	e.expectReservedFor("the controller sees the deletion for the first time", name, "a")
}

func TestReconciler_gatesPodsOfFabric(t *testing.T) {
	name := generatedName()
	pods := []client.Object{testPod("a", name), testPod("b", name), testPod("c", name)}
	for _, o := range pods {
		if pod, ok := o.(*corev1.Pod); ok {
			gate(pod)
		}
	}
	e := newTestEnv(t, append(pods, testPodGroup("template", ""), testTemplate("fabric."+testDriver))...)
	e.reconcile()
	e.expectGated("the claim is not allocated", "b", "c")

	e.allocate(name, "a")
	e.reconcile()
	e.expectReservedFor("the leader has its entry", name, "a")
	e.expectGated("the leader has its entry", "b", "c")
	e.updatePod("a", bind)
	e.reconcile()
	e.expectReservedFor("the leader is bound", name, "a", "b", "c", "group-uid")
	e.reconcile()
	e.expectGated("the claim is reserved for all pods")
}

// Pods that were admitted before the annotation disabled gates do not wait for it.
func TestReconciler_gatesDisabledWhilePodsWait(t *testing.T) {
	name := generatedName()
	a, b, pg := testPod("a", name), testPod("b", name), testPodGroup("template", "")
	gate(a)
	gate(b)
	e := newTestEnv(t, a, b, pg, testTemplate("fabric."+testDriver))
	e.reconcile()
	e.expectGated("the claim is not allocated", "b")
	pg = e.podGroup()
	pg.Annotations = map[string]string{scheduling.GatesAnnotation: scheduling.GatesDisabled}
	if err := e.client.Update(t.Context(), pg); err != nil {
		t.Fatalf("disable gates: %v", err)
	}
	e.reconcile()
	e.expectGated("gates are disabled")
}

// The scheduler rejects the leaders of a claim: the PodGroup reports it, and later another pod becomes the
// leader. The clock of the API server, which writes when pods were created, may differ from the controller's.
func TestReconciler_rejectedLeaders(t *testing.T) {
	for name, ahead := range map[string]time.Duration{
		"same clocks": 0, "API server's clock is behind": -time.Hour, "API server's clock is ahead": time.Hour,
	} {
		t.Run(name, func(t *testing.T) { testRejectedLeaders(t, time.Now().Add(ahead)) })
	}
}

func testRejectedLeaders(t *testing.T, created time.Time) {
	name := generatedName()
	objects := []client.Object{testPodGroup("template", ""), testTemplate("fabric." + testDriver)}
	for _, pod := range []string{"a", "b", "c", "d", "e"} {
		p := testPod(pod, name)
		p.CreationTimestamp = metav1.NewTime(created)
		gate(p)
		objects = append(objects, p)
	}
	e := newTestEnv(t, objects...)
	for _, leader := range []string{"a", "b", "c"} {
		e.reconcile()
		e.updatePod(leader, reject)
	}
	result := e.reconcile()
	e.expectGated("three pods were rejected", "d", "e")
	condition := meta.FindStatusCondition(e.podGroup().Status.Conditions, scheduling.ConditionReserved)
	want := "the scheduler found no node for 3 pods that use claim net (a, b, c): see their events"
	if condition == nil || condition.Reason != scheduling.ReasonUnschedulable ||
		!strings.Contains(condition.Message, want) {
		t.Errorf("got condition %+v, want %s: %s", condition, scheduling.ReasonUnschedulable, want)
	}
	if result.RequeueAfter != leaderInterval {
		t.Errorf("reconcile again after %s, want %s", result.RequeueAfter, leaderInterval)
	}
	rejections := e.reconciler.rejections.times
	for uid, s := range rejections {
		rejections[uid] = sighting{first: s.first.Add(-leaderInterval), last: s.last}
	}
	e.reconcile()
	e.expectGated("a minute has passed", "e")
	e.allocate(name, "d")
	e.updatePod("d", bind)
	e.reconcile()
	e.reconcile()
	e.expectGated("the fourth pod is bound")
	if pg := e.podGroup(); !meta.IsStatusConditionTrue(pg.Status.Conditions, scheduling.ConditionReserved) {
		t.Errorf("got conditions %+v, want that %s is true", pg.Status.Conditions, scheduling.ConditionReserved)
	}
}

// expectGated checks which pods have the driver's gate.
func (e *testEnv) expectGated(condition string, want ...string) {
	e.Helper()
	var pods corev1.PodList
	if err := e.client.List(e.Context(), &pods); err != nil {
		e.Fatalf("list pods: %v", err)
	}
	var got []string
	for i := range pods.Items {
		if isGated(&pods.Items[i]) {
			got = append(got, pods.Items[i].Name)
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		e.Errorf("pods behind the gate when %s: got %q, want %q", condition, got, want)
	}
}

func TestReconciler_reportsSharedClaim(t *testing.T) {
	claim := testClaim("team")
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{
		APIGroup: scheduling.GroupName, Resource: scheduling.Resource, Name: "other", UID: "other-uid",
	}}
	e := newTestEnv(t, testPodGroup("", "team"), claim)
	e.reconcile()
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionTrue, "ClaimShared",
		"ResourceClaim team is also held by PodGroup other")
	e.expectEvent("ClaimShared")
}

func TestReconciler_mapsObjectsToGroups(t *testing.T) {
	claim := testClaim("team")
	claim.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: scheduling.GroupVersion.String(), Kind: scheduling.Kind, Name: "owner", Controller: ptr.To(true),
	}}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{
		APIGroup: scheduling.GroupName, Resource: scheduling.Resource, Name: "holder", UID: "holder-uid",
	}}
	e := newTestEnv(t, testPodGroup("", "team"))
	var got []string
	for _, request := range e.reconciler.groupsOfClaim(t.Context(), claim) {
		got = append(got, request.Name)
	}
	if want := []string{"owner", "holder", "group"}; !slices.Equal(got, want) {
		t.Errorf("PodGroups of a claim: got %q, want %q", got, want)
	}
	e = newTestEnv(t, testPodGroup("template", ""))
	if got := e.reconciler.groupsOfTemplate(t.Context(), testTemplate("nic")); len(got) != 1 || got[0].Name != "group" {
		t.Errorf("PodGroups of a template: got %v, want group", got)
	}
}

func TestReconciler_createsNativePodGroup(t *testing.T) {
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"))
	e.reconciler.Mode = mode.Native
	e.reconcile()
	var native schedulingapi.PodGroup
	key := types.NamespacedName{Namespace: testNamespace, Name: "group"}
	if err := e.client.Get(t.Context(), key, &native); !apierrors.IsNotFound(err) {
		t.Errorf("get the native PodGroup before the first pod: got %v, want not found", err)
	}
	pod := testPod("a", generatedName())
	pod.Spec.PriorityClassName = "high"
	e.create(pod)
	e.reconcile()
	if err := e.client.Get(t.Context(), key, &native); err != nil {
		t.Fatalf("get the native PodGroup: %v", err)
	}
	if native.Spec.PriorityClassName != "high" {
		t.Errorf("priority class of the native PodGroup: got %q, want that of its pods", native.Spec.PriorityClassName)
	}
	if !metav1.IsControlledBy(&native, e.podGroup()) {
		t.Errorf("owners of the native PodGroup: got %+v, want the driver's PodGroup", native.OwnerReferences)
	}
	entries := native.Spec.ResourceClaims
	if len(entries) != 1 || entries[0].Name != "net" || ptr.Deref(entries[0].ResourceClaimName, "") != generatedName() {
		t.Errorf("claims of the native PodGroup: got %+v, want %s for the shared claim net", entries, generatedName())
	}
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionTrue, "Generated", "all claims exist (1)")
}

func TestReconciler_reportsConflictWithNativePodGroup(t *testing.T) {
	foreign := &schedulingapi.PodGroup{ObjectMeta: metav1.ObjectMeta{Namespace: testNamespace, Name: "group"}}
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"), foreign)
	e.reconciler.Mode = mode.Native
	e.reconcile()
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionFalse, "ClaimMissing",
		"PodGroup group of scheduling.k8s.io exists and was not created for this PodGroup")
}
