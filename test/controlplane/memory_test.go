// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
	"github.com/dra-shared/dra-driver-shared/test/simnode"
)

// maxMemory is the limit for the controller's resident memory with claimsOfOthers claims of
// other drivers in the cluster.
const (
	maxMemory      = 200 // MiB
	claimsOfOthers = "150000"
)

// TestController_memoryWithClaimsOfOtherDrivers measures the controller's memory in a cluster with many
// claims of other drivers. Its output becomes a section of docs/dev/scale.md (make bench-memory).
func TestController_memoryWithClaimsOfOtherDrivers(t *testing.T) {
	if os.Getenv(envBench) == "" {
		t.Skip("takes several minutes: run `make bench-memory`")
	}
	e := requireTestEnv(t)
	n, err := strconv.Atoi(cmp.Or(os.Getenv("CONTROLPLANE_CLAIMS"), claimsOfOthers))
	if err != nil {
		t.Fatalf("environment variable CONTROLPLANE_CLAIMS: %v", err)
	}
	empty, stop := e.controllerMemory(t)
	stop()
	ns := e.createNamespace(t, "others")
	size := e.createClaimsOfOthers(t, ns, n)
	full, stop := e.controllerMemory(t)
	defer stop()
	fmt.Printf("\n## Memory with claims of other drivers\n\n"+
		"| claims of other drivers | controller, at most | after a minute | admission works after |\n"+
		"| --- | --- | --- | --- |\n| 0 | %d MiB | %d MiB | %s |\n| %d | %d MiB | %d MiB | %s |\n\n"+
		"Each claim has %d bytes in JSON.\n\n",
		empty.most, empty.now, round(empty.ready), n, full.most, full.now, round(full.ready), size)
	if full.most > maxMemory {
		t.Errorf("the controller uses %d MiB with %d claims of other drivers, want at most %d", full.most, n, maxMemory)
	}
}

// residentMemory is in MiB. ready is the time from the start until admission works.
type residentMemory struct {
	now, most int
	ready     time.Duration
}

// controllerMemory starts the controller and returns its memory a minute after its caches
// are filled.
func (e *testEnv) controllerMemory(t *testing.T) (m residentMemory, stop func()) {
	t.Helper()
	start := time.Now()
	process := e.startControllerProcess(t) // returns when admission works, which needs caches
	m.ready = time.Since(start)
	// The garbage collector runs at least every two minutes; what matters is the peak.
	settled := time.Now().Add(time.Minute)
	eventually.Eventually(t, 2*time.Minute, "a minute has passed", func() error {
		if left := time.Until(settled); left > 0 {
			return fmt.Errorf("%s are left", round(left))
		}
		return nil
	})
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", process.Pid))
	if err != nil {
		t.Fatalf("read the memory of the controller: %v: has it ended?", err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), ":")
		kib, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
		switch {
		case err != nil:
		case name == "VmRSS":
			m.now = kib / 1024
		case name == "VmHWM":
			m.most = kib / 1024
		}
	}
	return m, func() { _ = process.Kill() }
}

// createClaimsOfOthers creates n claims as Kubernetes generates them for pods of another
// driver, and returns the size of one in JSON. The API server creates the first one. The others are
// copies of it in etcd, because the API server creates a few hundred per second.
func (e *testEnv) createClaimsOfOthers(t *testing.T, ns string, n int) (size int) {
	t.Helper()
	first := claimOfOther(ns)
	e.create(t, first)
	raw, err := e.kube.ResourceV1().RESTClient().Get().Namespace(ns).Resource("resourceclaims").
		Name(first.Name).DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	key := "/registry/resourceclaims/" + ns + "/" + first.Name
	value := readEtcd(t, key)
	const batch = 100 // etcd permits 128 operations in a transaction
	put := func(i int) error {
		var puts []any
		for j := i * batch; j < min((i+1)*batch, n); j++ {
			// Names and UIDs of equal length leave the encoding valid.
			replace := strings.NewReplacer(first.Name, fmt.Sprintf("%s%06d", first.Name[:len(first.Name)-6], j),
				string(first.UID), fmt.Sprintf("%s%06d", first.UID[:len(first.UID)-6], j))
			puts = append(puts, map[string]any{"requestPut": map[string]any{
				"key": []byte(replace.Replace(key)), "value": []byte(replace.Replace(string(value))),
			}})
		}
		return callEtcd(t.Context(), "txn", map[string]any{"success": puts}, nil)
	}
	if err := simnode.Parallel((n+batch-1)/batch, put); err != nil {
		t.Fatalf("write %d claims to etcd: %v", n, err)
	}
	eventually.Eventually(t, 5*time.Minute, fmt.Sprintf("the API server has %d claims", n), func() error {
		// The API server answers from its cache, which follows etcd.
		list, err := e.kube.ResourceV1().ResourceClaims(ns).List(t.Context(), metav1.ListOptions{Limit: 1})
		if err != nil {
			return err
		}
		if got := 1 + ptr.Deref(list.RemainingItemCount, 0); got < int64(n) {
			return fmt.Errorf("it has %d", got)
		}
		return nil
	})
	return len(raw)
}

// readEtcd returns the value of a key.
func readEtcd(t *testing.T, key string) []byte {
	t.Helper()
	var answer struct {
		KVs []struct {
			Value []byte `json:"value"`
		} `json:"kvs"`
	}
	err := callEtcd(t.Context(), "range", map[string]any{"key": []byte(key)}, &answer)
	if err != nil || len(answer.KVs) != 1 {
		t.Fatalf("read %s from etcd: %v, %d values", key, err, len(answer.KVs))
	}
	return answer.KVs[0].Value
}

// callEtcd calls the etcd of the test's control plane by its JSON gateway.
func callEtcd(ctx context.Context, method string, question, answer any) error {
	body, err := json.Marshal(question)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost,
		"http://127.0.0.1:2379/v3/kv/"+method, bytes.NewReader(body))
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("etcd %s: %s: %.200s", method, response.Status, raw)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(raw, answer)
}

// claimOfOther is the claim of a pod for a GPU with parameters.
func claimOfOther(ns string) *resourceapi.ResourceClaim {
	const pod = "inference-server-7d9c8b6f5d-x7k2p"
	parameters := fmt.Sprintf(`{"apiVersion":"gpu.example.com/v1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing",`+
		`"timeSlicingConfig":{"interval":"Long"}},"comment":%q}`, strings.Repeat("x", 1500))
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: ns, Name: pod + "-gpu-000000",
			Labels:      map[string]string{"app.kubernetes.io/name": "inference-server", "team": "search"},
			Annotations: map[string]string{"resource.kubernetes.io/pod-claim-name": "gpu"},
			OwnerReferences: []metav1.OwnerReference{{
				// A pod that the garbage collector does not look up, or it would delete the claim.
				APIVersion: "example.com/v1", Kind: "Server", Name: pod, UID: "1d1a1ec1-3a93-4c5e-a3ae-1f10cc7ab9d2",
				Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true),
			}},
		},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: "gpu.example.com",
				Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
					Expression: `device.attributes["gpu.example.com"].productName.startsWith("H") && ` +
						`device.capacity["gpu.example.com"].memory.compareTo(quantity("80Gi")) >= 0`,
				}}},
			}}},
			Config: []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
				Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: "gpu.example.com", Parameters: runtime.RawExtension{Raw: []byte(parameters)},
				},
			}}},
		}},
	}
}
