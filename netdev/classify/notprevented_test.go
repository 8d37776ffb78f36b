// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// These attacks work, as docs/user/security.md states. A change that prevents one of them fails its
// test: move the test to the tests of prevented attacks, and correct the page.

// The kernel switches broadcasts between macvlans in mode bridge before they reach the NIC.
func TestNotPrevented_broadcastsBetweenAdditionalLinksInModeBridge(t *testing.T) {
	e := newTestEnv(t, enforced())
	const grant = 10 * mega
	pods := []*pod{e.pod(0, 1, hardCap(grant), netdev.Private), e.pod(1, 2, hardCap(grant), netdev.Private)}
	for i, p := range pods {
		p.Do(func() error {
			net1, err := netlink.LinkByName("net1")
			if err != nil {
				return err
			}
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.ParentIndex = "more", net1.Attrs().Index
			return errors.Join(
				netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}),
				nstest.ConfigureLink("more", fmt.Sprintf("10.77.0.%d/24", i+1)),
			)
		})
	}
	frame := append(classify.EtherTo(broadcast, pods[0].Interface("more").HardwareAddr, 0x88b5), make([]byte, 1400)...)
	before, start := pods[1].bytesReceivedBy("more"), time.Now()
	if _, err := pods[0].Flood("more", frame, false, duration); err != nil {
		t.Fatal(err)
	}
	rate := float64(pods[1].bytesReceivedBy("more")-before) * 8 / time.Since(start).Seconds()
	if rate < atLeast(2*grant) {
		t.Errorf("broadcasts between two shares of %d Mbit/s: got %.1f Mbit/s, want more than twice as much",
			grant/mega, rate/mega)
	}
}

// bytesReceivedBy returns how many bytes a link of the pod has received.
func (p *pod) bytesReceivedBy(name string) (n uint64) {
	p.Do(func() error {
		link, err := netlink.LinkByName(name)
		if err == nil {
			n = link.Attrs().Statistics.RxBytes
		}
		return err
	})
	return n
}

// The NIC has one entry for both links in the list of addresses that it accepts. The link does not receive anything if
// the programs read its list of senders.
func TestNotPrevented_hiddenLinkWithAddressOfLinkOnVLAN(t *testing.T) {
	e := newTestEnvWithoutLists(t)
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	nstest.VLAN(t, "nic0", "nic0.5", 5)
	mac := net.HardwareAddr{2, 0, 0, 0, 5, 1}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex, attrs.HardwareAddr = "net2", nstest.FindNIC(t, "nic0.5").Index, mac
	attrs.Namespace = netlink.NsFd(int(attacker.File.Fd()))
	if err := netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE}); err != nil {
		t.Fatal(err)
	}
	attacker.Do(func() error { return nstest.ConfigureLink("net2") })
	frames := listen(t, attacker.hide(t, mac, e.wireMAC()), "more")
	for range 3 {
		e.skip(time.Minute)
		if _, _, err := e.node.Inspect(e.nic.Index); err != nil {
			t.Fatal(err)
		}
	}
	frame := classify.EtherTo(victim.attachment.MAC, e.wireMAC(), 0x0800,
		classify.IPv4(wireIP, 17, 0, classify.UDP(1, 2)))
	sendRaw(e.wire, "wire", append(frame, marker(1)...))
	if !frames.saw(marker(1), time.Second) {
		t.Error("the hidden link received no frame for a sibling")
	}
}
