// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/netdev/dhcp"
)

// fakeAttachments are attachments that have ended.
type fakeAttachments struct {
	list      []driver.Attachment
	listErr   error
	updateErr error
}

func (f fakeAttachments) List(selected func(*attach.Record) bool) (list []driver.Attachment, err error) {
	for _, a := range f.list {
		if selected(&a.Record) {
			list = append(list, a)
		}
	}
	return list, f.listErr
}

func (f fakeAttachments) Update(
	context.Context, attach.Record, func(driver.Attachment, func(json.RawMessage) error) error,
) error {
	return f.updateErr
}

func attachmentOf(t *testing.T, link attach.Link) driver.Attachment {
	t.Helper()
	payload, err := json.Marshal(link)
	if err != nil {
		t.Fatal(err)
	}
	return driver.Attachment{Record: attach.Record{Payload: payload}}
}

// A pod ends while the plugin leases an address for it. No record has the lease.
func TestLeasedLink_setNew_releasesAddressOfEndedPod(t *testing.T) {
	link := func(id byte) attach.Link {
		return attach.Link{MAC: "02:00:00:00:00:01", DHCP: &attach.Lease{ClientID: []byte{id}}}
	}
	for _, tc := range []struct {
		name        string
		attachments fakeAttachments
		want        bool
	}{
		{"the pod has ended", fakeAttachments{updateErr: driver.ErrEnded}, true},
		{"another pod leases an address",
			fakeAttachments{updateErr: driver.ErrEnded, list: []driver.Attachment{attachmentOf(t, link(2))}}, true},
		{"another sandbox of the pod leases an address",
			fakeAttachments{updateErr: driver.ErrEnded, list: []driver.Attachment{attachmentOf(t, link(1))}}, false},
		{"the records are unreadable", fakeAttachments{updateErr: driver.ErrEnded, listErr: errors.New("unreadable")}, false},
		{"a newer plugin runs", fakeAttachments{updateErr: driver.ErrOutdated}, false},
		{"the record has the address", fakeAttachments{}, false},
	} {
		var operations []string
		k := newKind(t, Options{Failpoints: func(name string, _ func() error) error {
			operations = append(operations, name)
			return nil
		}})
		lease := testLease()
		lease.Expires = dhcp.Never
		l := leasedLink{kind: k, attachments: tc.attachments, link: link(1)}
		if err := l.setNew(t.Context(), lease); !errors.Is(err, tc.attachments.updateErr) {
			t.Errorf("%s: got error %v, want %v", tc.name, err, tc.attachments.updateErr)
		}
		if got := slices.Equal(operations, []string{"release lease"}); got != tc.want {
			t.Errorf("%s: got the operations %v; released: want %t", tc.name, operations, tc.want)
		}
	}
}

// The plugin reads the records of links without leases once.
func TestRenewer_mayHaveLeases(t *testing.T) {
	attachment := func(claim string, link attach.Link) driver.Attachment {
		a := attachmentOf(t, link)
		a.Record.ClaimUID = claim
		return a
	}
	attachments := &fakeAttachments{list: []driver.Attachment{
		attachment("static", attach.Link{Index: 1}),
		attachment("not attached yet", attach.Link{}),
		attachment("lease", attach.Link{Index: 1, DHCP: &attach.Lease{}}),
	}}
	r := newRenewer(newKind(t, Options{}), attachments)
	r.running = parallelExchanges // so that start does not start a task
	listed := func() (claims []string) {
		var workers sync.WaitGroup
		r.start(t.Context(), &workers)
		all, err := r.mayHaveLeases()
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range all {
			claims = append(claims, a.Record.ClaimUID)
		}
		return claims
	}
	if got, want := listed(), []string{"not attached yet", "lease"}; !slices.Equal(got, want) {
		t.Errorf("the links that may have leases are %q, want %q", got, want)
	}
	attachments.list = attachments.list[1:]
	if listed(); len(r.withoutLease) > 0 {
		t.Errorf("the plugin remembers ended links without leases: %v", r.withoutLease)
	}
}

// The plugin must not forget when a lease is due, or it would renew the lease too early.
func TestRenewer_start_keepsTasksIfRecordsAreUnreadable(t *testing.T) {
	for _, tc := range []struct {
		err  error
		want int
	}{{nil, 0}, {errors.New("unreadable"), 1}} {
		r := newRenewer(newKind(t, Options{}), fakeAttachments{listErr: tc.err})
		r.tasks[leaseID{claim: "c"}] = &leaseTask{next: dhcp.SinceBoot() + time.Hour}
		var workers sync.WaitGroup
		r.start(t.Context(), &workers)
		if len(r.tasks) != tc.want {
			t.Errorf("error %v: got %d tasks, want %d", tc.err, len(r.tasks), tc.want)
		}
	}
}
