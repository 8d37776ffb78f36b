// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"
)

// job returns an owner that is not a PodGroup: the package supports any kind.
func job(name string, uid types.UID) Owner {
	return Owner{
		GroupVersionKind: schema.GroupVersionKind{Group: "batch", Version: "v1", Kind: "Job"}, Resource: "jobs",
		Namespace: "ns", Name: name, UID: uid,
	}
}

func TestName_dependsOnOwnerUID(t *testing.T) {
	first := Name(job("train", "uid-1"), "net", 0)
	if !strings.HasPrefix(first, "train-net-") || first != Name(job("train", "uid-1"), "net", 0) {
		t.Errorf("name of the first shard: got %s, want a stable name with prefix train-net-", first)
	}
	seen := map[string]string{}
	for variant, name := range map[string]string{
		"another owner UID": Name(job("train", "uid-2"), "net", 0),
		"another entry":     Name(job("train", "uid-1"), "gpu", 0),
		"another shard":     Name(job("train", "uid-1"), "net", 1),
		"the first shard":   first,
	} {
		if other, taken := seen[name]; taken {
			t.Errorf("the names for %s and %s are equal: %s", variant, other, name)
		}
		seen[name] = variant
	}
}

func FuzzName(f *testing.F) {
	f.Add("a", "uid", "net", 0)
	f.Add(strings.Repeat("a.", 126)+"a", "uid", strings.Repeat("b", 63), 255)
	f.Fuzz(func(t *testing.T, owner, uid, entry string, shard int) {
		invalid := len(validation.IsDNS1123Subdomain(owner)) > 0 || len(validation.IsDNS1123Label(entry)) > 0
		if invalid || shard < 0 || shard >= MaxShards {
			t.Skip("the API server rejects these names")
		}
		name := Name(job(owner, types.UID(uid)), entry, shard)
		if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
			t.Errorf("claim name %q is invalid: %v", name, problems)
		}
		if n, ok := ShardNumber(job(owner, types.UID(uid)), entry, name); n != shard || !ok {
			t.Errorf("shard number of claim %q: got %d, %t, want %d", name, n, ok, shard)
		}
	})
}

func TestGenerate(t *testing.T) {
	template := &resourceapi.ResourceClaimTemplate{Spec: resourceapi.ResourceClaimTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"}},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "nic"}},
		}},
	}}
	claim := Generate(job("train", "uid"), "net", 0, template)
	if claim.Namespace != "ns" || claim.Labels["a"] != "b" || claim.Annotations["c"] != "d" ||
		claim.Annotations["scheduling.dra-shared.dev/claim"] != "net" ||
		claim.Spec.Devices.Requests[0].Name != "nic" {
		t.Errorf("the generated claim does not have the contents of its template: %+v", claim)
	}
	if !IsGeneratedFor(claim, "uid") || IsGeneratedFor(claim, "another") ||
		claim.OwnerReferences[0].Kind != "Job" || claim.OwnerReferences[0].APIVersion != "batch/v1" {
		t.Errorf("the generated claim does not have the Job as its controller: %+v", claim.OwnerReferences)
	}
	claim.Labels["a"] = "changed"
	claim.Spec.Devices.Requests[0].Name = "changed"
	if template.Spec.Labels["a"] != "b" || template.Spec.Spec.Devices.Requests[0].Name != "nic" {
		t.Error("a change of the generated claim changes its template")
	}
}

const driver = "dra-shared.dev"

// onFabric returns a claim for one fabric, which is allocated with these capacities.
func onFabric(consumed ...resourceapi.QualifiedName) *resourceapi.ResourceClaim {
	result := resourceapi.DeviceRequestAllocationResult{
		Request: "f", Driver: driver, Pool: "fabric/rack1", Device: "rack1",
		ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{},
	}
	for _, c := range consumed {
		result.ConsumedCapacity[c] = resource.MustParse("1")
	}
	request := resourceapi.DeviceRequest{Name: "f", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: "fabric." + driver, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
	}}
	return &resourceapi.ResourceClaim{
		Spec: resourceapi.ResourceClaimSpec{
			Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{request}},
		},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{result}},
		}},
	}
}

