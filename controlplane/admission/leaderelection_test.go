// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	testclock "k8s.io/utils/clock/testing"

	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

// fakeLock is a lock of leader election in memory.
type fakeLock struct {
	resourcelock.Interface
	identity string
	record   resourcelock.LeaderElectionRecord
}

func (l *fakeLock) Identity() string { return l.identity }

func (l *fakeLock) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record := l.record
	return &record, nil, nil
}

func syncedShards(clock *testclock.FakePassiveClock) *Shards {
	s := NewShards(clock)
	s.synced = func() bool { return true }
	return s
}

// A replica that does not lead asks the leading one, and decides itself only if that
// replica is gone.
func TestShards_asksLeadingReplica(t *testing.T) {
	clock := testclock.NewFakePassiveClock(time.Now())
	leading := syncedShards(clock)
	full := syncedShards(clock)
	q := shardQuestion{Namespace: "ns", Claim: "claim", Request: "r"}
	for i := range shardPods {
		for _, s := range []*Shards{leading, full} {
			q := shardQuestion{Namespace: "ns", Claim: "claim", Request: fmt.Sprint(i)}
			if _, err := s.assignLocally(q); err != nil {
				t.Fatal(err)
			}
		}
	}
	for shard := 1; shard < claims.MaxShards; shard++ {
		for i := range shardPods {
			q := shardQuestion{Namespace: "ns", Claim: "claim", Request: fmt.Sprint(shard, i)}
			if _, err := full.assignLocally(q); err != nil {
				t.Fatal(err)
			}
		}
	}
	serve := func(h http.Handler) string {
		server := httptest.NewTLSServer(h)
		t.Cleanup(server.Close)
		return strings.TrimPrefix(server.URL, "https://")
	}
	stopped := httptest.NewTLSServer(leading)
	stopped.Close()
	hangs := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // only then does the server notice that the client is gone
		<-r.Context().Done()
	})
	// All servers of httptest have the same certificate.
	trusting := httptest.NewTLSServer(nil)
	t.Cleanup(trusting.Close)
	for _, test := range []struct {
		name   string
		holder string
		lost   time.Duration // since the last renewal
		shard  int
		err    string
	}{
		{name: "no replica leads"},
		{name: "this replica leads", holder: "self"},
		{name: "the leading replica has no address", holder: "other_uid"},
		{name: "another replica leads", holder: "other_uid_" + serve(leading), shard: 1},
		{
			name: "the leading replica has no room", holder: "other_uid_" + serve(full),
			err: "61440 pods on one device",
		},
		{
			name: "the leading replica is not ready", holder: "other_uid_" + serve(NewShards(clock)),
			err: "503 Service Unavailable: the controller has just started and has not listed the pods yet",
		},
		{
			name: "the leading replica was replaced", holder: "other_uid_" + strings.TrimPrefix(stopped.URL, "https://"),
		},
		{
			name: "the leading replica hangs", holder: "other_uid_" + serve(hangs),
			err: "ask the leading replica of the controller", lost: renewalTimeout - time.Second,
		},
		{name: "the leading replica is lost", holder: "other_uid_" + serve(hangs), lost: renewalTimeout + time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			clock := testclock.NewFakePassiveClock(time.Now())
			lock := &fakeLock{identity: "self", record: resourcelock.LeaderElectionRecord{HolderIdentity: test.holder}}
			s := syncedShards(clock)
			s.LeadingReplica = &LeadingReplica{Interface: lock, HTTP: trusting.Client(), Clock: clock}
			if _, _, err := s.LeadingReplica.Get(t.Context()); err != nil { // as leader election does
				t.Fatal(err)
			}
			clock.SetTime(clock.Now().Add(test.lost))
			shard, err := s.assign(t.Context(), q)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Errorf("error %v, want one that contains %q", err, test.err)
				}
				return
			}
			if err != nil || shard != test.shard {
				t.Errorf("shard %d, error %v; want shard %d", shard, err, test.shard)
			}
		})
	}
}

// A renewal that leaves the record unchanged does not count: the record contains the time
// of the renewal.
func TestLeadingReplica_observesRenewals(t *testing.T) {
	clock := testclock.NewFakePassiveClock(time.Now())
	record := resourcelock.LeaderElectionRecord{HolderIdentity: "other_uid_10.0.0.1:9443"}
	lock := &fakeLock{identity: "self", record: record}
	l := &LeadingReplica{Interface: lock, Clock: clock}
	get := func() time.Time {
		t.Helper()
		if _, _, err := l.Get(t.Context()); err != nil {
			t.Fatal(err)
		}
		address, renewed := l.address()
		if address != "10.0.0.1:9443" {
			t.Errorf("address %q", address)
		}
		return renewed
	}
	first := get()
	clock.SetTime(clock.Now().Add(time.Second))
	if got := get(); !got.Equal(first) {
		t.Errorf("the same record counts as renewed at %s, want %s", got, first)
	}
	lock.record.RenewTime = metav1.NewTime(clock.Now())
	if got := get(); !got.Equal(clock.Now()) {
		t.Errorf("renewed at %s, want %s", got, clock.Now())
	}
}
