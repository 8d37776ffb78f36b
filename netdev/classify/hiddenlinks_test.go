// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/kernelcheck"
)

// In mode source, a link receives all frames of the senders that the pod lists, also
// those for a sibling or for the node.
func TestAttack_sourceMode(t *testing.T) {
	e := newTestEnvWithoutLists(t)
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	wireMAC := e.wire.Interface("wire").HardwareAddr
	frames, victims := listen(t, attacker.Namespace, "net1"), listen(t, victim.Namespace, "net1")
	number := 0
	read := func(destination net.HardwareAddr) (attacker, victim bool) {
		number++
		frame := classify.EtherTo(destination, wireMAC, 0x0800, classify.IPv4(wireIP, 17, 0, classify.UDP(1, 2)))
		sendRaw(e.wire, "wire", append(frame, marker(number)...))
		return frames.saw(marker(number), 300*time.Millisecond), victims.saw(marker(number), 300*time.Millisecond)
	}
	state := func() string {
		s, err := e.node.ReadAndBlock(attacker.attachment)
		if err != nil {
			t.Fatal(err)
		}
		return s.Blocked
	}
	if blocked := state(); blocked != "" {
		t.Fatalf("an unchanged link is blocked: %s", blocked)
	}
	attacker.Do(func() error { return changeMacvlan("net1", netlink.MACVLAN_MODE_SOURCE, wireMAC) })
	if taken, _ := read(victim.attachment.MAC); !taken {
		t.Fatal("the attack has no effect before it is detected: does the test attack?")
	}
	if blocked := state(); blocked != "the pod changed the mode of net1 from private to source, with which it could "+
		"receive other pods' frames" {
		t.Fatalf("Blocked is %q", blocked)
	}
	for to, mac := range map[string]net.HardwareAddr{
		"the node": e.nic.MAC, "its sibling": victim.attachment.MAC, "itself": attacker.attachment.MAC,
	} {
		taken, received := read(mac)
		if taken || received != (to == "its sibling") {
			t.Errorf("a frame to %s: the attacker received it: %t, the sibling: %t", to, taken, received)
		}
	}
	wire := listen(t, e.wire, "wire")
	frame := classify.EtherTo(wireMAC, attacker.attachment.MAC, 0x0800,
		classify.IPv4("10.20.0.1", 17, 0, classify.UDP(1, 2)))
	sendRaw(attacker.Namespace, "net1", append(frame, marker(100)...))
	if wire.saw(marker(100), 200*time.Millisecond) {
		t.Error("a blocked link sent a frame")
	}

	attacker.Do(func() error { return changeMacvlan("net1", netlink.MACVLAN_MODE_PRIVATE, nil) })
	if blocked := state(); blocked != "" {
		t.Fatalf("after the attack was reverted: %s", blocked)
	}
	if received, _ := read(attacker.attachment.MAC); !received {
		t.Error("after the attack was reverted, the link receives nothing")
	}
}

// changeMacvlan changes the mode of a link of the current namespace. With sender, it
// gives the link a list of senders; without, it removes the list.
func changeMacvlan(name string, mode netlink.MacvlanMode, sender net.HardwareAddr) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if sender == nil {
		if err := netlink.MacvlanMACAddrFlush(link); err != nil {
			return err
		}
	}
	if err := netlink.LinkSetMacvlanMode(link, mode); err != nil {
		return err
	}
	if sender == nil {
		return nil
	}
	return netlink.MacvlanMACAddrAdd(link, sender)
}

