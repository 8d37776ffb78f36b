// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

// Pods that are assigned and never created do not take memory without bound.
func TestShards_limitsPendingPods(t *testing.T) {
	clock := testclock.NewFakePassiveClock(time.Now())
	s := NewShards(clock)
	s.synced = func() bool { return true }
	assign := func(i int) error {
		q := shardQuestion{Namespace: "ns", Claim: fmt.Sprint(i / 100), Request: fmt.Sprint(i)}
		_, err := s.assign(t.Context(), q)
		return err
	}
	for i := range maxPending {
		if err := assign(i); err != nil {
			t.Fatalf("pod %d: %v", i, err)
		}
	}
	if err := assign(maxPending); err == nil || !strings.Contains(err.Error(), "65536 pods were admitted") {
		t.Errorf("got error %v, want that too many pods were not created", err)
	}
	s.observe(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", UID: "1", Labels: map[string]string{scheduling.GroupUIDLabel: "1"},
			Annotations: map[string]string{scheduling.AdmittedAnnotation: "0"},
		},
		Spec: corev1.PodSpec{ResourceClaims: []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: ptr.To("0")}}},
	})
	if err := assign(maxPending); err != nil {
		t.Errorf("after one of the pods was created: %v", err)
	}
	clock.SetTime(clock.Now().Add(pendingTimeout + time.Second))
	if err := assign(maxPending + 1); err != nil || s.waiting != 1 {
		t.Errorf("after the others expired: %v, and %d pods wait, want 1", err, s.waiting)
	}
}

// A namespace with pods that are admitted and never created, for example because of its quota, does not keep out the
// pods of others.
func TestShards_limitsPendingPodsOfEachNamespace(t *testing.T) {
	clock := testclock.NewFakePassiveClock(time.Now())
	s := syncedShards(clock)
	assigned := 0
	assign := func(namespace string) error {
		assigned++
		q := shardQuestion{Namespace: namespace, Claim: fmt.Sprint(assigned / 100), Request: fmt.Sprint(assigned)}
		_, err := s.assign(t.Context(), q)
		return err
	}
	for range maxPending {
		if err := assign("greedy"); err != nil {
			t.Fatal(err)
		}
	}
	for range 1000 {
		for _, namespace := range []string{"a", "b"} {
			if err := assign(namespace); err != nil {
				t.Fatalf("a pod of another namespace: %v", err)
			}
		}
	}
	if err := assign("greedy"); err == nil || !strings.Contains(err.Error(), `65536 of them in namespace "greedy"`) {
		t.Errorf("a further pod of the namespace that has all: got error %v", err)
	}
	for assign("a") == nil {
	}
	if got, want := s.waits["a"], maxPending/3; got != want {
		t.Errorf("pods of one of three namespaces while all have too many: got %d, want %d", got, want)
	}
	clock.SetTime(clock.Now().Add(pendingTimeout + time.Second))
	if err := assign("greedy"); err != nil || len(s.waits) != 1 {
		t.Errorf("after the others expired: %v, and %d namespaces have pods that wait, want 1", err, len(s.waits))
	}
}

// A dry run does not create a pod, so it does not take room in a claim.
func TestShards_dryRun(t *testing.T) {
	s := syncedShards(testclock.NewFakePassiveClock(time.Now()))
	for range shardPods + 1 {
		n, err := s.assign(t.Context(), shardQuestion{Namespace: "ns", Claim: "claim"})
		if err != nil || n != 0 || s.waiting != 0 {
			t.Fatalf("got shard %d, error %v, and %d pods that wait, want shard 0 and none", n, err, s.waiting)
		}
	}
}

func TestShards_fillsClaimsInOrder(t *testing.T) {
	clock := testclock.NewFakePassiveClock(time.Now())
	s := NewShards(clock)
	if _, err := s.assign(t.Context(), shardQuestion{Namespace: "ns", Claim: "claim", Request: "r"}); err == nil {
		t.Error("assign succeeded before the existing pods were counted")
	}
	s.synced = func() bool { return true }
	requests := 0
	name := func(n int) string { return claims.NameOfShard("claim", n) }
	next := func() int {
		t.Helper()
		requests++
		n, err := s.assign(t.Context(), shardQuestion{Namespace: "ns", Claim: "claim", Request: fmt.Sprint(requests)})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	pod := func(i, shard int) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "ns", UID: types.UID(fmt.Sprint(i)),
				Labels:      map[string]string{scheduling.GroupUIDLabel: "1"},
				Annotations: map[string]string{scheduling.AdmittedAnnotation: fmt.Sprint(i + 1)},
			},
			Spec: corev1.PodSpec{ResourceClaims: []corev1.PodResourceClaim{
				{Name: "net", ResourceClaimName: ptr.To(name(shard))},
			}},
		}
	}
	for i := range shardPods {
		if n := next(); n != 0 {
			t.Fatalf("pod %d is assigned to shard %d, want 0", i, n)
		}
	}
	// Pods that are observed after their assignment do not count twice.
	for i := range 100 {
		s.observe(pod(i, 0))
		s.observe(pod(i, 0))
	}
	if n := next(); n != 1 {
		t.Errorf("with shard 0 full, the next pod is assigned to shard %d, want 1", n)
	}
	// A pod that another replica assigned is not pending here.
	s.observe(pod(10000, 1))
	s.observeDeleted(pod(10000, 1))
	if pending := s.pending[types.NamespacedName{Namespace: "ns", Name: name(1)}]; len(pending) != 1 {
		t.Errorf("shard 1 has %d pending pods after another replica's pod was observed, want 1", len(pending))
	}
	// A deleted pod leaves room for one.
	s.observeDeleted(pod(7, 0))
	if a, b := next(), next(); a != 0 || b != 1 {
		t.Errorf("after one pod of shard 0 was deleted, the next pods are assigned to shards %d and %d, want 0 and 1", a, b)
	}
	// Assigned pods that are never observed stop counting, including pods of other claims.
	clock.SetTime(clock.Now().Add(time.Minute))
	other := shardQuestion{Namespace: "ns", Claim: "other", Request: "other"}
	if _, err := s.assign(t.Context(), other); err != nil || len(s.pending) != 1 {
		t.Errorf("assign for another claim: %v; pending pods of %d claims, want 1", err, len(s.pending))
	}
	if n := next(); n != 0 {
		t.Errorf("after pending pods expired, the next pod is assigned to shard %d, want 0", n)
	}
}
