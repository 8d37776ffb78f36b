package classify_test

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

func TestMain(m *testing.M) { nstest.Main(m, nstest.Root) }

const (
	mega     = 1_000_000
	line     = 1000 * mega
	reserve  = 100 * mega
	wireIP   = "10.20.0.254"
	nodeIP   = "10.20.0.253"
	duration = 1500 * time.Millisecond
)

// world is a node with one NIC of 1 Gbit/s and what it is plugged into.
type world struct {
	t     *testing.T
	node  *netdev.Node
	nic   netdev.NIC
	wire  *nstest.Namespace
	ports int
	mu    *sync.Mutex

	parent netdev.NICConfig
}

func newWorld(t *testing.T, parent netdev.NICConfig, keys ...classify.Key) *world {
	t.Helper()
	return newWorldAt(t, nstest.MountBPFFS(t), parent, keys...)
}

func newWorldAt(t *testing.T, bpffs string, parent netdev.NICConfig, keys ...classify.Key) *world {
	t.Helper()
	w := &world{t: t, ports: 5000, mu: &sync.Mutex{}}
	w.nic, w.wire = nstest.NIC(t, "nic0", 1500, wireIP+"/16", "fd00:20::fe/64")
	var err error
	if w.node, err = netdev.NewNode(netdev.Options{BPFFS: bpffs, Keys: keys}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.node.Close() })
	parent.Name, parent.Index, parent.MAC, parent.Enforce = w.nic.Name, w.nic.Index, w.nic.MAC, true
	parent.Rates = shape.NICRates{Line: line, Reserve: reserve, MinShare: 10 * mega}
	w.parent = parent
	if _, err := w.node.Manage(parent); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := w.node.Unmanage(w.nic.Name, w.nic.Index); err != nil {
			t.Error(err)
		}
	})
	return w
}

// pod is a pod with one link.
type pod struct {
	*nstest.Namespace
	a  netdev.Attachment
	ip string
}

