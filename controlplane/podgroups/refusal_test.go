// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"context"
	"net/http"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

const denialText = `admission webhook "policy.example.com" denied the request: no owner label`

// denied returns the error of a write that a webhook denies without a code.
func denied() error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusBadRequest, Message: denialText,
	}}
}

// refuse makes the API server refuse the controller's writes that the functions intercept.
func (e *testEnv) refuse(funcs interceptor.Funcs) {
	e.Helper()
	c, ok := e.client.(client.WithWatch)
	if !ok {
		e.Fatalf("client of the tests: got %T, want a client.WithWatch", e.client)
	}
	e.reconciler.Client = cached(interceptor.NewClient(c, funcs))
}

// reconcileDenied reconciles the PodGroup, and checks that Reconcile returns the error of the webhook.
func (e *testEnv) reconcileDenied() {
	e.Helper()
	_, err := e.reconciler.Reconcile(e.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(e.podGroup())})
	if err == nil || !strings.Contains(err.Error(), denialText) {
		e.Errorf("reconcile PodGroup group: got error %v, want %q", err, denialText)
	}
}

// refuseCreate returns functions that refuse to create claims.
func refuseCreate(refusal error) interceptor.Funcs {
	return interceptor.Funcs{Create: func(
		ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption,
	) error {
		if _, ok := o.(*resourceapi.ResourceClaim); ok {
			return refusal
		}
		return c.Create(ctx, o, opts...)
	}}
}

// refusePatch returns functions that refuse to patch objects with the name.
func refusePatch(name string) interceptor.Funcs {
	return interceptor.Funcs{
		Patch: func(
			ctx context.Context, c client.WithWatch, o client.Object, patch client.Patch, opts ...client.PatchOption,
		) error {
			if o.GetName() == name {
				return denied()
			}
			return c.Patch(ctx, o, patch, opts...)
		},
		SubResourcePatch: func(
			ctx context.Context, c client.Client, subresource string, o client.Object, patch client.Patch,
			opts ...client.SubResourcePatchOption,
		) error {
			if _, ok := o.(*resourceapi.ResourceClaim); ok && o.GetName() == name {
				return denied()
			}
			return c.SubResource(subresource).Patch(ctx, o, patch, opts...)
		},
	}
}

func TestReconciler_reportsDeniedClaim(t *testing.T) {
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"))
	e.refuse(refuseCreate(denied()))
	e.reconcileDenied()
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionFalse, "ClaimMissing",
		`resourceClaims["net"]: create ResourceClaim `+generatedName()+": "+denialText)
	e.expectEvent("ClaimMissing")

	e.refuse(interceptor.Funcs{})
	e.reconcile()
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionTrue, "Generated", "all claims exist (1)")
}

// An overloaded API server does not get additional writes of conditions, and the condition does not say that claims
// exist.
func TestReconciler_overloadedAPIServer(t *testing.T) {
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"))
	e.refuse(refuseCreate(apierrors.NewTooManyRequests("try again", 1)))
	request := ctrl.Request{NamespacedName: client.ObjectKeyFromObject(e.podGroup())}
	if _, err := e.reconciler.Reconcile(t.Context(), request); !apierrors.IsTooManyRequests(err) {
		t.Errorf("reconcile PodGroup group: got error %v, want that there are too many requests", err)
	}
	if c := meta.FindStatusCondition(e.podGroup().Status.Conditions, scheduling.ConditionClaimsReady); c != nil {
		t.Errorf("condition ClaimsReady after too many requests: got %+v, want none", c)
	}
}

func TestReconciler_reportsDeniedFinalizer(t *testing.T) {
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"))
	e.refuse(refusePatch("group"))
	e.reconcileDenied()
	e.expectCondition(scheduling.ConditionClaimsReady, metav1.ConditionFalse, "ClaimMissing",
		"add the finalizer "+scheduling.Finalizer+" to the PodGroup: "+denialText)
	e.expectEvent("ClaimMissing")
}

func TestReconciler_reportsDeniedReservation(t *testing.T) {
	name := generatedName()
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("nic"), testPod("a", name))
	e.reconcile()
	e.allocate(name, "a")
	e.updatePod("a", bind)
	e.refuse(refusePatch(name))
	e.reconcileDenied()
	e.expectCondition(scheduling.ConditionReserved, metav1.ConditionFalse, "WriteRefused",
		"the API server refuses a change of the reservations of ResourceClaim "+name+": "+denialText)
	e.expectEvent("WriteRefused")

	e.refuse(interceptor.Funcs{})
	e.reconcile()
	e.reconcile()
	e.expectCondition(scheduling.ConditionReserved, metav1.ConditionTrue, "Held", "the claims stay allocated")
}

func TestReconciler_reportsDeniedRemovalOfGate(t *testing.T) {
	pod := testPod("a", generatedName())
	gate(pod)
	e := newTestEnv(t, testPodGroup("template", ""), testTemplate("fabric."+testDriver), pod)
	e.refuse(refusePatch("a"))
	e.reconcileDenied()
	e.expectCondition(scheduling.ConditionReserved, metav1.ConditionFalse, "WriteRefused",
		"the API server refused the write: remove the scheduling gate "+scheduling.ReservedGate+" from pod a: "+denialText)
	e.expectEvent("WriteRefused")
}

// A Job does not have conditions of the driver, so an event is all that a user sees.
func TestReconciler_reportProblems_ofRefusedWrites(t *testing.T) {
	e := newTestEnv(t)
	g := groupWith()
	g.gateProblem = denied()
	e.reconciler.reportProblems(&batchv1.Job{}, g)
	e.expectEvent("WriteRefused")
	g.gateProblem, g.sharedClaims[0].reserveProblem = nil, denied()
	e.reconciler.reportProblems(&batchv1.Job{}, g)
	e.expectEvent("WriteRefused")
}

// The error of a refused write may differ each time, and the condition has it.
func TestRelevantGroupChange(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*scheduling.PodGroup)
		want   bool
	}{
		"its status": {func(pg *scheduling.PodGroup) {
			pg.Status.Conditions = []metav1.Condition{{Message: "x"}}
		}, false},
		"its finalizers": {func(pg *scheduling.PodGroup) { pg.Finalizers = nil }, true},
		"an annotation":  {func(pg *scheduling.PodGroup) { pg.Annotations = map[string]string{"a": "b"} }, true},
		"its deletion":   {func(pg *scheduling.PodGroup) { pg.DeletionTimestamp = ptr.To(metav1.Now()) }, true},
		"nothing, in a periodic update of the cache": {func(pg *scheduling.PodGroup) { pg.ResourceVersion = "1" }, true},
	} {
		before := testPodGroup("template", "")
		before.ResourceVersion, before.Finalizers = "1", []string{scheduling.Finalizer}
		after := before.DeepCopy()
		after.ResourceVersion = "2"
		tc.change(after)
		if got := relevantGroupChange().Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after}); got != tc.want {
			t.Errorf("an update that changes %s is relevant: got %t, want %t", name, got, tc.want)
		}
	}
}
