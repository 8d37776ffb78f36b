// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package metrics exports the states of PodGroups, claims, and pods that the controller is
// responsible for. The leading replica counts them in its cache when Prometheus asks.
package metrics

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// collectTimeout limits the time of a collection. The reads are from a cache, and wait only while
// it is filled.
const collectTimeout = 5 * time.Second

var (
	modeDesc = prometheus.NewDesc("dra_shared_mode_info",
		"1 for the controller's mode.", []string{"mode"}, nil)
	versionsDesc = prometheus.NewDesc("dra_shared_kubernetes_podgroups_info",
		"1 for each API version of Kubernetes' PodGroups that the API server served when the controller started.",
		[]string{"version"}, nil)
	groupsDesc = prometheus.NewDesc("dra_shared_podgroups",
		"PodGroups, by the reason of their first condition that is not True, or Held; Pending before they have conditions.",
		[]string{"state"}, nil)
	shardsDesc = prometheus.NewDesc("dra_shared_shards",
		"Claims that were generated because more pods share a claim than it can be reserved for.", nil, nil)
	unusedDesc = prometheus.NewDesc("dra_shared_unused_held_claims",
		"Allocated claims that a PodGroup, a Job, a replica, or another object holds and no pod uses.", nil, nil)
	unusedAgeDesc = prometheus.NewDesc("dra_shared_unused_held_claims_age_seconds",
		"Time in seconds since the oldest unused held claim was last used, measured since this replica became the "+
			"leading one.", nil, nil)
	reservedForDesc = prometheus.NewDesc("dra_shared_reserved_for_claims",
		"Claims with the annotation reserved-for, by the reason of their condition or annotation Held, or Pending.",
		[]string{"reason"}, nil)
	gatedDesc = prometheus.NewDesc("dra_shared_gated_pods",
		"Pods behind the driver's scheduling gate.", nil, nil)
	gatedAgeDesc = prometheus.NewDesc("dra_shared_gated_pods_age_seconds",
		"Age of the oldest pod behind the driver's scheduling gate.", nil, nil)
	descs = []*prometheus.Desc{
		modeDesc, versionsDesc, groupsDesc, shardsDesc, unusedDesc, unusedAgeDesc, reservedForDesc, gatedDesc, gatedAgeDesc,
	}
)

// Collector is a prometheus.Collector. As a manager.Runnable, it is registered only while the
// replica leads. Otherwise, sums over all replicas would count each object several times.
type Collector struct {
	// Client reads from a cache.
	Client client.Reader
	Mode   mode.Mode
	// PodGroupVersions is the result of mode.Versions.
	PodGroupVersions []string
	Clock            clock.PassiveClock
	Registry         prometheus.Registerer

	mu     sync.Mutex
	unused map[types.UID]time.Time // since when claims have been unused
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (*Collector) NeedLeaderElection() bool { return true }

// Start implements manager.Runnable.
func (c *Collector) Start(ctx context.Context) error {
	if err := c.Registry.Register(c); err != nil {
		return err
	}
	<-ctx.Done()
	c.Registry.Unregister(c)
	return nil
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range descs {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout)
	defer cancel()
	var (
		groups scheduling.PodGroupList
		all    resourceapi.ResourceClaimList
		pods   corev1.PodList
	)
	for _, list := range []client.ObjectList{&groups, &all, &pods} {
		if err := c.Client.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			klog.FromContext(ctx).Error(err, "Failed to count objects for metrics; the caches may not be filled yet")
			return
		}
	}
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	now := c.Clock.Now()
	gauge(modeDesc, 1, string(c.Mode))
	for _, version := range c.PodGroupVersions {
		gauge(versionsDesc, 1, version)
	}
	for state, n := range groupStates(groups.Items) {
		gauge(groupsDesc, float64(n), state)
	}
	gauge(shardsDesc, float64(countShards(all.Items)))
	for reason, n := range reservedForReasons(all.Items) {
		gauge(reservedForDesc, float64(n), reason)
	}
	gated, oldest := gatedPods(pods.Items, now)
	gauge(gatedDesc, float64(gated))
	gauge(gatedAgeDesc, oldest.Seconds())
	unused, oldest := c.unusedAge(unusedClaims(all.Items, pods.Items), now)
	gauge(unusedDesc, float64(unused))
	gauge(unusedAgeDesc, oldest.Seconds())
}

// statePending is the state of a PodGroup without conditions, and the reason of a claim without the condition Held.
const statePending = "Pending"

// groupStates counts PodGroups by their states. The states that need an administrator are always present, so an alert
// can compare them.
func groupStates(groups []scheduling.PodGroup) map[string]int {
	states := map[string]int{
		statePending: 0, scheduling.ReasonHeld: 0, scheduling.ReasonReleased: 0, scheduling.ReasonNotAllocated: 0,
		scheduling.ReasonClaimMissing: 0, scheduling.ReasonClaimDeleted: 0, scheduling.ReasonNoRoom: 0,
		scheduling.ReasonNotShared: 0, scheduling.ReasonUnschedulable: 0, scheduling.ReasonWriteRefused: 0,
		scheduling.ReasonTerminating: 0,
	}
	for i := range groups {
		states[groupState(groups[i].Status.Conditions)]++
	}
	return states
}