// pod attaches a new pod to the share with that number.
func (w *world) pod(share, number int, rates shape.Rates, mode netdev.Mode) *pod {
	w.t.Helper()
	p := &pod{Namespace: nstest.New(w.t), ip: fmt.Sprintf("10.20.0.%d", number)}
	var err error
	p.a, err = w.node.Attach(p.Pod(), netdev.LinkSpec{
		Parent: w.nic.Index, Name: "net1", MAC: net.HardwareAddr{2, 0, 0, 0, 0, byte(number)}, Mode: mode,
		Addresses: []netip.Prefix{netip.MustParsePrefix(p.ip + "/16"), netip.MustParsePrefix(fmt.Sprintf("fd00:20::%d/64", number))},
		Minor:     uint16(shape.FirstMinor + share), Rates: rates, SegmentBytes: shape.SegmentBytes(rates.Ceil, 1500),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

func hard(bits uint64) shape.Rates { return shape.Rates{Floor: bits, Ceil: bits} }

func (w *world) address(ip string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ports++
	return net.JoinHostPort(ip, fmt.Sprint(w.ports))
}

// measured runs flows at once and returns their rates in bits per second.
func (w *world) measured(flows ...nstest.Flow) []float64 {
	w.t.Helper()
	rates, errs := make([]float64, len(flows)), make([]error, len(flows))
	var wait sync.WaitGroup
	for i, f := range flows {
		if f.Duration == 0 {
			f.Duration = duration
		}
		wait.Go(func() { rates[i], errs[i] = f.Run() })
	}
	wait.Wait()
	for _, err := range errs {
		if err != nil {
			w.t.Fatal(err)
		}
	}
	return rates
}

func (w *world) sends(p *pod) nstest.Flow {
	return nstest.Flow{From: p.Namespace, To: w.wire, Address: w.address(wireIP)}
}

func (w *world) receives(p *pod) nstest.Flow {
	return nstest.Flow{From: w.wire, To: p.Namespace, Address: w.address(p.ip)}
}

// payload is what is left of an Ethernet rate for TCP at an MTU of 1500.
const payload = 1448.0 / 1514

func (w *world) wantRate(what string, got float64, granted uint64) {
	w.t.Helper()
	if want := float64(granted) * payload; math.Abs(got-want)/want > 0.06 {
		w.t.Errorf("%s: %.1f Mbit/s, granted %d (%.1f of payload)", what, got/mega, granted/mega, want/mega)
	}
}

func (w *world) wantAtMost(what string, got float64, limit uint64) {
	w.t.Helper()
	if got > float64(limit) {
		w.t.Errorf("%s: %.1f Mbit/s, want at most %d", what, got/mega, limit/mega)
	}
}

func TestEachKeyHoldsAShareToItsGrantInBothDirections(t *testing.T) {
	for _, key := range []classify.Key{classify.KeyCookie, classify.KeyMAC} {
		for _, granted := range []uint64{10 * mega, 100 * mega, 800 * mega} {
			t.Run(fmt.Sprintf("%s %dM", key, granted/mega), func(t *testing.T) {
				w := newWorld(t, netdev.NICConfig{}, key)
				if w.node.ClassifierKey() != key {
					t.Fatalf("key in force is %s", w.node.ClassifierKey())
				}
				p := w.pod(0, 1, hard(granted), netdev.Private)
				send, receive := w.sends(p), w.receives(p)
				// What arrives is handed over in pieces of up to 64 KiB: at
				// 10 Mbit/s one of them is 52 ms.
				send.Duration = duration + time.Duration(25e6/granted)*time.Second
				receive.Duration = send.Duration
				w.wantRate("sends", w.measured(send)[0], granted)
				w.wantRate("receives", w.measured(receive)[0], granted)
			})
		}
	}
}

func TestSharesDoNotDisturbEachOther(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	a, b, c := w.pod(0, 1, hard(100*mega), netdev.Private), w.pod(1, 2, hard(200*mega), netdev.Private), w.pod(2, 3, hard(500*mega), netdev.Private)
	for i, got := range w.measured(w.sends(a), w.sends(b), w.sends(c)) {
		w.wantRate(fmt.Sprintf("pod %d of three that send", i), got, []uint64{100 * mega, 200 * mega, 500 * mega}[i])
	}
	for i, got := range w.measured(w.receives(a), w.receives(b), w.receives(c)) {
		w.wantRate(fmt.Sprintf("pod %d of three that receive", i), got, []uint64{100 * mega, 200 * mega, 500 * mega}[i])
	}
}

func TestAllPodsOfAShareDrawOnOneClass(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	a, b := w.pod(0, 1, hard(100*mega), netdev.Private), w.pod(0, 2, hard(100*mega), netdev.Private)
	sent := w.measured(w.sends(a), w.sends(b))
	w.wantRate("both together send", sent[0]+sent[1], 100*mega)
	received := w.measured(w.receives(a), w.receives(b))
	w.wantRate("both together receive", received[0]+received[1], 100*mega)
}

func TestAFloorMayBorrowWhatIsIdleAndGivesItBack(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	floor := func(bits uint64) shape.Rates { return shape.Rates{Floor: bits, Ceil: line} }
	small, large := w.pod(0, 1, floor(100*mega), netdev.Private), w.pod(1, 2, floor(300*mega), netdev.Private)
	if alone := w.measured(w.sends(small))[0]; alone < 0.85*line {
		t.Errorf("alone it gets %.0f Mbit/s, want most of the line", alone/mega)
	}
	both := w.measured(w.sends(small), w.sends(large))
	if ratio := both[1] / both[0]; ratio < 2.4 || ratio > 3.6 {
		t.Errorf("together %.0f and %.0f Mbit/s: want what is idle divided as the floors are, 1 to 3", both[0]/mega, both[1]/mega)
	}
}

func TestAPodCannotChooseItsClassByPriority(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	attacker := w.pod(0, 1, hard(30*mega), netdev.Private)
	w.pod(1, 2, hard(500*mega), netdev.Private)
	for name, priority := range map[string]uint32{
		"another share's class": netlink.MakeHandle(shape.Major, shape.FirstMinor+1),
		"the host's class":      netlink.MakeHandle(shape.Major, 2),
		"past all classes":      netlink.MakeHandle(shape.Major, 0),
	} {
		flow := w.sends(attacker)
		flow.Priority = int(int32(priority))
		w.wantRate("sends with the priority of "+name, w.measured(flow)[0], 30*mega)
	}
}

// frame is a UDP-like Ethernet frame from src to the wire.
func frame(src, dst net.HardwareAddr) []byte {
	f := make([]byte, 1500)
	copy(f, dst)
	copy(f[6:], src)
	f[12], f[13] = 0x08, 0x00
	return f
}

// sent returns the bytes that a share's class has sent.
func (w *world) sent(share int) uint64 {
	w.t.Helper()
	conn, err := rtnl.Open()
	if err != nil {
		w.t.Fatal(err)
	}
	defer conn.Close()
	state, err := shape.New(conn, nil).ReadClass(w.nic.Index, uint16(shape.FirstMinor+share))
	if err != nil || state == nil {
		w.t.Fatal(state, err)
	}
	return state.SentBytes
}

func (w *world) wireMAC() (mac net.HardwareAddr) { return w.wire.Interface("wire").HardwareAddr }

// arrived counts what reaches the wire while f runs, in bits per second.
func (w *world) arrived(f func() error) float64 {
	w.t.Helper()
	before, start := w.wireBytes(), time.Now()
	if err := f(); err != nil {
		w.t.Fatal(err)
	}
	return float64(w.wireBytes()-before) * 8 / time.Since(start).Seconds()
}

func (w *world) wireBytes() (n uint64) {
	w.t.Helper()
	w.wire.Do(func() error {
		link, err := netlink.LinkByName("wire")
		if err == nil {
			n = link.Attrs().Statistics.RxBytes
		}
		return err
	})
	return n
}

func TestRawFramesWithASiblingsAddressAreNotTheSiblings(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	attacker, victim := w.pod(0, 1, hard(10*mega), netdev.Private), w.pod(1, 2, hard(500*mega), netdev.Private)
	for name, source := range map[string]net.HardwareAddr{"the victim's address": victim.a.MAC, "the NIC's own": w.nic.MAC, "anybody's": {2, 9, 9, 9, 9, 9}} {
		for _, bypass := range []bool{false, true} {
			before := w.sent(1)
			rate := w.arrived(func() error {
				_, err := attacker.Flood("net1", frame(source, w.wireMAC()), bypass, duration)
				return err
			})
			w.wantAtMost(fmt.Sprintf("frames with %s, bypass %t", name, bypass), rate, reserve/4*13/10)
			if took := w.sent(1) - before; took > 10_000 {
				t.Errorf("frames with %s, bypass %t: %d bytes went through the victim's class", name, bypass, took)
			}
		}
	}
}

// Why there is no key between the cookie and the address: a program on the
// pod's link, which could vouch for what it has seen, is not asked about frames
// of a packet socket with PACKET_QDISC_BYPASS, and every pod with the default
// capabilities can open one.
func TestAProgramOnTheLinkDoesNotSeeEveryFrame(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	p := w.pod(0, 1, hard(100*mega), netdev.Private)
	drop, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer drop.Close()
	var attached link.Link
	p.Do(func() error {
		attached, err = link.AttachTCX(link.TCXOptions{Interface: p.a.Index, Program: drop, Attach: ebpf.AttachTCXEgress})
		return err
	})
	defer attached.Close()
	for bypass, arrives := range map[bool]bool{false: false, true: true} {
		rate := w.arrived(func() error {
			_, err := p.Flood("net1", frame(p.a.MAC, w.wireMAC()), bypass, duration)
			return err
		})
		if got := rate > 10*mega; got != arrives {
			t.Errorf("past a program that drops everything, bypass %t: %.1f Mbit/s", bypass, rate/mega)
		}
	}
}

func TestFramesWithoutASocketBelongToNobody(t *testing.T) {
	for _, trust := range []bool{false, true} {
		t.Run(fmt.Sprintf("trustMAC=%t", trust), func(t *testing.T) {
			w := newWorld(t, netdev.NICConfig{TrustMAC: trust})
			router := w.pod(0, 1, hard(300*mega), netdev.Private)
			behind := w.behind(router)
			got := w.measured(nstest.Flow{From: behind, To: w.wire, Address: w.address(wireIP)})[0]
			if trust {
				w.wantRate("forwarded, addresses trusted", got, 300*mega)
			} else {
				w.wantAtMost("forwarded", got, reserve/4)
			}
		})
	}
}

// behind makes a namespace whose traffic a pod forwards.
func (w *world) behind(router *pod) *nstest.Namespace {
	w.t.Helper()
	inner := nstest.New(w.t)
	router.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "inner"
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "outer", PeerNamespace: netlink.NsFd(inner.File.Fd())}); err != nil {
			return err
		}
		if err := nstest.ConfigureLink("inner", "10.50.0.1/24"); err != nil {
			return err
		}
		return nstest.SetSysctl("net/ipv4/ip_forward", "1")
	})
	inner.Do(func() error {
		if err := nstest.ConfigureLink("outer", "10.50.0.2/24"); err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("10.50.0.1")})
	})
	w.wire.Do(func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: net.ParseIP("10.50.0.0"), Mask: net.CIDRMask(24, 32)}, Gw: net.ParseIP(router.ip)})
	})
	return inner
}

