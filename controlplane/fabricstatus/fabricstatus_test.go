// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package fabricstatus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	clienttesting "k8s.io/client-go/testing"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlfake "sigs.k8s.io/controller-runtime/pkg/client/fake"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/trim"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

const driver = "dra-shared.dev"

// testEnv is a Reconciler with an API server and a cache, which has the pods of PodGroups.
type testEnv struct {
	*testing.T
	reconciler *Reconciler
	cache      client.Client
	others     *fakeWatcher
	cluster    *fake.Clientset
	clock      *testclock.FakePassiveClock
}

// fakeWatcher is a podWatcher with pods by their names.
type fakeWatcher struct {
	pods map[string]*corev1.Pod
	// watched are the claims that were not forgotten.
	watched map[types.NamespacedName]bool
}

func (w *fakeWatcher) Pods(_ context.Context, claim types.NamespacedName) (pods []*corev1.Pod, err error) {
	w.watched[claim] = true
	for _, pod := range w.pods {
		pods = append(pods, pod)
	}
	return pods, nil
}

func (w *fakeWatcher) Forget(claim types.NamespacedName) { delete(w.watched, claim) }

func newTestEnv(t *testing.T, claim *resourceapi.ResourceClaim) *testEnv {
	t.Helper()
	e := &testEnv{
		T: t, cluster: fake.NewClientset(claim), clock: testclock.NewFakePassiveClock(time.Unix(0, 0)),
		cache: ctrlfake.NewClientBuilder().WithScheme(clientscheme.Scheme).
			WithIndex(&corev1.Pod{}, indexClaim, claimNames).WithObjects(claim.DeepCopy()).Build(),
		others: &fakeWatcher{pods: map[string]*corev1.Pod{}, watched: map[types.NamespacedName]bool{}},
	}
	e.reconciler = &Reconciler{
		Client: e.cache, Cluster: e.cluster, Driver: driver, Clock: e.clock, others: e.others,
		written: claimstatus.NewLog(e.clock, 0), uids: map[types.NamespacedName]types.UID{},
	}
	return e
}

// setPod creates or replaces a pod that uses the claim.
func (e *testEnv) setPod(name, node string, phase corev1.PodPhase, inPodGroup bool) {
	e.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)},
		Spec: corev1.PodSpec{NodeName: node, ResourceClaims: []corev1.PodResourceClaim{
			{Name: "rack", ResourceClaimName: ptr.To("claim")},
		}},
		Status: corev1.PodStatus{Phase: phase},
	}
	if !inPodGroup {
		trimmed, err := trim.PodWithClaims(pod)
		other, ok := trimmed.(*corev1.Pod)
		if err != nil || !ok {
			e.Fatalf("trim pod %s: %v", name, err)
		}
		e.others.pods[name] = other
		return
	}
	pod.Labels = map[string]string{scheduling.GroupUIDLabel: "1"}
	if err := client.IgnoreNotFound(e.cache.Delete(e.Context(), pod.DeepCopy())); err != nil {
		e.Fatal(err)
	}
	if err := e.cache.Create(e.Context(), pod.DeepCopy()); err != nil {
		e.Fatal(err)
	}
}

// setReservedFor reserves the claim for the pods in the cache.
func (e *testEnv) setReservedFor(pods ...string) {
	e.Helper()
	var claim resourceapi.ResourceClaim
	if err := e.cache.Get(e.Context(), types.NamespacedName{Namespace: "ns", Name: "claim"}, &claim); err != nil {
		e.Fatal(err)
	}
	claim.Status.ReservedFor = claimWith(nil, pods...).Status.ReservedFor
	if err := e.cache.Update(e.Context(), &claim); err != nil {
		e.Fatal(err)
	}
}

func (e *testEnv) reconcile() (ctrl.Result, error) {
	request := ctrl.Request{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "claim"}}
	return e.reconciler.Reconcile(e.Context(), request)
}

// mustReconcile reconciles the claim and expects the delay of the next call.
func (e *testEnv) mustReconcile(requeueAfter time.Duration) {
	e.Helper()
	result, err := e.reconcile()
	if err != nil {
		e.Fatal(err)
	}
	if result.RequeueAfter != requeueAfter {
		e.Errorf("the reconciler requeues the claim after %s, want %s", result.RequeueAfter, requeueAfter)
	}
}

// expectStatus compares the status in the API server with the counts, and returns
// its condition.
func (e *testEnv) expectStatus(pods, running, nodes int32) metav1.Condition {
	e.Helper()
	claim, err := e.cluster.ResourceV1().ResourceClaims("ns").Get(e.Context(), "claim", metav1.GetOptions{})
	if err != nil {
		e.Fatal(err)
	}
	if len(claim.Status.Devices) != 1 || len(claim.Status.Devices[0].Conditions) != 1 {
		e.Fatalf("status has the entries %+v, want one with one condition", claim.Status.Devices)
	}
	var got v1alpha1.FabricStatusSummary
	if err := json.Unmarshal(claim.Status.Devices[0].Data.Raw, &got); err != nil {
		e.Fatal(err)
	}
	want := v1alpha1.FabricStatusSummary{
		TypeMeta: metav1.TypeMeta{APIVersion: "dra-shared.dev/v1alpha1", Kind: "FabricStatusSummary"},
		Pods:     pods, Running: running, Nodes: nodes,
	}
	if got != want {
		e.Errorf("status has the data %+v, want %+v", got, want)
	}
	return claim.Status.Devices[0].Conditions[0]
}

