package podgroups

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// waiting is a pod behind the gate, that old in seconds.
func waiting(name string, age int) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(time.Unix(1000-int64(age), 0))},
		Spec: corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: scheduling.ReservedGate}},
			ResourceClaims: []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: ptr.To("claim")}}},
	}
}

func passed(p *corev1.Pod) *corev1.Pod {
	p.Spec.SchedulingGates = nil
	return p
}

func stuck(p *corev1.Pod) *corev1.Pod {
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
	return passed(p)
}

func TestWhoLeads(t *testing.T) {
	elsewhere := waiting("elsewhere", 9)
	elsewhere.Spec.SchedulingGates = append(elsewhere.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: "queue"})
	going := waiting("going", 9)
	going.DeletionTimestamp = ptr.To(metav1.Now())
	over := waiting("over", 9)
	over.Status.Phase = corev1.PodSucceeded
	for _, tc := range []struct {
		name string
		pods []*corev1.Pod
		want types.UID
	}{
		{"the oldest", []*corev1.Pod{waiting("b", 1), waiting("a", 2)}, "a"},
		{"of one age, by name", []*corev1.Pod{waiting("b", 1), waiting("a", 1)}, "a"},
		{"one that has passed", []*corev1.Pod{waiting("a", 2), passed(waiting("b", 1))}, "b"},
		{"not one that ends, is over, or waits for others", []*corev1.Pod{going, over, elsewhere, waiting("a", 1)}, "a"},
		{"not one that has no node", []*corev1.Pod{stuck(waiting("a", 3)), waiting("b", 2)}, "b"},
		{"nobody, if it is the device that is not to be had", []*corev1.Pod{stuck(waiting("a", 4)), stuck(waiting("b", 4)), stuck(waiting("c", 4)), waiting("d", 2)}, ""},
		{"nobody", nil, ""},
	} {
		g := &group{pods: tc.pods, entries: []*entry{{PodGroupResourceClaim: scheduling.PodGroupResourceClaim{Name: "net"}}}}
		if got := g.leaders()["claim"]; got != tc.want {
			t.Errorf("%s: %q leads, want %q", tc.name, got, tc.want)
		}
	}
}

func TestWhoMayPass(t *testing.T) {
	claim := func(allocated bool, reserved ...types.UID) *resourceapi.ResourceClaim {
		c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "claim"}}
		if allocated {
			c.Status.Allocation = &resourceapi.AllocationResult{}
		}
		for _, uid := range reserved {
			c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", UID: uid})
		}
		return c
	}
	deleting := claim(true, "a")
	deleting.DeletionTimestamp = ptr.To(metav1.Now())
	for _, tc := range []struct {
		name  string
		claim *resourceapi.ResourceClaim
		want  bool // of pod a, which leads
		other bool // of pod b
	}{
		{"no claim yet", nil, false, false},
		{"not allocated: who leads", claim(false), true, false},
		{"allocated, reserved for nobody here", claim(true), false, false},
		{"reserved", claim(true, "a", "b"), true, true},
		{"reserved for one", claim(true, "b"), false, true},
		{"being deleted", deleting, false, false},
	} {
		a, b := waiting("a", 2), waiting("b", 1)
		g := &group{pods: []*corev1.Pod{a, b}, entries: []*entry{{PodGroupResourceClaim: scheduling.PodGroupResourceClaim{Name: "net"}, shards: map[int]*resourceapi.ResourceClaim{}}}}
		if tc.claim != nil {
			g.entries[0].shards[0] = tc.claim
		}
		if got, other := g.mayPass(a, g.leaders()), g.mayPass(b, g.leaders()); got != tc.want || other != tc.other {
			t.Errorf("%s: a %t, b %t, want %t, %t", tc.name, got, other, tc.want, tc.other)
		}
	}
}

// What is cached may be behind what was written.
func TestAGateIsTakenAwayOnce(t *testing.T) {
	var r recently
	if r.has("a") {
		t.Error("it was not yet")
	}
	r.add("a")
	if !r.has("a") || r.has("b") {
		t.Error("it was")
	}
}

func TestClaimsOfKubernetesOwnEntryAreTheirOwners(t *testing.T) {
	native := resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g", UID: "n"}
	ours := resourceapi.ResourceClaimConsumerReference{APIGroup: scheduling.GroupName, Resource: scheduling.Resource, Name: "g", UID: "o"}
	claim := &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{ReservedFor: []resourceapi.ResourceClaimConsumerReference{native}}}
	if got := holders(claim); got != nil {
		t.Errorf("by name: whose it is nobody knows: %v", got)
	}
	claim.OwnerReferences = []metav1.OwnerReference{{APIVersion: scheduling.GroupVersion.String(), Kind: scheduling.Kind, Name: "g", UID: "o", Controller: ptr.To(true)}}
	if got := holders(claim); len(got) != 1 || got[0] != (holder{"g", "o"}) {
		t.Errorf("%v", got)
	}
	claim.Status.ReservedFor[0] = resourceapi.ResourceClaimConsumerReference{APIGroup: scheduling.GroupName, Resource: "pods", Name: "p", UID: "p"}
	if got := holders(claim); len(got) != 1 || got[0] != (holder{"g", "o"}) {
		t.Errorf("an entry of a pod that has ended is left: %v", got)
	}
	claim.Status.ReservedFor = append(claim.Status.ReservedFor, ours)
	if got := holders(claim); len(got) != 1 {
		t.Errorf("%v", got)
	}
}
