// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

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
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
)

const (
	// shardPods is the number of pods that a replica assigns to a claim. It is
	// less than the claim has room for: when another replica becomes the leading one, it
	// may not have observed yet which pods its predecessor assigned.
	shardPods = claims.MaxPods - 15
	// pendingTimeout is how long an assigned pod counts if the informer does not report it: the API
	// server may refuse the pod after this webhook has admitted it.
	pendingTimeout = 15 * time.Second
	// maxPending limits the number of assigned pods that were not observed yet. An API server cannot create
	// so many pods within pendingTimeout, but it can refuse them, for example because of a quota: see isFull.
	maxPending = 1 << 16
	// pendingSteps is the number of times per pendingTimeout that expired pods are removed.
	pendingSteps = 5
)

// Shards counts the pods of each claim, so no claim gets more pods than its status.reservedFor has room for. Terminal
// pods count until they are deleted, because their entries remain that long (see claims.StaleEntriesChange). Pods that
// this replica has assigned but not observed yet count too, because a Job may create hundreds of pods per second.
type Shards struct {
	// LeadingReplica, if not nil, asks the leading replica instead.
	LeadingReplica *LeadingReplica

	clock clock.PassiveClock

	mu      sync.Mutex
	pods    map[types.NamespacedName]map[types.UID]bool   // observed pods, by claim
	pending map[types.NamespacedName]map[string]time.Time // assignment times of other pods, by claim and request
	waiting int                                           // number of elements of pending
	waits   map[string]int                                // the same by namespace, without zeros
	expired time.Time                                     // time of the last expirePending
	synced  func() bool
}

// NewShards returns Shards, which return errors until Watch was called and the informer has
// reported all pods.
func NewShards(c clock.PassiveClock) *Shards {
	return &Shards{
		clock:   c,
		pods:    map[types.NamespacedName]map[types.UID]bool{},
		pending: map[types.NamespacedName]map[string]time.Time{},
		waits:   map[string]int{},
		synced:  func() bool { return false },
	}
}

// assignLocally returns the number of the first claim that has room for the pod that is
// being created by the admission request, and counts the pod except in a dry run.
func (s *Shards) assignLocally(q shardQuestion) (int, error) {
	if !s.synced() {
		return 0, errors.New("the controller has just started and has not listed the pods yet; retry")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clock.Since(s.expired) > pendingTimeout/pendingSteps {
		s.expirePending()
	}
	if s.isFull(q.Namespace) {
		return 0, fmt.Errorf("%d pods were admitted in the last %s and are not created yet, %d of them in "+
			"namespace %q; retry", s.waiting, pendingTimeout, s.waits[q.Namespace], q.Namespace)
	}
	for shard := range claims.MaxShards {
		claim := types.NamespacedName{Namespace: q.Namespace, Name: claims.NameOfShard(q.Claim, shard)}
		if len(s.pods[claim])+len(s.pending[claim]) >= shardPods {
			continue
		}
		if q.Request != "" {
			s.count(claim, q.Request)
		}
		return shard, nil
	}
	return 0, denied(reasonNoRoom,
		"the PodGroup, Job, or replica has %d pods on one device, and its claims cannot be reserved for more",
		claims.MaxShards*shardPods)
}

// isFull reports whether the namespace cannot get another pod assigned. When maxPending pods of all namespaces wait,
// only namespaces with less than an equal part of them can continue. One namespace therefore cannot block the others.
func (s *Shards) isFull(namespace string) bool {
	return s.waiting >= maxPending && s.waits[namespace] >= maxPending/max(1, len(s.waits))
}

// addWaiting changes the number of pods of the namespace that wait.
func (s *Shards) addWaiting(namespace string, n int) {
	s.waiting += n
	if s.waits[namespace] += n; s.waits[namespace] == 0 {
		delete(s.waits, namespace)
	}
}

// count counts a pod that a request creates.
func (s *Shards) count(claim types.NamespacedName, request string) {
	if s.pending[claim] == nil {
		s.pending[claim] = map[string]time.Time{}
	}
	if _, ok := s.pending[claim][request]; !ok {
		s.addWaiting(claim.Namespace, 1)
	}
	s.pending[claim][request] = s.clock.Now()
}

// expirePending removes assigned pods of all claims that were not observed in time.
func (s *Shards) expirePending() {
	s.expired = s.clock.Now()
	expired := func(_ string, assigned time.Time) bool { return s.clock.Since(assigned) > pendingTimeout }
	for claim, pending := range s.pending {
		before := len(pending)
		maps.DeleteFunc(pending, expired)
		s.addWaiting(claim.Namespace, len(pending)-before)
		if len(pending) == 0 {
			delete(s.pending, claim)
		}
	}
}

// Watch counts the pods that an informer reports.
func (s *Shards) Watch(informer interface {
	AddEventHandler(cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error)
}) error {
	registration, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    s.observe,
		UpdateFunc: func(_, object any) { s.observe(object) },
		DeleteFunc: s.observeDeleted,
	})
	if err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	s.synced = registration.HasSynced
	return nil
}

// observe counts a pod of a PodGroup that exists.
func (s *Shards) observe(object any) {
	pod, ok := object.(*corev1.Pod)
	if !ok || pod.Labels[scheduling.GroupUIDLabel] == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range claimref.Names(pod) {
		claim := types.NamespacedName{Namespace: pod.Namespace, Name: name}
		if s.pods[claim][pod.UID] {
			continue
		}
		if s.pods[claim] == nil {
			s.pods[claim] = map[types.UID]bool{}
		}
		s.pods[claim][pod.UID] = true
		request := pod.Annotations[scheduling.AdmittedAnnotation]
		if _, ok := s.pending[claim][request]; ok {
			delete(s.pending[claim], request)
			s.addWaiting(claim.Namespace, -1)
		}
	}
}

// observeDeleted stops counting a pod of a PodGroup.
func (s *Shards) observeDeleted(object any) {
	if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = unknown.Obj
	}
	pod, ok := object.(*corev1.Pod)
	if !ok || pod.Labels[scheduling.GroupUIDLabel] == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range claimref.Names(pod) {
		claim := types.NamespacedName{Namespace: pod.Namespace, Name: name}
		delete(s.pods[claim], pod.UID)
		if len(s.pods[claim]) == 0 {
			delete(s.pods, claim)
		}
	}
}
