// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// arrival compares how many frames a NIC sends and receives with how many of them
// reach the classifier's programs.
type arrival struct {
	last     frames
	sent     direction
	received direction
	// strays is how many of the NIC's outgoing frames reached a queue without their class, which dropped them, since no
	// program kept frames from their queue.
	strays uint64
}

// frames are counters of a NIC at one time.
type frames struct {
	nic, seen classify.Counts
	at        time.Time
	// members is how many members the NIC has if it is a bond.
	members int
	// strays is how many frames reached a queue without their class.
	strays uint64
}

// direction is the state of one direction.
type direction struct {
	pending uint64 // frames since the program last saw one
	// missed is set while frames do not reach the program.
	missed bool
}

const (
	// missedFrames is how many frames in a row must have missed the program. A few may
	// miss it when programs are replaced.
	missedFrames = 32
	// framesOfMember is the largest number of frames per second that a member of a bond is expected to send or
	// receive for the bond itself: one of LACP with the fast rate, or a few of ARP monitoring. The bond counts
	// them as its own, but they pass the member only.
	framesOfMember = 20
)

// update takes the current counters into account.
func (a *arrival) update(now frames) {
	own := now.framesOfMembers(a.last.at)
	a.sent.update(now.nic.Sent-a.last.nic.Sent, now.seen.Sent-a.last.seen.Sent, own)
	a.received.update(now.nic.Received-a.last.nic.Received, now.seen.Received-a.last.seen.Received, own)
	if now.strays > a.last.strays { // fewer if the queues were created again
		a.strays += now.strays - a.last.strays
	}
	a.last = now
}

// framesOfMembers returns how many frames since a given time may belong to members of a bond.
func (f frames) framesOfMembers(since time.Time) uint64 {
	return uint64(math.Ceil(f.at.Sub(since).Seconds())) * uint64(f.members) * framesOfMember
}

// update adds new frames of the NIC and of the program. Up to own of the NIC's frames may never have been meant for the
// program.
func (d *direction) update(nic, seen, own uint64) {
	switch {
	case seen > 0 || nic > 1<<63: // the program saw frames, or the NIC's counters were reset
		*d = direction{}
	default:
		d.pending += nic - min(nic, own)
		d.missed = d.pending >= missedFrames
	}
}

// watchArrival updates the arrival of a NIC. The caller holds n.mu.
func (n *Node) watchArrival(index int) error {
	link, err := netlink.LinkByIndex(index)
	if err != nil {
		return fmt.Errorf("read the counters of link %d: %w", index, err)
	}
	seen, err := n.classifier.Counts(index)
	if err != nil {
		return err
	}
	now := frames{seen: seen, at: n.now()}
	if link.Type() == "bond" {
		links, err := listLinks()
		if err != nil {
			return err
		}
		now.members = len(newTopology(links).below(index))
	}
	if now.strays, err = n.shaper.Strays(index, n.managed[index].trees); err != nil {
		return err
	}
	if s := link.Attrs().Statistics; s != nil {
		now.nic = classify.Counts{Sent: s.TxPackets, Received: s.RxPackets}
	}
	a, known := n.arrivals[index]
	if !known {
		n.arrivals[index] = &arrival{last: now}
		return nil
	}
	a.update(now)
	if a.strays == 0 {
		return nil
	}
	before, err := n.classifier.BeforeSteering(index)
	if err == nil && len(before) == 0 {
		a.strays = 0 // a few may stray while queues are replaced
	}
	return err
}

// Missed describes which frames of a NIC do not reach the classifier, or the queue of their class, and which programs
// may take them; "" if the frames reach both, or the NIC has not sent or received any. Manage updates the
// result.
func (n *Node) Missed(index int) string {
	n.mu.Lock()
	classifier := n.classifier
	var sent, received, strayed bool
	if a := n.arrivals[index]; a != nil {
		sent, received, strayed = a.sent.missed, a.received.missed, a.strays >= missedFrames
	}
	n.mu.Unlock()
	var parts []string
	if sent {
		parts = append(parts, describeMissed(classifier, "sends", index, true))
	}
	if received {
		parts = append(parts, describeMissed(classifier, "receives", index, false))
	}
	if strayed {
		parts = append(parts, describeStrayed(classifier, index))
	}
	return strings.Join(parts, "; ")
}

func describeStrayed(c *classify.Classifier, index int) string {
	const text = "frames that the NIC sends are dropped, because they do not come to the queue of their share"
	before, err := c.BeforeSteering(index)
	switch {
	case err != nil:
		return fmt.Sprintf("%s: listing the programs before the filter that chooses the queue: %v", text, err)
	case len(before) == 0:
		return text + ", until a moment ago" // the program was detached since Manage
	}
	return fmt.Sprintf("%s; before the filter that chooses the queue runs %s: detach it, make it pass frames on "+
		"(TCX_NEXT), or set shaping SingleQueue", text, strings.Join(before, ", "))
}

func describeMissed(c *classify.Classifier, verb string, index int, sent bool) string {
	ahead, err := c.Ahead(index, sent)
	switch {
	case err != nil:
		return fmt.Sprintf("frames that the NIC %s do not reach the driver's program: listing the programs before it: %v",
			verb, err)
	case len(ahead) == 0:
		return fmt.Sprintf("frames that the NIC %s do not reach the driver's program: does an XDP program or the NIC's "+
			"hardware take them?", verb)
	}
	return fmt.Sprintf("frames that the NIC %s do not reach the driver's program; before it runs %s: detach it, or make "+
		"it pass frames on (TCX_NEXT)", verb, strings.Join(ahead, ", "))
}
