package admission

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

const (
	// shardPods is how many pods a claim is given here: fewer than there is room
	// for, because another replica of the controller may give it some that are not
	// seen here yet.
	shardPods = claims.MaxPods - 15
	// unseenFor is how long a pod that was admitted counts without having been
	// seen: what comes after admission may have refused it.
	unseenFor = 15 * time.Second
)

// Shards counts the pods of each claim, so that none gets more than can be in its
// status.reservedFor. Pods that have ended keep their place as long as they are
// there (see claims.StaleEntriesChange). Pods that were admitted and are not in the cache
// yet count too: a Job creates hundreds in a second.
type Shards struct {
	clock clock.PassiveClock

	mu     sync.Mutex
	pods   map[types.NamespacedName]map[types.UID]bool
	unseen map[types.NamespacedName]map[string]time.Time // when they were admitted, by request
	synced func() bool
}

// NewShards returns a count of nothing; Watch keeps it.
func NewShards(c clock.PassiveClock) *Shards {
	return &Shards{clock: c, pods: map[types.NamespacedName]map[types.UID]bool{}, unseen: map[types.NamespacedName]map[string]time.Time{}, synced: func() bool { return false }}
}

// next is the number of the first claim with room for a pod more, which is of that
// request. name gives the claims' names.
func (s *Shards) next(namespace, request string, name func(shard int) string) (int, error) {
	if !s.synced() {
		return 0, errors.New("the pods that there are have not been counted yet: try again")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := range claims.MaxShards {
		key := types.NamespacedName{Namespace: namespace, Name: name(n)}
		s.forget(key)
		if len(s.pods[key])+len(s.unseen[key]) < shardPods {
			if s.unseen[key] == nil {
				s.unseen[key] = map[string]time.Time{}
			}
			s.unseen[key][request] = s.clock.Now()
			return n, nil
		}
	}
	return 0, denied("the PodGroup has %d pods on one device: that is as many as its claims can be reserved for", claims.MaxShards*shardPods)
}

// forget drops pods that have not been seen for too long.
func (s *Shards) forget(key types.NamespacedName) {
	maps.DeleteFunc(s.unseen[key], func(_ string, at time.Time) bool { return s.clock.Since(at) > unseenFor })
	if len(s.unseen[key]) == 0 {
		delete(s.unseen, key)
	}
}

// Watch keeps the count by the pods that an informer tells of.
func (s *Shards) Watch(informer interface {
	AddEventHandler(cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error)
}) error {
	registration, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { s.seen(o) },
		UpdateFunc: func(_, o any) { s.seen(o) },
		DeleteFunc: func(o any) {
			if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			if pod, ok := o.(*corev1.Pod); ok {
				s.count(pod, false)
			}
		},
	})
	if err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	s.synced = registration.HasSynced
	return nil
}

func (s *Shards) seen(o any) {
	if pod, ok := o.(*corev1.Pod); ok {
		s.count(pod, true)
	}
}

func (s *Shards) count(pod *corev1.Pod, there bool) {
	if pod.Labels[scheduling.GroupUIDLabel] == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range pod.Spec.ResourceClaims {
		if c.ResourceClaimName == nil {
			continue
		}
		key := types.NamespacedName{Namespace: pod.Namespace, Name: *c.ResourceClaimName}
		switch {
		case !there:
			delete(s.pods[key], pod.UID)
			if len(s.pods[key]) == 0 {
				delete(s.pods, key)
			}
		case !s.pods[key][pod.UID]:
			if s.pods[key] == nil {
				s.pods[key] = map[types.UID]bool{}
			}
			s.pods[key][pod.UID] = true
			delete(s.unseen[key], pod.Annotations[scheduling.AdmittedAnnotation])
		}
	}
}
