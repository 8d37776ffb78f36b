// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
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

// Pods that share a fabric wait behind a scheduling gate until their claim is reserved for them. Without the gate, the
// scheduler would add the entries of hundreds of pods one by one, and its writes would conflict with each other
// (measured with 765 pods: 2,798 conflicts, and 17 pods scheduled after 105 s). Instead, one pod, the leader, passes
// the gate first, and the scheduler allocates the claim. When the leader is bound, the controller adds the entries of
// all other pods with one write, and removes their gates. An earlier entry would keep the claim on devices that the
// leader cannot use, such as a failed rack's.

const (
	// maxConcurrentUngates limits concurrent writes that remove gates. Every pod needs
	// a separate write.
	maxConcurrentUngates = 16
	// maxCacheDelay is how long a write is expected to take to reach the cache.
	maxCacheDelay = 10 * time.Second
	// maxRejectedLeaders is the number of leaders of a claim that the scheduler may
	// reject before the next one waits. If the device itself is not available, the
	// scheduler would reject all pods, one after the other, and pods without the gate
	// write the claim one by one when the device is available again.
	maxRejectedLeaders = 3
	// leaderInterval is the delay after the last rejection before another pod becomes the leader, once
	// maxRejectedLeaders are reached. Only some of the pods may be impossible to schedule, for example because of their
	// other requests.
	leaderInterval = time.Minute
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

// ungatePods removes the driver's gate from the pods that the scheduler may schedule now, and from all pods if the
// annotation gates disables gating; those pods were admitted before the annotation was set. It sets g.gateProblem if
// the API server refuses a write.
func (r *Reconciler) ungatePods(ctx context.Context, g *group) error {
	var writes errgroup.Group
	writes.SetLimit(maxConcurrentUngates)
	now := time.Now()
	g.leadership = g.leaders(func(pod types.UID) time.Duration { return r.rejections.age(pod, now) })
	disabled := g.Annotations[scheduling.GatesAnnotation] == scheduling.GatesDisabled
	for _, pod := range g.pods {
		gated := isGated(pod) && !r.ungated.has(pod.UID)
		if !gated || pod.DeletionTimestamp != nil || !disabled && !g.maySchedule(pod, g.leadership) {
			continue
		}
		writes.Go(func() error {
			err := r.ungate(ctx, pod)
			if err != nil {
				return fmt.Errorf("remove the scheduling gate %s from pod %s: %w", scheduling.ReservedGate, pod.Name, err)
			}
			r.ungated.add(pod.UID)
			return nil
		})
	}
	err := writes.Wait()
	if claims.IsRefused(err) {
		g.gateProblem = fmt.Errorf("the API server refused the write: %w: "+
			"change the webhook or policy that the error names; until then the pod stays gated", err)
	}
	return err
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

// ungatedCache has the UIDs of pods that were ungated recently. The cache of pods may still show the gate then. If an
// entry is missing, the controller repeats the write, which then does not have an effect. The zero value is an empty
// cache.
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
func (g *group) maySchedule(pod *corev1.Pod, leaders map[string]*leadership) bool {
	for _, s := range g.sharedClaims {
		name := claimref.Name(pod, s.Name)
		if name == "" {
			continue
		}
		claim := s.claimNamed(name)
		switch {
		case claim == nil || claim.DeletionTimestamp != nil:
			return false
		case !leaders[name].isLeader(pod) && !claims.IsReservedFor(claim, pod.UID):
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

// leadership is the state of a claim's leader.
type leadership struct {
	// leader is the UID of the leader; "" if there is none.
	leader types.UID
	// rejected are the pods that the scheduler does not find a node for.
	rejected []*corev1.Pod
	// sinceRejection is the time since the controller first saw the last of the rejections.
	sinceRejection time.Duration
	// waiting reports whether other pods wait behind the gate.
	waiting bool
}

func (l *leadership) isLeader(pod *corev1.Pod) bool { return l != nil && l.leader == pod.UID }

// reject adds a pod that the scheduler does not find a node for, with the time when the controller first saw that.
func (l *leadership) reject(pod *corev1.Pod, since time.Duration) {
	if len(l.rejected) == 0 || since < l.sinceRejection {
		l.sinceRejection = since
	}
	l.rejected = append(l.rejected, pod)
}

// mayTryNext reports whether one more pod may become the leader.
func (l *leadership) mayTryNext() bool {
	return len(l.rejected) < maxRejectedLeaders || l.sinceRejection >= leaderInterval
}

// leaders returns the leaders by the names of their claims. The leader of a claim is the first
// candidate that the scheduler has not rejected. rejectedFor returns the time since the controller first saw the
// rejection of a pod.
func (g *group) leaders(rejectedFor func(pod types.UID) time.Duration) map[string]*leadership {
	leaders := map[string]*leadership{}
	for _, pod := range g.leaderCandidates() {
		if hasForeignGate(pod) {
			continue // another controller decides when to schedule the pod
		}
		for _, s := range g.sharedClaims {
			name := claimref.Name(pod, s.Name)
			l := leaders[name]
			if l == nil {
				l = &leadership{}
				leaders[name] = l
			}
			switch {
			case l.leader == "" && podstatus.IsUnschedulable(pod):
				l.reject(pod, rejectedFor(pod.UID))
			case l.leader == "" && (!isGated(pod) || l.mayTryNext()):
				l.leader = pod.UID
			case isGated(pod):
				l.waiting = true
			}
		}
	}
	return leaders
}

// stalled returns the leadership of a shard of the shared claim if its pods wait because the scheduler has rejected
// several leaders, or nil.
func (g *group) stalled(s *sharedClaim) *leadership {
	for _, n := range s.neededShards {
		if l := g.leadership[g.claimName(s, n)]; l != nil && l.waiting && len(l.rejected) >= maxRejectedLeaders {
			return l
		}
	}
	return nil
}

// stalledMessage names the pods that the scheduler has rejected, and describes what happens next.
func stalledMessage(s *sharedClaim, l *leadership) string {
	var names []string
	for _, pod := range l.rejected {
		names = append(names, pod.Name)
	}
	return fmt.Sprintf("the scheduler found no node for %d pods that use claim %s (%s): see their events; "+
		"the controller releases one more pod from the gate %s each minute", len(names), s.Name, abbreviate(names),
		scheduling.ReservedGate)
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