func TestAPodThatTakesANewAddressLeavesItsClass(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	p := w.pod(0, 1, hard(300*mega), netdev.Private)
	p.Do(func() error {
		link, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetDown(link); err != nil {
			return err
		}
		if err := netlink.LinkSetHardwareAddr(link, net.HardwareAddr{2, 7, 7, 7, 7, 7}); err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	})
	w.wantAtMost("sends from an address of its own choice", w.measured(w.sends(p))[0], reserve/4)
	state, err := w.node.Read(p.a)
	if err != nil || state.Send != nil {
		t.Errorf("read back: class %+v, error %v; want no class", state.Send, err)
	}
}

func TestTheNodeItselfIsNotHeldBack(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	if err := nstest.ConfigureLink("nic0", nodeIP+"/16"); err != nil {
		t.Fatal(err)
	}
	node := w.self()
	flow := func() nstest.Flow { return nstest.Flow{From: node, To: w.wire, Address: w.address(wireIP)} }
	back := func() nstest.Flow { return nstest.Flow{From: w.wire, To: node, Address: w.address(nodeIP)} }
	if alone := w.measured(flow())[0]; alone < 0.85*line {
		t.Errorf("alone the node sends %.0f Mbit/s of %d", alone/mega, line/mega)
	}
	a, b := w.pod(0, 1, hard(500*mega), netdev.Private), w.pod(1, 2, hard(400*mega), netdev.Private)
	busy := w.measured(flow(), w.sends(a), w.sends(b))
	if busy[0] < 0.8*reserve/2 {
		t.Errorf("beside busy pods the node sends %.0f Mbit/s, want at least its part of the reserve", busy[0]/mega)
	}
	if got := w.measured(back(), w.receives(a), w.receives(b))[0]; got < 0.8*reserve/2 {
		t.Errorf("beside busy pods the node receives %.0f Mbit/s", got/mega)
	}
}