func TestGenerateShard_selectsDeviceAndConsumesNothing(t *testing.T) {
	template := &resourceapi.ResourceClaimTemplate{}
	claim, err := GenerateShard(job("train", "uid"), "net", 3, template, onFabric("groups"), driver)
	if err != nil {
		t.Fatalf("generate shard 3: %v", err)
	}
	request := claim.Spec.Devices.Requests[0].Exactly
	if q := request.Capacity.Requests["groups"]; !q.IsZero() {
		t.Errorf("shard 3 requests capacity groups: got %s, want 0", q.String())
	}
	const want = `device.attributes["dra-shared.dev"].fabric == "rack1"`
	if got := request.Selectors[0].CEL.Expression; got != want {
		t.Errorf("selector of shard 3: got %s, want %s", got, want)
	}
	if got := claim.Annotations["scheduling.dra-shared.dev/shard"]; got != "3" {
		t.Errorf("shard annotation: got %q, want 3", got)
	}
	claim, err = GenerateShard(job("train", "uid"), "net", 1, template, onFabric(), driver)
	if err != nil || claim.Spec.Devices.Requests[0].Exactly.Capacity != nil {
		t.Errorf("shard of a fabric without groups: got %+v, %v, want no capacity", claim, err)
	}
}

func TestGenerateShard_keepsOnlyAllocatedAlternative(t *testing.T) {
	first := onFabric("groups")
	first.Spec.Devices.Requests[0] = resourceapi.DeviceRequest{Name: "f", FirstAvailable: []resourceapi.DeviceSubRequest{
		{Name: "a", DeviceClassName: "other"},
		{Name: "b", DeviceClassName: "fabric." + driver,
			AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
	}}
	first.Status.Allocation.Devices.Results[0].Request = "f/b"
	claim, err := GenerateShard(job("train", "uid"), "net", 1, &resourceapi.ResourceClaimTemplate{}, first, driver)
	if err != nil {
		t.Fatalf("generate shard 1: %v", err)
	}
	if r := claim.Spec.Devices.Requests[0]; r.FirstAvailable != nil || r.Exactly.DeviceClassName != "fabric."+driver {
		t.Errorf("request of the shard: got %+v, want only the allocated alternative b", r)
	}
	none := func(string) (*resourceapi.DeviceClass, error) { return nil, nil }
	if isFabric, err := RequestsFabric(&first.Spec, driver, none); err != nil || !isFabric {
		t.Errorf("RequestsFabric for a request with a fabric as an alternative: got %t, %v", isFabric, err)
	}
}

func TestGenerateShard_rejects(t *testing.T) {
	unallocated, nic, two := onFabric(), onFabric(), onFabric()
	unallocated.Status.Allocation = nil
	nic.Status.Allocation.Devices.Results[0].Pool = "n1"
	two.Spec.Devices.Requests[0].Exactly.Count = 2
	for want, first := range map[string]*resourceapi.ResourceClaim{
		"is not allocated yet":                  unallocated,
		"is not a fabric: at most 255 pods":     nic,
		"more than one device":                  two,
		"divided by its capacity channels":      onFabric("groups", "channels"),
		"set the fabric's groups field instead": onFabric("channels"),
	} {
		_, err := GenerateShard(job("train", "uid"), "net", 1, &resourceapi.ResourceClaimTemplate{}, first, driver)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error of GenerateShard: got %v, want %q", err, want)
		}
	}
}

