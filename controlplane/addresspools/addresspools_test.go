// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package addresspools_test

import (
	"context"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	testingclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane"
	"github.com/dra-shared/dra-driver-shared/controlplane/addresspools"
)

const (
	driverName = "dra-shared.dev"
	quarantine = 5 * time.Minute
)

func pool(name, ranges string, age time.Duration) *network.AddressPool {
	return &network.AddressPool{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(time.Now().Add(-age).Truncate(time.Second)),
		},
		Spec: network.AddressPoolSpec{
			Network: "storage", Subnet: "10.20.0.0/16", Ranges: []string{ranges}, BlockSize: ptr.To(int32(4)),
		},
	}
}

func block(name, node, ranges string) *network.AddressBlock {
	return &network.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       network.AddressBlockSpec{Network: "storage", Pool: "office", Node: node, Ranges: []string{ranges}},
	}
}

func node(name string) *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }

type testEnv struct {
	t *testing.T
	*addresspools.Reconciler
	clock *testingclock.FakeClock
}

func newEnv(t *testing.T, objects ...client.Object) *testEnv {
	t.Helper()
	scheme, err := controlplane.Scheme()
	if err != nil {
		t.Fatal(err)
	}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithStatusSubresource(&network.AddressPool{}).Build()
	clock := testingclock.NewFakeClock(time.Now())
	r := &addresspools.Reconciler{Client: c, Driver: driverName, Clock: clock, Quarantine: quarantine}
	return &testEnv{t, r, clock}
}

func (e *testEnv) reconcile(name string) ctrl.Result {
	e.t.Helper()
	result, err := e.Reconcile(e.t.Context(), ctrl.Request{NamespacedName: types.NamespacedName{Name: name}})
	if err != nil {
		e.t.Fatal(err)
	}
	return result
}

func (e *testEnv) status(name string) network.AddressPoolStatus {
	e.t.Helper()
	e.reconcile(name)
	var p network.AddressPool
	if err := e.Client.Get(e.t.Context(), types.NamespacedName{Name: name}, &p); err != nil {
		e.t.Fatal(err)
	}
	return p.Status
}

func TestReconcile_countsAddresses(t *testing.T) {
	e := newEnv(t, pool("office", "10.20.1.0/28", time.Hour), node("n1"),
		block("a", "n1", "10.20.1.0-10.20.1.3"), block("b", "n1", "10.20.1.4-10.20.1.5"))
	s := e.status("office")
	if s.Addresses != "16" || s.Assigned != 6 || s.Blocks != 2 {
		t.Errorf("got %s addresses, %d assigned in %d blocks, want 16, 6 in 2", s.Addresses, s.Assigned, s.Blocks)
	}
	if !meta.IsStatusConditionTrue(s.Conditions, network.ConditionReady) ||
		!meta.IsStatusConditionFalse(s.Conditions, network.ConditionShort) {
		t.Errorf("got conditions %v, want Ready and not Short", s.Conditions)
	}
}

func TestReconcile_reportsShortPool(t *testing.T) {
	e := newEnv(t, pool("office", "10.20.1.0/28", time.Hour), node("n1"), block("a", "n1", "10.20.1.0-10.20.1.12"))
	if s := e.status("office"); !meta.IsStatusConditionTrue(s.Conditions, network.ConditionShort) {
		t.Errorf("3 of 16 addresses free, blocks of 4: got conditions %v, want Short", s.Conditions)
	}
}

// Addresses that only some claims get do not help other nodes.
func TestReconcile_reportsShortPoolWithReservedAddresses(t *testing.T) {
	p := pool("office", "10.20.1.0/28", time.Hour)
	p.Spec.Reserved = []string{"10.20.1.8/29"}
	e := newEnv(t, p, node("n1"), block("a", "n1", "10.20.1.0-10.20.1.3"))
	if s := e.status("office"); meta.IsStatusConditionTrue(s.Conditions, network.ConditionShort) {
		t.Errorf("4 of 8 addresses free, blocks of 4: got conditions %v, want not Short", s.Conditions)
	}
	e = newEnv(t, p, node("n1"), block("a", "n1", "10.20.1.0-10.20.1.4"))
	if s := e.status("office"); !meta.IsStatusConditionTrue(s.Conditions, network.ConditionShort) {
		t.Errorf("3 of 8 addresses free, blocks of 4: got conditions %v, want Short", s.Conditions)
	}
}

