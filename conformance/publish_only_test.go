// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/conformance/fakeapi"
)

// TestRun_withKubeconfigOnly tests what a driver publishes in a cluster. The suite does not have the driver's sockets.
func TestRun_withKubeconfigOnly(t *testing.T) {
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: resourceapi.ResourceSliceSpec{
		Driver: "gpu.example.com", NodeName: ptr.To("n1"), Devices: []resourceapi.Device{{Name: "gpu-0"}},
		Pool: resourceapi.ResourcePool{Name: "n1", Generation: 1, ResourceSliceCount: 2},
	}}
	server, err := fakeapi.New(slice)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, []byte(server.Kubeconfig()), 0o600); err != nil {
		t.Fatal(err)
	}
	report, err := Run(t.Context(), Config{
		Driver: "gpu.example.com", Kubeconfig: path, Only: []string{"PUB-01", "PUB-02", "PREP-01", "SEC-04"},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if report.Kubelet != "none" || report.APIServer != "real" {
		t.Errorf("the report has the kubelet %q and the API server %q, want none and real", report.Kubelet, report.APIServer)
	}
	want := map[string]Status{"PUB-01": Passed, "PUB-02": Failed, "PREP-01": Skipped, "SEC-04": Skipped}
	for _, r := range report.Results() {
		if id := r.Requirement.ID; r.Status != want[id] {
			t.Errorf("%s: got %s: %s, want %s", id, r.Status, r.Message, want[id])
		} else if r.Status == Skipped && !strings.Contains(r.Message, "needs the driver's sockets") {
			t.Errorf("%s was skipped with the reason %q", id, r.Message)
		}
	}
}
