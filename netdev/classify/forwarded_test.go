// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"net"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/kernelcheck"
)

// forwarded is the rate that the tests guarantee to frames that the node forwards.
const forwarded = 200 * mega

// newUplinkEnv returns a testEnv with a forwarding node that has an address on the NIC, and a pod in the node's cluster
// network.
func newUplinkEnv(t *testing.T, config netdev.NICConfig) (e *testEnv, ordinary *nstest.Namespace) {
	t.Helper()
	e = newTestEnv(t, config)
	return e, e.forwardFrom("nic0")
}

// forwardFrom gives a link of the node addresses, makes the node forward, and returns the namespace of a pod in the
// node's cluster network.
func (e *testEnv) forwardFrom(uplink string) (ordinary *nstest.Namespace) {
	t := e.t
	t.Helper()
	ordinary = nstest.New(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "cni0"
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(ordinary.File.Fd())}
	err := errors.Join(
		nstest.ConfigureLink(uplink, nodeIP+"/16", "fd00:20::fd/64"),
		netlink.LinkAdd(veth),
		nstest.ConfigureLink("cni0", "10.60.0.1/24", "fd00:60::1/64"),
		nstest.SetSysctl("net/ipv4/ip_forward", "1"),
		nstest.SetSysctl("net/ipv6/conf/all/forwarding", "1"),
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(veth) })
	ordinary.Do(func() error {
		return errors.Join(
			nstest.ConfigureLink("eth0", "10.60.0.2/24", "fd00:60::2/64"),
			netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("10.60.0.1")}),
			netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("fd00:60::1")}),
		)
	})
	e.wire.Do(func() error {
		return errors.Join(
			netlink.RouteAdd(&netlink.Route{Dst: network("10.60.0.0/24"), Gw: net.ParseIP(nodeIP)}),
			netlink.RouteAdd(&netlink.Route{Dst: network("fd00:60::/64"), Gw: net.ParseIP("fd00:20::fd")}),
		)
	})
	return ordinary
}

func network(text string) *net.IPNet {
	_, n, err := net.ParseCIDR(text)
	if err != nil {
		panic(err) // a literal of this file
	}
	return n
}

// openStrongest loads the programs for the strongest key that the kernel accepts them for.
func openStrongest(bpffs string) (c *classify.Classifier, err error) {
	for _, key := range classify.Keys() {
		if c, err = classify.Open(bpffs, nil, classify.AttachClsact, key); err == nil {
			return c, nil
		}
	}
	return nil, err
}

// needRoutes skips the test if the programs cannot read routes on this kernel; see package kernelcheck.
func needRoutes(t *testing.T) {
	t.Helper()
	c, err := openStrongest(nstest.MountBPFFS(t))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if !c.ReadsRoutes() {
		kernelcheck.Skip(t, kernelcheck.ForwardedByRoute, "the programs do not read the route of a frame")
	}
}

func TestForwardedByNode_hasGuaranteeAndBorrows(t *testing.T) {
	needRoutes(t)
	config := enforced()
	config.Forwarded = forwarded
	e, ordinary := newUplinkEnv(t, config)
	if got := e.node.ForwardedBy(e.nic.Index); got != classify.ForwardedByRoute {
		t.Errorf("the classifier recognizes forwarded frames by %d, want their route", got)
	}
	for _, ip := range []string{wireIP, "fd00:20::fe"} {
		flow := nstest.Flow{From: ordinary, To: e.wire, Address: e.address(ip)}
		if alone := e.measure(flow)[0]; alone < atLeast(0.8*line) {
			t.Errorf("an ordinary pod alone sends to %s at %.0f Mbit/s, want at least 80%% of the line", ip, alone/mega)
		}
	}
	a := e.pod(0, 1, hardCap(400*mega), netdev.Private)
	b := e.pod(1, 2, hardCap(300*mega), netdev.Private)
	rates := e.measure(nstest.Flow{From: ordinary, To: e.wire, Address: e.address(wireIP)}, e.fromPod(a), e.fromPod(b))
	if want := atLeast(0.85 * forwarded); rates[0] < want {
		t.Errorf("an ordinary pod sends while shares send: got %.0f Mbit/s, want at least %.0f Mbit/s",
			rates[0]/mega, want/mega)
	}
	e.expectRate("a share that sends while the node forwards", rates[1], 400*mega)
	e.expectRate("another share", rates[2], 300*mega)
}

