// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

var claimResource = resourceapi.Resource("resourceclaims")

// denial returns the error of a write that a webhook denies without a code.
func denial() error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusBadRequest,
		Message: `admission webhook "policy.example.com" denied the request: no owner label`,
	}}
}

// policyDenial returns the error of a write that a ValidatingAdmissionPolicy denies with its default reason.
func policyDenial() error {
	const message = "ValidatingAdmissionPolicy 'frozen' with binding 'frozen' denied request: no changes today"
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusUnprocessableEntity, Reason: metav1.StatusReasonInvalid,
		Message: `resourceclaims.resource.k8s.io "net" is forbidden: ` + message,
		Details: &metav1.StatusDetails{Name: "net", Causes: []metav1.StatusCause{{Message: message}}},
	}}
}

// validationError returns the error of a write of more entries than a claim can have.
func validationError() error {
	return apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").GroupKind(), "net",
		field.ErrorList{field.TooMany(field.NewPath("status", "reservedFor"), 257, 256)})
}

func TestIsRefused(t *testing.T) {
	for _, tc := range []struct {
		name string
		err  error
		want bool
	}{
		{"denied by a webhook without a code", denial(), true},
		{"denied by a policy", policyDenial(), true},
		{"invalid", validationError(), true},
		{"a quota is exceeded", apierrors.NewForbidden(claimResource, "net", errors.New("exceeded quota")), true},
		{"a webhook does not answer", apierrors.NewInternalError(errors.New("failed calling webhook")), true},
		{"wrapped", fmt.Errorf("create: %w", denial()), true},
		{"without an error", nil, false},
		{"the object has changed", apierrors.NewConflict(claimResource, "net", errors.New("changed")), false},
		{"the object does not exist", apierrors.NewNotFound(claimResource, "net"), false},
		{"too many requests", apierrors.NewTooManyRequests("later", 1), false},
		{"the API server stops", apierrors.NewServiceUnavailable("stopping"), false},
		{"the API server is slow", apierrors.NewTimeoutError("timeout", 1), false},
		{"the context has ended", context.Canceled, false},
		{"the connection is refused", errors.New("connection refused"), false},
	} {
		if got := IsRefused(tc.err); got != tc.want {
			t.Errorf("IsRefused when %s (%v): got %t, want %t", tc.name, tc.err, got, tc.want)
		}
	}
}

// The API server's own validation refuses entries that are no longer valid, and an event then triggers the next
// reconcile. No event follows what a policy refuses.
func TestClaimWriter_Apply_refusedEntries(t *testing.T) {
	for name, tc := range map[string]struct{ refusal, want error }{
		"by validation": {validationError(), nil},
		"by a policy":   {policyDenial(), policyDenial()},
	} {
		t.Run(name, func(t *testing.T) {
			err := applyRefused(t, tc.refusal)
			switch {
			case tc.want == nil && err != nil:
				t.Errorf("got error %v, want none", err)
			case tc.want != nil && (err == nil || !strings.Contains(err.Error(), tc.want.Error())):
				t.Errorf("got error %v, want %v", err, tc.want)
			}
		})
	}
}

// applyRefused applies a change that adds one entry and removes another. The API server refuses writes that add
// entries. It checks that the removal succeeds, and returns the error of Apply.
func applyRefused(t *testing.T, refusal error) error {
	t.Helper()
	former := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "former", UID: "former"}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "net", UID: "net-uid"}}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{former}
	refuseEntries := func(
		ctx context.Context, c client.Client, _ string, o client.Object, patch client.Patch,
		opts ...client.SubResourcePatchOption,
	) error {
		raw, err := patch.Data(o)
		if err != nil {
			return err
		}
		if strings.Contains(string(raw), `"new"`) {
			return refusal
		}
		return c.Status().Patch(ctx, o, patch, opts...)
	}
	c := fake.NewClientBuilder().WithObjects(claim).WithStatusSubresource(claim).
		WithInterceptorFuncs(interceptor.Funcs{SubResourcePatch: refuseEntries}).Build()
	added := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "new", UID: "new"}
	result := ClaimWriter{Client: c, APIReader: c}.Apply(t.Context(), claim, Change{
		Add: []resourceapi.ResourceClaimConsumerReference{added}, Remove: []types.UID{former.UID},
	})
	var after resourceapi.ResourceClaim
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(claim), &after); err != nil {
		t.Fatal(err)
	}
	if len(after.Status.ReservedFor) != 0 {
		t.Errorf("entries after the write: got %v, want none", after.Status.ReservedFor)
	}
	return result
}