// self is the node's own namespace as an end of a flow.
func (w *world) self() *nstest.Namespace { return nstest.Current(w.t) }

func TestNeighboursAreFoundWhileAShareIsFull(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	full, other := w.pod(0, 1, hard(10*mega), netdev.Private), w.pod(1, 2, hard(10*mega), netdev.Private)
	done := make(chan []float64)
	flow := w.sends(full)
	flow.Duration = 2 * time.Second
	go func() { done <- w.measured(flow) }()
	// The other pod has not spoken with the wire yet: this needs ARP, and
	// neighbour discovery for IPv6.
	for _, address := range []string{w.address(wireIP), w.address("fd00:20::fe")} {
		start := time.Now()
		w.measured(nstest.Flow{From: other.Namespace, To: w.wire, Address: address, Duration: 50 * time.Millisecond})
		if took := time.Since(start); took > 600*time.Millisecond {
			t.Errorf("first words to %s took %s", address, took)
		}
	}
	<-done
}

func TestPrivateSharesDoNotReachEachOther(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	a, b := w.pod(0, 1, hard(100*mega), netdev.Private), w.pod(1, 2, hard(100*mega), netdev.Private)
	flow := nstest.Flow{From: a.Namespace, To: b.Namespace, Address: w.address(b.ip), Duration: duration, DialTimeout: 300 * time.Millisecond}
	if rate, err := flow.Run(); err == nil {
		t.Errorf("a private share reached its sibling, at %.0f Mbit/s", rate/mega)
	}
}

