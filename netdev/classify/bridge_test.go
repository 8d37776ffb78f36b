// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// between returns a flow from a pod to another pod of the same NIC.
func (e *testEnv) between(from, to *pod) nstest.Flow {
	return nstest.Flow{From: from.Namespace, To: to.Namespace, Address: e.address(to.ip)}
}

func TestBridgeMode_limitsTrafficToGrantOfReceiver(t *testing.T) {
	e := newTestEnv(t, enforced())
	a := e.pod(0, 1, hardCap(300*mega), netdev.Bridge)
	b := e.pod(1, 2, hardCap(50*mega), netdev.Bridge)
	e.expectRate("flow from another share of the NIC", e.measure(e.between(a, b))[0], 50*mega)
}

// The grant limits the sum of what a share sends to other shares and to the network.
func TestBridgeMode_limitsTrafficToGrantOfSender(t *testing.T) {
	for _, key := range classify.Keys() {
		t.Run(string(key), func(t *testing.T) {
			needKey(t, key)
			e := newTestEnv(t, enforced(), key)
			e.expectGrantOfSender()
		})
	}
	t.Run("without identity", func(t *testing.T) {
		e := newTestEnv(t, netdev.NICConfig{})
		e.expectGrantOfSender()
	})
}

func (e *testEnv) expectGrantOfSender() {
	e.t.Helper()
	a, b := e.pod(0, 1, hardCap(100*mega), netdev.Bridge), e.pod(1, 2, hardCap(500*mega), netdev.Bridge)
	const tolerance = 0.05
	e.expectRateWithin("to another share", e.measure(e.between(a, b))[0], 100*mega, tolerance)
	both := e.measure(e.between(a, b), e.fromPod(a))
	e.expectRateWithin("to another share and to the network", both[0]+both[1], 100*mega, tolerance)
}

func TestBridgeMode_lendsIdleBandwidth(t *testing.T) {
	e := newTestEnv(t, enforced())
	a := e.pod(0, 1, shape.Rates{Floor: 100 * mega, Ceil: line}, netdev.Bridge)
	b := e.pod(1, 2, shape.Rates{Floor: 100 * mega, Ceil: line}, netdev.Bridge)
	for name, flow := range map[string]nstest.Flow{"to another share": e.between(a, b), "to the network": e.fromPod(a)} {
		if got := e.measure(flow)[0]; got < atLeast(0.8*line) {
			t.Errorf("a share that borrows sends %s: got %.0f Mbit/s, want most of the line", name, got/mega)
		}
	}
}

// IPv6 and large datagrams pass between shares, and frames for all links reach the shares
// that may see them: those in the same mode, and not the node.
func TestBridgeMode_deliversMulticast(t *testing.T) {
	e := newTestEnv(t, enforced())
	a, b := e.pod(0, 1, hardCap(100*mega), netdev.Bridge), e.pod(1, 2, hardCap(100*mega), netdev.Bridge)
	private := e.pod(2, 3, hardCap(100*mega), netdev.Private)
	e.measure(nstest.Flow{From: a.Namespace, To: b.Namespace, Address: e.address("fd00:20::2"), Duration: duration / 3})

	listeners := map[string]listener{
		"the other share": listen(t, b.Namespace, "net1"), "the network": listen(t, e.wire, "wire"),
		"the sender": listen(t, a.Namespace, "net1"), "a private share": listen(t, private.Namespace, "net1"),
	}
	broadcast := classify.EtherTo(net.HardwareAddr{255, 255, 255, 255, 255, 255}, a.attachment.MAC, 0x0800,
		classify.IPv4("10.20.0.1", 17, 0, classify.UDP(5000, 5001)))
	sendRaw(a.Namespace, "net1", append(broadcast, marker(1)...))
	for name, want := range map[string]bool{
		"the other share": true, "the network": true, "the sender": false, "a private share": false,
	} {
		if got := listeners[name].saw(marker(1), 300*time.Millisecond); got != want {
			t.Errorf("%s received the broadcast: %t, want %t", name, got, want)
		}
	}
}

// The node does not answer to what a share sends to other shares.
func TestBridgeMode_nodeIgnoresFramesBetweenShares(t *testing.T) {
	e := newTestEnv(t, enforced())
	if err := nstest.ConfigureLink("nic0", nodeIP+"/16"); err != nil {
		t.Fatal(err)
	}
	a := e.pod(0, 1, hardCap(100*mega), netdev.Bridge)
	e.pod(1, 2, hardCap(100*mega), netdev.Bridge)
	a.Do(func() error { // needs ARP, which the node would answer and learn from
		return ignoreUnreachable(sendUDP(net.JoinHostPort(nodeIP, "9"), marker(1)))
	})
	e.measure(nstest.Flow{From: a.Namespace, To: e.wire, Address: e.address(wireIP), Duration: duration / 3})
	neighbors, err := netlink.NeighList(e.nic.Index, netlink.FAMILY_V4)
	if err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(neighbors, func(n netlink.Neigh) bool { return n.IP.String() == a.ip }) {
		t.Errorf("the node has the neighbor %s, which it learned from a frame between shares", a.ip)
	}
}

