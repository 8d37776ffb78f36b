// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// ShardsPath is the path that a replica serves Shards to the others at.
	ShardsPath = "/shards"
	// askTimeout is less than the webhook's timeout of 2 s, so a replica can still answer if the leading one does not.
	askTimeout = time.Second
	// renewalTimeout is how long a replica waits for the leading one after the last renewal of the
	// lease that the replica has observed. Replicas read the lease every 4.4 s at most.
	renewalTimeout = 8 * time.Second
	// maxBody limits the size of an answer or a question, in bytes.
	maxBody = 4096
)

// shardQuestion asks for the number of the claim that has room for one more pod.
type shardQuestion struct {
	Namespace string `json:"namespace"`
	// Claim is the name of the first claim.
	Claim string `json:"claim"`
	// Request is the UID of the admission request that creates the pod; "" in a dry run.
	Request string `json:"request"`
}

type shardAnswer struct {
	Shard int `json:"shard"`
}

// LeadingReplica asks the leading replica to assign pods to shards. If each replica counted for
// itself, a claim could get too many pods, because a replica sees only later which pods
// another one has admitted.
//
// It also implements the lock of leader election, which shows it which replica leads.
type LeadingReplica struct {
	// Interface is the lock. The identity of a replica is from ReplicaIdentity.
	resourcelock.Interface
	HTTP  *http.Client
	Clock clock.PassiveClock

	mu       sync.Mutex
	observed resourcelock.LeaderElectionRecord
	renewed  time.Time // when a renewal was observed
}

// ReplicaIdentity returns an identity for leader election that contains the host:port of
// the replica's webhook server. The name must be unique.
func ReplicaIdentity(name, address string) string { return name + "_" + address }

// Get implements resourcelock.Interface.
func (l *LeadingReplica) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := l.Interface.Get(ctx)
	if err == nil {
		l.observe(*record)
	}
	return record, raw, err
}

// Create implements resourcelock.Interface.
func (l *LeadingReplica) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Create(ctx, record)
	if err == nil {
		l.observe(record)
	}
	return err
}

// Update implements resourcelock.Interface.
func (l *LeadingReplica) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Update(ctx, record)
	if err == nil {
		l.observe(record)
	}
	return err
}

func (l *LeadingReplica) observe(record resourcelock.LeaderElectionRecord) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.observed != record {
		l.observed, l.renewed = record, l.Clock.Now()
	}
}

// address returns the host:port of the leading replica, or "" if this replica leads or the leading
// one cannot be asked. It also returns when that replica was last known to lead.
func (l *LeadingReplica) address() (address string, renewed time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	holder := l.observed.HolderIdentity
	address = holder[strings.LastIndex(holder, "_")+1:]
	if holder == l.Identity() || !strings.Contains(address, ":") {
		return "", l.renewed
	}
	return address, l.renewed
}

// errAssignLocally means that this replica assigns the pod itself, because it leads, or because the leading
// replica no longer renews its lease.
var errAssignLocally = errors.New("this replica assigns the pod itself")

// ask returns the leading replica's answer, or errAssignLocally.
func (l *LeadingReplica) ask(ctx context.Context, q shardQuestion) (int, error) {
	address, renewed := l.address()
	if address == "" {
		return 0, errAssignLocally
	}
	shard, err := l.askAt(ctx, address, q)
	gone := errors.Is(err, syscall.ECONNREFUSED) || l.Clock.Since(renewed) > renewalTimeout
	if err != nil && !errors.As(err, new(*deniedError)) && gone {
		klog.FromContext(ctx).Info("Leading replica did not respond; assigning pod locally",
			"claim", klog.KRef(q.Namespace, q.Claim), "address", address, "err", err)
		return 0, errAssignLocally
	}
	if err != nil {
		err = fmt.Errorf("ask the leading replica of the controller which claim has room for the pod: %w", err)
	}
	return shard, err
}

func (l *LeadingReplica) askAt(ctx context.Context, address string, q shardQuestion) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	body, err := json.Marshal(q)
	if err != nil {
		return 0, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+address+ShardsPath, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	response, err := l.HTTP.Do(request)
	if err != nil {
		return 0, err
	}
	defer func() { _ = response.Body.Close() }()
	raw, err := io.ReadAll(io.LimitReader(response.Body, maxBody))
	if err != nil {
		return 0, err
	}
	switch response.StatusCode {
	case http.StatusOK:
		var answer shardAnswer
		return answer.Shard, json.Unmarshal(raw, &answer)
	case http.StatusForbidden:
		return 0, denied(reasonNoRoom, "%s", strings.TrimSpace(string(raw)))
	case http.StatusUnauthorized:
		l.HTTP.CloseIdleConnections() // the certificate may have expired since the connection began
	}
	return 0, fmt.Errorf("the leading replica at %s answers %s: %s",
		address, response.Status, strings.TrimSpace(string(raw)))
}

// assign returns the number of the claim that has room for the pod. The leading replica
// chooses it.
func (s *Shards) assign(ctx context.Context, q shardQuestion) (int, error) {
	if s.LeadingReplica == nil {
		return s.assignLocally(q)
	}
	shard, err := s.LeadingReplica.ask(ctx, q)
	if errors.Is(err, errAssignLocally) {
		return s.assignLocally(q)
	}
	return shard, err
}

// ServeHTTP answers the questions of other replicas. The caller authenticates them.
func (s *Shards) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var q shardQuestion
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(&q); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	shard, err := s.assignLocally(q)
	switch {
	case errors.As(err, new(*deniedError)):
		http.Error(w, err.Error(), http.StatusForbidden)
	case err != nil:
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
	default:
		_ = json.NewEncoder(w).Encode(shardAnswer{Shard: shard}) // fails only if the other replica has closed the connection
	}
}
