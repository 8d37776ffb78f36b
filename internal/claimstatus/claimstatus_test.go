// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package claimstatus

import (
	"context"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
)

const manager = "test-manager"

// allocatedClaim returns a claim with one share and one whole device.
func allocatedClaim() *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "claim", UID: "1"},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
				Results: []resourceapi.DeviceRequestAllocationResult{
					{Request: "a", Driver: "d", Pool: "n1", Device: "nic0", ShareID: ptr.To(types.UID("share"))},
					{Request: "b", Driver: "d", Pool: "n1", Device: "gpu0"},
				},
			}},
		},
	}
}

func condition(status metav1.ConditionStatus, message string) metav1.Condition {
	return metav1.Condition{Type: "Ready", Status: status, Reason: "Test", Message: message}
}

// apply calls Apply against a fake API server that stores the claim, and returns
// the claim that it stores afterwards.
func apply(
	t *testing.T,
	claim *resourceapi.ResourceClaim,
	entries ...resourceapi.AllocatedDeviceStatus,
) *resourceapi.ResourceClaim {
	t.Helper()
	client := fake.NewClientset(claim)
	if err := Apply(t.Context(), client, claim, manager, entries); err != nil {
		t.Fatal(err)
	}
	got, err := client.ResourceV1().ResourceClaims(claim.Namespace).Get(t.Context(), claim.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func TestApply_writesEveryField(t *testing.T) {
	claim := allocatedClaim()
	share := NewEntry(
		claim.Status.Allocation.Devices.Results[0],
		&runtime.RawExtension{Raw: []byte(`{"pods":1}`)},
		condition(metav1.ConditionTrue, "attached"),
	)
	share.NetworkData = &resourceapi.NetworkDeviceData{
		InterfaceName:   "net1",
		HardwareAddress: "02:00:00:00:00:01",
		IPs:             []string{"10.0.0.1/24"},
	}
	whole := NewEntry(claim.Status.Allocation.Devices.Results[1], nil, condition(metav1.ConditionFalse, "not running"))
	devices := apply(t, claim, share, whole).Status.Devices
	if len(devices) != 2 {
		t.Fatalf("status has %d devices, want 2: %+v", len(devices), devices)
	}
	got := devices[0]
	if ptr.Deref(got.ShareID, "") != "share" || string(got.Data.Raw) != `{"pods":1}` || got.NetworkData == nil ||
		got.NetworkData.InterfaceName != "net1" || len(got.NetworkData.IPs) != 1 ||
		got.NetworkData.HardwareAddress != "02:00:00:00:00:01" {
		t.Errorf("entry of the share: %+v", got)
	}
	if len(got.Conditions) != 1 || got.Conditions[0].Message != "attached" ||
		got.Conditions[0].LastTransitionTime.IsZero() {
		t.Errorf("conditions of the share: %+v", got.Conditions)
	}
	if got := devices[1]; got.ShareID != nil || got.Data != nil || got.NetworkData != nil ||
		got.Conditions[0].Status != metav1.ConditionFalse {
		t.Errorf("entry of the whole device: %+v", got)
	}
}

func TestApply_omitsDevicesThatAreNotAllocated(t *testing.T) {
	claim := allocatedClaim()
	otherShare := NewEntry(claim.Status.Allocation.Devices.Results[0], nil)
	otherShare.ShareID = ptr.To("other")
	otherDevice := NewEntry(claim.Status.Allocation.Devices.Results[1], nil)
	otherDevice.Device = "gpu1"
	if got := apply(t, claim, otherShare, otherDevice).Status.Devices; len(got) != 0 {
		t.Errorf("status has entries for devices that are not allocated: %+v", got)
	}
	deallocated := allocatedClaim()
	entry := NewEntry(deallocated.Status.Allocation.Devices.Results[1], nil)
	deallocated.Status.Allocation = nil
	if got := apply(t, deallocated, entry).Status.Devices; len(got) != 0 {
		t.Errorf("a deallocated claim has entries: %+v", got)
	}
}

func TestApply_keepsTransitionTimes(t *testing.T) {
	before := metav1.NewTime(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	claim := allocatedClaim()
	result := claim.Status.Allocation.Devices.Results[0]
	current := condition(metav1.ConditionTrue, "attached to 1 pod")
	current.LastTransitionTime = before
	// The entry of another share of the device must not lend its time.
	other := NewEntry(result, nil, condition(metav1.ConditionFalse, ""))
	other.ShareID = ptr.To("other")
	claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{other, NewEntry(result, nil, current)}
	for _, tc := range []struct {
		name  string
		entry metav1.Condition
		kept  bool
	}{
		{"only the message changes", condition(metav1.ConditionTrue, "attached to 2 pods"), true},
		{"the status changes", condition(metav1.ConditionFalse, "detached"), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := keepTransitionTimes(claim, NewEntry(result, nil, tc.entry)).Conditions
			if len(got) != 1 || got[0].Message != tc.entry.Message || got[0].Status != tc.entry.Status {
				t.Fatalf("conditions: %+v", got)
			}
			if kept := got[0].LastTransitionTime.Equal(&before); kept != tc.kept {
				t.Errorf("transition time %s, kept: %t, want %t", got[0].LastTransitionTime, kept, tc.kept)
			}
		})
	}
	if claim.Status.Devices[1].Conditions[0].Message != "attached to 1 pod" {
		t.Error("keepTransitionTimes modified the claim")
	}
}

func TestApply_sendsUIDAndForcesOwnership(t *testing.T) {
	claim := allocatedClaim()
	client := fake.NewClientset()
	client.PrependReactor("patch", "resourceclaims", func(a clienttesting.Action) (bool, runtime.Object, error) {
		patch, ok := a.(clienttesting.PatchActionImpl)
		if !ok || patch.Subresource != "status" || patch.PatchType != types.ApplyPatchType ||
			!strings.Contains(string(patch.Patch), `"uid":"1"`) {
			t.Errorf("patch of the status: %+v, %s", a, patch.Patch)
		}
		if o := patch.PatchOptions; o.FieldManager != manager || !ptr.Deref(o.Force, false) {
			t.Errorf("patch options: %+v", o)
		}
		return true, claim, nil
	})
	if err := Apply(t.Context(), client, claim, manager, nil); err != nil {
		t.Error(err)
	}
}

func TestApply_errors(t *testing.T) {
	resource := schema.GroupResource{Resource: "resourceclaims"}
	for _, tc := range []struct {
		name   string
		answer error
		want   func(error) bool
	}{
		{
			"a deleted claim is not an error", apierrors.NewNotFound(resource, "claim"),
			func(err error) bool { return err == nil },
		},
		{"a replaced claim is a conflict", apierrors.NewConflict(resource, "claim", context.Canceled), apierrors.IsConflict},
		{"the error names the claim", apierrors.NewForbidden(resource, "claim", nil), func(err error) bool {
			return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "write status of claim ns/claim: ")
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			client := fake.NewClientset()
			client.PrependReactor(
				"patch",
				"resourceclaims",
				func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, tc.answer },
			)
			if err := Apply(t.Context(), client, allocatedClaim(), manager, nil); !tc.want(err) {
				t.Errorf("Apply returned %v", err)
			}
		})
	}
}