// With the policy, the node and shares in mode Bridge reach each other, and shares in mode Private
// and the node do not.
func TestBridgeMode_reachesNode(t *testing.T) {
	config := enforced()
	config.Policy.ReachesNode = true
	e := newTestEnv(t, config)
	if err := nstest.ConfigureLink("nic0", nodeIP+"/16", "fd00:20::ff/64"); err != nil {
		t.Fatal(err)
	}
	node := nstest.Current(t)
	bridge := e.pod(0, 1, hardCap(100*mega), netdev.Bridge)
	private := e.pod(1, 2, hardCap(100*mega), netdev.Private)

	toNode := nstest.Flow{From: bridge.Namespace, To: node, Address: e.address(nodeIP)}
	e.expectRate("a share sends to the node", e.measure(toNode)[0], 100*mega)
	fromNode := nstest.Flow{From: node, To: bridge.Namespace, Address: e.address(bridge.ip)}
	e.expectRate("the node sends to a share", e.measure(fromNode)[0], 100*mega)
	e.measure(nstest.Flow{From: bridge.Namespace, To: node, Address: e.address("fd00:20::ff"), Duration: duration / 3})

	received := listen(t, private.Namespace, "net1")
	if err := ignoreUnreachable(sendUDP(net.JoinHostPort(private.ip, "9"), marker(7))); err != nil {
		t.Fatal(err)
	}
	if received.saw(marker(7), 300*time.Millisecond) {
		t.Error("a private share received a datagram of the node")
	}
}

func ignoreUnreachable(err error) error {
	var network *net.OpError
	if errors.As(err, &network) {
		return nil
	}
	return err
}

func TestBridgeMode_limitsBroadcastsOfShare(t *testing.T) {
	e := newTestEnv(t, enforced())
	a := e.pod(0, 1, hardCap(10*mega), netdev.Bridge)
	b := e.pod(1, 2, hardCap(100*mega), netdev.Bridge)
	frame := classify.EtherTo(net.HardwareAddr{255, 255, 255, 255, 255, 255}, a.attachment.MAC, 0x0800,
		classify.IPv4("10.20.0.1", 17, 0, append(classify.UDP(5000, 5001), make([]byte, 1400)...)))
	before, start := b.receivedBytes(), time.Now()
	if _, err := a.Flood("net1", frame, false, duration); err != nil {
		t.Fatal(err)
	}
	got := float64(b.receivedBytes()-before) * 8 / time.Since(start).Seconds()
	e.expectAtMost("broadcasts that another share receives", got, 11*mega)
	if got < atLeast(mega) {
		t.Errorf("broadcasts that another share receives: got %.1f Mbit/s, want some", got/mega)
	}
}

// A pod cannot send to another share with the address of a third, even through its own bridge, where frames do not have
// a socket.
func TestAttack_bridgedFramesToSibling(t *testing.T) {
	for identity, receives := range map[classify.Identity]bool{
		classify.IdentityEnforce: false, classify.IdentityAudit: true,
	} {
		t.Run(fmt.Sprint(identity), func(t *testing.T) {
			config := enforced()
			config.Policy.Identity = identity
			e := newTestEnv(t, config)
			e.needCookie()
			sendBridgedFrames(t, e, receives)
		})
	}
}

// On a network that allows forwarding, a link in mode Private still cannot reach others: frames that its pod bridges
// leave through the NIC, whatever address they have.
func TestAttack_bridgedFramesWithAddressOfBridgeLink(t *testing.T) {
	needRoutes(t)
	config := enforced()
	config.Policy.Forwarding = true
	e := newTestEnv(t, config)
	attacker := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	victim, third := e.pod(1, 2, hardCap(100*mega), netdev.Bridge), e.pod(2, 3, hardCap(100*mega), netdev.Bridge)
	behind := e.bridgedBehind(attacker)
	frames, wire := listen(t, victim.Namespace, "net1"), listen(t, e.wire, "wire")
	frame := classify.EtherTo(victim.attachment.MAC, third.attachment.MAC, 0x88b5)
	arrived := false
	for tries := 0; tries < 5 && !arrived; tries++ { // the bridge forwards nothing before its ports are up
		sendRaw(behind, "eth0", append(frame, marker(1)...))
		if frames.saw(marker(1), 200*time.Millisecond) {
			t.Fatal("a bridged frame with the address of another link reached a share")
		}
		arrived = wire.saw(marker(1), 100*time.Millisecond)
	}
	if !arrived {
		t.Error("the bridged frame did not leave the NIC")
	}
}

