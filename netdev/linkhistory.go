// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"maps"
	"sync"
	"time"
)

// detachGracePeriod is how long the NIC may accept the address of a link after it was detached: the kernel removes the
// links of a namespace some time after the namespace has ended.
const detachGracePeriod = 5 * time.Second

// linkHistory is what a Node remembers about links that have changed since they were attached. It is safe for
// concurrent use.
type linkHistory struct {
	mu         sync.Mutex
	displaced  map[LinkKey]Attachment // attachments with a link that is down or has another MAC address
	detachedAt map[LinkKey]time.Time  // when links were detached, for detachGracePeriod
	changes    uint64                 // number of changes of displaced and detachedAt
	detached   uint64                 // number of links that were detached
}

func newLinkHistory() *linkHistory {
	return &linkHistory{displaced: map[LinkKey]Attachment{}, detachedAt: map[LinkKey]time.Time{}}
}

// setDisplaced records whether the link of an attachment is displaced.
func (h *linkHistory) setDisplaced(key LinkKey, a Attachment, displaced bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, was := h.displaced[key]; was != displaced {
		h.changes++
	}
	if displaced {
		h.displaced[key] = a
	} else {
		delete(h.displaced, key)
	}
}

// displacedWith returns the attachment with the key if its link is displaced.
func (h *linkHistory) displacedWith(key LinkKey) (a Attachment, displaced bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	a, displaced = h.displaced[key]
	return a, displaced
}

// addDetached records that a link is being detached.
func (h *linkHistory) addDetached(key LinkKey, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.detachedAt, func(_ LinkKey, at time.Time) bool { return now.Sub(at) >= detachGracePeriod })
	h.detachedAt[key] = now
	h.changes++
	h.detached++
}

// wasDetachedRecently reports whether a link was detached less than detachGracePeriod ago.
func (h *linkHistory) wasDetachedRecently(key LinkKey, now time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	at, detached := h.detachedAt[key]
	return detached && now.Sub(at) < detachGracePeriod
}

// counts returns the number of changes, and of links that were detached.
func (h *linkHistory) counts() (changes, detached uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.changes, h.detached
}
