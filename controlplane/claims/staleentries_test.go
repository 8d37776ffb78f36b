package claims

import (
	"context"
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/version"
	discoveryfake "k8s.io/client-go/discovery/fake"
	"k8s.io/client-go/kubernetes/fake"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	crfake "sigs.k8s.io/controller-runtime/pkg/client/fake"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// withEnded adds entries of ours for pods that have ended.
func withEnded(claim *resourceapi.ResourceClaim, names ...string) *resourceapi.ResourceClaim {
	for _, name := range names {
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, terminalPodEntry(Pod{Name: name, UID: types.UID(name)}))
	}
	return claim
}

// full is a claim that is reserved for as many as it can be, of which one is named.
func full(name string) *resourceapi.ResourceClaim {
	names := []string{"group", name}
	for i := range resourceapi.ResourceClaimReservedForMaxSize - 2 {
		names = append(names, fmt.Sprint(i))
	}
	return reserved(true, false, names...)
}

func TestPodsThatHaveEndedKeepTheirPlace(t *testing.T) {
	ended := func(name string) Pod { return Pod{Name: name, UID: types.UID(name), Bound: true, Terminal: true} }
	for _, tc := range []struct {
		name   string
		claim  *resourceapi.ResourceClaim
		pods   []Pod
		gone   []types.UID
		atMost int
		want   string
	}{
		{"all run", reserved(true, false, "group", "a"), []Pod{{Name: "a", UID: "a", Bound: true}}, nil, 9, ""},
		{"one has ended", reserved(true, false, "group", "a", "b"), []Pod{ended("a"), {Name: "b", UID: "b", Bound: true}}, nil, 9, "+a"},
		{"Kubernetes was faster", reserved(true, false, "group"), []Pod{ended("a")}, nil, 9, "+a"},
		{"it has its place", withEnded(reserved(true, false, "group"), "a"), []Pod{ended("a")}, nil, 9, ""},
		{"it never had a node", reserved(true, false, "group"), []Pod{{Name: "a", UID: "a", Terminal: true}}, nil, 9, ""},
		{"it is being deleted: Kubernetes leaves it alone", reserved(true, false, "group"), []Pod{{Name: "a", UID: "a", Bound: true, Terminal: true, Terminating: true}}, nil, 9, ""},
		{"it is gone", withEnded(reserved(true, false, "group"), "a"), nil, []types.UID{"a"}, 9, "-a"},
		{"all that there was is gone", withEnded(reserved(true, false), "a"), nil, []types.UID{"a"}, 9, "deallocate"},
		{"one goes, one ends", withEnded(reserved(true, false, "group"), "a"), []Pod{ended("b")}, []types.UID{"a"}, 9, "+b-a"},
		{"too many have ended", withEnded(reserved(true, false, "group"), "a"), []Pod{ended("a"), ended("b"), ended("c")}, nil, 2, "+b"},
		{"named twice", reserved(true, false, "group"), []Pod{ended("a"), ended("a")}, nil, 9, "+a"},
		{"full: only what has an entry", full("a"), []Pod{ended("b"), ended("a")}, nil, 9, "+a"},
		{"full, one goes", full("a"), []Pod{ended("b"), ended("c")}, []types.UID{"0"}, 9, "+b-0"},
		{"not allocated", reserved(false, false), []Pod{ended("a")}, nil, 9, ""},
		{"being deleted", reserved(true, true, "group", "a"), []Pod{ended("a")}, nil, 9, ""},
	} {
		got := ""
		c := StaleEntriesChange(tc.claim, tc.pods, tc.gone, tc.atMost)
		for _, a := range c.Add {
			if !IsTerminalPodEntry(a) {
				t.Errorf("%s: %v", tc.name, a)
			}
			got += "+" + a.Name
		}
		for _, r := range c.Remove {
			got += "-" + string(r)
		}
		if c.Deallocate {
			got = "deallocate"
		}
		if got != tc.want || c.Precondition != (len(c.Remove) > 0) {
			t.Errorf("%s: got %q, guarded %t, want %q", tc.name, got, c.Precondition, tc.want)
		}
	}
}