// A link in mode source receives the frames of listed senders. With the flag nodst, it takes them from all others, and
// the node, also while it is down, in a namespace that the node does not see, where nothing shows it.
func TestAttack_listedSenders(t *testing.T) {
	needLists(t)
	for name, up := range map[string]bool{"a link that is up": true, "a link that is down": false} {
		t.Run(name, func(t *testing.T) {
			e := newTestEnv(t, enforced())
			attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
			nested := attacker.nest(t, func(nested netlink.NsFd, net1 netlink.Link) error {
				return addSourceLink("more", net1.Attrs().Index, int(nested))
			})
			nested.Do(func() error {
				link, err := netlink.LinkByName("more")
				if up {
					err = errors.Join(err, nstest.ConfigureLink("more"))
				}
				return errors.Join(err, netlink.MacvlanMACAddrAdd(link, e.wireMAC()))
			})
			const protocol = 0x88b5
			attackers := listenFor(t, nested, "more", protocol)
			for i, to := range []struct {
				name string
				ns   *nstest.Namespace
				link string
				mac  net.HardwareAddr
			}{
				{"another share", victim.Namespace, "net1", victim.attachment.MAC},
				{"the node", nstest.Current(t), "nic0", e.nic.MAC},
			} {
				receiver := listenFor(t, to.ns, to.link, protocol)
				sendRaw(e.wire, "wire", append(classify.EtherTo(to.mac, e.wireMAC(), protocol), marker(i)...))
				if !receiver.saw(marker(i), time.Second) {
					t.Errorf("a frame to %s did not arrive", to.name)
				}
				if attackers.saw(marker(i), 100*time.Millisecond) {
					t.Errorf("a frame to %s arrived at the link of the attacker", to.name)
				}
			}
		})
	}
}

// A link in mode source could have a host in its list only while frames of the host wait in the queue of a share: the
// programs look at the list before the queue, and the kernel behind it.
func TestAttack_briefListOfSenders(t *testing.T) {
	needLists(t)
	e := newTestEnv(t, enforced())
	attacker, victim := e.pod(0, 1, hardCap(mega), netdev.Private), e.pod(1, 2, hardCap(mega), netdev.Private)
	nested := attacker.nest(t, func(nested netlink.NsFd, net1 netlink.Link) error {
		return addSourceLink("more", net1.Attrs().Index, int(nested))
	})
	setListed := func(listed bool) {
		nested.Do(func() error {
			link, err := netlink.LinkByName("more")
			switch {
			case err != nil:
				return err
			case listed:
				return netlink.MacvlanMACAddrAdd(link, e.wireMAC())
			default:
				return netlink.MacvlanMACAddrDel(link, e.wireMAC())
			}
		})
	}
	nested.Do(func() error { return nstest.ConfigureLink("more") })
	const protocol = 0x88b5
	attackers, victims := listenFor(t, nested, "more", protocol), listenFor(t, victim.Namespace, "net1", protocol)
	frame := append(classify.EtherTo(victim.attachment.MAC, e.wireMAC(), protocol), make([]byte, 1400)...)
	expect := func(number int) {
		t.Helper()
		if !victims.saw(marker(number), 5*time.Second) {
			t.Errorf("frame %d did not arrive at the share", number)
		}
		if attackers.saw(marker(number), 100*time.Millisecond) {
			t.Errorf("frame %d arrived at the link of the attacker", number)
		}
	}
	setListed(true)
	sendRaw(e.wire, "wire", append(frame, marker(1)...))
	expect(1)
	setListed(false)
	if _, err := e.wire.Flood("wire", frame, false, 20*time.Millisecond); err != nil { // fills the queue
		t.Fatal(err)
	}
	sendRaw(e.wire, "wire", append(frame[:100], marker(2)...))
	setListed(true)
	expect(2)
}

// newTestEnvWithoutLists returns a testEnv with programs that do not read the sender lists of links in mode source, as
// on kernels that do not let them. The node then has to detect such links.
func newTestEnvWithoutLists(t *testing.T) *testEnv {
	t.Helper()
	nic, wire := nstest.NIC(t, "nic0", 1500, wireIP+"/16", "fd00:20::fe/64")
	options := netdev.Options{BPFFS: nstest.MountBPFFS(t), Failpoints: func(name string, operation func() error) error {
		if name == classify.FailpointLists {
			return errors.ErrUnsupported
		}
		return operation()
	}}
	return newTestEnvWith(t, options, nic, wire, enforced())
}

// needLists skips the test if the programs do not read the lists of senders of links in mode source.
func needLists(t *testing.T) {
	t.Helper()
	c, err := openStrongest(nstest.MountBPFFS(t))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.ListsErr(); err != nil {
		kernelcheck.Skip(t, kernelcheck.SenderLists, err)
	}
}

