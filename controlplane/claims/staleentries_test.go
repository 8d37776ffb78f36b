// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"fmt"
	"slices"
	"strings"
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

// withTerminal adds entries of the controller for terminal pods to the claim.
func withTerminal(claim *resourceapi.ResourceClaim, names ...string) *resourceapi.ResourceClaim {
	for _, name := range names {
		entry := terminalPodEntry(PodState{Name: name, UID: types.UID(name)})
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, entry)
	}
	return claim
}

// full returns a claim with a full status.reservedFor that has an entry for the pod.
func full(name string) *resourceapi.ResourceClaim {
	names := []string{"group", name}
	for i := range resourceapi.ResourceClaimReservedForMaxSize - 2 {
		names = append(names, fmt.Sprint(i))
	}
	return reserved(true, false, names...)
}

func TestStaleEntriesChange(t *testing.T) {
	terminal := func(name string) PodState {
		return PodState{Name: name, UID: types.UID(name), Bound: true, Terminal: true}
	}
	running := func(name string) PodState { return PodState{Name: name, UID: types.UID(name), Bound: true} }
	neverBound := PodState{Name: "a", UID: "a", Terminal: true}
	terminating := PodState{Name: "a", UID: "a", Bound: true, Terminal: true, Terminating: true}
	held := func(pods ...string) *resourceapi.ResourceClaim {
		return reserved(true, false, append([]string{"group"}, pods...)...)
	}
	for _, tc := range []struct {
		name        string
		claim       *resourceapi.ResourceClaim
		pods        []PodState
		deleted     []types.UID
		maxTerminal int
		want        string // +added -removed
	}{
		{"all pods run", held("a"), []PodState{running("a")}, nil, 9, ""},
		{"one pod is terminal", held("a", "b"), []PodState{terminal("a"), running("b")}, nil, 9, "+a"},
		{"Kubernetes has removed the entry already", held(), []PodState{terminal("a")}, nil, 9, "+a"},
		{"the terminal pod has the controller's entry", withTerminal(held(), "a"), []PodState{terminal("a")}, nil, 9, ""},
		{"the terminal pod never had a node", held(), []PodState{neverBound}, nil, 9, ""},
		{"the terminal pod is being deleted", held(), []PodState{terminating}, nil, 9, ""},
		{"the pod of the controller's entry is deleted", withTerminal(held(), "a"), nil, []types.UID{"a"}, 9, "-a"},
		{"the pods of all entries are deleted", withTerminal(reserved(true, false), "a"), nil,
			[]types.UID{"a"}, 9, "deallocate"},
		{"one pod is deleted and one is terminal", withTerminal(held(), "a"), []PodState{terminal("b")},
			[]types.UID{"a"}, 9, "+b-a"},
		{"more terminal pods than permitted", withTerminal(held(), "a"),
			[]PodState{terminal("a"), terminal("b"), terminal("c")}, nil, 2, "+b"},
		{"the pod is listed twice", held(), []PodState{terminal("a"), terminal("a")}, nil, 9, "+a"},
		{"the claim is full: only a pod with an entry", full("a"), []PodState{terminal("b"), terminal("a")}, nil, 9, "+a"},
		{"the claim is full and one pod is deleted", full("a"), []PodState{terminal("b"), terminal("c")},
			[]types.UID{"0"}, 9, "+b-0"},
		{"the claim is not allocated", reserved(false, false), []PodState{terminal("a")}, nil, 9, ""},
		{"the claim is being deleted", reserved(true, true, "group", "a"), []PodState{terminal("a")}, nil, 9, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := StaleEntriesChange(tc.claim, tc.pods, tc.deleted, tc.maxTerminal)
			for _, added := range c.Add {
				if !IsTerminalPodEntry(added) {
					t.Errorf("the change adds an entry that is not the controller's for a terminal pod: %v", added)
				}
			}
			if wantPrecondition := len(c.Remove) > 0; c.Precondition != wantPrecondition {
				t.Errorf("precondition of the change: got %t, want %t", c.Precondition, wantPrecondition)
			}
			if got := strings.TrimSuffix(describe(c), "!"); got != tc.want {
				t.Errorf("change of the stale entries: got %q, want %q", got, tc.want)
			}
		})
	}
}