func TestContains(t *testing.T) {
	claim := allocatedClaim()
	results := claim.Status.Allocation.Devices.Results
	ready := condition(metav1.ConditionTrue, "attached")
	otherMessage, otherStatus := condition(metav1.ConditionTrue, "x"), condition(metav1.ConditionFalse, "attached")
	type entries = []resourceapi.AllocatedDeviceStatus
	claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{
		NewEntry(results[0], nil, ready, metav1.Condition{Type: "Other"}),
	}
	for _, tc := range []struct {
		name    string
		entries entries
		want    bool
	}{
		{"no entries", nil, true},
		{"the same condition", entries{NewEntry(results[0], nil, ready)}, true},
		{"another message", entries{NewEntry(results[0], nil, otherMessage)}, false},
		{"another status", entries{NewEntry(results[0], nil, otherStatus)}, false},
		{"a missing entry", entries{NewEntry(results[0], nil, ready), NewEntry(results[1], nil, ready)}, false},
	} {
		if got := Contains(claim, tc.entries); got != tc.want {
			t.Errorf("%s: Contains = %t, want %t", tc.name, got, tc.want)
		}
	}
}

func TestMatches(t *testing.T) {
	claim := allocatedClaim()
	result, missing := claim.Status.Allocation.Devices.Results[0], claim.Status.Allocation.Devices.Results[1]
	entry := func(data string, ip string, c metav1.Condition) []resourceapi.AllocatedDeviceStatus {
		e := NewEntry(result, nil, c)
		if data != "" {
			e.Data = &runtime.RawExtension{Raw: []byte(data)}
		}
		if ip != "" {
			e.NetworkData = &resourceapi.NetworkDeviceData{IPs: []string{ip}}
		}
		return []resourceapi.AllocatedDeviceStatus{e}
	}
	ready := condition(metav1.ConditionTrue, "attached")
	claim.Status.Devices = entry(`{"a":1,"b":[2]}`, "10.0.0.1/24", ready)
	for name, tc := range map[string]struct {
		entries []resourceapi.AllocatedDeviceStatus
		want    bool
	}{
		"the same":          {entry(`{"a":1,"b":[2]}`, "10.0.0.1/24", ready), true},
		"another order":     {entry(`{"b": [2], "a": 1}`, "10.0.0.1/24", ready), true},
		"other data":        {entry(`{"a":2,"b":[2]}`, "10.0.0.1/24", ready), false},
		"no data":           {entry("", "10.0.0.1/24", ready), false},
		"another address":   {entry(`{"a":1,"b":[2]}`, "10.0.0.2/24", ready), false},
		"no network data":   {entry(`{"a":1,"b":[2]}`, "", ready), false},
		"another condition": {entry(`{"a":1,"b":[2]}`, "10.0.0.1/24", condition(metav1.ConditionFalse, "x")), false},
		"further entries":   {nil, true},
		"a missing entry":   {[]resourceapi.AllocatedDeviceStatus{NewEntry(missing, nil)}, false},
		"one that is released": {[]resourceapi.AllocatedDeviceStatus{{
			Driver: "d", Pool: "n1", Device: "gone", Conditions: []metav1.Condition{ready}}}, true},
	} {
		if got := Matches(claim, tc.entries); got != tc.want {
			t.Errorf("%s: Matches = %t, want %t", name, got, tc.want)
		}
	}
}