// writes returns the number of writes to the API server so far.
func (e *testEnv) writes() (n int) {
	for _, a := range e.cluster.Actions() {
		if a.GetVerb() == "patch" {
			n++
		}
	}
	return n
}

// claimWith returns a claim with the devices, reserved for the pods.
func claimWith(results []resourceapi.DeviceRequestAllocationResult, pods ...string) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "claim", UID: "1"},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: results},
		}},
	}
	for _, name := range pods {
		claim.Status.ReservedFor = append(claim.Status.ReservedFor,
			resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: name, UID: types.UID(name)})
	}
	return claim
}

var fabric = []resourceapi.DeviceRequestAllocationResult{
	{Request: "rack", Driver: driver, Pool: "fabric/a", Device: "a"},
}

func TestReconcile_countsPodsOfPodGroup(t *testing.T) {
	e := newTestEnv(t, claimWith(fabric))
	e.setPod("a", "n1", corev1.PodPending, true)
	e.setPod("b", "", corev1.PodPending, true)
	e.mustReconcile(0)
	c := e.expectStatus(1, 0, 0)
	if c.Type != "Ready" || c.Status != metav1.ConditionFalse || c.Reason != "NotRunning" ||
		c.Message != "none of 1 pods is running yet; the events of a pod explain why it does not start" {
		t.Errorf("condition before a pod runs: %+v", c)
	}

	e.clock.SetTime(e.clock.Now().Add(minWriteInterval))
	e.setPod("a", "n1", corev1.PodRunning, true)
	e.setPod("b", "n2", corev1.PodRunning, true)
	e.setPod("c", "n3", corev1.PodSucceeded, true)
	e.mustReconcile(0)
	c = e.expectStatus(2, 2, 2)
	if c.Status != metav1.ConditionTrue || c.Reason != "Prepared" || c.Message != "2 of 2 pods are running, on 2 nodes" {
		t.Errorf("condition once the pods run: %+v", c)
	}
}

func TestReconcile_limitsWrites(t *testing.T) {
	e := newTestEnv(t, claimWith(fabric))
	e.setPod("a", "n1", corev1.PodRunning, true)
	e.mustReconcile(0)
	e.setPod("b", "n1", corev1.PodRunning, true)
	e.clock.SetTime(e.clock.Now().Add(minWriteInterval / 4))
	e.mustReconcile(minWriteInterval / 4 * 3)
	e.expectStatus(1, 1, 1)
	e.clock.SetTime(e.clock.Now().Add(minWriteInterval))
	e.mustReconcile(0)
	e.expectStatus(2, 2, 1)
	e.clock.SetTime(e.clock.Now().Add(minWriteInterval))
	e.mustReconcile(0)
	if got := e.writes(); got != 2 {
		t.Errorf("%d writes for two changes", got)
	}
}

// The pods of other users are watched only where a claim has one of them.
func TestReconcile_watchesPodsWithoutPodGroup(t *testing.T) {
	e := newTestEnv(t, claimWith(fabric))
	e.setPod("in-group", "n1", corev1.PodRunning, true)
	e.setReservedFor("in-group")
	e.mustReconcile(0)
	e.expectStatus(1, 1, 1)
	if len(e.others.watched) > 0 {
		t.Errorf("while only pods of PodGroups have the claim: got %v watched, want no claim", e.others.watched)
	}
	e.clock.SetTime(e.clock.Now().Add(minWriteInterval))
	e.setReservedFor("a", "deleted", "replaced", "in-group")
	e.setPod("a", "n1", corev1.PodPending, false)
	e.setPod("replaced", "n2", corev1.PodRunning, false)
	e.others.pods["replaced"].UID = "another"
	e.mustReconcile(0)
	e.expectStatus(2, 1, 1)
	e.clock.SetTime(e.clock.Now().Add(minWriteInterval))
	e.setPod("a", "n3", corev1.PodRunning, false)
	e.mustReconcile(0)
	e.expectStatus(2, 2, 2)
	if want := (types.NamespacedName{Namespace: "ns", Name: "claim"}); !e.others.watched[want] {
		t.Errorf("while a pod without a PodGroup has the claim: got %v watched, want the claim", e.others.watched)
	}
}

