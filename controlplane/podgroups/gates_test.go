// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// gatedPod returns a pod behind the driver's gate that was created age seconds before a fixed
// time. It uses the claim "claim" for the entry "net".
func gatedPod(name string, age int) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(time.Unix(1000-int64(age), 0)),
		},
		Spec: corev1.PodSpec{
			SchedulingGates: []corev1.PodSchedulingGate{{Name: scheduling.ReservedGate}},
			ResourceClaims:  []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: ptr.To("claim")}},
		},
	}
}

func ungatedPod(name string, age int) *corev1.Pod {
	pod := gatedPod(name, age)
	pod.Spec.SchedulingGates = nil
	return pod
}

func unschedulablePod(name string, age int) *corev1.Pod {
	pod := ungatedPod(name, age)
	pod.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
	}}
	return pod
}

func groupWith(pods ...*corev1.Pod) *group {
	return &group{pods: pods, sharedClaims: []*sharedClaim{{
		PodGroupResourceClaim: scheduling.PodGroupResourceClaim{Name: "net"},
		shards:                map[int]*resourceapi.ResourceClaim{},
	}}}
}

// rejectedAt returns the argument of leaders, for pods that were rejected the given seconds ago, or a moment ago.
func rejectedAt(secondsAgo map[types.UID]int) func(types.UID) time.Duration {
	return func(pod types.UID) time.Duration { return time.Duration(secondsAgo[pod]) * time.Second }
}

func TestGroup_leaders(t *testing.T) {
	foreignGate := gatedPod("foreign", 9)
	foreignGate.Spec.SchedulingGates = append(foreignGate.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: "queue"})
	terminating := gatedPod("terminating", 9)
	terminating.DeletionTimestamp = ptr.To(metav1.Now())
	terminal := gatedPod("terminal", 9)
	terminal.Status.Phase = corev1.PodSucceeded
	threeRejected := []*corev1.Pod{
		unschedulablePod("a", 4), unschedulablePod("b", 4), unschedulablePod("c", 4), gatedPod("d", 2),
	}
	for _, tc := range []struct {
		name     string
		pods     []*corev1.Pod
		rejected map[types.UID]int // seconds ago
		want     types.UID
	}{
		{"of different ages", []*corev1.Pod{gatedPod("b", 1), gatedPod("a", 2)}, nil, "a"},
		{"of the same age", []*corev1.Pod{gatedPod("b", 1), gatedPod("a", 1)}, nil, "a"},
		{"one of which is ungated", []*corev1.Pod{gatedPod("a", 2), ungatedPod("b", 1)}, nil, "b"},
		{"that are terminating, terminal, or behind another gate, and one more",
			[]*corev1.Pod{terminating, terminal, foreignGate, gatedPod("a", 1)}, nil, "a"},
		{"one of which was rejected", []*corev1.Pod{unschedulablePod("a", 3), gatedPod("b", 2)}, nil, "b"},
		{"three of which were rejected", threeRejected, map[types.UID]int{"a": 180, "b": 120, "c": 59}, ""},
		{"three of which were rejected, the last a minute ago", threeRejected,
			map[types.UID]int{"a": 60, "b": 180, "c": 120}, "d"},
		{"four of which were rejected, the last a moment ago", append(threeRejected, unschedulablePod("e", 3)),
			map[types.UID]int{"a": 180, "b": 180, "c": 180}, ""},
		{"one of which has another node to try", append(threeRejected, ungatedPod("e", 2)), nil, "e"},
		{"that do not exist", nil, nil, ""},
	} {
		var got types.UID
		if l := groupWith(tc.pods...).leaders(rejectedAt(tc.rejected))["claim"]; l != nil {
			got = l.leader
		}
		if got != tc.want {
			t.Errorf("leader of pods %s: got %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestGroup_maySchedule(t *testing.T) {
	leaders := func(g *group) map[string]*leadership { return g.leaders(rejectedAt(nil)) }
	claim := func(allocated bool, reserved ...types.UID) *resourceapi.ResourceClaim {
		c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "claim"}}
		if allocated {
			c.Status.Allocation = &resourceapi.AllocationResult{}
		}
		for _, uid := range reserved {
			c.Status.ReservedFor = append(c.Status.ReservedFor,
				resourceapi.ResourceClaimConsumerReference{Resource: "pods", UID: uid})
		}
		return c
	}
	deleting := claim(true, "a")
	deleting.DeletionTimestamp = ptr.To(metav1.Now())
	for _, tc := range []struct {
		name   string
		claim  *resourceapi.ResourceClaim
		leader bool
		other  bool
	}{
		{"does not exist", nil, false, false},
		{"is not allocated", claim(false), true, false},
		{"is allocated and has no entries", claim(true), true, false},
		{"is reserved for both pods", claim(true, "a", "b"), true, true},
		{"is reserved for the other pod only", claim(true, "b"), true, true},
		{"is being deleted", deleting, false, false},
	} {
		a, b := gatedPod("a", 2), gatedPod("b", 1)
		g := groupWith(a, b)
		if tc.claim != nil {
			g.sharedClaims[0].shards[0] = tc.claim
		}
		if got := g.maySchedule(a, leaders(g)); got != tc.leader {
			t.Errorf("maySchedule for the leader when the claim %s: got %t, want %t", tc.name, got, tc.leader)
		}
		if got := g.maySchedule(b, leaders(g)); got != tc.other {
			t.Errorf("maySchedule for the other pod when the claim %s: got %t, want %t", tc.name, got, tc.other)
		}
	}
}

