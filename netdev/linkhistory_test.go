// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"net"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

var testKey = NewLinkKey(1, net.HardwareAddr{2, 0, 0, 0, 0, 1})

func TestLinkHistory_setDisplaced(t *testing.T) {
	h := newLinkHistory()
	for _, c := range []struct {
		displaced bool
		changes   uint64 // in total
	}{{false, 0}, {true, 1}, {true, 1}, {false, 2}} {
		h.setDisplaced(testKey, Attachment{Name: "net0"}, c.displaced)
		a, displaced := h.displacedWith(testKey)
		if displaced != c.displaced || displaced && a.Name != "net0" {
			t.Errorf("got %+v, displaced: %t, want %t", a, displaced, c.displaced)
		}
		if changes, detached := h.counts(); changes != c.changes || detached != 0 {
			t.Errorf("got %d changes and %d detached links, want %d and 0", changes, detached, c.changes)
		}
	}
}

func TestLinkHistory_wasDetachedRecently(t *testing.T) {
	h, start := newLinkHistory(), time.Now()
	h.addDetached(testKey, start)
	for after, want := range map[time.Duration]bool{0: true, detachGracePeriod - 1: true, detachGracePeriod: false} {
		if got := h.wasDetachedRecently(testKey, start.Add(after)); got != want {
			t.Errorf("%v after the link was detached: got %t, want %t", after, got, want)
		}
	}
	h.addDetached(NewLinkKey(1, net.HardwareAddr{2, 0, 0, 0, 0, 2}), start.Add(detachGracePeriod))
	if changes, detached := h.counts(); len(h.detachedAt) != 1 || changes != 2 || detached != 2 {
		t.Errorf("got %d changes, %d detached links, and the times of %d, want 2, 2, and 1", changes, detached,
			len(h.detachedAt))
	}
}

// A NIC is guarded while a link makes it necessary, and for the time of the timer afterwards.
func TestNICGuard_policy(t *testing.T) {
	g, now := &nicGuard{links: map[LinkKey]bool{}}, time.Now()
	expect := func(when string, guarded bool, length time.Duration) {
		t.Helper()
		p := g.policy(classify.Policy{}, now)
		if p.Guarded != guarded || p.GuardTime != length {
			t.Errorf("%s: guarded: %t for %v, want %t for %v", when, p.Guarded, p.GuardTime, guarded, length)
		}
	}
	expect("without a link", false, 0)
	g.links[testKey] = true
	expect("with a link", true, minGuardTime)
	delete(g.links, testKey)
	now = now.Add(minGuardTime - 1)
	expect("before the timer expires", true, minGuardTime)
	now = now.Add(2)
	expect("after the timer has expired", false, 0)
	g.inspection.unknown = []net.HardwareAddr{{2, 0, 0, 0, 0, 3}}
	expect("with a hidden link", true, 2*minGuardTime)
}