// reserved returns a claim with these entries: "group" is for the owner, "native" for
// Kubernetes' PodGroup, and all others are for pods.
func reserved(allocated bool, deleting bool, entries ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{}
	if allocated {
		c.Status.Allocation = &resourceapi.AllocationResult{}
	}
	if deleting {
		c.DeletionTimestamp = ptr.To(metav1.Now())
	}
	for _, name := range entries {
		entry := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: name, UID: types.UID(name)}
		switch name {
		case "group":
			entry = job("group", "group").Reference()
		case "native":
			entry = resourceapi.ResourceClaimConsumerReference{
				APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "group", UID: "native",
			}
		}
		c.Status.ReservedFor = append(c.Status.ReservedFor, entry)
	}
	return c
}

// describe returns a change as "+added-removed", with "!" for a precondition.
func describe(c Change) string {
	if c.Deallocate {
		return "deallocate"
	}
	text := ""
	for _, entry := range c.Add {
		text += "+" + entry.Name
	}
	for _, uid := range c.Remove {
		text += "-" + string(uid)
	}
	if c.Precondition {
		text += "!"
	}
	return text
}

func TestReservationChange(t *testing.T) {
	unbound := func(name string) PodState { return PodState{Name: name, UID: types.UID(name)} }
	bound := func(name string) PodState { return PodState{Name: name, UID: types.UID(name), Bound: true} }
	gated := func(name string) PodState {
		return PodState{Name: name, UID: types.UID(name), Gated: true, AwaitsEntry: true}
	}
	queued := PodState{Name: "q", UID: "q", Gated: true} // behind the gate of another controller
	stuck := PodState{Name: "s", UID: "s", Unschedulable: true}
	terminal := PodState{Name: "e", UID: "e", Bound: true, Terminal: true}
	allocated := func(entries ...string) *resourceapi.ResourceClaim { return reserved(true, false, entries...) }
	generated := allocated("s")
	generated.OwnerReferences = []metav1.OwnerReference{{UID: "group", Controller: ptr.To(true)}}
	for _, tc := range []struct {
		name   string
		claim  *resourceapi.ResourceClaim
		pods   []PodState
		native bool
		want   string // as describe returns it
	}{
		{"the claim is not allocated", reserved(false, false), []PodState{gated("a")}, false, ""},
		{"the claim is being deleted", reserved(true, true, "a"), []PodState{bound("a")}, false, ""},
		{"no pod is bound: the scheduler may deallocate", allocated("a"), []PodState{unbound("a")}, false, ""},
		{"the first pod is bound", allocated("a"), []PodState{bound("a")}, false, "+group"},
		{"held, and a pod is bound", allocated("a", "group"), []PodState{bound("a")}, false, ""},
		{"held, and all pods are deleted", allocated("group"), nil, false, ""},
		{"held, and all pods are terminal", allocated("group"), []PodState{terminal}, false, ""},
		{"not held, and all pods are terminal", allocated(), []PodState{terminal}, false, ""},
		{"held, and the only pod is unschedulable", allocated("group"), []PodState{stuck}, false, "-group!"},
		{"held, one pod is unschedulable and one bound", allocated("group", "a"), []PodState{stuck, bound("a")}, false, ""},
		{"held, one pod is unschedulable and one not tried", allocated("group"), []PodState{stuck, unbound("a")}, false, ""},
		{"held, and all pods that may be scheduled are unschedulable", allocated("group", "s", "b"),
			[]PodState{stuck, gated("b"), gated("c"), queued}, false, "-group-s-b!"},
		{"generated, and a waiting pod has an entry", generated, []PodState{stuck, gated("b")}, false, "-s!"},
		{"by name, and a waiting pod has an entry", allocated("s"), []PodState{stuck}, false, ""},
		{"a pod waits behind the gate of another controller", allocated("a"),
			[]PodState{bound("a"), queued}, false, "+group"},
		{"pods wait behind the gate", allocated("a"), []PodState{bound("a"), gated("b"), gated("c")}, false, "+group+b+c"},
		{"the leader has its entry and no node yet", allocated("a"), []PodState{unbound("a"), gated("b")}, false, ""},
		{"native: the cluster holds the claim", allocated("native", "group"), []PodState{bound("a")}, true, "-group!"},
		{"native: a pod still waits behind the gate", allocated("native"), []PodState{gated("a")}, true, "+a"},
		{"native: before the first pod", allocated("a", "group"), []PodState{bound("a")}, true, ""},
		{"back in bridge mode: pods need entries again", allocated("native"),
			[]PodState{bound("a"), bound("b"), terminal}, false, "+group+a+b-native"},
		{"back in bridge mode, without pods", allocated("native"), nil, false, "+group-native"},
		{"back in bridge mode, and held", allocated("native", "group", "a"),
			[]PodState{bound("a"), bound("b")}, false, "+b-native"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := ReservationChange(tc.claim, job("group", "group"), tc.pods, ReservationOptions{Native: tc.native})
			if got := describe(c); got != tc.want {
				t.Errorf("change of the reservation: got %q, want %q", got, tc.want)
			}
			if c.Empty() != (tc.want == "") {
				t.Errorf("Empty of change %q: got %t", tc.want, c.Empty())
			}
		})
	}
}

