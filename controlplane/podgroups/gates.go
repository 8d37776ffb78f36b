package podgroups

import (
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
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// Pods that share a fabric wait behind a scheduling gate until their claim is
// reserved for them: with hundreds of pods whose reservations the scheduler adds
// one by one, each of its writes conflicts with the others (measured with 765
// pods: 2,798 conflicts, and 17 pods scheduled after 105 s). One pod leads, so
// that the scheduler allocates the claim; then all others are reserved by one
// write, and their gates taken away.

// ungates at once: each is a write of its own.
const ungatesAtOnce = 16

func gated(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool { return g.Name == scheduling.ReservedGate })
}

// admit takes the gates away from pods that need not wait.
func (r *Reconciler) admit(ctx context.Context, g *group) error {
	var open errgroup.Group
	open.SetLimit(ungatesAtOnce)
	leaders := g.leaders()
	for _, pod := range g.pods {
		if !gated(pod) || pod.DeletionTimestamp != nil || !g.mayPass(pod, leaders) || r.passed.has(pod.UID) {
			continue
		}
		open.Go(func() error {
			err := r.ungate(ctx, pod)
			if err == nil {
				r.passed.add(pod.UID)
			}
			return err
		})
	}
	return open.Wait()
}

// recently are pods whose gates were taken away: the cache learns it later than
// the next pod comes. To forget one costs a write that changes nothing.
type recently struct {
	mu sync.Mutex
	at map[types.UID]time.Time
}

// cacheBehind is how far a cache may be behind.
const cacheBehind = 10 * time.Second

func (r *recently) add(uid types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(r.at, func(_ types.UID, at time.Time) bool { return now.Sub(at) > cacheBehind })
	if r.at == nil {
		r.at = map[types.UID]time.Time{}
	}
	r.at[uid] = now
}

func (r *recently) has(uid types.UID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, ok := r.at[uid]
	return ok && time.Since(at) < cacheBehind
}

// mayPass tells whether a pod's claims are reserved for it, or it is the one
// for which they are allocated.
func (g *group) mayPass(pod *corev1.Pod, leaders map[string]types.UID) bool {
	for _, e := range g.entries {
		name := claimref.Name(pod, e.Name)
		claim := g.named(e, name)
		switch {
		case name == "":
		case claim == nil || claim.DeletionTimestamp != nil:
			return false
		case claim.Status.Allocation == nil:
			if leaders[name] != pod.UID {
				return false
			}
		case !claims.IsReservedFor(claim, pod.UID):
			return false
		}
	}
	return true
}

func (g *group) named(e *entry, name string) *resourceapi.ResourceClaim {
	for _, claim := range e.shards {
		if claim.Name == name {
			return claim
		}
	}
	return nil
}

// leadersAtOnce bounds how many pods are let go ahead for a claim, one after the
// other, because the scheduler has no node for those before: if it is the device
// that is not to be had, all would.
const leadersAtOnce = 3

// leaders are, by claim, the pods that need no reservation to be scheduled: of
// those that live the first that the scheduler does not refuse.
func (g *group) leaders() map[string]types.UID {
	pods := slices.Clone(g.pods)
	slices.SortFunc(pods, func(a, b *corev1.Pod) int {
		if gated(a) != gated(b) { // one that has passed leads
			if gated(a) {
				return 1
			}
			return -1
		}
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
	leaders, stuck := map[string]types.UID{}, map[string]int{}
	for _, pod := range pods {
		if podstatus.IsTerminal(pod) || pod.DeletionTimestamp != nil {
			continue
		}
		for _, e := range g.entries {
			name := claimref.Name(pod, e.Name)
			_, taken := leaders[name]
			switch {
			case taken:
			case podstatus.IsUnschedulable(pod) || waitsForOthers(pod):
				stuck[name]++
			case stuck[name] < leadersAtOnce:
				leaders[name] = pod.UID
			}
		}
	}
	return leaders
}

// waitsForOthers tells whether somebody else's gate keeps a pod from being
// scheduled.
func waitsForOthers(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool { return g.Name != scheduling.ReservedGate })
}

func (r *Reconciler) ungate(ctx context.Context, pod *corev1.Pod) error {
	raw, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"spec":     map[string]any{"schedulingGates": []any{map[string]any{"$patch": "delete", "name": scheduling.ReservedGate}}},
	})
	if err != nil {
		return err
	}
	return ignoreBehind(r.Client.Patch(ctx, pod.DeepCopy(), client.RawPatch(types.StrategicMergePatchType, raw)))
}