// The node's default route can name a VLAN on the shared NIC. What the node forwards to the VLAN has its guarantee, and
// neighbor discovery of the node passes.
func TestForwardedByNode_framesThroughVLANHaveGuarantee(t *testing.T) {
	for name, tc := range map[string]struct{ isFirst, bridge, bond bool }{
		"the VLAN exists before":    {true, false, false},
		"the VLAN is created later": {false, false, false},
		"a bridge on the VLAN":      {true, true, false},
		"a bond below the VLAN":     {true, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			needRoutes(t)
			nic, wire := nstest.NIC(t, "nic0", 1500, wireIP+"/16", "fd00:20::fe/64")
			if tc.bond {
				nstest.Bond(t, "bond0", netlink.BOND_MODE_ACTIVE_BACKUP, "nic0")
				nic = nstest.FindNIC(t, "bond0")
			}
			uplink := nic.Name + ".100"
			addVLAN := func() {
				nstest.VLAN(t, nic.Name, uplink, 100)
				wire.Do(func() error { return moveAddressToVLAN("wire", 100, "fd00:20::fe/64") })
			}
			if tc.isFirst {
				addVLAN()
			}
			if tc.bridge {
				nstest.Bridge(t, "br0", uplink)
				uplink = "br0"
			}
			config := enforced()
			config.Forwarded = forwarded
			e := newTestEnvOn(t, nstest.MountBPFFS(t), nic, wire, config)
			if !tc.isFirst {
				addVLAN()
			}
			ordinary := e.forwardFrom(uplink)
			for _, ip := range []string{wireIP, "fd00:20::fe"} {
				flow := nstest.Flow{From: ordinary, To: e.wire, Address: e.address(ip)}
				// An emulated processor may be slow; without the class, the rate is a quarter of the reserve.
				if got := e.measure(flow)[0]; got < max(atLeast(0.8*line), reserve) {
					t.Errorf("an ordinary pod sends to %s at %.0f Mbit/s, want at least 80%% of the line", ip, got/mega)
				}
			}
		})
	}
}

func TestForwardedByNode_framesWithoutClassAreUnidentified(t *testing.T) {
	e, ordinary := newUplinkEnv(t, enforced())
	got := e.measure(nstest.Flow{From: ordinary, To: e.wire, Address: e.address(wireIP)})[0]
	e.expectAtMost("an ordinary pod", got, reserve/4)
	if got < atLeast(0.8*reserve/4*payloadRatio) {
		t.Errorf("an ordinary pod sends at %.1f Mbit/s, want most of a quarter of the reserve", got/mega)
	}
}

// A share that sends frames with the address of the NIC, without a socket that
// the classifier knows, looks like the node, except for the route.
func TestForwardedByNode_shareCannotImitateNode(t *testing.T) {
	for _, tc := range []struct {
		name         string
		trustMAC     bool
		least, limit uint64 // of what the share sends
	}{
		{name: "recognized by route", least: reserve / 8, limit: reserve / 4 * 13 / 10},
		{name: "recognized by address", trustMAC: true, least: reserve / 2, limit: forwarded * 11 / 10},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if !tc.trustMAC {
				needRoutes(t)
			}
			e, ordinary := newUplinkEnv(t, netdev.NICConfig{Forwarded: forwarded, TrustMAC: tc.trustMAC})
			e.needCookie()
			attacker := e.pod(0, 1, hardCap(10*mega), netdev.Private)
			router, inner := e.bridgedNamespaces(attacker)
			for flow, send := range map[string]func() error{
				"frames of a socket in a namespace behind a share": func() error {
					_, err := router.Flood("out", e.frameOfNIC(), false, duration)
					return err
				},
				"frames without a socket that a share bridges": func() error {
					return sendDatagrams(inner, e.address(wireIP))
				},
			} {
				rate := e.arrivalRate(send)
				e.expectAtMost(flow, rate, tc.limit)
				if want := atLeast(float64(tc.least)); rate < want {
					t.Errorf("%s: got %.1f Mbit/s, want at least %.1f: do the frames reach the NIC?", flow, rate/mega, want/mega)
				}
			}
			got := e.measure(nstest.Flow{From: ordinary, To: e.wire, Address: e.address(wireIP)})[0]
			if want := atLeast(0.85 * forwarded); got < want {
				t.Errorf("an ordinary pod sends at %.0f Mbit/s, want at least %.0f Mbit/s", got/mega, want/mega)
			}
		})
	}
}