func TestReservationChange_keepsDevicesOfPodsThatUseOtherClaims(t *testing.T) {
	stuck := PodState{Name: "s", UID: "s", Unschedulable: true}
	held := reserved(true, false, "group")
	c := ReservationChange(held, job("group", "group"), []PodState{stuck}, ReservationOptions{Pinned: true})
	if !c.Empty() {
		t.Errorf("change of the reservation: got %q, want none", describe(c))
	}
}

func TestReservationChange_respectsLimitOfAPI(t *testing.T) {
	pods := []PodState{{Name: "leader", UID: "leader", Bound: true}}
	for i := range 400 {
		pods = append(pods, PodState{Name: fmt.Sprint(i), UID: types.UID(fmt.Sprint(i)), Gated: true, AwaitsEntry: true})
	}
	for _, tc := range []struct {
		name  string
		claim *resourceapi.ResourceClaim
		bound bool
		want  int
	}{
		{"the group and 254 pods", reserved(true, false, "leader"), true, 255},
		{"254 pods, and the group is present", reserved(true, false, "leader", "group"), true, 254},
		{"no pod: the leader is not bound", reserved(true, false, "leader"), false, 0},
	} {
		pods[0].Bound = tc.bound
		c := ReservationChange(tc.claim, job("group", "group"), pods, ReservationOptions{})
		if len(c.Add) != tc.want {
			t.Errorf("%s: the change adds %d entries, want %d", tc.name, len(c.Add), tc.want)
		}
	}
}

func TestReleaseChange(t *testing.T) {
	remove := Change{Remove: []types.UID{"group"}}
	removeUnchanged := Change{Remove: []types.UID{"group"}, Precondition: true}
	deallocate := Change{Deallocate: true}
	for _, tc := range []struct {
		name       string
		claim      *resourceapi.ResourceClaim
		keepsClaim bool
		want       Change
	}{
		{"by name, not held", reserved(true, false, "a"), true, Change{}},
		{"by name, held by the group alone", reserved(true, false, "group"), true, deallocate},
		{"by name, without entries because no pod was scheduled", reserved(true, false), true, deallocate},
		{"by name, not allocated", reserved(false, false), true, Change{}},
		{"by name, with Kubernetes' entry", reserved(true, false, "group", "native"), true, deallocate},
		{"by name, with running pods", reserved(true, false, "group", "a"), true, removeUnchanged},
		{"by name, being deleted", reserved(true, true, "group"), true, removeUnchanged},
		{"generated, held by the group alone", reserved(true, true, "group"), false, remove},
		{"generated, with running pods", reserved(true, true, "group", "a"), false, remove},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := ReleaseChange(tc.claim, "group", tc.keepsClaim, "native")
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("change that releases the claim (-want +got):\n%s", diff)
			}
		})
	}
}