// addSourceLink creates a link in mode source with the flag nodst, which is down, in a namespace.
func addSourceLink(name string, parent, namespace int) error {
	const flags, nodst = 2, 2 // IFLA_MACVLAN_FLAGS, MACVLAN_FLAG_NODST
	request := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	request.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	request.AddData(nl.NewRtAttr(unix.IFLA_LINK, nl.Uint32Attr(uint32(parent))))
	request.AddData(nl.NewRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(namespace))))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("macvlan"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	data.AddRtAttr(nl.IFLA_MACVLAN_MODE, nl.Uint32Attr(uint32(nl.MACVLAN_MODE_SOURCE)))
	data.AddRtAttr(flags, nl.Uint16Attr(nodst))
	request.AddData(info)
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// nest returns a namespace where the pod has created or moved a link with f, which gets a descriptor of the namespace
// and the pod's link. The node cannot see the namespace.
func (p *pod) nest(t *testing.T, f func(nested netlink.NsFd, net1 netlink.Link) error) *nstest.Namespace {
	t.Helper()
	nested := nstest.New(t)
	p.Do(func() error {
		net1, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		return f(netlink.NsFd(nested.File.Fd()), net1)
	})
	return nested
}

// hide creates the link "more" in mode source on the NIC, in a namespace that the node cannot see.
// The link gets an address, unless it is nil, and takes the frames of a sender.
func (p *pod) hide(t *testing.T, mac, sender net.HardwareAddr) *nstest.Namespace {
	t.Helper()
	nested := p.nest(t, func(nested netlink.NsFd, net1 netlink.Link) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex, attrs.Namespace, attrs.HardwareAddr = "more", net1.Attrs().Index, nested, mac
		return netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_SOURCE})
	})
	nested.Do(func() error {
		return errors.Join(nstest.ConfigureLink("more"), changeMacvlan("more", netlink.MACVLAN_MODE_SOURCE, sender))
	})
	return nested
}

// A pod can hide a link that takes other pods' frames in a network namespace that it creates,
// which the node cannot look into.
func TestAttack_sourceModeInNestedNamespace(t *testing.T) {
	for name, attack := range map[string]func(*testing.T, *pod, net.HardwareAddr) (*nstest.Namespace, string){
		"the link itself": func(t *testing.T, p *pod, sender net.HardwareAddr) (*nstest.Namespace, string) {
			nested := p.nest(t, func(nested netlink.NsFd, net1 netlink.Link) error {
				return netlink.LinkSetNsFd(net1, int(nested))
			})
			nested.Do(func() error {
				return errors.Join(nstest.ConfigureLink("net1"), changeMacvlan("net1", netlink.MACVLAN_MODE_SOURCE, sender))
			})
			return nested, "net1"
		},
		"a further link": func(t *testing.T, p *pod, sender net.HardwareAddr) (*nstest.Namespace, string) {
			return p.hide(t, nil, sender), "more"
		},
		"a further link in a namespace that the node sees": func(
			t *testing.T, p *pod, sender net.HardwareAddr,
		) (*nstest.Namespace, string) {
			nested := p.hide(t, nil, sender)
			// The kernel gives the namespace an ID when the node lists a veth link between it and the pod.
			if _, err := nstest.Current(t).Socket.NamespaceID(nested.File); err != nil {
				t.Fatal(err)
			}
			return nested, "more"
		},
		"a further link with the address of the link": func(
			t *testing.T, p *pod, sender net.HardwareAddr,
		) (*nstest.Namespace, string) {
			p.Do(func() error {
				net1, err := netlink.LinkByName("net1")
				return errors.Join(err, netlink.LinkSetDown(net1))
			})
			return p.hide(t, p.attachment.MAC, sender), "more"
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := newTestEnvWithoutLists(t)
			attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
			nested, link := attack(t, attacker, e.wireMAC())
			frames, victims := listen(t, nested, link), listen(t, victim.Namespace, "net1")
			number := 0
			read := func(destination net.HardwareAddr) (attacker, victim bool) {
				number++
				frame := classify.EtherTo(destination, e.wireMAC(), 0x0800, classify.IPv4(wireIP, 17, 0, classify.UDP(1, 2)))
				sendRaw(e.wire, "wire", append(frame, marker(number)...))
				return frames.saw(marker(number), 300*time.Millisecond), victims.saw(marker(number), 300*time.Millisecond)
			}
			if taken, _ := read(victim.attachment.MAC); !taken {
				t.Fatal("the attack has no effect before it is detected: does the test attack?")
			}
			if _, err := e.node.ReadAndBlock(attacker.attachment); err != nil {
				t.Fatal(err)
			}
			e.inspect(true)
			for to, mac := range map[string]net.HardwareAddr{"the node": e.nic.MAC, "its sibling": victim.attachment.MAC} {
				taken, received := read(mac)
				if taken || received != (to == "its sibling") {
					t.Errorf("a frame to %s: the attacker received it: %t, the sibling: %t", to, taken, received)
				}
			}
			// The sources that a pod sees are of no use to it.
			nested.Do(func() error { return changeMacvlan(link, netlink.MACVLAN_MODE_SOURCE, e.lastSource(victim)) })
			if taken, _ := read(victim.attachment.MAC); taken {
				t.Error("the attacker received a frame after it had listed a source address that pods see")
			}
			nested.Do(func() error { return deleteLink(link) })
			if _, err := e.node.ReadAndBlock(attacker.attachment); err != nil {
				t.Fatal(err)
			}
			e.inspect(false)
			e.skip(10 * time.Second) // the shortest time that the NIC stays guarded
			e.inspect(false)
			frame := classify.EtherTo(victim.attachment.MAC, e.wireMAC(), 0x0800,
				classify.IPv4(wireIP, 17, 0, classify.UDP(1, 2)))
			sendRaw(e.wire, "wire", frame)
			if source := frame[6:14]; !victims.saw(source, 300*time.Millisecond) {
				t.Error("the sender of frames is hidden after the attack has ended")
			}
		})
	}
}