// Every change that removes a holder's entry also removes the controller's entries for terminal
// pods, unless another holder maintains them: they would keep the claim allocated.
func TestEntriesToRemove_withTerminalPods(t *testing.T) {
	expectRemoved := func(condition string, c Change, want ...types.UID) {
		t.Helper()
		if !slices.Equal(c.Remove, want) {
			t.Errorf("%s: the change removes %v, want %v", condition, c.Remove, want)
		}
	}
	if c := ReleaseChange(withTerminal(reserved(true, false, "group"), "a"), "group", true); !c.Deallocate {
		t.Errorf("release of a claim by name whose other entries are for terminal pods: "+
			"got %+v, want a deallocation", c)
	}
	switched := withTerminal(reserved(true, false, "group", "native"), "a")
	expectRemoved("native mode: the cluster holds the claim",
		ReservationChange(switched, job("group", "group"), nil, ReservationOptions{Native: true}), "group", "a")

	claim := withTerminal(reserved(true, false, "group"), "a")
	claim.Status.ReservedFor = append(claim.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{
		APIGroup: "batch", Resource: "jobs", Name: "other", UID: "other",
	})
	expectRemoved("another object, which no annotation names, holds the claim",
		ReleaseChange(claim, "group", true), "group", "a")
	claim.Annotations = map[string]string{scheduling.ReservedForAnnotation: "batch/jobs/other"}
	expectRemoved("the object that the annotation names holds the claim",
		ReleaseChange(claim, "group", true), "group")

	stuck := []PodState{{Name: "s", UID: "s", Unschedulable: true}}
	expectRemoved("a pod is unschedulable and no other is bound",
		ReservationChange(withTerminal(reserved(true, false, "group"), "a"), job("group", "group"), stuck,
			ReservationOptions{}),
		"group", "a")
}

func TestPodLookup_DeletedPods(t *testing.T) {
	pod := func(name string, uid types.UID) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: uid}}
	}
	reader := crfake.NewClientBuilder().WithScheme(clientscheme.Scheme).
		WithObjects(pod("running", "running"), pod("replaced", "another")).Build()
	deletedPods := func(leavesStale bool, claim *resourceapi.ResourceClaim, known ...PodState) []types.UID {
		t.Helper()
		claim.Namespace = "ns"
		lookup := PodLookup{APIReader: reader, ClusterLeavesStaleEntries: leavesStale}
		deleted, err := lookup.DeletedPods(context.Background(), claim, known)
		if err != nil {
			t.Fatalf("look up deleted pods: %v", err)
		}
		return deleted
	}
	held := withTerminal(reserved(true, false, "group", "running", "replaced", "deleted", "known"), "terminal", "over")
	for leavesStale, want := range map[bool][]types.UID{true: {"replaced", "deleted", "over"}, false: {"over"}} {
		got := deletedPods(leavesStale, held, PodState{UID: "known"}, PodState{UID: "terminal"})
		if !slices.Equal(got, want) {
			t.Errorf("deleted pods if the cluster leaves stale entries (%t): got %v, want %v", leavesStale, got, want)
		}
	}
	podsOnly := reserved(true, false, "running", "replaced", "deleted")
	if got := deletedPods(true, podsOnly); len(got) > 0 {
		t.Errorf("a claim with entries for pods only, which Kubernetes maintains: got deleted pods %v, want none", got)
	}
}

func TestClusterLeavesStaleEntries(t *testing.T) {
	for minor, want := range map[string]string{
		"34": "true <nil>", "35+": "true <nil>", "36": "false <nil>", "37+": "false <nil>",
		"x": `false version 1.x of the API server: the minor version is not a number: ` +
			`strconv.Atoi: parsing "x": invalid syntax`,
	} {
		d, ok := fake.NewClientset().Discovery().(*discoveryfake.FakeDiscovery)
		if !ok {
			t.Fatal("the fake clientset has no fake discovery client")
		}
		d.FakedServerVersion = &version.Info{Major: "1", Minor: minor}
		leaves, err := ClusterLeavesStaleEntries(d)
		if got := fmt.Sprint(leaves, " ", err); got != want {
			t.Errorf("Kubernetes 1.%s: got %s, want %s", minor, got, want)
		}
	}
}
