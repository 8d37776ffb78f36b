package claims

import (
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

// job is an owner that is no PodGroup: nothing here knows what it is.
func job(name string, uid types.UID) Owner {
	return Owner{GroupVersionKind: schema.GroupVersionKind{Group: "batch", Version: "v1", Kind: "Job"}, Resource: "jobs", Namespace: "ns", Name: name, UID: uid}
}

func TestANameFollowsFromTheOwnersUID(t *testing.T) {
	first := Name(job("train", "uid-1"), "net", 0)
	if !strings.HasPrefix(first, "train-net-") || first != Name(job("train", "uid-1"), "net", 0) {
		t.Errorf("%s", first)
	}
	seen := map[string]string{}
	for what, name := range map[string]string{
		"another generation": Name(job("train", "uid-2"), "net", 0),
		"another entry":      Name(job("train", "uid-1"), "gpu", 0),
		"a shard":            Name(job("train", "uid-1"), "net", 1),
		"the first":          first,
	} {
		if other, taken := seen[name]; taken {
			t.Errorf("%s and %s are both %s", what, other, name)
		}
		seen[name] = what
	}
}

func FuzzName(f *testing.F) {
	f.Add("a", "uid", "net", 0)
	f.Add(strings.Repeat("a.", 126)+"a", "uid", strings.Repeat("b", 63), 255)
	f.Fuzz(func(t *testing.T, owner, uid, entry string, shard int) {
		if len(validation.IsDNS1123Subdomain(owner)) > 0 || len(validation.IsDNS1123Label(entry)) > 0 || shard < 0 || shard >= MaxShards {
			t.Skip("the API server refuses it")
		}
		name := Name(job(owner, types.UID(uid)), entry, shard)
		if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
			t.Errorf("%q: %v", name, problems)
		}
		if n, ok := ShardNumber(job(owner, types.UID(uid)), entry, name); n != shard || !ok {
			t.Errorf("%q is shard %d, %t, want %d", name, n, ok, shard)
		}
	})
}

func TestAGeneratedClaimIsItsTemplatesAndItsOwners(t *testing.T) {
	template := &resourceapi.ResourceClaimTemplate{Spec: resourceapi.ResourceClaimTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"c": "d"}},
		Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "nic"}}}},
	}}
	claim := Generate(job("train", "uid"), "net", 0, template)
	if claim.Namespace != "ns" || claim.Labels["a"] != "b" || claim.Annotations["c"] != "d" || claim.Annotations["scheduling.dra-shared.dev/claim"] != "net" || claim.Spec.Devices.Requests[0].Name != "nic" {
		t.Errorf("%+v", claim)
	}
	if !IsGeneratedFor(claim, "uid") || IsGeneratedFor(claim, "another") || claim.OwnerReferences[0].Kind != "Job" || claim.OwnerReferences[0].APIVersion != "batch/v1" {
		t.Errorf("%+v", claim.OwnerReferences)
	}
	claim.Labels["a"] = "changed"
	claim.Spec.Devices.Requests[0].Name = "changed"
	if template.Spec.Spec.Devices.Requests[0].Name != "nic" {
		t.Error("the template was changed")
	}
}

const driver = "dra-shared.dev"

func onFabric(consumed ...resourceapi.QualifiedName) *resourceapi.ResourceClaim {
	result := resourceapi.DeviceRequestAllocationResult{Request: "f", Driver: driver, Pool: "fabric/rack1", Device: "rack1", ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{}}
	for _, c := range consumed {
		result.ConsumedCapacity[c] = resource.MustParse("1")
	}
	return &resourceapi.ResourceClaim{
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "f", Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: "fabric." + driver, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}}}}},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{result}}}},
	}
}

func TestAShardIsOnTheSameDeviceAndConsumesNothing(t *testing.T) {
	template := &resourceapi.ResourceClaimTemplate{}
	claim, err := GenerateShard(job("train", "uid"), "net", 3, template, onFabric("groups"), driver)
	if err != nil {
		t.Fatal(err)
	}
	request := claim.Spec.Devices.Requests[0].Exactly
	if q := request.Capacity.Requests["groups"]; !q.IsZero() || request.Selectors[0].CEL.Expression != `device.attributes["dra-shared.dev"].fabric == "rack1"` {
		t.Errorf("%+v", request)
	}
	if claim.Annotations["scheduling.dra-shared.dev/shard"] != "3" {
		t.Errorf("%v", claim.Annotations)
	}
	if claim, err = GenerateShard(job("train", "uid"), "net", 1, template, onFabric(), driver); err != nil || claim.Spec.Devices.Requests[0].Exactly.Capacity != nil {
		t.Errorf("a fabric without groups: %+v, %v", claim, err)
	}
}

