// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"net/netip"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

func TestKind_setLost(t *testing.T) {
	k := newKind(t, Options{})
	link := attach.Link{Network: "storage", Addresses: []string{"10.20.0.1/16"}}
	other := attach.Link{Network: "storage", Addresses: []string{"10.20.0.2/16"}}
	static := attach.Link{Sources: []string{"10.20.0.1"}}
	address := ipam.Address{Network: "storage", IP: netip.MustParseAddr("10.20.0.1")}
	check := func(when string, want, wantOther netdev.Blocking) {
		t.Helper()
		for of, c := range map[*attach.Link]netdev.Blocking{&link: want, &other: wantOther, &static: netdev.BlockIfChanged} {
			if got := k.lost.blocking(*of); got != c {
				t.Errorf("%s: blocking of %v: got %v, want %v", when, *of, got, c)
			}
		}
	}
	altered := func(when string, want int) {
		t.Helper()
		if got := k.lost.takeAltered(); len(got) != want {
			t.Errorf("%s: altered addresses: got %v, want %d", when, got, want)
		}
	}
	check("before it is known", netdev.BlockAsBefore, netdev.BlockAsBefore)
	k.setLost(ipam.Lost{address: "n2"})
	altered("first known", 2) // the links must be examined again, whatever the result
	check("lost", netdev.BlockAlways, netdev.BlockIfChanged)
	k.setLost(ipam.Lost{address: ""})
	altered("no node has it any longer", 1)
	k.setLost(ipam.Lost{address: ""})
	altered("the same", 0)
	k.setLost(ipam.Lost{})
	altered("taken again", 1)
	check("taken again", netdev.BlockIfChanged, netdev.BlockIfChanged)
	k.setLost(ipam.Lost{address: ""})
	altered("lost again, to no node", 1)
}

func TestLostAddresses_message(t *testing.T) {
	l := newLostAddresses()
	ip := netip.MustParseAddr("10.20.0.1")
	l.lost = ipam.Lost{ipam.Address{Network: "storage", IP: ip}: "n2"}
	for status, want := range map[metav1.ConditionStatus]string{
		metav1.ConditionTrue:  "node n2 has the address now; the link is blocked: delete the pod",
		metav1.ConditionFalse: "the link still uses the address, because the network has identity Off: delete the pod",
	} {
		identity := metav1.Condition{Status: status, Message: "the network has identity Off"}
		if got := l.message("storage", []netip.Addr{ip}, identity); !strings.Contains(got, want) {
			t.Errorf("IdentityEnforced %s: got %q, want a message that contains %q", status, got, want)
		}
	}
}