// lastSource returns the source address of a frame that a pod receives from the wire.
func (e *testEnv) lastSource(p *pod) net.HardwareAddr {
	e.t.Helper()
	mark := []byte("last source")
	l := listen(e.t, p.Namespace, "net1")
	sendRaw(e.wire, "wire", append(classify.EtherTo(p.attachment.MAC, e.wireMAC(), 0x88b5), mark...))
	frame := l.receive(mark, time.Second)
	if frame == nil {
		e.t.Fatal("the pod did not receive a frame from the wire")
	}
	return net.HardwareAddr(frame[6:12])
}

// inspect checks whether the node finds a link that a pod hides, and returns whether the NIC is guarded.
func (e *testEnv) inspect(want bool) (guarded bool) {
	e.t.Helper()
	unknown, guarded, err := e.node.Inspect(e.nic.Index)
	if err != nil || len(unknown) > 0 != want {
		e.t.Fatalf("Inspect returned %v and error %v, want an address: %t", unknown, err, want)
	}
	return guarded
}

// A pod that hides a link again and again receives other pods' frames until the link is detected, and
// nothing for a time that doubles.
func TestAttack_repeatedHiddenLinks(t *testing.T) {
	e := newTestEnvWithoutLists(t)
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	number := 0
	takes := func(link listener) bool {
		number++
		frame := classify.EtherTo(victim.attachment.MAC, e.wireMAC(), 0x0800,
			classify.IPv4(wireIP, 17, 0, classify.UDP(1, 2)))
		sendRaw(e.wire, "wire", append(frame, marker(number)...))
		return link.saw(marker(number), 100*time.Millisecond)
	}
	for round, hold := range []time.Duration{10 * time.Second, 20 * time.Second, 40 * time.Second} {
		nested := attacker.hide(t, nil, e.wireMAC())
		link := listen(t, nested, "more")
		if !takes(link) {
			t.Fatalf("round %d: the attack has no effect before it is detected: does the test attack?", round)
		}
		if !e.inspect(true) || takes(link) {
			t.Errorf("round %d: the NIC is not guarded after the link was detected", round)
		}
		remove := func() { nested.Do(func() error { return deleteLink("more") }) }
		remove()
		if !e.inspect(false) {
			t.Errorf("round %d: the NIC is no longer guarded when the link is gone", round)
		}
		e.skip(hold - 2*time.Second)
		e.inspect(false)
		nested = attacker.hide(t, nil, e.wireMAC())
		if link = listen(t, nested, "more"); takes(link) {
			t.Errorf("round %d: the attacker received a frame %s after its link was detected", round, hold-2*time.Second)
		}
		remove()
		e.skip(2 * time.Second)
		if e.inspect(false) {
			t.Errorf("round %d: the NIC is still guarded after %s", round, hold)
		}
	}
}