func TestAnAlternativeIsPinnedToTheOneThatWasChosen(t *testing.T) {
	first := onFabric("groups")
	first.Spec.Devices.Requests[0] = resourceapi.DeviceRequest{Name: "f", FirstAvailable: []resourceapi.DeviceSubRequest{
		{Name: "a", DeviceClassName: "other"},
		{Name: "b", DeviceClassName: "fabric." + driver, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
	}}
	first.Status.Allocation.Devices.Results[0].Request = "f/b"
	claim, err := GenerateShard(job("train", "uid"), "net", 1, &resourceapi.ResourceClaimTemplate{}, first, driver)
	if err != nil {
		t.Fatal(err)
	}
	if r := claim.Spec.Devices.Requests[0]; r.FirstAvailable != nil || r.Exactly.DeviceClassName != "fabric."+driver {
		t.Errorf("%+v", r)
	}
	if !RequestsFabric(&first.Spec, driver) {
		t.Error("an alternative that is a fabric spans nodes")
	}
}

func TestWhatCannotBeShardedSaysWhy(t *testing.T) {
	unallocated, nic, two := onFabric(), onFabric(), onFabric()
	unallocated.Status.Allocation = nil
	nic.Status.Allocation.Devices.Results[0].Pool = "n1"
	two.Spec.Devices.Requests[0].Exactly.Count = 2
	for want, first := range map[string]*resourceapi.ResourceClaim{
		"is not allocated yet":            unallocated,
		"is no fabric: at most 255 pods":  nic,
		"more than one device":            two,
		"shared by its capacity channels": onFabric("groups", "channels"),
		"give the fabric groups instead":  onFabric("channels"),
	} {
		if _, err := GenerateShard(job("train", "uid"), "net", 1, &resourceapi.ResourceClaimTemplate{}, first, driver); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// reserved is a claim that is reserved for some: "pod:x", "group", "native".
func reserved(allocated bool, deleting bool, by ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{}
	if allocated {
		c.Status.Allocation = &resourceapi.AllocationResult{}
	}
	if deleting {
		c.DeletionTimestamp = ptr.To(metav1.Now())
	}
	for _, b := range by {
		r := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: b, UID: types.UID(b)}
		switch b {
		case "group":
			r = job("group", "group").Reference()
		case "native":
			r = resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "group", UID: "native"}
		}
		c.Status.ReservedFor = append(c.Status.ReservedFor, r)
	}
	return c
}

func TestReservations(t *testing.T) {
	bound := func(name string) Pod { return Pod{Name: name, UID: types.UID(name), Bound: true} }
	gated := func(name string) Pod { return Pod{Name: name, UID: types.UID(name), Gated: true} }
	stuck := Pod{Name: "s", UID: "s", Unschedulable: true}
	gone := Pod{Name: "e", UID: "e", Bound: true, Terminal: true}
	for _, tc := range []struct {
		name   string
		claim  *resourceapi.ResourceClaim
		pods   []Pod
		native bool
		want   string // +added -removed !guarded
	}{
		{"not allocated", reserved(false, false), []Pod{gated("a")}, false, ""},
		{"being deleted", reserved(true, true, "a"), []Pod{bound("a")}, false, ""},
		{"allocated, no pod bound: the scheduler may give it up", reserved(true, false, "a"), []Pod{{Name: "a", UID: "a"}}, false, ""},
		{"the first pod is bound", reserved(true, false, "a"), []Pod{bound("a")}, false, "+group"},
		{"held", reserved(true, false, "a", "group"), []Pod{bound("a")}, false, ""},
		{"held, all pods gone", reserved(true, false, "group"), nil, false, ""},
		{"held, all pods ended", reserved(true, false, "group"), []Pod{gone}, false, ""},
		{"only ended pods", reserved(true, false), []Pod{gone}, false, ""},
		{"held, and no pod fits", reserved(true, false, "group"), []Pod{stuck}, false, "-group!"},
		{"held, one does not fit, another runs", reserved(true, false, "group", "a"), []Pod{stuck, bound("a")}, false, ""},
		{"others wait behind the gate", reserved(true, false, "a"), []Pod{bound("a"), gated("b"), gated("c")}, false, "+group+b+c"},
		{"the leader is reserved, not bound yet", reserved(true, false, "a"), []Pod{{Name: "a", UID: "a"}, gated("b")}, false, "+b"},
		{"native: the cluster holds it", reserved(true, false, "native", "group"), []Pod{bound("a")}, true, "-group!"},
		{"native: a pod that was gated before", reserved(true, false, "native"), []Pod{gated("a")}, true, "+a"},
		{"native: before its first pod", reserved(true, false, "a", "group"), []Pod{bound("a")}, true, ""},
		{"off again: the pods' entries come back", reserved(true, false, "native"), []Pod{bound("a"), bound("b"), gone}, false, "+group+a+b-native"},
		{"off again, no pod there", reserved(true, false, "native"), nil, false, "+group-native"},
		{"off again, held already", reserved(true, false, "native", "group", "a"), []Pod{bound("a"), bound("b")}, false, "+b-native"},
	} {
		got := ""
		c := ReservationChange(tc.claim, job("group", "group"), tc.pods, tc.native)
		for _, a := range c.Add {
			got += "+" + a.Name
		}
		for _, r := range c.Remove {
			got += "-" + string(r)
		}
		if c.Precondition {
			got += "!"
		}
		if got != tc.want || c.Empty() != (tc.want == "") {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestNoClaimIsReservedForMoreThanTheAPIHasRoomFor(t *testing.T) {
	pods := []Pod{{Name: "leader", UID: "leader", Bound: true}}
	for i := range 400 {
		pods = append(pods, Pod{Name: fmt.Sprint(i), UID: types.UID(fmt.Sprint(i)), Gated: true})
	}
	for _, tc := range []struct {
		claim *resourceapi.ResourceClaim
		bound bool
		want  int
	}{
		{reserved(true, false, "leader"), true, 255},          // the group and 254 pods
		{reserved(true, false, "leader", "group"), true, 254}, // 254 pods
		{reserved(true, false, "leader"), false, 254},         // 254 pods, and room for the group
	} {
		pods[0].Bound = tc.bound
		c := ReservationChange(tc.claim, job("group", "group"), pods, false)
		if len(c.Add) != tc.want {
			t.Errorf("bound %t: %d are added, want %d", tc.bound, len(c.Add), tc.want)
		}
	}
}

func TestWhatIsReleasedIsFree(t *testing.T) {
	for _, tc := range []struct {
		name  string
		claim *resourceapi.ResourceClaim
		stays bool
		want  Change
	}{
		{"not held", reserved(true, false, "a"), true, Change{}},
		{"generated, alone", reserved(true, true, "group"), false, Change{Remove: []types.UID{"group"}}},
		{"generated, pods live", reserved(true, true, "group", "a"), false, Change{Remove: []types.UID{"group"}}},
		{"by name, alone", reserved(true, false, "group"), true, Change{Deallocate: true}},
		{"by name, held by nobody, since its pods never fit", reserved(true, false), true, Change{Deallocate: true}},
		{"by name, free", reserved(false, false), true, Change{}},
		{"by name, Kubernetes' entry is left", reserved(true, false, "group", "native"), true, Change{Deallocate: true}},
		{"by name, pods live: it goes free with the last", reserved(true, false, "group", "a"), true, Change{Remove: []types.UID{"group"}, Precondition: true}},
		{"by name, being deleted", reserved(true, true, "group"), true, Change{Remove: []types.UID{"group"}, Precondition: true}},
	} {
		if diff := cmp.Diff(tc.want, ReleaseChange(tc.claim, "group", tc.stays, "native")); diff != "" {
			t.Errorf("%s:\n%s", tc.name, diff)
		}
	}
}

func TestAPatchTouchesWhatItMeansTo(t *testing.T) {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{UID: "c", ResourceVersion: "7"}}
	for want, c := range map[string]Change{
		`{"metadata":{"uid":"c"},"status":{"reservedFor":[{"apiGroup":"batch","resource":"jobs","name":"x","uid":"x"},{"$patch":"delete","uid":"y"}]}}`: {
			Add: []resourceapi.ResourceClaimConsumerReference{job("x", "x").Reference()}, Remove: []types.UID{"y"}},
		`{"metadata":{"resourceVersion":"7","uid":"c"},"status":{"reservedFor":[{"$patch":"delete","uid":"y"}]}}`: {Remove: []types.UID{"y"}, Precondition: true},
		`{"metadata":{"resourceVersion":"7","uid":"c"},"status":{"allocation":null,"reservedFor":null}}`:          {Deallocate: true},
	} {
		got, err := c.Patch(claim)
		if err != nil || string(got) != want {
			t.Errorf("got  %s, %v\nwant %s", got, err, want)
		}
	}
}

func TestADeletedClaimIsGivenUp(t *testing.T) {
	for _, tc := range []struct {
		claim   *resourceapi.ResourceClaim
		waiting []types.UID
		want    string
	}{
		{reserved(true, true, "a", "group"), nil, "group"},
		{reserved(true, true, "a", "group"), []types.UID{"a", "b"}, "a group"},
		{reserved(true, true, "group", "other"), []types.UID{"a"}, "group"},
		{reserved(true, true, "native"), nil, ""},
		{reserved(true, true, "native"), []types.UID{"native"}, "native"},
	} {
		c := DeletedClaimChange(tc.claim, job("group", "group"), tc.waiting...)
		var got []string
		for _, uid := range c.Remove {
			got = append(got, string(uid))
		}
		if strings.Join(got, " ") != tc.want || !c.Precondition || len(c.Add) > 0 {
			t.Errorf("%v, %v wait: %v goes, want %q", tc.claim.Status.ReservedFor, tc.waiting, got, tc.want)
		}
	}
}
