// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package accelerator

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/dra-shared/dra-driver-shared/accel"
	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/test/fstree"
)

// machine is a kind on a machine of accel's, with a configuration.
func machine(t *testing.T, name, accelerators string) (*Kind, fstest.MapFS) {
	t.Helper()
	files, err := fstree.Load("../../accel/testdata/" + name + ".tree")
	if err != nil {
		t.Fatal(err)
	}
	k := New(
		accel.Host{Sys: fstree.Sub(files, "sys"), Proc: fstree.Sub(files, "proc"), Dev: fstree.Sub(files, "dev")},
		configuration(t, accelerators),
		"n1",
	)
	refresh(t, k)
	return k, files
}

func configuration(t *testing.T, accelerators string) *config.DriverConfig {
	t.Helper()
	c, err := config.Load(
		[]byte("apiVersion: config.dra-shared.dev/v1alpha1\nkind: DriverConfig\naccelerators:\n" + accelerators),
	)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func refresh(t *testing.T, k *Kind, shares ...record.Share) {
	t.Helper()
	if _, err := k.Refresh(context.Background(), shares); err != nil {
		t.Fatal(err)
	}
}

const h200 = `
- name: h200
  match: {pciClass: "0302", vendor: 10de}
  capacity: {memory: 141Gi, compute: "100"}
  policy:
    memory: {default: 10Gi, min: 1Gi, step: 1Gi}
    compute: {default: "10", values: ["0", "10", "25", "50", "100"]}
  edits:
    environment:
      CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: 0=${memory.Mi}M
      CUDA_MPS_ACTIVE_THREAD_PERCENTAGE: ${compute.percent}
    deviceNodes: [/dev/nvidiactl, /dev/nvidia-uvm]
    mounts: [{hostPath: "/run/mps/${pciBusID}", containerPath: /tmp/nvidia-mps, writable: true}]
  allow: {deviceNodes: [/dev/nvidia-caps/*]}
`

func TestPublish(t *testing.T) {
	k, _ := machine(t, "eight-h200", h200)
	devices := k.Devices()
	if len(devices) != 8 {
		t.Fatalf("%d devices", len(devices))
	}
	got, err := yaml.Marshal(devices[4])
	if err != nil {
		t.Fatal(err)
	}
	want := `allowMultipleAllocations: true
attributes:
  accelerator:
    string: h200
  device:
    string: "2335"
  driver:
    string: nvidia
  driverVersion:
    version: 570.86.15
  kind:
    string: accelerator
  model:
    string: NVIDIA H200
  resource.kubernetes.io/numaNode:
    int: 1
  resource.kubernetes.io/pciBusID:
    string: 0000:9d:00.0
  resource.kubernetes.io/pcieRoot:
    string: pci0000:97
  vendor:
    string: 10de
capacity:
  compute:
    requestPolicy:
      default: "10"
      validValues:
      - "0"
      - "10"
      - "25"
      - "50"
      - "100"
    value: "100"
  memory:
    requestPolicy:
      default: 10Gi
      validRange:
        min: 1Gi
        step: 1Gi
    value: 141Gi
name: pci-0000-9d-00-0
`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestDiscover(t *testing.T) {
	k, files := machine(t, "render-nodes", `
- {name: amd, match: {vendor: "1002"}, exclusive: true, capacity: {memory: 192Gi}}
- {name: render, match: {devicePaths: ["/dev/dri/renderD*"]}}
- {name: npu, match: {devicePaths: ["/dev/npu[0-9]", /dev/accel/accel0]}}
- {name: unseen, match: {devicePaths: [/dev/nothing]}}
`)
	want := []string{
		"dev-npu0 npu shared", "dev-npu1 npu shared",
		"pci-0000-00-02-0 render shared", // the AMD ones are the first group's
		"pci-0000-00-0b-0 npu shared",
		"pci-0000-43-00-0 amd exclusive", "pci-0000-83-00-0 amd exclusive",
	}
	if diff := cmp.Diff(want, names(k)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// A device without its nodes is no longer published; if a claim has a share of it, it stays published, tainted and
	// unhealthy.
	delete(files, "dev/npu0")
	delete(files, "dev/npu1")
	refresh(t, k, record.Share{Kind: Name, Device: "dev-npu1"})
	if diff := cmp.Diff(append([]string{"dev-npu1 npu shared dra-shared.dev/absent"}, want[2:]...), names(k)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// A device that becomes exclusive while claims hold shares is tainted until they
	// are gone.
	k.config = configuration(t, `- {name: npu, match: {devicePaths: ["/dev/accel/accel0"]}, exclusive: true}`)
	refresh(t, k, record.Share{Kind: Name, Device: "pci-0000-00-0b-0", ShareID: "1"})
	if diff := cmp.Diff([]string{"pci-0000-00-0b-0 npu exclusive dra-shared.dev/shares-held"}, names(k)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	refresh(t, k, record.Share{Kind: Name, Device: "pci-0000-00-0b-0"})
	if diff := cmp.Diff([]string{"pci-0000-00-0b-0 npu exclusive"}, names(k)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// The driver of the devices is loaded again, and numbers them differently.
func TestConditions_otherDeviceNodes(t *testing.T) {
	k, _ := machine(t, "eight-h200", h200)
	s := share("1", "pci-0000-43-00-0", map[string]string{"memory": "10Gi", "compute": "25"})
	admin := share("", "pci-0000-43-00-0", nil)
	admin.AdminAccess = true
	for _, s := range []*record.Share{&s, &admin} {
		var err error
		if s.Parameters, err = k.Configure(t.Context(), "default", *s, nil); err != nil {
			t.Fatal(err)
		}
	}
	ready := func(s record.Share) metav1.Condition { return k.Conditions(s)[0] }
	if c := ready(s); c.Status != metav1.ConditionTrue {
		t.Errorf("with the same nodes: %+v", c)
	}
	device, other := k.devices.Get(s.Device), k.devices.Get("pci-0000-9d-00-0")
	device.Nodes = append(device.Nodes, "/dev/nvidia-added")
	if c := ready(s); c.Status != metav1.ConditionTrue {
		t.Errorf("with a further node: %+v", c)
	}
	device.Nodes, other.Nodes = other.Nodes, device.Nodes
	if c := ready(s); c.Status != metav1.ConditionFalse || c.Reason != v1alpha1.ReasonDeviceChanged ||
		!strings.Contains(c.Message, "[/dev/nvidia1]") {
		t.Errorf("with other nodes: %+v", c)
	}
	if c := ready(admin); c.Status != metav1.ConditionTrue {
		t.Errorf("admin access with other nodes: %+v", c)
	}
}

func TestHealth(t *testing.T) {
	k, files := machine(t, "render-nodes", `- {name: npu, match: {devicePaths: ["/dev/npu[0-9]"]}}`)
	delete(files, "dev/npu1")
	refresh(t, k, record.Share{Kind: Name, Device: "dev-npu1"})
	for _, h := range k.Health() {
		if h.Healthy != (h.Device != "dev-npu1") {
			t.Errorf("%+v", h)
		}
	}
	if _, err := k.Configure(t.Context(), "default", record.Share{Device: "dev-npu1"}, nil); err == nil ||
		!strings.Contains(err.Error(), "missing") {
		t.Errorf("a share of a device that is gone: %v", err)
	}
}

func names(k *Kind) (lines []string) {
	for _, d := range k.Devices() {
		how := " exclusive"
		if d.AllowMultipleAllocations != nil {
			how = " shared"
		}
		line := d.Name + " " + *d.Attributes["accelerator"].StringValue + how
		for _, taint := range d.Taints {
			line += " " + taint.Key
		}
		lines = append(lines, line)
	}
	return lines
}

func share(id, device string, capacity map[string]string) record.Share {
	s := record.Share{
		Name:     "claim-gpu-" + id,
		Kind:     Name,
		Request:  "gpu",
		Pool:     "n1",
		Device:   device,
		ShareID:  types.UID(id),
		Capacity: map[string]resource.Quantity{},
	}
	for name, value := range capacity {
		s.Capacity[name] = resource.MustParse(value)
	}
	return s
}

func TestConfigure_edits(t *testing.T) {
	k, files := machine(t, "eight-h200", h200)
	s := share("1", "pci-0000-43-00-0", map[string]string{"memory": "10Gi", "compute": "25"})
	raw := func(fields string) []byte {
		return []byte(`{"apiVersion": "dra-shared.dev/v1alpha1", "kind": "AcceleratorShare", ` + fields + `}`)
	}
	class := raw(`"environment": {"MODE": "class", "LEVEL": "1"}`)
	claim := raw(`"environment": {"MODE": "claim"}, "deviceNodes": ["/dev/nvidia-caps/nvidia-cap1"]`)
	var err error
	if s.Parameters, err = k.Configure(t.Context(), "default", s, [][]byte{class, claim}); err != nil {
		t.Fatal(err)
	}
	got, err := k.Edits(s)
	want := cdi.Edits{
		Env: []string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M",
			"DRA_SHARED_GPU_COMPUTE=25", "DRA_SHARED_GPU_MEMORY_BYTES=10737418240", "LEVEL=1", "MODE=claim"},
		DeviceNodes: []string{"/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-caps/nvidia-cap1"},
		Mounts:      []cdi.Mount{{HostPath: "/run/mps/0000:43:00.0", ContainerPath: "/tmp/nvidia-mps", Writable: true}},
	}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	for _, tc := range []struct{ fields, want string }{
		{`"deviceNodes": ["/dev/nvidia2"]`,
			`deviceNodes[0]: Forbidden: /dev/nvidia2: accelerator "h200" allows /dev/nvidia-caps/*`},
		{`"deviceNodes": ["/dev/nvidia-caps/nvidia-cap9"]`,
			`device node /dev/nvidia-caps/nvidia-cap9 does not exist on the node`},
		{`"environment": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}`, `accelerator "h200" sets it for all its shares`},
	} {
		_, err := k.Configure(t.Context(), "default", s, [][]byte{raw(tc.fields)})
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("got  %v\nwant %s", err, tc.want)
		}
	}
	// Admin access has no grant, and so no limit.
	admin := share("", "pci-0000-43-00-0", nil)
	admin.AdminAccess = true
	if admin.Parameters, err = k.Configure(t.Context(), "default", admin, nil); err != nil {
		t.Fatal(err)
	}
	got, err = k.Edits(admin)
	if diff := cmp.Diff([]string{"DRA_SHARED_GPU_ADMIN_ACCESS=true"}, got.Env); err != nil || diff != "" ||
		len(got.DeviceNodes) != 3 {
		t.Errorf("with admin access: %v %+v\n%s", err, got, diff)
	}
	// Admin access includes missing devices.
	gone := admin
	gone.Device = "pci-0000-99-00-0"
	refresh(t, k, gone)
	if gone.Parameters, err = k.Configure(t.Context(), "default", gone, nil); err != nil {
		t.Error(err)
	}
	if got, err := k.Edits(gone); err != nil || len(got.DeviceNodes) != 0 || len(got.Env) != 1 {
		t.Errorf("admin access to a device that is gone: %v %+v", err, got)
	}
	if len(k.Devices()) != 8 {
		t.Error("a device of unknown properties is published")
	}
	refresh(t, k)
	// A prepared share keeps its edits when the configuration or the device changes.
	delete(files, "dev/nvidia1")
	k.config = configuration(t, `- {name: other, match: {vendor: "1002"}}`)
	refresh(t, k, s)
	if again, err := k.Edits(s); err != nil || cmp.Diff(want, again) != "" {
		t.Errorf("later: %v %s", err, cmp.Diff(want, again))
	}
}

// The corner cases of KEP-5075 that a driver meets.
func TestAdmit(t *testing.T) {
	const device = "dev-npu0"
	for _, tc := range []struct {
		name, group string
		share       map[string]string // nil: of the whole device
		others      []map[string]string
		want        string // empty: admitted
	}{
		{"within the capacity", `capacity: {memory: 8Gi}`, map[string]string{"memory": "4Gi"},
			[]map[string]string{{"memory": "4Gi"}}, ""},
		{"beyond it", `capacity: {memory: 8Gi}`, map[string]string{"memory": "4Gi"}, []map[string]string{{"memory": "5Gi"}},
			"memory 4Gi: device dev-npu0 has 8Gi, and 5Gi are granted to other shares"},
		{"zero of an exhausted capacity", `capacity: {memory: 8Gi}`, map[string]string{"memory": "0"},
			[]map[string]string{{"memory": "8Gi"}}, ""},
		{"in fractions", `capacity: {compute: 1}`, map[string]string{"compute": "500m"},
			[]map[string]string{{"compute": "250m"}, {"compute": "250m"}}, ""},
		{"in fractions, beyond", `capacity: {compute: 1}`, map[string]string{"compute": "501m"},
			[]map[string]string{{"compute": "250m"}, {"compute": "250m"}}, "compute 501m"},
		{"no capacity: without limit", ``, map[string]string{}, []map[string]string{{}, {}, {}}, ""},
		{"the policy changed after the allocation",
			`capacity: {memory: 8Gi}, policy: {memory: {default: 1Gi, min: 1Gi, step: 1Gi}}`,
			map[string]string{"memory": "1500M"}, nil, ""},
		{"the capacity was lowered below what is granted", `capacity: {memory: 1Gi}`, map[string]string{"memory": "1Gi"},
			[]map[string]string{{"memory": "4Gi"}}, "and 4Gi are granted"},
		{"a capacity that is no longer configured", ``, map[string]string{"memory": "1Gi"},
			[]map[string]string{{"memory": "400Gi"}}, ""},
		{"a whole device that is free", `exclusive: true, capacity: {memory: 8Gi}`, nil, nil, ""},
		{"shared became exclusive: existing shares stay; new ones are refused", `exclusive: true`, nil,
			[]map[string]string{{}}, "claim requests the whole device dev-npu0, but 1 shares of it are in use"},
		{"exclusive became shared before it was prepared", `capacity: {memory: 8Gi}`, nil, nil, ""},
		{"and others came first", `capacity: {memory: 8Gi}`, nil, []map[string]string{{"memory": "1Gi"}}, "the whole device"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			group := strings.TrimSuffix("name: a, match: {devicePaths: [/dev/npu0]}, "+tc.group, ", ")
			k, _ := machine(t, "render-nodes", "- {"+group+"}\n")
			id := "1"
			if tc.share == nil {
				id = ""
			}
			var others []*record.Share
			for _, o := range tc.others {
				others = append(others, new(share("other", device, o)))
			}
			err := k.Admit(share(id, device, tc.share), others)
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got  %v\nwant %s", err, tc.want)
			}
		})
	}
}

func TestConditions_memory(t *testing.T) {
	k, files := machine(t, "eight-h200", h200)
	s := share("1", "pci-0000-43-00-0", map[string]string{"memory": "10Gi", "compute": "25"})
	c := meta.FindStatusCondition(k.Conditions(s), v1alpha1.ConditionMemoryEnforced)
	if c == nil || c.Status != "False" || c.Reason != v1alpha1.ReasonMemoryNotEnforced ||
		!strings.Contains(c.Message, "10Gi") {
		t.Errorf("%+v", c)
	}
	if c := meta.FindStatusCondition(k.Conditions(share("1", "pci-0000-43-00-0", map[string]string{"compute": "25"})),
		v1alpha1.ConditionMemoryEnforced); c != nil {
		t.Errorf("no memory was granted: %+v", c)
	}
	if !meta.IsStatusConditionTrue(k.Conditions(s), v1alpha1.ConditionReady) {
		t.Errorf("%+v", k.Conditions(s))
	}
	// If the kernel has the dmem controller, the condition reports it.
	k.host.Cgroups = fstest.MapFS{"dmem.capacity": {Data: []byte("drm/0000:43:00.0/vram0 151397597184\n")}}
	refresh(t, k)
	var err error
	if s.Parameters, err = k.Configure(t.Context(), "default", s, nil); err != nil {
		t.Fatal(err)
	}
	edits, err := k.Edits(s)
	if diff := cmp.Diff([]string{"limit-memory", "--region=drm/0000:43:00.0/vram0", "--bytes=10737418240"},
		edits.Hook); err != nil ||
		diff != "" {
		t.Errorf("%v %s", err, diff)
	}
	if c := meta.FindStatusCondition(k.Conditions(s), v1alpha1.ConditionMemoryEnforced); c == nil || c.Status != "True" ||
		c.Reason != v1alpha1.ReasonContainerLimited {
		t.Errorf("%+v", c)
	}
	delete(files, "dev/nvidia1")
	refresh(t, k, s)
	if c := meta.FindStatusCondition(k.Conditions(s), v1alpha1.ConditionReady); c == nil || c.Status != "False" ||
		c.Reason != v1alpha1.ReasonDeviceGone {
		t.Errorf("a device that is gone: %+v", c)
	}
}

func TestSemantic(t *testing.T) {
	for text, want := range map[string]string{"570.086.15": "570.86.15", "6.12": "6.12.0", "": "", "rolling": "",
		"535.129.03-custom": "535.129.3"} {
		if got := semantic(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// A later version must be able to read the recorded edits.
func TestEdits_recordFormat(t *testing.T) {
	raw := `{"env":["A=b"],"deviceNodes":["/dev/x"],"mounts":[{"hostPath":"/h","containerPath":"/c","writable":true}]}`
	k := &Kind{}
	edits, err := k.Edits(record.Share{Parameters: json.RawMessage(raw)})
	if err != nil {
		t.Fatal(err)
	}
	again, err := json.Marshal(edits)
	if err != nil || string(again) != raw {
		t.Errorf("%v: %s", err, again)
	}
}