func TestReconcile_refusesYoungerOfOverlappingPools(t *testing.T) {
	e := newEnv(t, pool("office", "10.20.1.0/28", time.Hour), pool("late", "10.20.1.8/29", time.Minute))
	if s := e.status("office"); !meta.IsStatusConditionTrue(s.Conditions, network.ConditionReady) {
		t.Errorf("older pool: got conditions %v, want Ready", s.Conditions)
	}
	c := meta.FindStatusCondition(e.status("late").Conditions, network.ConditionReady)
	if c == nil || c.Reason != network.ReasonOverlaps ||
		!strings.Contains(c.Message, "AddressPool office of network storage has 10.20.1.8-10.20.1.15 too") {
		t.Errorf("younger pool: got condition %v, want Overlaps with the addresses of office", c)
	}
}

func TestReconcile_reportsInvalidPool(t *testing.T) {
	e := newEnv(t, pool("office", "10.21.0.0/28", time.Hour))
	c := meta.FindStatusCondition(e.status("office").Conditions, network.ConditionReady)
	if c == nil || c.Reason != network.ReasonInvalid || !strings.Contains(c.Message, "spec.ranges[0]") {
		t.Errorf("got condition %v, want Invalid that names spec.ranges[0]", c)
	}
}

// The block of a deleted node returns after the quarantine, but not as long as a claim
// names the node.
func TestReconcile_returnsBlocksOfLostNode(t *testing.T) {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "stuck"}}
	claim.Status.Allocation = &resourceapi.AllocationResult{}
	claim.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{{Driver: driverName, Pool: "n2"}}
	e := newEnv(t, pool("office", "10.20.1.0/28", time.Hour), node("n1"), claim,
		block("a", "n1", "10.20.1.0-10.20.1.3"), block("b", "n2", "10.20.1.4-10.20.1.7"))
	if result := e.reconcile("office"); result.RequeueAfter != quarantine {
		t.Errorf("got requeue after %s, want %s", result.RequeueAfter, quarantine)
	}
	e.clock.Step(quarantine - 2*time.Second)
	if s := e.status("office"); s.Blocks != 2 {
		t.Errorf("before the end of the quarantine: got %d blocks, want 2", s.Blocks)
	}
	e.clock.Step(4 * time.Second)
	if result := e.reconcile("office"); result.RequeueAfter != 0 {
		t.Errorf("while a claim names the node: got requeue after %s, want that events suffice", result.RequeueAfter)
	}
	if s := e.status("office"); s.Blocks != 2 {
		t.Errorf("while a claim names the node: got %d blocks, want 2", s.Blocks)
	}
	if err := e.Client.Delete(t.Context(), claim); err != nil {
		t.Fatal(err)
	}
	e.reconcile("office")
	if s := e.status("office"); s.Blocks != 1 || s.Assigned != 4 {
		t.Errorf("after the quarantine: got %d blocks with %d addresses, want 1 with 4", s.Blocks, s.Assigned)
	}
}

// A node that returns keeps its blocks, and its next loss starts a new quarantine.
func TestReconcile_keepsBlocksOfNodeThatReturns(t *testing.T) {
	e := newEnv(t, pool("office", "10.20.1.0/28", time.Hour), block("b", "n2", "10.20.1.4-10.20.1.7"))
	e.reconcile("office")
	e.clock.Step(quarantine - time.Second)
	if err := e.Client.Create(t.Context(), node("n2")); err != nil {
		t.Fatal(err)
	}
	e.reconcile("office")
	if err := e.Client.Delete(t.Context(), node("n2")); err != nil {
		t.Fatal(err)
	}
	e.reconcile("office")
	e.clock.Step(quarantine - time.Second)
	if s := e.status("office"); s.Blocks != 1 {
		t.Errorf("got %d blocks, want 1: the quarantine started again", s.Blocks)
	}
}