// sendBridgedFrames sends frames with foreign addresses through a bridge in a pod to another
// pod, and fails the test unless they arrive as expected: those with the address of a share at
// the pod, and others on the network.
func sendBridgedFrames(t *testing.T, e *testEnv, receives bool) {
	t.Helper()
	attacker := e.pod(0, 1, hardCap(100*mega), netdev.Bridge)
	victim, third := e.pod(1, 2, hardCap(100*mega), netdev.Bridge), e.pod(2, 3, hardCap(100*mega), netdev.Bridge)
	behind := e.bridgedBehind(attacker)
	frames, wire := listen(t, victim.Namespace, "net1"), listen(t, e.wire, "wire")
	for i, source := range []net.HardwareAddr{third.attachment.MAC, {2, 7, 7, 7, 7, 7}} {
		frame := classify.EtherTo(victim.attachment.MAC, source, 0x88b5) // of IP, br_netfilter drops what is not valid
		got := false
		for tries := 0; tries < 5 && !got; tries++ { // the bridge forwards nothing before its ports are up
			sendRaw(behind, "eth0", append(frame, marker(i)...))
			got = frames.saw(marker(i), 200*time.Millisecond) || wire.saw(marker(i), 100*time.Millisecond)
		}
		if got != receives {
			t.Errorf("a bridged frame from %s arrived: %t, want %t", source, got, receives)
		}
	}
}

// bridgedBehind returns a namespace. A bridge in the pod connects its link eth0 to the pod's link.
func (e *testEnv) bridgedBehind(p *pod) *nstest.Namespace {
	e.t.Helper()
	behind := nstest.New(e.t)
	p.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "br0"
		bridge := &netlink.Bridge{LinkAttrs: attrs}
		if err := netlink.LinkAdd(bridge); err != nil {
			return err
		}
		attrs.Name, attrs.MasterIndex = "port", bridge.Index
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(behind.File.Fd())}
		net1, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkAdd(veth), netlink.LinkSetMaster(net1, bridge),
			nstest.ConfigureLink("br0"), nstest.ConfigureLink("port"))
	})
	behind.Do(func() error { return nstest.ConfigureLink("eth0") })
	return behind
}

// Links that an earlier release attached have the mode bridge in the kernel. They reach each
// other and links of this release.
func TestBridgeMode_reachesLinksOfEarlierRelease(t *testing.T) {
	e := newTestEnv(t, enforced())
	without := e.config
	without.Enforce = false
	if _, err := e.node.Manage(without); err != nil { // links then have the mode bridge
		t.Fatal(err)
	}
	grant := hardCap(100 * mega)
	old, older := e.pod(0, 1, grant, netdev.Bridge), e.pod(1, 2, grant, netdev.Bridge)
	e.manage()
	for _, p := range []*pod{old, older} {
		if p.attachment.Mode != netdev.Bridge {
			t.Fatalf("the link has mode %s without enforcement, want bridge", p.attachment.Mode)
		}
		if err := e.node.Restore(p.attachment, grant); err != nil {
			t.Fatal(err)
		}
	}
	added := e.pod(2, 3, grant, netdev.Bridge)
	e.expectRate("between links of the earlier release", e.measure(e.between(old, older))[0], 100*mega)
	e.expectRate("to a link of this release", e.measure(e.between(old, added))[0], 100*mega)
	e.expectRate("from a link of this release", e.measure(e.between(added, old))[0], 100*mega)
	e.expectRate("to the network", e.measure(e.fromPod(old))[0], 100*mega)
}

