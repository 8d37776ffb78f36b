// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"net/netip"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// routePayload returns the payload of an event of an IPv4 route in the main table.
func routePayload(dstLen, flags uint32, attrs ...*nl.RtAttr) []byte {
	header := nl.RtMsg{RtMsg: unix.RtMsg{
		Family: unix.AF_INET, Dst_len: uint8(dstLen), Table: unix.RT_TABLE_MAIN, Flags: flags,
	}}
	payload := append([]byte(nil), header.Serialize()...)
	for _, a := range attrs {
		payload = append(payload, a.Serialize()...)
	}
	return payload
}

// through returns the attributes of a hop.
func through(link uint32, gateway string) []*nl.RtAttr {
	return []*nl.RtAttr{
		nl.NewRtAttr(unix.RTA_OIF, nl.Uint32Attr(link)),
		nl.NewRtAttr(unix.RTA_GATEWAY, netip.MustParseAddr(gateway).AsSlice()),
	}
}

func TestNode_addEvent_routes(t *testing.T) {
	const enforced, plain, other = 7, 8, 9
	held := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	n := &Node{managed: map[int]managedNIC{
		enforced: {NICConfig: NICConfig{Index: enforced, Enforce: true, Policy: classify.Policy{NodeAddresses: held}}},
		plain:    {NICConfig: NICConfig{Index: plain}},
	}}
	var hops []byte
	for _, link := range []int32{other, enforced} {
		next := nl.RtNexthop{RtNexthop: unix.RtNexthop{Ifindex: link}, Children: []nl.NetlinkRequestData{
			nl.NewRtAttr(unix.RTA_GATEWAY, netip.MustParseAddr("192.0.2.9").AsSlice()),
		}}
		hops = append(hops, next.Serialize()...)
	}
	multipath := nl.NewRtAttr(unix.RTA_MULTIPATH, hops)
	for name, tc := range map[string]struct {
		payload []byte
		added   bool // whether the route's addition matters
		removed bool // whether its removal does
	}{
		"a default route":          {routePayload(0, 0, through(other, "192.0.2.9")...), true, true},
		"a cached default route":   {routePayload(0, unix.RTM_F_CLONED, through(other, "192.0.2.9")...), false, false},
		"a new gateway":            {routePayload(24, 0, through(enforced, "192.0.2.9")...), true, false},
		"a gateway that is held":   {routePayload(24, 0, through(enforced, "192.0.2.2")...), false, false},
		"through another link":     {routePayload(24, 0, through(other, "192.0.2.9")...), false, false},
		"without enforcement":      {routePayload(24, 0, through(plain, "192.0.2.9")...), false, false},
		"a new gateway of several": {routePayload(24, 0, multipath), true, false},
		"on the link": {
			routePayload(24, 0, nl.NewRtAttr(unix.RTA_OIF, nl.Uint32Attr(enforced))), false, false},
		"a message that is too short": {routePayload(0, 0)[:8], false, false},
	} {
		t.Run(name, func(t *testing.T) {
			for kind, want := range map[uint16]bool{unix.RTM_NEWROUTE: tc.added, unix.RTM_DELROUTE: tc.removed} {
				message := syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: kind}, Data: tc.payload}
				var c Change
				if got := n.addEvent(&c, nil, message); got != want || c.LinksChanged != want {
					t.Errorf("addEvent for type %d returned %t with LinksChanged %t, want %t", kind, got, c.LinksChanged, want)
				}
			}
		})
	}
}
