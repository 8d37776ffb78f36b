// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
	"github.com/dra-shared/dra-driver-shared/test/simnode"
)

// Known bugs of Kubernetes' own controllers with claims that many pods share must
// not affect the users of PodGroups and of the annotation reserved-for.
func TestKnownBugsOfKubernetes(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	for name, scenario := range map[string]func(*testing.T){
		"deleted pods leave room in a claim":                          e.deletedPodsLeaveRoom,
		"terminal pods of a group cause no writes":                    e.terminalPodsOfGroup,
		"terminal pods of several groups cause no writes":             e.terminalPodsOfSeveralGroups,
		"terminal pods of a held claim cause no writes":               e.terminalPodsOfHeldClaim,
		"pods that end while their group is deleted leave no entries": e.podsEndWithTheirGroup,
		"each group of a burst has one claim":                         e.burstOfGroups,
		"the names of several claims stay in the status":              e.severalClaimsInStatus,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // the scenarios mostly wait
			scenario(t)
		})
	}
}

// reservedPods returns the names of the pods that the only claim of a namespace is reserved for.
func (e *testEnv) reservedPods(ctx context.Context, ns string) ([]string, error) {
	claims, err := e.claims(ctx, ns)
	if err == nil && len(claims) != 1 {
		err = fmt.Errorf("namespace %s has %d claims, want one", ns, len(claims))
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, r := range claims[0].Status.ReservedFor {
		if r.Resource == "pods" && r.APIGroup == "" {
			names = append(names, r.Name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// awaitEntries waits until the only claim of a namespace has want entries.
func (e *testEnv) awaitEntries(t *testing.T, ns string, want int) {
	t.Helper()
	condition := fmt.Sprintf("the claim in namespace %s is reserved for %d objects", ns, want)
	eventually.Eventually(t, timeout, condition, func() error {
		claims, err := e.claims(t.Context(), ns)
		if err != nil {
			return err
		}
		if len(claims) != 1 || len(claims[0].Status.ReservedFor) != want {
			return fmt.Errorf("got %d claims: %s", len(claims), describe(claims))
		}
		return nil
	})
}

// describe returns the names, versions, and entries of claims.
func describe(claims []resourceapi.ResourceClaim) string {
	var b strings.Builder
	for _, c := range claims {
		fmt.Fprintf(&b, "claim %s at version %s is reserved for %v; ", c.Name, c.ResourceVersion, c.Status.ReservedFor)
	}
	return b.String()
}

// Pods of a group are deleted and created while the group exists. Entries of deleted
// pods must not take the place of entries of new pods (kubernetes/kubernetes#136406).
func (e *testEnv) deletedPodsLeaveRoom(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	ns := e.createNamespace(t, "room")
	e.mustCreateGroup(t, ns, "group")
	e.createRunningPods(t, ns, "group", 0, 200)
	deletePod := func(i int) error { return e.client.Delete(ctx, newPod(ns, "group", i)) }
	if err := simnode.Parallel(199, deletePod); err != nil {
		t.Fatalf("delete 199 pods: %v", err)
	}
	if !e.native { // in native mode, pods do not have entries
		eventually.Eventually(t, timeout, "the claim is reserved for the last pod only", func() error {
			names, err := e.reservedPods(ctx, ns)
			if err == nil && !slices.Equal(names, []string{"group-00199"}) {
				err = fmt.Errorf("it is reserved for %d pods: %v", len(names), names)
			}
			return err
		})
	}
	e.createRunningPods(t, ns, "group", 200, 400)
}

// For a terminal pod, the resource claim controller repeatedly reserves the claim and
// removes the reservation (kubernetes/kubernetes#141274).
func (e *testEnv) terminalPodsOfGroup(t *testing.T) {
	t.Helper()
	ns := e.createNamespace(t, "terminal")
	pg := e.mustCreateGroup(t, ns, "group")
	e.createRunningPods(t, ns, "group", 0, 3)
	e.setSucceeded(t, newPod(ns, "group", 0))
	e.awaitNoWrites(t, ns, "one of three pods is terminal")
	e.setSucceeded(t, newPod(ns, "group", 1))
	e.setSucceeded(t, newPod(ns, "group", 2))
	e.awaitNoWrites(t, ns, "all pods are terminal")
	e.createRunningPods(t, ns, "group", 3, 5)
	e.awaitNoWrites(t, ns, "two more pods run")
	e.deletePods(t, ns)
	e.awaitEntries(t, ns, 1) // the group's entry
	e.delete(t, pg)
	e.awaitEmpty(t, ns)
}

// The same bug, for a claim with a holder that has pods outside any group.
func (e *testEnv) terminalPodsOfHeldClaim(t *testing.T) {
	t.Helper()
	ns := e.createNamespace(t, "held")
	holder := e.createJob(t, ns)
	claim, pod := e.createHeldClaim(t, ns, "batch/jobs/train")
	another := newPodWithClaim(ns, "user", 1, claim.Name)
	e.create(t, another)
	e.awaitEntries(t, ns, 3) // the holder and two pods
	e.setSucceeded(t, pod)
	e.awaitNoWrites(t, ns, "one of two pods is terminal")
	e.setSucceeded(t, another)
	e.awaitNoWrites(t, ns, "both pods are terminal")
	e.delete(t, pod)
	e.awaitEntries(t, ns, 2)
	e.delete(t, holder)
	e.awaitEntries(t, ns, 0)
}

// The same bug, for a claim by name that two groups and a pod without a group
// share. Each group must consider the pods of all of them, even while the other
// group is deleted.
func (e *testEnv) terminalPodsOfSeveralGroups(t *testing.T) {
	t.Helper()
	ns := e.createNamespace(t, "shared")
	team := fabricClaim(ns, "team")
	e.create(t, team)
	var pods []*corev1.Pod
	groups := map[string]*scheduling.PodGroup{}
	for _, name := range []string{"a", "b"} {
		groups[name] = e.mustCreateGroup(t, ns, name,
			scheduling.PodGroupResourceClaim{Name: "team", ResourceClaimName: &team.Name})
		pod := newPodWithClaim(ns, "of-"+name, 0, team.Name)
		pod.Annotations = map[string]string{scheduling.GroupAnnotation: name}
		pods = append(pods, pod)
	}
	if !e.native { // there, Kubernetes itself reserves the claim and has the bug
		pods = append(pods, newPodWithClaim(ns, "alone", 0, team.Name))
	}
	for _, pod := range pods {
		pod.Spec.ResourceClaims[0].Name = "team"
		e.create(t, pod)
	}
	e.awaitRunning(t, ns, len(pods))
	for _, pod := range pods {
		e.setSucceeded(t, pod)
	}
	e.awaitNoWrites(t, ns, "the pods of both groups are terminal")
	e.delete(t, groups["a"])
	e.awaitDeleted(t, groups["a"])
	e.awaitNoWrites(t, ns, "group a is deleted, its pod is not")
	e.deletePods(t, ns)
	e.delete(t, groups["b"])
	eventually.Eventually(t, timeout, "claim team is deallocated", func() error {
		if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(team), team); err != nil {
			return err
		}
		if team.Status.Allocation != nil || len(team.Status.ReservedFor) > 0 {
			return fmt.Errorf("it is allocated: %t, reserved for %v", team.Status.Allocation != nil, team.Status.ReservedFor)
		}
		return nil
	})
}

// Entries that keep terminal pods from causing writes are removed with their
// group, even if pods end while the group is deleted.
func (e *testEnv) podsEndWithTheirGroup(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	ns := e.createNamespace(t, "together")
	const groups, podsEach = 30, 3
	name := func(i int) string { return fmt.Sprintf("g%02d", i) }
	err := simnode.Parallel(groups, func(i int) error {
		_, err := e.createGroup(ctx, ns, name(i))
		return err
	})
	if err != nil {
		t.Fatalf("create %d PodGroups: %v", groups, err)
	}
	pod := func(i int) *corev1.Pod { return newPod(ns, name(i/podsEach), i%podsEach) }
	err = simnode.Parallel(groups*podsEach, func(i int) error { return e.client.Create(ctx, pod(i)) })
	if err != nil {
		t.Fatalf("create the pods of %d PodGroups: %v", groups, err)
	}
	e.awaitRunning(t, ns, groups*podsEach)
	if err := e.client.DeleteAllOf(ctx, &scheduling.PodGroup{}, client.InNamespace(ns)); err != nil {
		t.Fatalf("delete all PodGroups: %v", err)
	}
	err = simnode.Parallel(groups*podsEach, func(i int) error {
		return e.client.Status().Patch(ctx, pod(i), succeededPatch)
	})
	if err != nil {
		t.Fatalf("set all pods to Succeeded: %v", err)
	}
	eventually.Eventually(t, timeout, "namespace "+ns+" has no claims", func() error {
		claims, err := e.claims(ctx, ns)
		if err == nil && len(claims) > 0 {
			err = fmt.Errorf("it has %d: %s", len(claims), describe(claims[:1]))
		}
		return err
	})
}

// quietPeriod is how long a claim must go without a write to count as unchanged. The bugs cause several writes per
// second.
const quietPeriod = 2 * time.Second

// awaitNoWrites waits until no component writes the claims of a namespace.
func (e *testEnv) awaitNoWrites(t *testing.T, ns, when string) {
	t.Helper()
	var last string
	var since time.Time
	condition := fmt.Sprintf("when %s, the claims in namespace %s are not written for %s", when, ns, quietPeriod)
	eventually.Eventually(t, 20*time.Second, condition, func() error {
		claims, err := e.claims(t.Context(), ns)
		if err != nil {
			return err
		}
		if len(claims) == 0 {
			return errors.New("there are no claims")
		}
		if now := describe(claims); now != last {
			last, since = now, time.Now()
		}
		if time.Since(since) < quietPeriod {
			return fmt.Errorf("the last write was %s ago: %s", time.Since(since), last)
		}
		return nil
	})
}

// Each group has one claim, even if many groups are created at the same time (kubernetes/kubernetes#140217).
func (e *testEnv) burstOfGroups(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	ns := e.createNamespace(t, "burst")
	const count = 300
	err := simnode.Parallel(count, func(i int) error {
		_, err := e.createGroup(ctx, ns, fmt.Sprintf("g%03d", i))
		return err
	})
	if err != nil {
		t.Fatalf("create %d PodGroups: %v", count, err)
	}
	eventually.Eventually(t, timeout, fmt.Sprintf("each of %d PodGroups has a claim in its status", count), func() error {
		var list scheduling.PodGroupList
		if err := e.client.List(ctx, &list, client.InNamespace(ns)); err != nil {
			return err
		}
		if len(list.Items) != count {
			return fmt.Errorf("there are %d PodGroups", len(list.Items))
		}
		for i := range list.Items {
			if n := len(list.Items[i].Status.ResourceClaimStatuses); n != 1 {
				return fmt.Errorf("the status of PodGroup %s has %d claims", list.Items[i].Name, n)
			}
		}
		return nil
	})
	claims, err := e.claims(ctx, ns)
	if err != nil {
		t.Fatal(err)
	}
	ofOwner := map[types.UID][]string{}
	for _, c := range claims {
		owner := c.OwnerReferences[0].UID
		ofOwner[owner] = append(ofOwner[owner], c.Name)
	}
	for owner, names := range ofOwner {
		if len(names) > 1 {
			t.Errorf("PodGroup %s has %d claims: %v", owner, len(names), names)
		}
	}
	if len(claims) != count || len(ofOwner) != count {
		t.Errorf("%d PodGroups have %d claims of %d owners, want one claim each", count, len(claims), len(ofOwner))
	}
}

// The status of a PodGroup has the names of all its claims, and the writers do
// not undo each other's changes (kubernetes/kubernetes#138407).
func (e *testEnv) severalClaimsInStatus(t *testing.T) {
	t.Helper()
	ns := e.createNamespace(t, "several")
	fromTemplate := func(name string) scheduling.PodGroupResourceClaim {
		return scheduling.PodGroupResourceClaim{Name: name, ResourceClaimTemplateName: ptr.To("fabric")}
	}
	pg := e.mustCreateGroup(t, ns, "group", fromTemplate("second"), fromTemplate("third"))
	pod := newPod(ns, "group", 0)
	for _, name := range []string{"second", "third", "own", "other"} {
		claim := corev1.PodResourceClaim{Name: name, ResourceClaimTemplateName: ptr.To("fabric")}
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, claim)
	}
	e.create(t, pod)
	var last string
	var since time.Time
	condition := "the PodGroup's status has 3 claims, the running pod's has 2, and both stay unchanged"
	eventually.Eventually(t, timeout, condition, func() error {
		for _, o := range []client.Object{pg, pod} {
			if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
				return err
			}
		}
		if now := pg.ResourceVersion + " " + pod.ResourceVersion; now != last {
			last, since = now, time.Now()
		}
		ofGroup, ofPod := pg.Status.ResourceClaimStatuses, pod.Status.ResourceClaimStatuses
		isComplete := len(ofGroup) == 3 && len(ofPod) == 2 && pod.Status.Phase == corev1.PodRunning
		if !isComplete || time.Since(since) < quietPeriod {
			return fmt.Errorf("PodGroup: %v; pod %s: %v; unchanged for %s", ofGroup, pod.Status.Phase, ofPod, time.Since(since))
		}
		return nil
	})
}
