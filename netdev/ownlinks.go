// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"hash/maphash"
	"maps"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// Pods can cause events of NICs in the node's namespace: with CAP_NET_RAW, by the promiscuous mode of their link, and
// with CAP_NET_ADMIN, by creating and deleting links on the NIC. These events do not change anything that the plugin
// uses. But other events do not show a change either, such as an event for a bond's new speed.

// unchangedInterval is how long events that do not show a change of a link wait before they are reported, once for all
// of them.
const unchangedInterval = 10 * time.Second

// ownLinks compares the events of the links in the node's namespace.
type ownLinks struct {
	seed      maphash.Seed
	last      map[linkEvent]uint64 // hashes of the last events
	unchanged bool                 // whether events since the last call of reportLater showed no change
	later     *time.Timer          // of the last report of such events; nil if there was none
	pending   atomic.Bool          // whether that report will follow
}

// linkEvent identifies a link and a kind of events about it.
type linkEvent struct {
	index  int32
	family uint8 // unix.AF_UNSPEC, or the protocol that the event is about
}

func newOwnLinks() *ownLinks {
	return &ownLinks{seed: maphash.MakeSeed(), last: map[linkEvent]uint64{}}
}

// forget makes the next event of each link one that shows a change.
func (o *ownLinks) forget() { clear(o.last) }

// isChange reports whether the payload of an event shows a change of a link since the last event, or names a change
// that it does not show.
func (o *ownLinks) isChange(payload []byte, removed bool) bool {
	if len(payload) < unix.SizeofIfInfomsg || isOfCutoffLink(payload) {
		return false
	}
	info, attrs := nl.DeserializeIfInfomsg(payload), payload[unix.SizeofIfInfomsg:]
	if removed {
		maps.DeleteFunc(o.last, func(key linkEvent, _ uint64) bool { return key.index == info.Index })
		return true
	}
	key := linkEvent{info.Index, info.Family}
	before, known := o.last[key]
	o.last[key] = o.hash(info, attrs)
	named := rtnl.Attribute(attrs, unix.IFLA_EVENT) != nil
	if named || !known || o.last[key] != before {
		return true
	}
	o.unchanged = true
	return false
}

// hash returns a hash of an event, except what pods can change and counters of frames.
func (o *ownLinks) hash(info *nl.IfInfomsg, attrs []byte) uint64 {
	var h maphash.Hash
	h.SetSeed(o.seed)
	maphash.WriteComparable(&h, info.Flags&^(unix.IFF_PROMISC|unix.IFF_ALLMULTI))
	for attrType, value := range rtnl.Attributes(attrs) {
		switch attrType {
		case unix.IFLA_PROMISCUITY, unix.IFLA_ALLMULTI, unix.IFLA_STATS, unix.IFLA_STATS64, unix.IFLA_AF_SPEC:
		default:
			maphash.WriteComparable(&h, [2]int{int(attrType), len(value)})
			_, _ = h.Write(value) // it never fails
		}
	}
	return h.Sum64()
}

// reportLater makes report follow after unchangedInterval if events have not shown a change, unless it will follow
// anyway.
func (o *ownLinks) reportLater(ctx context.Context, report func(Change)) {
	unchanged := o.unchanged
	o.unchanged = false
	if !unchanged || !o.pending.CompareAndSwap(false, true) {
		return
	}
	o.later = time.AfterFunc(unchangedInterval, func() {
		o.pending.Store(false)
		if ctx.Err() == nil {
			report(Change{LinksChanged: true})
		}
	})
}

// stop ends the timer.
func (o *ownLinks) stop() {
	if o.later != nil {
		o.later.Stop()
	}
}
