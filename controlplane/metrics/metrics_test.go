// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/clock"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/test/metricslint"
)

var start = time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)

func podGroup(name string, conditions ...metav1.Condition) *scheduling.PodGroup {
	return &scheduling.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
		Status:     scheduling.PodGroupStatus{Conditions: conditions},
	}
}

func condition(name string, status metav1.ConditionStatus, reason string) metav1.Condition {
	return metav1.Condition{Type: name, Status: status, Reason: reason}
}

// claim returns an allocated claim that was generated for an owner and is reserved for objects
// of these resources.
func claim(name, owner string, resources ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: name, UID: types.UID(name),
			Annotations:     map[string]string{scheduling.ClaimAnnotation: "net"},
			OwnerReferences: []metav1.OwnerReference{{UID: types.UID(owner), Controller: ptr.To(true)}},
		},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
	for _, resource := range resources {
		entry := resourceapi.ResourceClaimConsumerReference{Resource: resource, Name: resource, UID: types.UID(resource)}
		if resource != "pods" {
			entry.APIGroup = scheduling.GroupName
		}
		c.Status.ReservedFor = append(c.Status.ReservedFor, entry)
	}
	return c
}

// reservedFor returns a claim with the annotation reserved-for, and an annotation or a condition
// that reports whether it is held.
func reservedFor(name, annotation, reason string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: name, UID: types.UID(name),
		Annotations: map[string]string{scheduling.ReservedForAnnotation: "batch/jobs/train"},
	}}
	if annotation != "" {
		c.Annotations[scheduling.HeldAnnotation] = annotation
	}
	if reason != "" {
		c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
			Driver: "dra-shared.dev", Pool: "pool", Device: "nic0",
			Conditions: []metav1.Condition{condition(v1alpha1.ConditionHeld, metav1.ConditionTrue, reason)},
		}}
	}
	return c
}

func pod(name, claim string, phase corev1.PodPhase, gated bool) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, CreationTimestamp: metav1.NewTime(start)},
		Spec:       corev1.PodSpec{ResourceClaims: []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: &claim}}},
		Status:     corev1.PodStatus{Phase: phase},
	}
	if gated {
		p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: scheduling.ReservedGate}}
	}
	return p
}

// newCollector returns the collector of a controller in bridge mode.
func newCollector(t *testing.T, clock clock.PassiveClock, objects ...client.Object) *Collector {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientscheme.AddToScheme, scheduling.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	return &Collector{
		Client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).Build(),
		Mode:   mode.Bridge, PodGroupVersions: []string{"v1alpha2"}, Clock: clock,
	}
}

func TestCollector_exposition(t *testing.T) {
	registry := metricslint.NewRegistry()
	registry.MustRegister(newCollector(t, testclock.NewFakePassiveClock(start)))
	registry.Check(t, "dra_shared_gated_pods", "dra_shared_gated_pods_age_seconds",
		"dra_shared_kubernetes_podgroups_info", "dra_shared_mode_info", "dra_shared_podgroups",
		"dra_shared_reserved_for_claims", "dra_shared_shards", "dra_shared_unused_held_claims",
		"dra_shared_unused_held_claims_age_seconds")
}

func TestCollector_Collect(t *testing.T) {
	ready := condition(scheduling.ConditionClaimsReady, metav1.ConditionTrue, scheduling.ReasonGenerated)
	objects := []client.Object{
		podGroup("new"),
		podGroup("held", ready, condition(scheduling.ConditionReserved, metav1.ConditionTrue, scheduling.ReasonHeld)),
		podGroup("waits", ready,
			condition(scheduling.ConditionReserved, metav1.ConditionFalse, scheduling.ReasonNotAllocated)),
		podGroup("lacks", condition(scheduling.ConditionClaimsReady, metav1.ConditionFalse, scheduling.ReasonClaimMissing)),
		claim("a", "a", "podgroups", "pods"), // used by a pod
		claim("a-1", "a", "podgroups"),       // another shard, without pods
		claim("b", "b", "podgroups"),         // used by a pod in native mode
		claim("c", "c", "podgroups"),         // its pod is terminal
		claim("d", "d", "pods"),              // not held
		claim("e", "e"),                      // not reserved
		reservedFor("f", "", "HolderFound"),
		reservedFor("g", "HolderForbidden: not held", ""),
		reservedFor("h", "", ""),
		pod("runs", "b", corev1.PodRunning, false),
		pod("ended", "c", corev1.PodSucceeded, false),
		pod("waits", "a", corev1.PodPending, true),
	}
	clock := testclock.NewFakePassiveClock(start.Add(time.Minute))
	c := newCollector(t, clock, objects...)
	const head = `
dra_shared_gated_pods 1
dra_shared_gated_pods_age_seconds %GATED
dra_shared_kubernetes_podgroups_info{version="v1alpha2"} 1
dra_shared_mode_info{mode="bridge"} 1
dra_shared_podgroups{state="ClaimDeleted"} 0
dra_shared_podgroups{state="ClaimMissing"} 1
dra_shared_podgroups{state="Held"} 1
dra_shared_podgroups{state="NoRoom"} 0
dra_shared_podgroups{state="NotAllocated"} 1
dra_shared_podgroups{state="NotShared"} 0
dra_shared_podgroups{state="Pending"} 1
dra_shared_podgroups{state="Released"} 0
dra_shared_podgroups{state="Terminating"} 0
dra_shared_podgroups{state="Unschedulable"} 0
dra_shared_podgroups{state="WriteRefused"} 0
dra_shared_reserved_for_claims{reason="HolderForbidden"} 1
dra_shared_reserved_for_claims{reason="HolderFound"} 1
dra_shared_reserved_for_claims{reason="HolderInvalid"} 0
dra_shared_reserved_for_claims{reason="HolderMissing"} 0
dra_shared_reserved_for_claims{reason="HolderUnknown"} 0
dra_shared_reserved_for_claims{reason="NoRoom"} 0
dra_shared_reserved_for_claims{reason="Pending"} 1
dra_shared_shards 1
dra_shared_unused_held_claims 2
dra_shared_unused_held_claims_age_seconds %UNUSED
`
	check := func(gated, unused string) {
		t.Helper()
		want := strings.NewReplacer("%GATED", gated, "%UNUSED", unused).Replace(head)
		if got := samples(t, c); got != strings.TrimSpace(want) {
			t.Errorf("got\n%s\nwant%s", got, want)
		}
	}
	check("60", "0")
	clock.SetTime(clock.Now().Add(30 * time.Second))
	check("90", "30")
}

// samples returns the samples of a collector in the format of Prometheus, without comments.
func samples(t *testing.T, c prometheus.Collector) string {
	t.Helper()
	text, err := testutil.CollectAndFormat(c, expfmt.TypeTextPlain, "dra_shared_gated_pods",
		"dra_shared_gated_pods_age_seconds", "dra_shared_kubernetes_podgroups_info", "dra_shared_mode_info",
		"dra_shared_podgroups", "dra_shared_reserved_for_claims", "dra_shared_shards",
		"dra_shared_unused_held_claims", "dra_shared_unused_held_claims_age_seconds")
	if err != nil {
		t.Fatal(err)
	}
	var kept []string
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "#") {
			kept = append(kept, strings.TrimSpace(line))
		}
	}
	return strings.Join(kept, "\n")
}