func TestSiblingsInBridgeModeAreHeldToTheReceiversGrant(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	a, b := w.pod(0, 1, hard(300*mega), netdev.Bridge), w.pod(1, 2, hard(50*mega), netdev.Bridge)
	got := w.measured(nstest.Flow{From: a.Namespace, To: b.Namespace, Address: w.address(b.ip)})[0]
	w.wantAtMost("from a sibling", got, 52*mega)
}

// A plugin that starts finds what the last one made: running pods stay where
// they are.
func TestASecondPluginTakesOverWithoutAGap(t *testing.T) {
	bpffs := nstest.MountBPFFS(t)
	w := newWorldAt(t, bpffs, netdev.NICConfig{})
	p := w.pod(0, 1, hard(100*mega), netdev.Private)
	second := *w
	var err error
	if second.node, err = netdev.NewNode(netdev.Options{BPFFS: bpffs}); err != nil {
		t.Fatal(err)
	}
	defer second.node.Close()
	for range 2 {
		if _, err := second.node.Manage(w.parent); err != nil {
			t.Fatal(err)
		}
	}
	if there, err := second.node.Presence(p.a); err != nil || there != netdev.LinkPresent {
		t.Errorf("presence %d, %v", there, err)
	}
	w.wantRate("sends", w.measured(w.sends(p))[0], 100*mega)
	if err := second.node.Restore(p.a, hard(100*mega)); err != nil {
		t.Fatal(err)
	}
	w.wantRate("receives", w.measured(w.receives(p))[0], 100*mega)
	q := second.pod(1, 2, hard(50*mega), netdev.Private)
	w.wantRate("a new pod of the second plugin sends", w.measured(w.sends(q))[0], 50*mega)
}