// Whoever lets go of a claim leaves nobody's entry that would keep it.
func TestPlacesOfPodsThatHaveEndedGoWithTheHolder(t *testing.T) {
	if c := ReleaseChange(withEnded(reserved(true, false, "group"), "a"), "group", true); !c.Deallocate {
		t.Errorf("by name, with pods that have ended: %+v", c)
	}
	switched := withEnded(reserved(true, false, "group", "native"), "a")
	if c := ReservationChange(switched, job("group", "group"), nil, true); !slices.Equal(c.Remove, []types.UID{"group", "a"}) {
		t.Errorf("Kubernetes holds it now, and has no such entries: %+v", c)
	}
	two := withEnded(reserved(true, false, "group"), "a")
	two.Status.ReservedFor = append(two.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{APIGroup: "batch", Resource: "jobs", Name: "other", UID: "other"})
	if c := ReleaseChange(two, "group", true); !slices.Equal(c.Remove, []types.UID{"group", "a"}) {
		t.Errorf("by name, with a holder who knows nothing of them: %+v", c)
	}
	two.Annotations = map[string]string{scheduling.ReservedForAnnotation: "batch/jobs/other"}
	if c := ReleaseChange(two, "group", true); !slices.Equal(c.Remove, []types.UID{"group"}) {
		t.Errorf("by name, with another holder, who needs them: %+v", c)
	}
	stuck := []Pod{{Name: "s", UID: "s", Unschedulable: true}}
	if c := ReservationChange(withEnded(reserved(true, false, "group"), "a"), job("group", "group"), stuck, false); !slices.Equal(c.Remove, []types.UID{"group", "a"}) {
		t.Errorf("given up for a pod that does not fit: %+v", c)
	}
}

func TestGoneIsWhatTheAPIServerHasNotGot(t *testing.T) {
	pod := func(name string, uid types.UID) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: uid}}
	}
	live := crfake.NewClientBuilder().WithScheme(clientscheme.Scheme).WithObjects(pod("there", "there"), pod("again", "another")).Build()
	claim := withEnded(reserved(true, false, "group", "there", "again", "gone", "known"), "ended", "over")
	claim.Namespace = "ns"
	known := []Pod{{UID: "known"}, {UID: "ended"}}
	for all, want := range map[bool][]types.UID{true: {"again", "gone", "over"}, false: {"over"}} {
		got, err := PodLookup{APIReader: live, ClusterLeavesStaleEntries: all}.DeletedPods(context.Background(), claim, known)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("all %t: got %v, %v, want %v", all, got, err, want)
		}
	}
	alone := reserved(true, false, "there", "again", "gone")
	alone.Namespace = "ns"
	if got, err := (PodLookup{APIReader: live, ClusterLeavesStaleEntries: true}).DeletedPods(context.Background(), alone, nil); len(got) > 0 || err != nil {
		t.Errorf("of pods alone Kubernetes takes care: %v, %v", got, err)
	}
}

func TestVersionsThatLeaveEntries(t *testing.T) {
	for minor, want := range map[string]string{"34": "true <nil>", "35+": "true <nil>", "36": "false <nil>", "37+": "false <nil>",
		"x": `false the API server's version 1.x: the minor version is no number: strconv.Atoi: parsing "x": invalid syntax`} {
		d, ok := fake.NewClientset().Discovery().(*discoveryfake.FakeDiscovery)
		if !ok {
			t.Fatal("no fake")
		}
		d.FakedServerVersion = &version.Info{Major: "1", Minor: minor}
		stay, err := ClusterLeavesStaleEntries(d)
		if got := fmt.Sprint(stay, " ", err); got != want {
			t.Errorf("1.%s: got %s, want %s", minor, got, want)
		}
	}
}