func TestIsWritten(t *testing.T) {
	ready, other := condition(metav1.ConditionTrue, "attached"), condition(metav1.ConditionTrue, "")
	other.Type = "OfFormerRelease"
	claim := allocatedClaim()
	results := claim.Status.Allocation.Devices.Results
	entry := NewEntry(results[0], nil, ready)
	entries := []resourceapi.AllocatedDeviceStatus{entry}
	for name, tc := range map[string]struct {
		devices []resourceapi.AllocatedDeviceStatus
		want    bool
	}{
		"the same":        {entries, true},
		"no entry":        {nil, false},
		"other condition": {[]resourceapi.AllocatedDeviceStatus{NewEntry(results[0], nil, ready, other)}, false},
		"entry of the same pool": {
			[]resourceapi.AllocatedDeviceStatus{entry, NewEntry(results[1], nil, ready)}, false},
		"entry of another pool": {
			[]resourceapi.AllocatedDeviceStatus{entry, {Driver: "d", Pool: "fabrics", Device: "f"}}, true},
		"entry of another driver": {
			[]resourceapi.AllocatedDeviceStatus{entry, {Driver: "e", Pool: "n1", Device: "gpu0"}}, true},
	} {
		claim.Status.Devices = tc.devices
		if got := IsWritten(claim, entries); got != tc.want {
			t.Errorf("%s: IsWritten = %t, want %t", name, got, tc.want)
		}
	}
}

func TestTruncate(t *testing.T) {
	for _, tc := range []struct{ text, want string }{
		{"short", "short"},
		{"exactly 10", "exactly 10"},
		{"more than ten", "mor... ten"},
		{"äöüäöü", "ä...öü"}, // the cut is inside a character
	} {
		if got := Truncate(tc.text, 10); got != tc.want || !utf8.ValidString(got) {
			t.Errorf("Truncate(%q, 10) = %q, want %q", tc.text, got, tc.want)
		}
	}
}

func TestLog(t *testing.T) {
	clock := testclock.NewFakePassiveClock(time.Unix(0, 0))
	digest := func(pool string) Digest {
		t.Helper()
		d, err := DigestOf([]resourceapi.AllocatedDeviceStatus{{Pool: pool}})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	a, b := digest("a"), digest("b")
	l := NewLog(clock, time.Minute)
	if l.Has("1", a) {
		t.Error("an empty Log has a write")
	}
	if _, ok := l.Age("1"); ok {
		t.Error("an empty Log has the age of a write")
	}
	l.Record("1", a)
	clock.SetTime(time.Unix(59, 0))
	if age, ok := l.Age("1"); !ok || age != 59*time.Second {
		t.Errorf("the last write is %s old, want 59s", age)
	}
	if !l.Has("1", a) || l.Has("1", b) || l.Has("2", a) {
		t.Error("the Log does not have exactly the write that was recorded")
	}
	clock.SetTime(time.Unix(60, 0))
	if l.Has("1", a) {
		t.Error("a write counts after the maximum age")
	}
	if !l.Wrote("1", a) || l.Wrote("1", b) || l.Wrote("2", a) {
		t.Error("after the maximum age, the Log does not have exactly the write that was recorded")
	}
	l.Record("1", b)
	if l.Has("1", a) || !l.Has("1", b) {
		t.Error("the Log does not have the last write")
	}
	l.Fail("1")
	if age, ok := l.Age("1"); !ok || age != 0 || l.Has("1", b) || l.Wrote("1", b) {
		t.Error("after Fail, the Log still has the write, or no age")
	}
	l.Forget("1")
	if _, ok := l.Age("1"); ok {
		t.Error("Forget left the write")
	}
	l.Record("1", a)
	l.ForgetAll()
	if l.Has("1", a) {
		t.Error("ForgetAll left a write")
	}
	unlimited := NewLog(clock, 0)
	unlimited.Record("1", a)
	clock.SetTime(time.Unix(1e9, 0))
	if !unlimited.Has("1", a) {
		t.Error("without a maximum age a write stopped counting")
	}
}
