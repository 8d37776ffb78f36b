// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// A pod has a virtual address with the MAC address of VRRP, on a link of its own, as keepalived creates it
// (use_vmac). Its advertisements pass, and what it receives with the address counts for its share.
func TestAllowed_virtualRouter(t *testing.T) {
	const virtual = "10.20.9.9"
	mac := net.HardwareAddr{0, 0, 0x5e, 0, 1, 51}
	config := enforced()
	config.Policy.MACs = []net.HardwareAddr{mac}
	config.Policy.Addresses = []netip.Prefix{netip.MustParsePrefix(virtual + "/32")}
	e := newTestEnv(t, config)
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	p.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex, attrs.HardwareAddr = "vrrp0", linkIndex("net1"), mac
		return errors.Join(netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE}),
			nstest.ConfigureLink("vrrp0", virtual+"/32"))
	})
	setNeighbor := func(ns *nstest.Namespace, link, ip string, mac net.HardwareAddr) {
		ns.Do(func() error {
			return netlink.NeighSet(&netlink.Neigh{
				LinkIndex: linkIndex(link), IP: net.ParseIP(ip), HardwareAddr: mac, State: netlink.NUD_PERMANENT,
			})
		})
	}
	setNeighbor(e.wire, "wire", virtual, mac)
	wire := listen(t, e.wire, "wire")
	advertisement := classify.EtherTo(net.HardwareAddr{1, 0, 0x5e, 0, 0, 18}, mac, 0x0800,
		classify.IPv4(virtual, 112, 0, marker(1)))
	sendRaw(p.Namespace, "vrrp0", advertisement)
	if !wire.saw(marker(1), time.Second) {
		t.Fatal("the advertisement did not arrive")
	}
	e.expectRate("to the virtual address", e.measure(nstest.Flow{
		From: e.wire, To: p.Namespace, Address: e.address(virtual),
	})[0], 100*mega)
	if refused := e.refusals(p); len(refused.Dropped) > 0 {
		t.Errorf("the programs dropped %v", refused.Dropped)
	}
}
