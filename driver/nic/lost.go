// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"fmt"
	"maps"
	"net/netip"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

// lostAddresses holds the pool addresses that links use and the node has lost. Links with such an address are
// blocked, because another node may have assigned it.
type lostAddresses struct {
	changed chan struct{} // has an element if altered has grown

	mu sync.Mutex
	// lost is nil until setLost was called.
	lost ipam.Lost
	// kept are the addresses of links that blocking was called for before setLost.
	kept map[ipam.Address]bool
	// altered are the addresses where the result of blocking has changed since takeAltered was called.
	altered map[ipam.Address]bool
}

func newLostAddresses() *lostAddresses {
	return &lostAddresses{
		changed: make(chan struct{}, 1), kept: map[ipam.Address]bool{}, altered: map[ipam.Address]bool{},
	}
}

// setLost sets the addresses that the node has lost; see ipam.Options.
func (k *Kind) setLost(lost ipam.Lost) {
	l := k.lost
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, addresses := range []ipam.Lost{lost, l.lost} {
		for address := range addresses {
			node, isLost := lost[address]
			before, wasLost := l.lost[address]
			if isLost != wasLost || node != before {
				l.altered[address] = true
			}
		}
	}
	maps.Copy(l.altered, l.kept)
	l.kept, l.lost = nil, lost
	if len(l.altered) > 0 {
		signal(l.changed)
	}
}

// takeAltered returns the addresses where the result of blocking has changed since the last call.
func (l *lostAddresses) takeAltered() map[ipam.Address]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	altered := l.altered
	l.altered = map[ipam.Address]bool{}
	return altered
}

// blocking returns when a link must be blocked because of its addresses. Until setLost was called,
// a link that the previous plugin has blocked stays blocked.
func (l *lostAddresses) blocking(link attach.Link) netdev.Blocking {
	l.mu.Lock()
	defer l.mu.Unlock()
	result := netdev.BlockIfChanged
	for _, address := range addressesOf(link) {
		if _, lost := l.lost[address]; lost {
			return netdev.BlockAlways
		}
		if l.lost == nil {
			l.kept[address] = true
			result = netdev.BlockAsBefore
		}
	}
	return result
}

// message returns the message of the condition Ready with the reason AddressLost.
// identity is the condition IdentityEnforced of the link.
func (l *lostAddresses) message(network string, addresses []netip.Addr, identity metav1.Condition) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	effect := "the link is blocked"
	if identity.Status != metav1.ConditionTrue {
		effect = "the link still uses the address, because " + identity.Message
	}
	for _, ip := range addresses {
		if node, lost := l.lost[ipam.Address{Network: network, IP: ip}]; lost {
			return fmt.Sprintf("the link has lost its address %s: %s; %s: delete the pod to get another address",
				ip, ipam.LostReason(node), effect)
		}
	}
	return fmt.Sprintf("the link has lost its address; %s: delete the pod to get another address", effect)
}

// changeOfLostAddresses returns the change of the status of links with these addresses.
func changeOfLostAddresses(addresses map[ipam.Address]bool) driver.Change {
	return driver.Change{Modified: func(r *attach.Record) bool {
		if r.Kind != Name {
			return false
		}
		link, err := r.Link()
		if err != nil {
			return false
		}
		for _, address := range addressesOf(link) {
			if addresses[address] {
				return true
			}
		}
		return false
	}}
}
