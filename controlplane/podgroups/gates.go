// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// Pods that share a fabric wait behind a scheduling gate until their claim is reserved
// for them. Without the gate, the scheduler would add the entries of hundreds of pods
// one by one, and its writes would conflict with each other (measured with 765 pods:
// 2,798 conflicts, and 17 pods scheduled after 105 s). Instead, one pod, the leader,
// passes the gate first, so that the scheduler allocates the claim. When the leader is
// bound, the controller adds the entries of all other pods with one write, and removes
// their gates. An earlier entry would keep the claim on devices that the leader cannot
// use, such as those of a rack that has failed.

const (
	// maxConcurrentUngates limits concurrent writes that remove gates. Every pod needs
	// a separate write.
	maxConcurrentUngates = 16
	// maxCacheDelay is the time after which the cache is expected to have a write.
	maxCacheDelay = 10 * time.Second
	// maxRejectedLeaders is the number of leaders of a claim that the scheduler may
	// reject before no further pod becomes leader. If the device itself is not
	// available, the scheduler would reject all pods, one after the other.
	maxRejectedLeaders = 3
)

// isGated reports whether the pod has the driver's scheduling gate.
func isGated(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool {
		return g.Name == scheduling.ReservedGate
	})
}

// hasForeignGate reports whether the pod has a scheduling gate of another controller.
func hasForeignGate(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool {
		return g.Name != scheduling.ReservedGate
	})
}

// ungatePods removes the driver's gate from the pods that the scheduler may schedule now.
func (r *Reconciler) ungatePods(ctx context.Context, g *group) error {
	var writes errgroup.Group
	writes.SetLimit(maxConcurrentUngates)
	leaders := g.leaders()
	for _, pod := range g.pods {
		gated := isGated(pod) && !r.ungated.has(pod.UID)
		if !gated || pod.DeletionTimestamp != nil || !g.maySchedule(pod, leaders) {
			continue
		}
		writes.Go(func() error {
			err := r.ungate(ctx, pod)
			if err == nil {
				r.ungated.add(pod.UID)
			}
			return err
		})
	}
	return writes.Wait()
}

// ungate removes the driver's gate from the pod.
func (r *Reconciler) ungate(ctx context.Context, pod *corev1.Pod) error {
	removeGate := map[string]any{"$patch": "delete", "name": scheduling.ReservedGate}
	raw, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"spec":     map[string]any{"schedulingGates": []any{removeGate}},
	})
	if err != nil {
		return err
	}
	patch := client.RawPatch(types.StrategicMergePatchType, raw)
	if err := r.Client.Patch(ctx, pod.DeepCopy(), patch); err != nil {
		return ignoreStaleCache(err)
	}
	klog.FromContext(ctx).V(4).Info("Removed the scheduling gate", "pod", klog.KObj(pod))
	return nil
}

// ungatedCache has the UIDs of pods that were ungated recently. The cache of pods may
// still show the gate then. If an entry is missing, the controller repeats a write
// without effect. The zero value is an empty cache.
type ungatedCache struct {
	mu    sync.Mutex
	times map[types.UID]time.Time
}

func (c *ungatedCache) add(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(c.times, func(_ types.UID, t time.Time) bool { return now.Sub(t) > maxCacheDelay })
	if c.times == nil {
		c.times = map[types.UID]time.Time{}
	}
	c.times[uid] = now
}

func (c *ungatedCache) has(uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	t, ok := c.times[uid]
	return ok && time.Since(t) < maxCacheDelay
}

// maySchedule reports whether each of the group's claims that the pod uses is reserved
// for the pod, or has the pod as its leader.
func (g *group) maySchedule(pod *corev1.Pod, leaders map[string]types.UID) bool {
	for _, s := range g.sharedClaims {
		name := claimref.Name(pod, s.Name)
		if name == "" {
			continue
		}
		claim := s.claimNamed(name)
		switch {
		case claim == nil || claim.DeletionTimestamp != nil:
			return false
		case leaders[name] != pod.UID && !claims.IsReservedFor(claim, pod.UID):
			return false
		}
	}
	return true
}

func (s *sharedClaim) claimNamed(name string) *resourceapi.ResourceClaim {
	for _, claim := range s.shards {
		if claim.Name == name {
			return claim
		}
	}
	return nil
}

// leaders returns the UIDs of the leaders by the names of their claims. The leader of
// a claim is the first candidate that the scheduler has not rejected.
func (g *group) leaders() map[string]types.UID {
	leaders, rejected := map[string]types.UID{}, map[string]int{}
	for _, pod := range g.leaderCandidates() {
		for _, s := range g.sharedClaims {
			name := claimref.Name(pod, s.Name)
			_, found := leaders[name]
			switch {
			case found || hasForeignGate(pod): // another controller decides when to schedule the pod
			case podstatus.IsUnschedulable(pod):
				rejected[name]++
			case rejected[name] < maxRejectedLeaders:
				leaders[name] = pod.UID
			}
		}
	}
	return leaders
}

// leaderCandidates returns the group's pods that the scheduler may bind: pods without
// the driver's gate come first, then the oldest.
func (g *group) leaderCandidates() []*corev1.Pod {
	pods := slices.DeleteFunc(slices.Clone(g.pods), func(pod *corev1.Pod) bool {
		return podstatus.IsTerminal(pod) || pod.DeletionTimestamp != nil
	})
	gateOrder := func(pod *corev1.Pod) int {
		if isGated(pod) {
			return 1
		}
		return 0
	}
	slices.SortFunc(pods, func(a, b *corev1.Pod) int {
		return cmp.Or(
			cmp.Compare(gateOrder(a), gateOrder(b)),
			a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
			strings.Compare(a.Name, b.Name),
		)
	})
	return pods
}
