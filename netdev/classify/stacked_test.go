// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/classify/trial"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// A VLAN and a bond do not have hardware queues, and frames reach them through the attach points of the NIC below.
func TestTraffic_onStackedNICIsLimitedToGrant(t *testing.T) {
	for _, tc := range []struct {
		name  string
		nic   string
		stack func(t *testing.T, wire *nstest.Namespace)
	}{
		{"a VLAN", "nic0.100", func(t *testing.T, wire *nstest.Namespace) {
			nstest.VLAN(t, "nic0", "nic0.100", 100)
			wire.Do(func() error { return moveAddressToVLAN("wire", 100) })
		}},
		{"a bond", "bond0", func(t *testing.T, _ *nstest.Namespace) {
			nstest.Bond(t, "bond0", netlink.BOND_MODE_ACTIVE_BACKUP, "nic0")
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, wire := nstest.NIC(t, "nic0", 1500, wireIP+"/16")
			tc.stack(t, wire)
			e := newTestEnvOn(t, nstest.MountBPFFS(t), nstest.FindNIC(t, tc.nic), wire, netdev.NICConfig{})
			p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
			e.expectRate("pod sends", e.measure(e.fromPod(p))[0], 100*mega)
			e.expectRate("pod receives", e.measure(e.toPod(p))[0], 100*mega)
		})
	}
}

// The kernel of the node sends through VLANs on a shared NIC, even if a firewall has kept the trial from recognizing
// frames by their route.
func TestIdentity_permitsVLANsOfNode(t *testing.T) {
	for name, tc := range map[string]struct {
		routes error // the result of the trial
		inner  bool  // a VLAN on the VLAN
	}{
		"the trial recognized routes":     {nil, false},
		"a firewall filtered the trial":   {errors.New("a firewall of the node drops the frames"), false},
		"a VLAN on a VLAN":                {nil, true},
		"a VLAN on a VLAN and a firewall": {errors.New("a firewall of the node drops the frames"), true},
	} {
		t.Run(name, func(t *testing.T) {
			o := optionsOfTrial(t, func(r *trial.Result) {
				if tc.routes != nil {
					r.Routes = tc.routes
				}
			})
			nic, wire := nstest.NIC(t, "nic0", 1500, wireIP+"/16")
			uplink := "nic0.100"
			nstest.VLAN(t, "nic0", uplink, 100)
			wire.Do(func() error { return moveAddressToVLAN("wire", 100) })
			if tc.inner {
				uplink = "nic0.100.200"
				nstest.VLAN(t, "nic0.100", uplink, 200)
				wire.Do(func() error { return moveAddressToVLAN("wire.100", 200) })
			}
			if err := nstest.ConfigureLink(uplink, nodeIP+"/16"); err != nil {
				t.Fatal(err)
			}
			e := newTestEnvWith(t, o, nic, wire, enforced())
			flow := nstest.Flow{From: nstest.Current(t), To: wire, Address: e.address(wireIP), Duration: time.Second}
			flow.DialTimeout = 5 * time.Second
			if rate, err := flow.Run(); err != nil || rate < atLeast(reserve/2) {
				t.Errorf("the node sends at %.1f Mbit/s, error %v, want at least half of the reserve", rate/mega, err)
			}
			refused, err := e.node.Refusals(nic.Index, 0)
			if err != nil || refused.Dropped["SourceMAC"] != 0 {
				t.Errorf("Refusals returned %+v and error %v, want no SourceMAC", refused, err)
			}
		})
	}
}

