// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// A pod with CAP_NET_ADMIN in its own user namespace can change the mode of its link. In mode source, the link receives
// all frames of the senders that the pod lists, including frames for other links. The classifier blocks the addresses
// of such a link and guards its NIC: it replaces the source address of received frames with a random one, which no pod
// can list. See hidden.go for links that the node does not see.

// nicGuard decides whether a NIC is guarded. Node.mu protects it.
type nicGuard struct {
	links      map[LinkKey]bool // links of attachments that make the guard necessary
	inspection inspection       // the last result of Inspect
	timer      guardTimer
}

// guardOf returns the guard of a NIC. The caller holds n.mu.
func (n *Node) guardOf(index int) *nicGuard {
	if n.guards[index] == nil {
		n.guards[index] = &nicGuard{links: map[LinkKey]bool{}}
	}
	return n.guards[index]
}

// policy renews the timer while a link makes guarding necessary, and returns p with the fields that follow from the
// timer.
func (g *nicGuard) policy(p classify.Policy, now time.Time) classify.Policy {
	if len(g.links) > 0 || len(g.inspection.unknown) > 0 {
		g.timer.renew(now)
	}
	p.Guarded, p.GuardTime = now.Before(g.timer.until), 0
	if p.Guarded {
		p.GuardTime = g.timer.length
	}
	return p
}

// resumeGuard starts the timer of a NIC that an earlier process has guarded, because this one has not looked for
// hidden links yet. The caller holds n.mu and has opened the classifier.
func (n *Node) resumeGuard(index int) error {
	guarded, length, err := n.classifier.Guarded(index)
	if err != nil {
		return fmt.Errorf("read whether link %d is guarded: %w", index, err)
	}
	if guarded {
		length = max(length, minGuardTime)
		n.guardOf(index).timer = guardTimer{length: length, until: n.now().Add(length)}
	}
	return nil
}

// applyGuard starts or stops guarding a NIC according to its timer. If it fails, the next call
// tries again. The caller holds n.mu.
func (n *Node) applyGuard(index int) error {
	nic, managed := n.managed[index]
	if !managed || !nic.Enforce {
		return nil
	}
	policy := n.guardOf(index).policy(nic.Policy, n.now())
	if nic.Policy.Guarded == policy.Guarded && nic.Policy.GuardTime == policy.GuardTime {
		return nil
	}
	nic.Policy = policy
	if err := n.classifier.SetPolicy(n.classified(nic)); err != nil {
		return err
	}
	n.managed[index] = nic
	return nil
}

// violation describes a change that could let an attachment receive other pods' frames, given all macvlans in its pod's
// namespace; "" if there is none. link is the attachment's link, or nil if it is not among the macvlans.
func violation(a Attachment, macvlans []macvlanState) (text string, link *macvlanState) {
	for i, m := range macvlans {
		if m.parent != a.Parent {
			continue
		}
		switch own := m.index == a.Index; {
		case own && m.mode != a.Mode:
			text = fmt.Sprintf("the pod changed the mode of %s from %s to %s", m.name, a.Mode, m.mode)
		case own && m.flags&flagNoDst != 0:
			text = fmt.Sprintf("the pod set the flag nodst of %s", m.name)
		case own && m.macs > 0:
			text = fmt.Sprintf("the pod gave %s a list of %d senders", m.name, m.macs)
		case !own && m.mode == modeSource:
			text = cmp.Or(text, fmt.Sprintf("the pod created %s in mode source on the NIC", m.name))
		}
		if m.index == a.Index {
			link = &macvlans[i]
		}
	}
	return text, link
}

// UpdateBlocking blocks or unblocks the link of an attachment, as ReadAndBlock does.
func (n *Node) UpdateBlocking(a Attachment) error {
	_, err := n.updateBlocking(a)
	return err
}

// updateBlocking blocks the link of an attachment if its pod changed it in a way that lets it receive other
// pods' frames or delay their broadcasts, or if Attachment.Blocking asks for it, and unblocks it
// otherwise. It returns a description of the pod's change, or "". It does nothing without
// enforcement.
func (n *Node) updateBlocking(a Attachment) (text string, err error) {
	n.blocking.Lock()
	defer n.blocking.Unlock()
	nic, enforced := n.enforcedNIC(a.Parent)
	if !enforced || a.Mode == 0 {
		return "", nil
	}
	macvlans, err := n.macvlans(a.NSID)
	if err != nil {
		return "", err
	}
	if n.isIDReused(a) && !slices.ContainsFunc(macvlans, func(m macvlanState) bool { return bytes.Equal(m.mac, a.MAC) }) {
		return "", nil // the macvlans belong to another pod
	}
	text, link := violation(a, macvlans)
	if text == "" && link == nil {
		if text, err = n.describeMissing(a); err != nil {
			return "", err
		}
	}
	takes := text != ""
	if takes {
		text += ", with which it could receive other pods' frames"
	} else {
		text = longQueue(a, macvlans)
	}
	blocked := text != "" || a.Blocking == BlockAlways
	if a.Blocking != BlockAsBefore || blocked {
		_, err = n.classifier.SetBlocked(nic.member(a), blocked)
	}
	displaced := link == nil || !link.up || !bytes.Equal(link.mac, a.MAC)
	return text, errors.Join(err, n.setGuarded(a, takes, displaced), n.keepCutoff(a.Parent, macvlans))
}

// describeMissing describes the pod's change to a link that is missing from its namespace:
// the pod has moved the link if the NIC still accepts the address. It returns "" if the link
// or the namespace no longer exists.
func (n *Node) describeMissing(a Attachment) (string, error) {
	exists, err := n.namespaceExists(a)
	if err != nil || !exists {
		return "", err
	}
	accepted, err := n.acceptedAddresses(a.Parent)
	if err != nil || len(a.MAC) != len(macAddress{}) || !slices.Contains(accepted, macAddress(a.MAC)) {
		return "", err
	}
	return fmt.Sprintf("the pod moved %s to another network namespace", a.Name), nil
}

// setGuarded adds the link of an attachment to the guard of its NIC, or removes it, and then starts or stops guarding.
// It also records whether the link is displaced, which means that it is not up with its address, and another link can
// have the address. A Detach that runs at the same time removes the entries of the classifier first.
func (n *Node) setGuarded(a Attachment, needed, displaced bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if needed || displaced {
		known, err := n.classifier.Knows(a.Parent, a.MAC)
		if err != nil {
			return err
		}
		needed, displaced = needed && known, displaced && known
	}
	key := NewLinkKey(a.Parent, a.MAC)
	n.history.setDisplaced(key, a, displaced)
	if links := n.guardOf(a.Parent).links; needed {
		links[key] = true
	} else {
		delete(links, key)
	}
	return n.applyGuard(a.Parent)
}

// A pod could alternate between a link that takes other pods' frames and harmless ones, and
// receive them each time until it is detected. So a NIC stays guarded for some time after the
// last such link. The time doubles with each repetition.
const (
	minGuardTime = 10 * time.Second
	maxGuardTime = time.Hour
)

// guardTimer measures how long a NIC stays guarded after the last link that made it necessary.
type guardTimer struct {
	length time.Duration
	until  time.Time
}

// renew starts the timer again while there is such a link. The time doubles if the timer had
// expired, unless that was longer than maxGuardTime ago.
func (g *guardTimer) renew(now time.Time) {
	switch {
	case g.length == 0 || now.Sub(g.until) > maxGuardTime:
		g.length = minGuardTime
	case now.After(g.until):
		g.length = min(2*g.length, maxGuardTime)
	}
	g.until = now.Add(g.length)
}