// A share cannot send frames with the address of the NIC from a socket, even on a NIC that forwards for
// the cluster network: the node has received the frames that it forwards, and has a route for its own.
// Frames that a share bridges look like frames that a program of the cluster network redirects.
func TestForwardedByNode_refusesAddressOfNICFromShare(t *testing.T) {
	needRoutes(t)
	config := enforced()
	config.Forwarded = forwarded
	e, _ := newUplinkEnv(t, config)
	attacker := e.pod(0, 1, hardCap(10*mega), netdev.Private)
	nested := attacker.nest(t, func(nested netlink.NsFd, net1 netlink.Link) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex, attrs.Namespace = "more", net1.Attrs().Index, nested
		return netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE})
	})
	nested.Do(func() error { return nstest.ConfigureLink("more") })
	wire := listen(t, e.wire, "wire")
	for i, tc := range []struct {
		name string
		from *nstest.Namespace
		link string
	}{{"the pod", attacker.Namespace, "net1"}, {"a namespace of the pod's own", nested, "more"}} {
		sendRaw(tc.from, tc.link, append(classify.EtherTo(e.wireMAC(), e.nic.MAC, 0x88b5), marker(i)...))
		if wire.saw(marker(i), 300*time.Millisecond) {
			t.Errorf("a frame of %s with the address of the NIC arrived", tc.name)
		}
	}
	refused, err := e.node.Refusals(attacker.attachment.Parent, attacker.attachment.Minor)
	if err != nil || refused.Dropped["SourceMAC"] != 1 {
		t.Errorf("Refusals of the share returned %+v and error %v, want SourceMAC once", refused, err)
	}
	// The other link's frames for neighbor discovery are among them.
	if refused, err = e.node.Refusals(e.nic.Index, 0); err != nil || refused.Dropped["SourceMAC"] == 0 {
		t.Errorf("Refusals of no share returned %+v and error %v, want SourceMAC", refused, err)
	}
}

// A program of the cluster network that redirects the frames of pods to the NIC, as Cilium does, is not refused on a
// NIC that forwards for the cluster network: such frames keep their socket, and do not have a route. On other NICs,
// they look like the frames of a bridge with the NIC's address in a pod.
func TestForwardedByNode_permitsRedirectedFrames(t *testing.T) {
	for name, rate := range map[string]uint64{"with forwarded": forwarded, "without": 0} {
		t.Run(name, func(t *testing.T) {
			needRoutes(t)
			testRedirectedFrames(t, rate)
		})
	}
}

func testRedirectedFrames(t *testing.T, forwarded uint64) {
	config := enforced()
	config.Forwarded = forwarded
	e, _ := newUplinkEnv(t, config)
	share := e.pod(0, 1, hardCap(10*mega), netdev.Private) // has eth0 of the cluster network, too
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "lxc0"
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(share.File.Fd())}
	if err := errors.Join(netlink.LinkAdd(veth), nstest.ConfigureLink("lxc0")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(veth) })
	share.Do(func() error { return nstest.ConfigureLink("eth0") })
	if err := redirect(veth.Index, e.nic.Index); err != nil {
		t.Fatal(err)
	}
	wire := listen(t, e.wire, "wire")
	sendRaw(share.Namespace, "eth0", append(classify.EtherTo(e.wireMAC(), e.nic.MAC, 0x88b5), marker(1)...))
	if got, want := wire.saw(marker(1), time.Second), forwarded > 0; got != want {
		t.Errorf("a frame that a program of the node redirected to the NIC arrived: %t, want %t", got, want)
	}
	refused, err := e.node.Refusals(e.nic.Index, 0) // the socket does not show the sender of a redirected frame
	if err != nil || forwarded == 0 && refused.Dropped["SourceMAC"] == 0 {
		t.Errorf("Refusals of no share returned %+v and error %v, want SourceMAC", refused, err)
	}
}

// redirect sends the frames that arrive at a link out of another link.
func redirect(from, to int) error {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "MIT",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R1, int32(to)), asm.Mov.Imm(asm.R2, 0), asm.FnRedirect.Call(), asm.Return(),
		},
	})
	if err != nil {
		return err
	}
	defer program.Close()
	if err := nstest.AddClsact(from); err != nil {
		return err
	}
	return netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: from, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL,
		},
		Fd: program.FD(), Name: "redirect", DirectAction: true,
	})
}

// frameOfNIC returns a frame to the wire with the address of the NIC. Its type is one
// for experiments, because a bridge may check frames of IP.
func (e *testEnv) frameOfNIC() []byte {
	e.t.Helper()
	f := frame(e.nic.MAC, e.wireMAC())
	f[12], f[13] = 0x88, 0xb5
	return f
}