// The link of an address that all pods may use can be hidden as well. One that the node sees is not.
func TestAttack_hiddenLinkWithAllowedAddress(t *testing.T) {
	config, mac := enforced(), net.HardwareAddr{0, 0, 0x5e, 0, 1, 7}
	config.Policy.MACs = []net.HardwareAddr{mac}
	e := newTestEnv(t, config)
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	p.Do(func() error {
		net1, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex, attrs.HardwareAddr = "vrrp", net1.Attrs().Index, mac
		vrrp := &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE}
		return errors.Join(netlink.LinkAdd(vrrp), netlink.LinkSetUp(vrrp))
	})
	if e.inspect(false) {
		t.Error("the NIC is guarded because of a link of the pod that the node sees")
	}
	p.Do(func() error { return deleteLink("vrrp") })
	e.inspect(false)
	p.hide(t, mac, e.wireMAC())
	if !e.inspect(true) {
		t.Error("the NIC is not guarded although a link is hidden")
	}
}

// addDecoy creates a bridge in the pod with the interface index of the NIC.
func (p *pod) addDecoy(t *testing.T, index int) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "decoy", index
	p.Do(func() error {
		decoy := &netlink.Bridge{LinkAttrs: attrs}
		return errors.Join(netlink.LinkAdd(decoy), netlink.LinkSetUp(decoy))
	})
}

// addToDecoy creates a macvlan on the link decoy in the pod. index 0 lets the kernel choose one.
func (p *pod) addToDecoy(t *testing.T, name string, index int, mac net.HardwareAddr, mode netlink.MacvlanMode) {
	t.Helper()
	p.Do(func() error {
		decoy, err := netlink.LinkByName("decoy")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.Index, attrs.ParentIndex, attrs.HardwareAddr = name, index, decoy.Attrs().Index, mac
		link := &netlink.Macvlan{LinkAttrs: attrs, Mode: mode}
		return errors.Join(netlink.LinkAdd(link), netlink.LinkSetUp(link))
	})
}

// A pod cannot cover the address of a hidden link by a link on a decoy that has the index of the NIC.
func TestAttack_decoyWithIndexOfNIC(t *testing.T) {
	t.Run("for a further link", func(t *testing.T) {
		e := newTestEnv(t, enforced())
		p, mac := e.pod(0, 1, hardCap(100*mega), netdev.Private), net.HardwareAddr{2, 0, 0, 0, 6, 1}
		p.hide(t, mac, e.wireMAC())
		p.addDecoy(t, e.nic.Index)
		p.addToDecoy(t, "shown", 0, mac, netlink.MACVLAN_MODE_BRIDGE)
		if !e.inspect(true) {
			t.Error("the NIC is not guarded although a link is hidden")
		}
	})
	t.Run("for the link", func(t *testing.T) {
		e := newTestEnv(t, enforced())
		p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
		p.Do(func() error {
			net1, err := netlink.LinkByName("net1")
			return errors.Join(err, netlink.LinkSetDown(net1))
		})
		p.hide(t, p.attachment.MAC, e.wireMAC())
		p.Do(func() error { return deleteLink("net1") })
		p.addDecoy(t, e.nic.Index)
		p.addToDecoy(t, "net1", p.attachment.Index, p.attachment.MAC, netlink.MACVLAN_MODE_PRIVATE)
		if state, err := e.node.ReadAndBlock(p.attachment); err != nil || state.Exists {
			t.Errorf("Read returned %+v and error %v, want no link", state, err)
		}
		if presence, err := e.node.Presence(p.attachment); err != nil || presence != netdev.LinkMissing {
			t.Errorf("Presence returned %v and error %v, want LinkMissing", presence, err)
		}
		if !e.inspect(true) {
			t.Error("the NIC is not guarded although a link is hidden")
		}
	})
	t.Run("a harmless link", func(t *testing.T) {
		e := newTestEnv(t, enforced())
		p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
		p.addDecoy(t, e.nic.Index)
		p.addToDecoy(t, "other", 0, nil, netlink.MACVLAN_MODE_SOURCE)
		if state, err := e.node.ReadAndBlock(p.attachment); err != nil || state.Blocked != "" {
			t.Errorf("Read returned %+v and error %v, want a link that is not blocked", state, err)
		}
	})
}
