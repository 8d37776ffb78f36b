// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/test/metricslint"
)

func TestDenials_Count(t *testing.T) {
	registry := metricslint.NewRegistry()
	denials, err := NewDenials(registry)
	if err != nil {
		t.Fatal(err)
	}
	handler := denials.Count(&PodGroups{Mode: mode.Bridge})
	for object, allowed := range map[string]bool{
		`{"metadata":{"annotations":{"scheduling.dra-shared.dev/release":"Never"}}}`: false,
		`{"metadata":{}}`: true,
		`{`:               false, // an error, not a denial
	} {
		response := handler.Handle(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
			Kind: metav1.GroupVersionKind{Kind: "PodGroup"}, Object: runtime.RawExtension{Raw: []byte(object)},
		}})
		if response.Allowed != allowed {
			t.Errorf("%s: allowed: got %t, want %t", object, response.Allowed, allowed)
		}
	}
	if n := testutil.ToFloat64(denials.total.WithLabelValues("PodGroup", "Invalid")); n != 1 {
		t.Errorf("invalid PodGroups: got %v, want 1", n)
	}
	if n, err := testutil.GatherAndCount(registry); err != nil || n != 1 {
		t.Errorf("metrics: got %d, error %v, want 1: errors are not denials", n, err)
	}
	registry.Check(t, "dra_shared_admission_denials_total")
}

// A denial keeps its reason when a caller adds context to the error.
func TestErrorResponse(t *testing.T) {
	err := errors.Join(errors.New("create pod"), denied(reasonNoRoom, "no room"))
	response := errorResponse(err, []string{"a warning"})
	if response.AuditAnnotations[auditReason] != "NoRoom" || response.Result.Code != 403 || len(response.Warnings) != 1 {
		t.Errorf("got %+v, want a denial with the reason NoRoom and a warning", response)
	}
	response = errorResponse(errors.New("no connection"), nil)
	if response.Result.Code != 500 || response.AuditAnnotations != nil {
		t.Errorf("got %+v, want an internal error without a reason", response)
	}
}

func TestDenialReasons_areDocumented(t *testing.T) {
	source, err := os.ReadFile("denial.go")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/user/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "### Admission denials\n")
	section, _, _ = strings.Cut(section, "\n#")
	reasons := regexp.MustCompile(`denialReason = "(\w+)"`).FindAllSubmatch(source, -1)
	if len(reasons) == 0 {
		t.Fatal("denial.go declares no reasons")
	}
	for _, reason := range reasons {
		if !strings.Contains(section, "`"+string(reason[1])+"`") {
			t.Errorf("docs/user/operations.md does not explain the reason %s", reason[1])
		}
	}
}