// Two controllers run, as when a new leading replica takes over. The node returns after one of them has read
// that it is lost, and the other one has seen it.
func TestReconcile_keepsBlocksIfAnotherControllerSawNodeReturn(t *testing.T) {
	for name, b := range map[string]*network.AddressBlock{
		"for any pod": block("b", "n2", "10.20.1.4-10.20.1.7"), "kept": keptBlock("b", "n2", "web-0"),
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, pool("office", "10.20.1.0/28", time.Hour), statefulSet("web"), b)
			e.reconcile("office") // marks the block
			e.clock.Step(quarantine + time.Second)
			other := *e.Reconciler
			returned := false
			c, ok := e.Client.(client.WithWatch)
			if !ok {
				t.Fatalf("the client is a %T, want one with watches", e.Client)
			}
			e.Client = interceptor.NewClient(c, interceptor.Funcs{
				List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, o ...client.ListOption) error {
					err := c.List(ctx, list, o...)
					if _, last := list.(*resourceapi.ResourceClaimList); last && !returned { // before it writes
						returned = true
						if err := c.Create(ctx, node("n2")); err != nil {
							t.Error(err)
						}
						request := ctrl.Request{NamespacedName: types.NamespacedName{Name: "office"}}
						if _, err := other.Reconcile(ctx, request); err != nil {
							t.Error(err)
						}
					}
					return err
				},
			})
			e.reconcile("office")
			if !returned {
				t.Fatal("the reconciler did not look for claims of the node")
			}
			if err := e.Client.Get(t.Context(), client.ObjectKeyFromObject(b), b); err != nil || b.Spec.Node != "n2" {
				t.Errorf("got the block of node %q and error %v, want that of n2", b.Spec.Node, err)
			}
		})
	}
}

// An administrator declares with a taint that the machine of a node does not run.
func TestReconcile_returnsBlocksOfNodeOutOfService(t *testing.T) {
	n1 := node("n1")
	e := newEnv(t, pool("office", "10.20.1.0/28", time.Hour), n1, block("a", "n1", "10.20.1.0-10.20.1.3"))
	e.reconcile("office")
	e.clock.Step(2 * quarantine)
	if s := e.status("office"); s.Blocks != 1 {
		t.Fatalf("before the taint: got %d blocks, want 1", s.Blocks)
	}
	n1.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService, Effect: corev1.TaintEffectNoExecute}}
	if err := e.Client.Update(t.Context(), n1); err != nil {
		t.Fatal(err)
	}
	if result := e.reconcile("office"); result.RequeueAfter != quarantine {
		t.Errorf("after the taint: got requeue after %s, want %s", result.RequeueAfter, quarantine)
	}
	e.clock.Step(quarantine + time.Second)
	e.reconcile("office")
	if s := e.status("office"); s.Blocks != 0 {
		t.Errorf("after the quarantine: got %d blocks, want none", s.Blocks)
	}
}

func statefulSet(name string) *appsv1.StatefulSet {
	return &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
}

func keptBlock(name, node, pod string) *network.AddressBlock {
	b := block(name, node, "10.20.1.0-10.20.1.0")
	b.Spec.Namespace, b.Spec.Pod = "default", pod
	return b
}

func TestReconcile_deletesKeptAddressesOfDeletedStatefulSets(t *testing.T) {
	for name, tc := range map[string]struct {
		block *network.AddressBlock
		want  bool
	}{
		"StatefulSet exists":            {keptBlock("a", "", "web-0"), true},
		"StatefulSet is gone":           {keptBlock("a", "", "db-0"), false},
		"a node has it":                 {keptBlock("a", "n1", "db-0"), true},
		"not a pod of a StatefulSet":    {keptBlock("a", "", "web"), false},
		"StatefulSet with another name": {keptBlock("a", "", "web-0-0"), false},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, pool("office", "10.20.1.0/28", time.Hour), node("n1"), statefulSet("web"), tc.block)
			e.reconcile("office")
			err := e.Client.Get(t.Context(), client.ObjectKeyFromObject(tc.block), &network.AddressBlock{})
			if exists := err == nil; exists != tc.want {
				t.Errorf("the block exists: got %v, want %v: %v", exists, tc.want, err)
			}
			if s := e.status("office"); tc.want && (s.Kept != 1 || s.Assigned != 1) {
				t.Errorf("got %d of %d assigned addresses kept, want 1 of 1", s.Kept, s.Assigned)
			}
		})
	}
}

func TestReconcile_takesKeptAddressesFromLostNodes(t *testing.T) {
	kept := keptBlock("a", "lost", "web-0")
	e := newEnv(t, pool("office", "10.20.1.0/28", time.Hour), statefulSet("web"), kept)
	e.reconcile("office") // marks the block
	e.clock.Step(quarantine)
	e.reconcile("office")
	if err := e.Client.Get(t.Context(), client.ObjectKeyFromObject(kept), kept); err != nil {
		t.Fatal(err)
	}
	if kept.Spec.Node != "" || len(kept.Annotations) > 0 {
		t.Errorf("got node %q, annotations %v, want none", kept.Spec.Node, kept.Annotations)
	}
}