// After a failed write the status in the API server is unknown, so even the status
// of the last successful write is written again. The attempt counts for the limit of writes.
func TestReconcile_retriesFailedWrite(t *testing.T) {
	e := newTestEnv(t, claimWith(fabric))
	e.setPod("a", "n1", corev1.PodRunning, true)
	e.mustReconcile(0)
	outage := errors.New("connection refused")
	failing := true
	e.cluster.PrependReactor("patch", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		return failing, nil, outage
	})
	e.clock.SetTime(e.clock.Now().Add(minWriteInterval))
	e.setPod("a", "n1", corev1.PodPending, true)
	if _, err := e.reconcile(); !errors.Is(err, outage) {
		t.Fatalf("Reconcile returned %v, want the error of the API server", err)
	}
	failing = false
	e.setPod("a", "n1", corev1.PodRunning, true)
	e.mustReconcile(minWriteInterval)
	e.clock.SetTime(e.clock.Now().Add(minWriteInterval))
	e.mustReconcile(0)
	e.expectStatus(1, 1, 1)
	if got := e.writes(); got != 3 {
		t.Errorf("%d attempts to write, want 3", got)
	}
}

func TestReconcile_ignoresOtherClaims(t *testing.T) {
	for _, tc := range []struct {
		name  string
		claim *resourceapi.ResourceClaim
	}{
		{"a NIC", claimWith([]resourceapi.DeviceRequestAllocationResult{{Driver: driver, Pool: "n1", Device: "nic0"}})},
		{"a fabric of another driver", claimWith([]resourceapi.DeviceRequestAllocationResult{
			{Driver: "other", Pool: "fabric/a", Device: "a"},
		})},
		{"no allocation", &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "claim"}}},
		{"a deleted claim", &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "other"}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newTestEnv(t, tc.claim)
			e.setPod("a", "n1", corev1.PodRunning, true)
			e.mustReconcile(0)
			if got := e.writes(); got != 0 {
				t.Errorf("%d writes to a claim without a fabric", got)
			}
		})
	}
}

// A claim that is allocated again gets a status even if the counts are the same.
func TestReconcile_writesAgainAfterDeallocation(t *testing.T) {
	e := newTestEnv(t, claimWith(fabric))
	e.setPod("a", "n1", corev1.PodRunning, true)
	e.mustReconcile(0)
	var claim resourceapi.ResourceClaim
	if err := e.cache.Get(t.Context(), types.NamespacedName{Namespace: "ns", Name: "claim"}, &claim); err != nil {
		t.Fatal(err)
	}
	allocation := claim.Status.Allocation
	for _, a := range []*resourceapi.AllocationResult{nil, allocation} {
		claim.Status.Allocation = a
		if err := e.cache.Update(t.Context(), &claim); err != nil {
			t.Fatal(err)
		}
		e.mustReconcile(0)
	}
	if got := e.writes(); got != 2 {
		t.Errorf("%d writes, want one per allocation", got)
	}
}

func TestStatusEntries_onlySharesOfFabrics(t *testing.T) {
	claim := claimWith([]resourceapi.DeviceRequestAllocationResult{
		{Driver: driver, Pool: "n1", Device: "nic0"},
		{Driver: "other", Pool: "fabric/a", Device: "a"},
		{Driver: driver, Pool: "fabric/a", Device: "a", AdminAccess: ptr.To(true)},
		{Driver: driver, Pool: "fabric/a", Device: "a", ShareID: ptr.To(types.UID("share"))},
	})
	entries, err := statusEntries(claim, v1alpha1.FabricStatusSummary{Pods: 2, Running: 1, Nodes: 1}, driver)
	if err != nil || len(entries) != 1 || ptr.Deref(entries[0].ShareID, "") != "share" {
		t.Fatalf("entries %+v, %v, want one for the share", entries, err)
	}
	c := entries[0].Conditions[0]
	if c.Status != metav1.ConditionTrue || c.Message != "1 of 2 pods are running, on 1 nodes" {
		t.Errorf("condition %+v", c)
	}
}

func TestRequestsForPod(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns"}}
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{
		{Name: "x", ResourceClaimName: ptr.To("a")},
		{Name: "y", ResourceClaimTemplateName: ptr.To("t")},
		{Name: "z", ResourceClaimName: ptr.To("b")},
	}
	if got := fmt.Sprint(requestsForPod(t.Context(), pod)); got != "[ns/a ns/b]" {
		t.Errorf("requests %s, want one per claim with a name", got)
	}
}

// The log of writes does not have an entry for a claim that is gone.
func TestReconciler_forgetsDeletedClaims(t *testing.T) {
	claim := claimWith(fabric, "a")
	e := newTestEnv(t, claim)
	e.setPod("a", "n1", corev1.PodRunning, false)
	e.mustReconcile(0)
	if _, ok := e.reconciler.written.Age(claim.UID); !ok || len(e.others.watched) == 0 {
		t.Fatalf("the log has a write to the claim: %t; watched claims: %v", ok, e.others.watched)
	}
	if err := e.cache.Delete(t.Context(), claim.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	e.mustReconcile(0)
	if _, ok := e.reconciler.written.Age(claim.UID); ok || len(e.reconciler.uids)+len(e.others.watched) > 0 {
		t.Errorf("the log has a write to the deleted claim: %t; known UIDs: %v; watched claims: %v",
			ok, e.reconciler.uids, e.others.watched)
	}
}