func TestChange_Patch(t *testing.T) {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{UID: "c", ResourceVersion: "7"}}
	for _, tc := range []struct {
		name   string
		change Change
		want   string
	}{
		{"without precondition",
			Change{Add: []resourceapi.ResourceClaimConsumerReference{job("x", "x").Reference()}, Remove: []types.UID{"y"}},
			`{"metadata":{"uid":"c"},"status":{"reservedFor":[` +
				`{"apiGroup":"batch","resource":"jobs","name":"x","uid":"x"},{"$patch":"delete","uid":"y"}]}}`},
		{"with precondition", Change{Remove: []types.UID{"y"}, Precondition: true},
			`{"metadata":{"resourceVersion":"7","uid":"c"},"status":{"reservedFor":[{"$patch":"delete","uid":"y"}]}}`},
		{"deallocation", Change{Deallocate: true},
			`{"metadata":{"resourceVersion":"7","uid":"c"},"status":{"allocation":null,"reservedFor":null}}`},
	} {
		got, err := tc.change.Patch(claim)
		if err != nil || string(got) != tc.want {
			t.Errorf("patch %s:\ngot  %s, %v\nwant %s", tc.name, got, err, tc.want)
		}
	}
}

func TestDeletedClaimChange(t *testing.T) {
	for _, tc := range []struct {
		claim   *resourceapi.ResourceClaim
		waiting []types.UID
		want    string
	}{
		{reserved(true, true, "a", "group"), nil, "-group!"},
		{reserved(true, true, "a", "group"), []types.UID{"a", "b"}, "-a-group!"},
		{reserved(true, true, "group", "other"), []types.UID{"a"}, "-group!"},
		{reserved(true, true, "native"), nil, "!"},
		{reserved(true, true, "native"), []types.UID{"native"}, "-native!"},
	} {
		if got := describe(DeletedClaimChange(tc.claim, job("group", "group"), tc.waiting...)); got != tc.want {
			t.Errorf("change of a deleted claim with entries %v and waiting pods %v: got %q, want %q",
				tc.claim.Status.ReservedFor, tc.waiting, got, tc.want)
		}
	}
}

// Administrators may create their own classes for fabrics, and users may select fabrics in
// requests.
func TestRequestsFabric_selectors(t *testing.T) {
	const attributes = `device.attributes["dra-shared.dev"]`
	for _, tc := range []struct {
		expression string
		want       bool
	}{
		{`device.driver == "dra-shared.dev" && ` + attributes + `.kind == "fabric"`, true},
		{attributes + `.fabric == "rack1"`, true},
		{attributes + `.fabric=="rack1"`, true},
		{attributes + `.fabric in ["rack1", "rack2"]`, true},
		{attributes + `.fabric.startsWith("rack")`, true},
		{attributes + `["fabric"] == "rack1"`, true},
		{`has(` + attributes + `.fabric)`, true},
		{attributes + `.?fabric.orValue("") == "rack1"`, true},
		{`"fabric" in ` + attributes, true},
		{`device.attributes['dra-shared.dev'].kind=='fabric'`, true},
		{attributes + `["kind"] == "fabric"`, true},
		{attributes + `.kind in ["nic", "fabric"]`, true},
		{attributes + `.?kind.orValue("") == "fabric"`, true},
		{attributes + `[?"kind"].orValue("") == "fabric"`, true},
		{`"fabric" == ` + attributes + `.kind`, true},
		{"device .attributes[ \"dra-shared.dev\" ]\n  . kind\t== \"fabric\" // a comment", true},
		{attributes + `.kind == "nic" || ` + attributes + `.kind == "fabric"`, true},

		{attributes + `.kind == "nic"`, false},
		{attributes + `.kind != "fabric"`, false},
		{attributes + `.kind in ["nic", "accelerator"] && "fabric" in ["fabric"]`, false},
		{attributes + `.fabrics == "rack1"`, false},
		{attributes + `.name == "fabric"`, false},
		{`!has(` + attributes + `.fabric)`, false},
		{`!("fabric" in ` + attributes + `)`, false},
		{`"fabric" in ` + attributes + `.topology`, false},
		{`device.attributes["other.example.com"].kind == "fabric"`, false},
		{`device.attributes["other.example.com"].note == 'device.attributes["dra-shared.dev"].fabric'`, false},
		{`"an unterminated string`, false},
	} {
		selectors := []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: tc.expression}}}
		for place, request := range map[string]resourceapi.DeviceRequest{
			"DeviceClass": {Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "racks"}},
			"request":     {Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "driver", Selectors: selectors}},
			"alternative": {FirstAvailable: []resourceapi.DeviceSubRequest{
				{DeviceClassName: "driver"}, {DeviceClassName: "driver", Selectors: selectors},
			}},
		} {
			spec := &resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
				Requests: []resourceapi.DeviceRequest{request},
			}}
			class := func(name string) (*resourceapi.DeviceClass, error) {
				if name != "racks" {
					return &resourceapi.DeviceClass{}, nil
				}
				return &resourceapi.DeviceClass{Spec: resourceapi.DeviceClassSpec{Selectors: selectors}}, nil
			}
			if got, err := RequestsFabric(spec, "dra-shared.dev", class); got != tc.want || err != nil {
				t.Errorf("%s in a %s: got %t, %v, want %t", tc.expression, place, got, err, tc.want)
			}
		}
	}
}

