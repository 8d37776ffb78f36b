// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// linkPayload returns the payload of an event of link 7.
func linkPayload(flags uint32, attrs ...*nl.RtAttr) []byte {
	info := nl.NewIfInfomsg(unix.AF_UNSPEC)
	info.Index, info.Flags = 7, flags
	payload := info.Serialize()
	for _, a := range attrs {
		payload = append(payload, a.Serialize()...)
	}
	return payload
}

func TestOwnLinks_isChange(t *testing.T) {
	number := func(kind int, value uint32) *nl.RtAttr { return nl.NewRtAttr(kind, nl.Uint32Attr(value)) }
	name := nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated("nic0"))
	up := func(attrs ...*nl.RtAttr) []byte {
		return linkPayload(unix.IFF_UP, append([]*nl.RtAttr{name}, attrs...)...)
	}
	mtu := number(unix.IFLA_MTU, 1500)
	first := up(mtu, number(unix.IFLA_PROMISCUITY, 0))
	for condition, test := range map[string]struct {
		payload []byte
		want    bool
	}{
		"nothing changed": {first, false},
		"the NIC has become promiscuous": {
			linkPayload(unix.IFF_UP|unix.IFF_PROMISC, name, mtu, number(unix.IFLA_PROMISCUITY, 1)), false},
		"the NIC has counted frames":  {up(mtu, number(unix.IFLA_STATS64, 9)), false},
		"the NIC has gone down":       {linkPayload(0, name, mtu), true},
		"the MTU has changed":         {up(number(unix.IFLA_MTU, 9000)), true},
		"an attribute is missing":     {up(), true},
		"the event names a change":    {up(mtu, number(unix.IFLA_EVENT, 2)), true},
		"a link that resets a cutoff": {linkPayload(0, nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated("drabc7"))), false},
		"the payload is too short":    {first[:8], false},
	} {
		t.Run(condition, func(t *testing.T) {
			links := newOwnLinks()
			if !links.isChange(first, false) {
				t.Error("the first event shows no change")
			}
			if got := links.isChange(test.payload, false); got != test.want {
				t.Errorf("shows returned %t, want %t", got, test.want)
			}
		})
	}
	links := newOwnLinks()
	if links.isChange(first, false); !links.isChange(first, true) || !links.isChange(first, false) {
		t.Error("a removed link, or the link after it, shows no change")
	}
	if links.forget(); !links.isChange(first, false) {
		t.Error("an event after missed ones shows no change")
	}
}

// Events that do not show a change are reported once, after an interval.
func TestOwnLinks_reportLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reports []time.Duration
		links, start := newOwnLinks(), time.Now()
		defer links.stop()
		receive := func(flags uint32) {
			links.isChange(linkPayload(flags), false)
			links.reportLater(t.Context(), func(c Change) {
				if c.LinksChanged {
					reports = append(reports, time.Since(start))
				}
			})
		}
		wait := func(d time.Duration) { time.Sleep(d) } //nolint:forbidigo // the time of synctest
		receive(0)
		receive(unix.IFF_UP)
		wait(20 * time.Second)
		if len(reports) > 0 {
			t.Errorf("events that show changes were reported after %v", reports)
		}
		for range 3 {
			receive(unix.IFF_UP)
			wait(3 * time.Second)
		}
		wait(20 * time.Second)
		receive(unix.IFF_UP)
		wait(20 * time.Second)
		if want := []time.Duration{30 * time.Second, 59 * time.Second}; !slices.Equal(reports, want) {
			t.Errorf("reports after %v, want %v", reports, want)
		}
	})
}