// moveAddressToVLAN creates a VLAN on a link of the current namespace, and moves the address wireIP, and more
// addresses, to it.
func moveAddressToVLAN(parent string, id int, further ...string) error {
	link, err := netlink.LinkByName(parent)
	if err != nil {
		return err
	}
	addresses := append([]string{wireIP + "/16"}, further...)
	for _, text := range addresses {
		address, err := netlink.ParseAddr(text)
		if err == nil {
			err = netlink.AddrDel(link, address)
		}
		if err != nil {
			return err
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = fmt.Sprintf("%s.%d", parent, id), link.Attrs().Index
	return errors.Join(
		netlink.LinkAdd(&netlink.Vlan{LinkAttrs: attrs, VlanId: id}),
		nstest.ConfigureLink(attrs.Name, addresses...),
	)
}

// Frames for the node can have an address other than the NIC had when the plugin managed it: the address can change
// while no plugin runs, and a bond of mode balance-alb receives frames for the addresses of all members.
func TestReceived_forOtherAddressOfNode(t *testing.T) {
	other := net.HardwareAddr{2, 0, 0, 0, 0x77, 1}
	type setUp func(t *testing.T) (e *testEnv, sender *nstest.Namespace, to net.HardwareAddr)
	for name, setUp := range map[string]setUp{
		"the address of the NIC has changed": func(t *testing.T) (*testEnv, *nstest.Namespace, net.HardwareAddr) {
			e := newTestEnv(t, enforced())
			if err := netlink.LinkSetHardwareAddr(linkOf(t, "nic0"), other); err != nil {
				t.Fatal(err)
			}
			return e, e.wire, other
		},
		"the address of another member of a bond": func(t *testing.T) (*testEnv, *nstest.Namespace, net.HardwareAddr) {
			_, wire := nstest.NIC(t, "nic0", 1500, wireIP+"/16")
			_, second := nstest.NIC(t, "nic1", 1500, "10.20.0.252/16")
			nstest.Bond(t, "bond0", netlink.BOND_MODE_BALANCE_ALB, "nic0", "nic1")
			e := newTestEnvOn(t, nstest.MountBPFFS(t), nstest.FindNIC(t, "bond0"), wire, enforced())
			member := linkOf(t, "nic1").Attrs().HardwareAddr
			if bytes.Equal(member, e.nic.MAC) {
				t.Fatalf("all members of the bond have the address %s", member)
			}
			return e, second, member
		},
	} {
		t.Run(name, func(t *testing.T) {
			e, sender, to := setUp(t)
			if err := nstest.ConfigureLink(e.nic.Name, nodeIP+"/16"); err != nil {
				t.Fatal(err)
			}
			address := e.address(nodeIP)
			server, err := net.ListenPacket("udp4", address)
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			sender.Do(func() error { return sendTo(address, to) })
			if err := server.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
				t.Fatal(err)
			}
			if _, _, err := server.ReadFrom(make([]byte, 16)); err != nil {
				t.Errorf("the node received no datagram in a frame for %s: %v", to, err)
			}
		})
	}
}

// The node must find its peers while the NIC's address differs from the one that the
// plugin has written: the programs know that the ARP comes from the node.
func TestSent_ARPOfNodeWithNewAddress(t *testing.T) {
	e := newTestEnv(t, enforced())
	e.requireARPSender()
	next := net.HardwareAddr{2, 0, 0, 0, 0x77, 4}
	err := errors.Join(nstest.ConfigureLink("nic0", nodeIP+"/16"), netlink.LinkSetHardwareAddr(linkOf(t, "nic0"), next))
	if err != nil {
		t.Fatal(err)
	}
	wire := listen(t, e.wire, "wire")
	if err := ignoreUnreachable(sendUDP("10.20.9.9:9", []byte("x"))); err != nil {
		t.Fatal(err)
	}
	if !wire.saw(classify.ARP(1, next, nodeIP, "10.20.9.9")[:18], 2*time.Second) {
		t.Error("no ARP of the node arrived")
	}
}

// A bridge accepts its own address, even if none of its ports has it. The address does not belong to a hidden link.
func TestInspect_bridgeWithSeparateAddress(t *testing.T) {
	_, wire := nstest.NIC(t, "nic0", 1500, wireIP+"/16")
	nstest.Bridge(t, "br0", "nic0")
	if err := netlink.LinkSetHardwareAddr(linkOf(t, "br0"), net.HardwareAddr{2, 0, 0, 0, 0x77, 2}); err != nil {
		t.Fatal(err)
	}
	e := newTestEnvOn(t, nstest.MountBPFFS(t), nstest.FindNIC(t, "br0"), wire, enforced())
	e.pod(0, 1, hardCap(100*mega), netdev.Private)
	if e.inspect(false) {
		t.Error("the bridge is guarded")
	}
}

func linkOf(t *testing.T, name string) netlink.Link {
	t.Helper()
	link, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return link
}

// sendTo sends a datagram from the link "wire" of the current namespace, in a frame for a MAC address.
func sendTo(address string, mac net.HardwareAddr) error {
	wire, err := netlink.LinkByName("wire")
	if err != nil {
		return err
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	err = netlink.NeighSet(&netlink.Neigh{LinkIndex: wire.Attrs().Index, IP: net.ParseIP(host), HardwareAddr: mac,
		State: netlink.NUD_PERMANENT})
	if err != nil {
		return err
	}
	conn, err := net.Dial("udp4", address)
	if err != nil {
		return err
	}
	_, err = conn.Write([]byte("to the node"))
	return errors.Join(err, conn.Close())
}