func groupState(conditions []metav1.Condition) string {
	for _, name := range []string{scheduling.ConditionClaimsReady, scheduling.ConditionReserved} {
		c := meta.FindStatusCondition(conditions, name)
		switch {
		case c == nil:
			return statePending
		case c.Status != metav1.ConditionTrue:
			return c.Reason
		}
	}
	return scheduling.ReasonHeld
}

// countShards returns the number of generated claims besides the first of each entry of an owner.
func countShards(all []resourceapi.ResourceClaim) (n int) {
	type key struct {
		owner          types.UID
		entry, replica string
	}
	seen := map[key]bool{}
	for i := range all {
		claim := &all[i]
		entry, generated := claim.Annotations[scheduling.ClaimAnnotation]
		owner := metav1.GetControllerOfNoCopy(claim)
		if !generated || owner == nil {
			continue
		}
		k := key{owner.UID, entry, claim.Annotations[scheduling.ReplicaAnnotation]}
		if seen[k] {
			n++
		}
		seen[k] = true
	}
	return n
}

// reservedForReasons counts the claims with the annotation reserved-for by the reason why they are held or not. The
// reasons are always present, so an alert can compare them.
func reservedForReasons(all []resourceapi.ResourceClaim) map[string]int {
	reasons := map[string]int{
		statePending: 0, v1alpha1.ReasonHolderFound: 0, v1alpha1.ReasonHolderMissing: 0,
		v1alpha1.ReasonHolderUnknown: 0, v1alpha1.ReasonHolderForbidden: 0, v1alpha1.ReasonHolderInvalid: 0,
		v1alpha1.ReasonNoRoom: 0,
	}
	for i := range all {
		if _, ok := all[i].Annotations[scheduling.ReservedForAnnotation]; ok {
			reasons[heldReason(&all[i])]++
		}
	}
	return reasons
}

// heldReason returns the reason from the condition Held of the driver's devices, or from the annotation of claims on
// other drivers' devices.
func heldReason(claim *resourceapi.ResourceClaim) string {
	for _, device := range claim.Status.Devices {
		if c := meta.FindStatusCondition(device.Conditions, v1alpha1.ConditionHeld); c != nil {
			return c.Reason
		}
	}
	if reason, _, ok := strings.Cut(claim.Annotations[scheduling.HeldAnnotation], ":"); ok {
		return reason
	}
	return statePending
}

func gatedPods(pods []corev1.Pod, now time.Time) (n int, oldest time.Duration) {
	for i := range pods {
		for _, gate := range pods[i].Spec.SchedulingGates {
			if gate.Name == scheduling.ReservedGate && pods[i].DeletionTimestamp == nil {
				n++
				oldest = max(oldest, now.Sub(pods[i].CreationTimestamp.Time))
			}
		}
	}
	return n, oldest
}

// unusedClaims returns the allocated claims of the driver's owners and holders that no pod uses. In native mode, claims
// do not have entries for pods.
func unusedClaims(all []resourceapi.ResourceClaim, pods []corev1.Pod) (unused []types.UID) {
	used := map[types.NamespacedName]bool{}
	for i := range pods {
		if podstatus.IsTerminal(&pods[i]) {
			continue
		}
		for _, name := range claimref.Names(&pods[i]) {
			used[types.NamespacedName{Namespace: pods[i].Namespace, Name: name}] = true
		}
	}
	for i := range all {
		claim := &all[i]
		_, generated := claim.Annotations[scheduling.ClaimAnnotation]
		_, held := claim.Annotations[scheduling.ReservedForAnnotation]
		isUsed := used[client.ObjectKeyFromObject(claim)]
		if (generated || held) && claim.Status.Allocation != nil && !isUsed && isHeldOnly(claim.Status.ReservedFor) {
			unused = append(unused, claim.UID)
		}
	}
	return unused
}

// isHeldOnly reports whether there is an entry, and none for a pod that may run.
func isHeldOnly(entries []resourceapi.ResourceClaimConsumerReference) bool {
	held := false
	for _, entry := range entries {
		switch {
		case claimref.IsPodEntry(entry):
			return false
		case !claims.IsTerminalPodEntry(entry):
			held = true
		}
	}
	return held
}

// unusedAge returns the number of unused claims, and how long the first of them has been unused.
func (c *Collector) unusedAge(unused []types.UID, now time.Time) (n int, oldest time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	since := map[types.UID]time.Time{}
	for _, uid := range unused {
		at, known := c.unused[uid]
		if !known {
			at = now
		}
		since[uid] = at
		oldest = max(oldest, now.Sub(at))
	}
	c.unused = since
	return len(unused), oldest
}