// chosenIndex is the interface index that a pod chooses for a link that it creates.
const chosenIndex = 7777

// This is why ingress_ifindex does not distinguish the frames of the node from
// the frames of a share: the index belongs to a link in the pod, and the pod chooses it.
func TestKernel_showsIngressIndexOfPod(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	router, _ := e.bridgedNamespaces(e.pod(0, 1, hardCap(10*mega), netdev.Private))
	counts, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer counts.Close()
	const ingressIfindex = 36 // offset in struct __sk_buff
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "MIT",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, ingressIfindex, asm.Word),
			asm.JNE.Imm(asm.R2, chosenIndex, "other"),
			asm.LoadMapValue(asm.R1, counts.FD(), 0),
			asm.Mov.Imm(asm.R2, 1),
			asm.AddAtomic.Mem(asm.R1, asm.R2, asm.DWord, 0),
			asm.Mov.Imm(asm.R0, -1).WithSymbol("other"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	if err := nstest.AddClsact(e.nic.Index); err != nil {
		t.Fatal(err)
	}
	err = netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: e.nic.Index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL,
		},
		Fd: program.FD(), Name: "count", DirectAction: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := router.Flood("out", e.frameOfNIC(), false, 100*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	var frames uint64
	if err := counts.Lookup(uint32(0), &frames); err != nil || frames < 50 {
		t.Errorf("%d frames left the NIC with the ingress index that the pod chose, error %v; want at least 50", frames, err)
	}
}

// bridgedNamespaces returns two namespaces behind a pod. The pod bridges the link
// "out" of the first, which has the address of the NIC, to its own link of the
// share. The first namespace forwards what the second sends.
func (e *testEnv) bridgedNamespaces(p *pod) (router, inner *nstest.Namespace) {
	e.t.Helper()
	router, inner = nstest.New(e.t), nstest.New(e.t)
	p.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "br0"
		bridge := &netlink.Bridge{LinkAttrs: attrs}
		if err := netlink.LinkAdd(bridge); err != nil {
			return err
		}
		attrs.Name, attrs.Index, attrs.MasterIndex = "port", chosenIndex, bridge.Index
		veth := &netlink.Veth{
			LinkAttrs: attrs, PeerName: "out", PeerHardwareAddr: e.nic.MAC,
			PeerNamespace: netlink.NsFd(router.File.Fd()),
		}
		net1, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkAdd(veth), netlink.LinkSetMaster(net1, bridge),
			nstest.ConfigureLink("br0"), nstest.ConfigureLink("port"))
	})
	router.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "in"
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(inner.File.Fd())}
		if err := errors.Join(netlink.LinkAdd(veth), nstest.ConfigureLink("in", "10.70.0.1/24"),
			nstest.ConfigureLink("out", "10.20.0.77/16"), nstest.SetSysctl("net/ipv4/ip_forward", "1")); err != nil {
			return err
		}
		out, err := netlink.LinkByName("out")
		if err != nil {
			return err
		}
		return netlink.NeighAdd(&netlink.Neigh{
			LinkIndex: out.Attrs().Index, IP: net.ParseIP(wireIP), HardwareAddr: e.wireMAC(), State: netlink.NUD_PERMANENT,
		})
	})
	inner.Do(func() error {
		return errors.Join(nstest.ConfigureLink("eth0", "10.70.0.2/24"),
			netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("10.70.0.1")}))
	})
	return router, inner
}

// sendDatagrams sends UDP from a namespace for the duration of a measurement.
func sendDatagrams(from *nstest.Namespace, address string) error {
	var result error
	from.Do(func() error {
		c, err := net.Dial("udp", address)
		if err != nil {
			return err
		}
		defer c.Close()
		datagram := make([]byte, 1400)
		for end := time.Now().Add(duration); time.Now().Before(end); {
			_, err := c.Write(datagram)
			if err != nil && !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ENOBUFS) {
				result = err
				break
			}
		}
		return nil
	})
	return result
}

func TestOpen_readsRoutesOnlyWithPerfmon(t *testing.T) {
	bpffs := nstest.MountBPFFS(t)
	nstest.WithoutCapabilities(t, func() error {
		c, err := openStrongest(bpffs)
		if err != nil {
			return err
		}
		if c.ReadsRoutes() {
			t.Error("the programs read routes without CAP_PERFMON")
		}
		return c.Close()
	}, unix.CAP_PERFMON, unix.CAP_SYS_ADMIN)
}