func TestUngatedCache(t *testing.T) {
	var c ungatedCache
	if c.has("a") {
		t.Error("an empty cache has pod a")
	}
	c.add("a")
	if !c.has("a") || c.has("b") {
		t.Errorf("a cache to which pod a was added: has a %t, has b %t, want true, false", c.has("a"), c.has("b"))
	}
}

func TestHolders(t *testing.T) {
	native := resourceapi.ResourceClaimConsumerReference{
		APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g", UID: "n",
	}
	own := resourceapi.ResourceClaimConsumerReference{
		APIGroup: scheduling.GroupName, Resource: scheduling.Resource, Name: "g", UID: "o",
	}
	terminal := resourceapi.ResourceClaimConsumerReference{
		APIGroup: scheduling.GroupName, Resource: "pods", Name: "p", UID: "p",
	}
	generated := []metav1.OwnerReference{{
		APIVersion: scheduling.GroupVersion.String(), Kind: scheduling.Kind, Name: "g", UID: "o", Controller: ptr.To(true),
	}}
	for _, tc := range []struct {
		name    string
		owners  []metav1.OwnerReference
		entries []resourceapi.ResourceClaimConsumerReference
		want    []holder
	}{
		{"by name, with Kubernetes' entry", nil,
			[]resourceapi.ResourceClaimConsumerReference{native}, nil},
		{"generated, with Kubernetes' entry", generated,
			[]resourceapi.ResourceClaimConsumerReference{native}, []holder{{"g", "o"}}},
		{"generated, with an entry for a terminal pod", generated,
			[]resourceapi.ResourceClaimConsumerReference{terminal}, []holder{{"g", "o"}}},
		{"generated, with an entry for a terminal pod and the group's", generated,
			[]resourceapi.ResourceClaimConsumerReference{terminal, own}, []holder{{"g", "o"}}},
		{"generated, without entries", generated, nil, nil},
	} {
		claim := &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{OwnerReferences: tc.owners},
			Status:     resourceapi.ResourceClaimStatus{ReservedFor: tc.entries},
		}
		if got := holders(claim); !slices.Equal(got, tc.want) {
			t.Errorf("holders of a claim %s: got %v, want %v", tc.name, got, tc.want)
		}
	}
}