// Somebody takes apart what holds shares: it is noticed, and put back.
func TestWhatIsTakenApartIsPutBack(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	p := w.pod(0, 1, hard(100*mega), netdev.Private)
	if changed, err := w.node.Manage(w.parent); err != nil || changed {
		t.Fatalf("with everything in place: changed %t, %v", changed, err)
	}
	for name, sabotage := range map[string]func() error{
		"the classifier": func() error {
			return netlink.QdiscDel(&netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{LinkIndex: w.nic.Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}})
		},
		"the root qdisc": func() error {
			return netlink.QdiscDel(netlink.NewHtb(netlink.QdiscAttrs{LinkIndex: w.nic.Index, Handle: netlink.MakeHandle(shape.Major, 0), Parent: netlink.HANDLE_ROOT}))
		},
		"the IFB device": func() error {
			link, err := netlink.LinkByName(shape.IFBName("nic0"))
			if err != nil {
				return err
			}
			return netlink.LinkDel(link)
		},
	} {
		if err := sabotage(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		state, err := w.node.Read(p.a)
		if err != nil || state.Send != nil && state.Receive != nil {
			t.Errorf("without %s the kernel is said to have %+v, %+v, %v", name, state.Send, state.Receive, err)
		}
		if changed, err := w.node.Manage(w.parent); err != nil || !changed {
			t.Fatalf("without %s: changed %t, %v", name, changed, err)
		}
		if err := w.node.Restore(p.a, hard(100*mega)); err != nil {
			t.Fatalf("without %s: %v", name, err)
		}
		w.wantRate("after "+name+" was removed, sends", w.measured(w.sends(p))[0], 100*mega)
		w.wantRate("after "+name+" was removed, receives", w.measured(w.receives(p))[0], 100*mega)
	}
}

func TestARenamedNICIsStillHeld(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	p := w.pod(0, 1, hard(100*mega), netdev.Private)
	link, err := netlink.LinkByName("nic0")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetName(link, "nic7"); err != nil {
		t.Fatal(err)
	}
	renamed := w.parent
	renamed.Name = "nic7"
	if _, err := w.node.Manage(renamed); err != nil {
		t.Fatal(err)
	}
	if err := w.node.Restore(p.a, hard(100*mega)); err != nil {
		t.Fatal(err)
	}
	w.wantRate("receives", w.measured(w.receives(p))[0], 100*mega)
	if _, err := netlink.LinkByName(shape.IFBName("nic0")); err == nil {
		t.Error("the IFB device of the old name is left")
	}
	w.nic.Name = "nic7"
}

// Without enforcement nothing is left of it, also from a process before.
func TestEnforcementIsTakenBack(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	other, err := netdev.NewNode(netdev.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	parent := w.parent
	parent.Enforce = false
	if changed, err := other.Manage(parent); err != nil || !changed {
		t.Fatalf("changed %t, %v", changed, err)
	}
	if owned, err := shape.Owned(w.nic.Index); err != nil || owned {
		t.Errorf("our root qdisc is left: %t, %v", owned, err)
	}
}

func TestLeaveRestoresTheNIC(t *testing.T) {
	w := newWorld(t, netdev.NICConfig{})
	other, err := netdev.NewNode(netdev.Options{}) // another process: it knows of nothing
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if found, err := other.Unmanage(w.nic.Name, w.nic.Index); err != nil || !found {
		t.Fatalf("found %t, %v", found, err)
	}
	if attached, err := classify.Detach(w.nic.Index, nil); err != nil || attached {
		t.Errorf("classifier is left: %t, %v", attached, err)
	}
	qdiscs, err := netlink.QdiscList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: w.nic.Index}})
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range qdiscs {
		if q.Type() == "htb" {
			t.Errorf("%s is left", q)
		}
	}
	if _, err := netlink.LinkByName(shape.IFBName("nic0")); err == nil {
		t.Error("the IFB device is left")
	}
}

func TestAQdiscOfSomebodyElseIsNotReplacedUnlessAsked(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	attrs := netlink.QdiscAttrs{LinkIndex: nic.Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
	if err := netlink.QdiscAdd(netlink.NewHtb(attrs)); err != nil {
		t.Fatal(err)
	}
	node, err := netdev.NewNode(netdev.Options{BPFFS: nstest.MountBPFFS(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	parent := netdev.NICConfig{Name: nic.Name, Index: nic.Index, MAC: nic.MAC, Enforce: true, Rates: shape.NICRates{Line: line, Reserve: reserve, MinShare: 10 * mega}}
	want := "root qdisc belongs to somebody else: nic0 has htb 1:0: remove it, or set takeOver for this network"
	if _, err := node.Manage(parent); err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	parent.TakeOver = true
	if _, err := node.Manage(parent); err != nil {
		t.Error(err)
	}
}