// Manage and Restore repair what another program changes, and Unmanage removes the hairpin.
func TestBridgeMode_hairpinIsRepairedAndRemoved(t *testing.T) {
	e := newTestEnv(t, enforced())
	grant := hardCap(100 * mega)
	a, b := e.pod(0, 1, grant, netdev.Bridge), e.pod(1, 2, grant, netdev.Bridge)
	outer, inner := shape.HairpinNames("nic0")
	for name, remove := range map[string]func() error{
		"the links": func() error { return netlink.LinkDel(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: outer}}) },
		"the queues": func() error {
			link, err := netlink.LinkByName(outer)
			if err != nil {
				return err
			}
			return netlink.QdiscDel(netlink.NewHtb(netlink.QdiscAttrs{
				LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(shape.Major, 0), Parent: netlink.HANDLE_ROOT}))
		},
		"the inner link's state": func() error {
			link, err := netlink.LinkByName(inner)
			if err != nil {
				return err
			}
			return netlink.LinkSetDown(link)
		},
	} {
		if changed, err := e.node.Manage(e.config); err != nil || changed {
			t.Fatalf("Manage of an intact NIC returned changed %t and error %v, want no change", changed, err)
		}
		if err := remove(); err != nil {
			t.Fatalf("remove %s: %v", name, err)
		}
		if changed, err := e.node.Manage(e.config); err != nil || !changed {
			t.Fatalf("Manage without %s returned changed %t and error %v, want a change", name, changed, err)
		}
		for _, p := range []*pod{a, b} {
			if err := e.node.Restore(p.attachment, grant); err != nil {
				t.Fatalf("Restore without %s: %v", name, err)
			}
		}
		e.expectRate("after the repair of "+name, e.measure(e.between(a, b))[0], 100*mega)
		if s, err := e.node.ReadAndBlock(a.attachment); err != nil || s.Send == nil || *s.Send != grant {
			t.Errorf("Read after the repair of %s returned %+v and error %v, want the grant", name, s.Send, err)
		}
	}
	e.config.Policy.Forwarding = true
	e.manage()
	if s, err := e.node.ReadAndBlock(a.attachment); err != nil || s.Send == nil || *s.Send != grant {
		t.Errorf("Read after a change of the policy returned %+v and error %v, want the grant", s.Send, err)
	}
	if _, err := e.node.Unmanage(e.nic.Name, e.nic.Index); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{outer, inner} {
		if _, err := netlink.LinkByName(name); err == nil {
			t.Errorf("link %s still exists", name)
		}
	}
}

// Links without a grant, which do not have a separate class, reach each other, too.
func TestBridgeMode_connectsLinksWithoutGrant(t *testing.T) {
	e := newTestEnv(t, enforced())
	var pods []*pod
	for number := 1; number <= 2; number++ {
		p := &pod{Namespace: nstest.New(t), ip: fmt.Sprintf("10.20.0.%d", number)}
		var err error
		p.attachment, err = e.node.Attach(p.Pod(), netdev.LinkSpec{
			Parent: e.nic.Index, MAC: net.HardwareAddr{2, 0, 0, 0, 0, byte(number)}, Mode: netdev.Bridge,
			Addresses: []netip.Prefix{netip.MustParsePrefix(p.ip + "/16")},
		})
		if err != nil {
			t.Fatal(err)
		}
		pods = append(pods, p)
	}
	e.expectAtMost("between links without a grant", e.measure(e.between(pods[0], pods[1]))[0], reserve/4)
}

// The traffic of a share includes what it sends to other shares, once.
func TestNode_ShareTraffic(t *testing.T) {
	e := newTestEnv(t, enforced())
	a := e.pod(0, 1, hardCap(100*mega), netdev.Bridge)
	b := e.pod(1, 2, hardCap(100*mega), netdev.Bridge)
	e.measure(e.between(a, b))
	e.measure(e.fromPod(a))
	shares, _, err := e.node.ShareTraffic(e.nic.Index)
	if err != nil {
		t.Fatal(err)
	}
	both := atLeast(2 * 100 * mega * 0.9 * duration.Seconds() / 8)
	if sent := float64(shares[shape.FirstMinor].Sent); sent < both || sent > both*1.5 && !nstest.Emulated() {
		t.Errorf("the share sent %.0f bytes to another share and to the network, want about %.0f", sent, both)
	}
	if received := float64(shares[shape.FirstMinor+1].Received); received < both/2 {
		t.Errorf("the other share received %.0f bytes, want at least %.0f", received, both/2)
	}
}

// A class on the hairpin that another program changes shows in the state of the link.
func TestBridgeMode_readsClassOfHairpin(t *testing.T) {
	e := newTestEnv(t, enforced())
	grant := hardCap(100 * mega)
	p := e.pod(0, 1, grant, netdev.Bridge)
	outer, _ := shape.HairpinNames("nic0")
	link, err := netlink.LinkByName(outer)
	if err != nil {
		t.Fatal(err)
	}
	class := netlink.NewHtbClass(netlink.ClassAttrs{
		LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(shape.Major, shape.FirstMinor),
		Parent: netlink.MakeHandle(shape.Major, 1),
	}, netlink.HtbClassAttrs{Rate: 100 * mega, Ceil: 300 * mega})
	if err := netlink.ClassChange(class); err != nil {
		t.Fatal(err)
	}
	state, err := e.node.ReadAndBlock(p.attachment)
	if err != nil || state.Send == nil || *state.Send == grant {
		t.Errorf("Read returned %+v and error %v, want rates other than the grant", state.Send, err)
	}
	snapshot, err := e.node.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	if send, _, err := snapshot.Rates(p.attachment); err != nil || send == nil || *send == grant {
		t.Errorf("Rates returned %+v and error %v, want rates other than the grant", send, err)
	}
}