func TestAnySelectsDriver(t *testing.T) {
	const attributes = `device.attributes["dra-shared.dev"]`
	for _, tc := range []struct {
		expression  string
		driver, nic bool
	}{
		{`device.driver == "dra-shared.dev" && ` + attributes + `.kind == "nic"`, true, true},
		{`device.driver=='dra-shared.dev' && device.attributes['dra-shared.dev'].kind=='nic'`, true, true},
		{`'dra-shared.dev' == device.driver`, true, false},
		{attributes + `.network == "storage"`, true, false},
		{attributes + `.kind in ["nic", "accelerator"]`, true, true},
		{attributes + `.kind == "accelerator"`, true, false},
		{`device.driver in ["other.example.com", "dra-shared.dev"]`, true, false},
		{`device.capacity["dra-shared.dev"].bandwidth.compareTo(quantity("1G")) >= 0`, true, false},
		{`device.driver != "other.example.com" && device.driver == "dra-shared.dev"`, true, false},

		{`device.driver == "other.example.com"`, false, false},
		{`device.driver != "dra-shared.dev"`, false, false},
		{`'dra-shared.dev' != device.driver`, false, false},
		{`!(device.driver == "dra-shared.dev")`, false, false},
		{`!("dra-shared.dev" in device.attributes)`, false, false},
		{`device.driver == "nic.dra-shared.dev"`, false, false},
		{`device.driver == "other.example.com" // not "dra-shared.dev"`, false, false},
		{`device.attributes["other.example.com"].kind == "nic"`, false, false},
	} {
		selectors := []resourceapi.DeviceSelector{{}, {CEL: &resourceapi.CELDeviceSelector{Expression: tc.expression}}}
		if got := AnySelectsDriver(selectors, "dra-shared.dev"); got != tc.driver {
			t.Errorf("%s selects devices of the driver: got %t, want %t", tc.expression, got, tc.driver)
		}
		if got := AnySelectsNIC(selectors, "dra-shared.dev"); got != tc.nic {
			t.Errorf("%s selects NICs: got %t, want %t", tc.expression, got, tc.nic)
		}
	}
}

func TestRequestsFabric_withoutDeviceClass(t *testing.T) {
	spec := &resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
		{Name: "r", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "racks"}},
	}}}
	for _, want := range []error{nil, errors.New("unavailable")} {
		class := func(string) (*resourceapi.DeviceClass, error) { return nil, want }
		if got, err := RequestsFabric(spec, "dra-shared.dev", class); got || !errors.Is(err, want) {
			t.Errorf("got %t, %v, want false, %v", got, err, want)
		}
	}
}
