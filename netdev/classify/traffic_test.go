// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
	"github.com/dra-shared/dra-driver-shared/test/kernelcheck"
)

func TestMain(m *testing.M) { nstest.Main(m, nstest.Root) }

// Rates are in bits per second.
const (
	mega     = 1_000_000
	line     = 1000 * mega
	reserve  = 100 * mega
	wireIP   = "10.20.0.254"
	nodeIP   = "10.20.0.253"
	duration = 1500 * time.Millisecond
)

// testEnv is a node with one NIC of 1 Gbit/s, and the namespace at the other
// end of the NIC's wire.
type testEnv struct {
	t     *testing.T
	bpffs string
	node  *netdev.Node
	nic   netdev.NIC
	wire  *nstest.Namespace
	// config is the configuration that node manages the NIC with.
	config netdev.NICConfig

	mu      *sync.Mutex
	ports   int           // last TCP port in use
	skipped time.Duration // how far the clock of node is ahead
}

// newTestEnv returns a testEnv with a separate BPF file system. It completes
// config, and restores the NIC at the end of the test.
func newTestEnv(t *testing.T, config netdev.NICConfig, keys ...classify.Key) *testEnv {
	t.Helper()
	return newTestEnvAt(t, nstest.MountBPFFS(t), config, keys...)
}

func newTestEnvAt(t *testing.T, bpffs string, config netdev.NICConfig, keys ...classify.Key) *testEnv {
	t.Helper()
	queues := 1
	if config.QueuePerShare || *queuePerShare {
		queues = nicQueues
	}
	nic, wire := nstest.NICWithQueues(t, "nic0", 1500, queues, wireIP+"/16", "fd00:20::fe/64")
	return newTestEnvOn(t, bpffs, nic, wire, config, keys...)
}

// newTestEnvOn returns a testEnv with an existing NIC and wire.
func newTestEnvOn(
	t *testing.T,
	bpffs string,
	nic netdev.NIC,
	wire *nstest.Namespace,
	config netdev.NICConfig,
	keys ...classify.Key,
) *testEnv {
	t.Helper()
	return newTestEnvWith(t, netdev.Options{BPFFS: bpffs, Keys: keys}, nic, wire, config)
}

// newTestEnvWith returns a testEnv with a Node that has the options o.
func newTestEnvWith(
	t *testing.T, o netdev.Options, nic netdev.NIC, wire *nstest.Namespace, config netdev.NICConfig,
) *testEnv {
	t.Helper()
	e := &testEnv{t: t, bpffs: o.BPFFS, nic: nic, wire: wire, ports: 5000, mu: &sync.Mutex{}}
	o.Now = e.now
	e.node = newNode(t, o)
	config.Name, config.Index, config.MAC, config.Enforce = e.nic.Name, e.nic.Index, e.nic.MAC, true
	overhead := config.Rates.Overhead
	config.QueuePerShare = config.QueuePerShare || *queuePerShare
	config.Rates = shape.NICRates{Line: line, Reserve: reserve, MinShare: 10 * mega, Overhead: overhead}
	e.config = config
	if _, err := e.node.Manage(config); err != nil {
		t.Fatalf("Manage: %v", err)
	}
	if *queuePerShare && *withXPS && e.trees() != shape.OneTree {
		e.setXPS(2)
	}
	t.Cleanup(func() {
		if _, err := e.node.Unmanage(e.nic.Name, e.nic.Index); err != nil {
			t.Errorf("Unmanage: %v", err)
		}
	})
	return e
}

// now is the clock of the node.
func (e *testEnv) now() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return time.Now().Add(e.skipped)
}

// skip puts the clock of the node forward.
func (e *testEnv) skip(d time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.skipped += d
}

// newNode returns a Node, as a plugin process has one, and closes it at the end
// of the test.
func newNode(t *testing.T, o netdev.Options) *netdev.Node {
	t.Helper()
	node, err := netdev.NewNode(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = node.Close() })
	return node
}

// pod is a pod with one link.
type pod struct {
	*nstest.Namespace
	attachment netdev.Attachment
	ip         string
}

// pod creates a pod and attaches it to a share. Shares are numbered from 0;
// number determines the addresses of the link.
func (e *testEnv) pod(share, number int, rates shape.Rates, mode netdev.Mode) *pod {
	e.t.Helper()
	p := &pod{Namespace: nstest.New(e.t), ip: fmt.Sprintf("10.20.0.%d", number)}
	var err error
	p.attachment, err = e.node.Attach(p.Pod(), netdev.LinkSpec{
		Parent: e.nic.Index,
		Name:   "net1",
		MAC:    net.HardwareAddr{2, 0, 0, 0, 0, byte(number)},
		Mode:   mode,
		Addresses: []netip.Prefix{
			netip.MustParsePrefix(p.ip + "/16"),
			netip.MustParsePrefix(fmt.Sprintf("fd00:20::%d/64", number)),
		},
		Minor:        uint16(shape.FirstMinor + share),
		Rates:        rates,
		SegmentBytes: shape.SegmentBytes(rates.Ceil, 1500),
	})
	if err != nil {
		e.t.Fatalf("Attach: %v", err)
	}
	return p
}

// hardCap returns the rates of a share that does not borrow.
func hardCap(rate uint64) shape.Rates { return shape.Rates{Floor: rate, Ceil: rate} }

// address returns ip with a TCP port that is not in use.
func (e *testEnv) address(ip string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ports++
	return net.JoinHostPort(ip, fmt.Sprint(e.ports))
}

// measure runs flows at the same time and returns their rates.
func (e *testEnv) measure(flows ...nstest.Flow) []float64 {
	e.t.Helper()
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
			e.t.Fatal(err)
		}
	}
	return rates
}

// fromPod returns a flow from a pod to the wire.
func (e *testEnv) fromPod(p *pod) nstest.Flow {
	return nstest.Flow{From: p.Namespace, To: e.wire, Address: e.address(wireIP)}
}

// toPod returns a flow from the wire to a pod.
func (e *testEnv) toPod(p *pod) nstest.Flow {
	return nstest.Flow{From: e.wire, To: p.Namespace, Address: e.address(p.ip)}
}

// payloadRatio is the part of an Ethernet rate that is TCP payload at an MTU of
// 1500 bytes.
const payloadRatio = 1448.0 / 1514

// expectRate fails the test unless a measured payload rate is within 6% of a granted rate. An emulated machine does not
// need to reach the granted rate.
func (e *testEnv) expectRate(flow string, got float64, granted uint64) {
	e.t.Helper()
	e.expectRateWithin(flow, got, granted, 0.06)
}

// expectRateWithin is expectRate with the part that the rate may differ by.
func (e *testEnv) expectRateWithin(flow string, got float64, granted uint64, tolerance float64) {
	e.t.Helper()
	want := float64(granted) * payloadRatio
	if got > want*(1+tolerance) || got < atLeast(want*(1-tolerance)) {
		e.t.Errorf("%s: got %.1f Mbit/s, want the grant of %d Mbit/s (%.1f of payload)",
			flow, got/mega, granted/mega, want/mega)
	}
}

// emulatedRate is what each of several flows reaches on an emulated machine, even
// if the machine that emulates it is busy.
const emulatedRate = 5 * mega

// attempts returns how often a test measures before it fails: the processor of an emulated machine
// stands still from time to time, which changes rates.
func attempts() int {
	if nstest.Emulated() {
		return 3
	}
	return 1
}

// atLeast returns what a measured rate must reach on this machine where others reach
// want. An emulated machine is slow: there, high grants are only limits.
func atLeast(want float64) float64 {
	if nstest.Emulated() {
		return min(want, emulatedRate)
	}
	return want
}

func (e *testEnv) expectAtMost(flow string, got float64, limit uint64) {
	e.t.Helper()
	if got > float64(limit) {
		e.t.Errorf("%s: got %.1f Mbit/s, want at most %d Mbit/s", flow, got/mega, limit/mega)
	}
}

func TestTraffic_isLimitedToGrant(t *testing.T) {
	for _, key := range classify.Keys() {
		for _, granted := range []uint64{10 * mega, 100 * mega, 800 * mega} {
			t.Run(fmt.Sprintf("key %s, grant %d Mbit per s", key, granted/mega), func(t *testing.T) {
				needKey(t, key)
				e := newTestEnv(t, netdev.NICConfig{}, key)
				if got := e.node.ClassifierKey(); got != key {
					t.Fatalf("the classifier uses key %s, want %s", got, key)
				}
				p := e.pod(0, 1, hardCap(granted), netdev.Private)
				send, receive := e.fromPod(p), e.toPod(p)
				// The receiver gets data in pieces of up to 64 KiB. At 10 Mbit/s,
				// a piece takes 52 ms, so slow flows need more time.
				send.Duration = duration + time.Duration(25e6/granted)*time.Second
				receive.Duration = send.Duration
				e.expectRate("pod sends", e.measure(send)[0], granted)
				e.expectRate("pod receives", e.measure(receive)[0], granted)
			})
		}
	}
}

func TestTraffic_sharesAreIndependent(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	grants := []uint64{100 * mega, 200 * mega, 500 * mega}
	var send, receive []nstest.Flow
	for i, granted := range grants {
		p := e.pod(i, i+1, hardCap(granted), netdev.Private)
		send, receive = append(send, e.fromPod(p)), append(receive, e.toPod(p))
	}
	for i, got := range e.measure(send...) {
		e.expectRate(fmt.Sprintf("pod %d of three that send", i), got, grants[i])
	}
	for i, got := range e.measure(receive...) {
		e.expectRate(fmt.Sprintf("pod %d of three that receive", i), got, grants[i])
	}
}

func TestTraffic_podsOfShareHaveOneLimit(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	a := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	b := e.pod(0, 2, hardCap(100*mega), netdev.Private)
	sent := e.measure(e.fromPod(a), e.fromPod(b))
	e.expectRate("both pods together send", sent[0]+sent[1], 100*mega)
	received := e.measure(e.toPod(a), e.toPod(b))
	e.expectRate("both pods together receive", received[0]+received[1], 100*mega)
}

func TestTraffic_borrowsIdleBandwidthInProportionToFloors(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	speed := e.slowToFill()
	small := e.pod(0, 1, shape.Rates{Floor: speed / 10, Ceil: speed}, netdev.Private)
	large := e.pod(1, 2, shape.Rates{Floor: speed * 3 / 10, Ceil: speed}, netdev.Private)
	alone := e.measure(e.fromPod(small))[0]
	if want := 0.85 * float64(speed); !nstest.Emulated() && alone < want {
		t.Errorf("the small share alone: got %.0f Mbit/s, want at least %.0f Mbit/s", alone/mega, want/mega)
	}
	both := e.measure(e.fromPod(small), e.fromPod(large))
	isProportional := func() bool { return both[1] > 2.4*both[0] && both[1] < 3.6*both[0] }
	for tries := 1; !isProportional() && tries < attempts(); tries++ {
		both = e.measure(e.fromPod(small), e.fromPod(large))
	}
	if nstest.Emulated() && both[0]+both[1] < 0.9*float64(speed) {
		t.Skipf("this machine is too slow to fill the line of %.1f Mbit/s: alone %.1f, both %.1f and %.1f Mbit/s",
			float64(speed)/mega, alone/mega, both[0]/mega, both[1]/mega)
	}
	if !isProportional() {
		t.Errorf("both shares together: got %.1f and %.1f Mbit/s of %.1f, want the ratio of their floors, 1 to 3",
			both[0]/mega, both[1]/mega, float64(speed)/mega)
	}
}

// slowToFill makes the line so slow that this machine fills it, because shares compete
// only for a full line, and returns its new rate. An emulated machine is slow: there,
// the rate is a quarter of what one flow reaches at the moment.
func (e *testEnv) slowToFill() uint64 {
	e.t.Helper()
	if !nstest.Emulated() {
		return line
	}
	reached := e.measure(e.fromPod(e.pod(9, 9, hardCap(line), netdev.Private)))[0]
	part := min(max(reached/4, emulatedRate)/line, 1)
	for _, rate := range []*uint64{&e.config.Rates.Line, &e.config.Rates.Reserve, &e.config.Rates.MinShare} {
		*rate = uint64(part * float64(*rate))
	}
	if _, err := e.node.Manage(e.config); err != nil {
		e.t.Fatalf("Manage with a slower line: %v", err)
	}
	e.t.Logf("one flow reaches %.1f Mbit/s, the line has %.1f Mbit/s", reached/mega, float64(e.config.Rates.Line)/mega)
	return e.config.Rates.Line
}

func TestTraffic_ignoresPriorityOfSocket(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	attacker := e.pod(0, 1, hardCap(30*mega), netdev.Private)
	e.pod(1, 2, hardCap(500*mega), netdev.Private)
	for name, priority := range map[string]uint32{
		"another share's class":   netlink.MakeHandle(shape.Major, shape.FirstMinor+1),
		"the host's class":        netlink.MakeHandle(shape.Major, 2),
		"the root qdisc's handle": netlink.MakeHandle(shape.Major, 0),
	} {
		flow := e.fromPod(attacker)
		flow.Priority = int(int32(priority))
		e.expectRate("pod sends with the priority of "+name, e.measure(flow)[0], 30*mega)
	}
}

// A frame of 60 bytes occupies 84 bytes of an Ethernet: the preamble, the checksum, and the
// gap between frames have 24.
func TestTraffic_countsOverheadOfSmallFrames(t *testing.T) {
	const granted = 5 * mega // few enough frames for a slow machine
	for _, tc := range []struct {
		overhead uint16
		want     float64
	}{{0, granted}, {24, granted * 60 / 84}} {
		t.Run(fmt.Sprintf("overhead %d bytes", tc.overhead), func(t *testing.T) {
			e := newTestEnv(t, netdev.NICConfig{Rates: shape.NICRates{Overhead: tc.overhead}})
			p := e.pod(0, 1, hardCap(granted), netdev.Private)
			got := e.arrivalRate(func() error {
				_, err := p.Flood("net1", frame(p.attachment.MAC, e.wireMAC())[:60], false, duration)
				return err
			})
			if got > tc.want*1.06 || got < atLeast(tc.want*0.94) {
				t.Errorf("a flood of frames of 60 bytes: got %.1f Mbit/s, want %.1f Mbit/s", got/mega, tc.want/mega)
			}
		})
	}
}

// frame returns an Ethernet frame of 1500 bytes with the type of IPv4.
func frame(src, dst net.HardwareAddr) []byte {
	f := make([]byte, 1500)
	copy(f, dst)
	copy(f[6:], src)
	f[12], f[13] = 0x08, 0x00
	return f
}

// sentBytes returns the bytes that the class of a share has sent.
func (e *testEnv) sentBytes(share int) uint64 {
	e.t.Helper()
	return e.bytesOf(e.nic.Index, share)
}

// bytesOf returns how many bytes the class of a share has sent on the NIC or its IFB device.
func (e *testEnv) bytesOf(device, share int) uint64 {
	e.t.Helper()
	conn, err := rtnl.Open()
	if err != nil {
		e.t.Fatal(err)
	}
	defer conn.Close()
	state, err := shape.New(conn, nil).ReadClass(device, e.trees().Class(uint16(shape.FirstMinor+share)))
	if err != nil || state == nil {
		e.t.Fatalf("read class of share %d: %v, %v", share, state, err)
	}
	return state.SentBytes
}

// needTCX skips the test if the kernel does not have TCX (Linux 6.6 or newer); see package kernelcheck.
func needTCX(t *testing.T) {
	t.Helper()
	if !hasTCX(t) {
		kernelcheck.Skip(t, kernelcheck.TCX, "the kernel does not list programs of TCX")
	}
}

func hasTCX(t *testing.T) bool {
	t.Helper()
	const loopback = 1
	_, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXEgress})
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}
	return true
}

// needKey skips the test if the kernel lacks what a key needs; see package kernelcheck.
func needKey(t *testing.T, key classify.Key) {
	t.Helper()
	switch key {
	case classify.KeyCookie:
		if err := features.HaveProgramHelper(ebpf.SchedCLS, asm.FnGetNetnsCookie); err != nil {
			t.Skipf("the kernel has no helper for the cookie: %v", err)
		}
	case classify.KeySocketCookie:
		if classify.InLockdown() {
			kernelcheck.Skip(t, kernelcheck.NetnsCookieOfSocket, "the kernel is in lockdown and refuses to read its memory")
		}
		if _, err := os.Stat("/sys/kernel/btf/vmlinux"); err != nil {
			kernelcheck.Skip(t, kernelcheck.NetnsCookieOfSocket, fmt.Errorf("the kernel has no BTF: %w", err))
		}
	}
}

// needCookie skips a test on kernels with the address as the only key, which does not distinguish the frames of a share
// from frames that carry another share's address. See TestRawFrames_useClassOfForgedAddressOnlyWithoutCookie, and
// package kernelcheck.
func (e *testEnv) needCookie() {
	e.t.Helper()
	if key := e.node.ClassifierKey(); !key.HasCookie() {
		kernelcheck.Skip(e.t, kernelcheck.NetnsCookieOfSocket, fmt.Sprintf("the only key is %s", key))
	}
}

func (e *testEnv) wireMAC() net.HardwareAddr { return e.wire.Interface("wire").HardwareAddr }

// arrivalRate runs f and returns the rate of the frames that arrive at the wire meanwhile.
func (e *testEnv) arrivalRate(f func() error) float64 {
	e.t.Helper()
	before, start := e.wireBytes(), time.Now()
	if err := f(); err != nil {
		e.t.Fatal(err)
	}
	return float64(e.wireBytes()-before) * 8 / time.Since(start).Seconds()
}

// wireBytes returns how many bytes the wire has received.
func (e *testEnv) wireBytes() (n uint64) {
	e.t.Helper()
	e.wire.Do(func() error {
		link, err := netlink.LinkByName("wire")
		if err == nil {
			n = link.Attrs().Statistics.RxBytes
		}
		return err
	})
	return n
}

// With a key that has the cookie, a pod cannot send in the class of another share.
// With the address alone it can; the condition of a share reports it.
func TestRawFrames_useClassOfForgedAddressOnlyWithoutCookie(t *testing.T) {
	for _, key := range classify.Keys() {
		t.Run("key "+string(key), func(t *testing.T) {
			needKey(t, key)
			e := newTestEnv(t, netdev.NICConfig{}, key)
			attacker := e.pod(0, 1, hardCap(10*mega), netdev.Private)
			victim := e.pod(1, 2, hardCap(500*mega), netdev.Private)
			if key.HasCookie() {
				e.expectForgedFramesHeld(attacker, victim)
				return
			}
			before := e.sentBytes(1)
			e.flood(attacker, victim.attachment.MAC, false)
			if sent := e.sentBytes(1) - before; sent < 1_000_000 {
				t.Errorf("frames with the victim's address: the victim's class sent %d bytes, want more than 1000000", sent)
			}
		})
	}
}

// expectForgedFramesHeld fails the test if an attacker that sends raw frames with
// the addresses of others exceeds the class for unidentified frames.
func (e *testEnv) expectForgedFramesHeld(attacker, victim *pod) {
	e.t.Helper()
	for name, source := range map[string]net.HardwareAddr{
		"the victim's address": victim.attachment.MAC,
		"the NIC's address":    e.nic.MAC,
		"an unknown address":   {2, 9, 9, 9, 9, 9},
	} {
		for _, bypass := range []bool{false, true} {
			before := e.sentBytes(1)
			flow := fmt.Sprintf("frames with %s, bypass %t", name, bypass)
			e.expectAtMost(flow, e.flood(attacker, source, bypass), reserve/4*13/10)
			if sent := e.sentBytes(1) - before; sent > 10_000 {
				e.t.Errorf("%s: the victim's class sent %d bytes, want at most 10000", flow, sent)
			}
		}
	}
}

// flood sends raw frames with the address source from a pod, and returns their arrival rate at the wire.
func (e *testEnv) flood(p *pod, source net.HardwareAddr, bypass bool) float64 {
	e.t.Helper()
	return e.arrivalRate(func() error {
		_, err := p.Flood("net1", frame(source, e.wireMAC()), bypass, duration)
		return err
	})
}

// This is the reason why there is no key between the cookie and the MAC
// address. A program on the pod's link could attest the source of a frame, but
// the kernel does not run it for frames of a packet socket with
// PACKET_QDISC_BYPASS, which a pod with the default capabilities can open.
func TestKernel_skipsProgramOnLinkForBypassingFrames(t *testing.T) {
	needTCX(t)
	e := newTestEnv(t, netdev.NICConfig{})
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	drop, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         ebpf.SchedCLS,
		License:      "MIT",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer drop.Close()
	var attached link.Link
	p.Do(func() error {
		attached, err = link.AttachTCX(link.TCXOptions{
			Interface: p.attachment.Index,
			Program:   drop,
			Attach:    ebpf.AttachTCXEgress,
		})
		return err
	})
	defer attached.Close()
	for bypass, arrives := range map[bool]bool{false: false, true: true} {
		rate := e.flood(p, p.attachment.MAC, bypass)
		if got := rate > 10*mega; got != arrives {
			t.Errorf("with a program that drops all frames, bypass %t: got %.1f Mbit/s, want more than 10 Mbit/s: %t",
				bypass, rate/mega, arrives)
		}
	}
}

func TestForwardedFrames_useShareOnlyIfMACIsTrusted(t *testing.T) {
	for _, trust := range []bool{false, true} {
		t.Run(fmt.Sprintf("trustMAC=%t", trust), func(t *testing.T) {
			e := newTestEnv(t, netdev.NICConfig{TrustMAC: trust})
			router := e.pod(0, 1, hardCap(300*mega), netdev.Private)
			inner := e.namespaceBehind(router)
			got := e.measure(nstest.Flow{From: inner, To: e.wire, Address: e.address(wireIP)})[0]
			if trust {
				e.expectRate("forwarded flow", got, 300*mega)
			} else {
				e.expectAtMost("forwarded flow", got, reserve/4)
			}
		})
	}
}

// namespaceBehind returns a namespace. A pod forwards its traffic.
func (e *testEnv) namespaceBehind(router *pod) *nstest.Namespace {
	e.t.Helper()
	inner := nstest.New(e.t)
	router.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "inner"
		veth := &netlink.Veth{
			LinkAttrs:     attrs,
			PeerName:      "outer",
			PeerNamespace: netlink.NsFd(inner.File.Fd()),
		}
		if err := netlink.LinkAdd(veth); err != nil {
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
	e.wire.Do(func() error {
		return netlink.RouteAdd(&netlink.Route{
			Dst: &net.IPNet{IP: net.ParseIP("10.50.0.0"), Mask: net.CIDRMask(24, 32)},
			Gw:  net.ParseIP(router.ip),
		})
	})
	return inner
}

func TestTraffic_losesClassAfterPodChangesMAC(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	p := e.pod(0, 1, hardCap(300*mega), netdev.Private)
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
	e.expectAtMost("pod sends from an address that it chose", e.measure(e.fromPod(p))[0], reserve/4)
	state, err := e.node.ReadAndBlock(p.attachment)
	if err != nil || state.Send != nil {
		t.Errorf("Read returned class %+v for sending and error %v, want no class", state.Send, err)
	}
}

func TestTraffic_nodeHasReserve(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	if err := nstest.ConfigureLink("nic0", nodeIP+"/16"); err != nil {
		t.Fatal(err)
	}
	node := nstest.Current(t)
	fromNode := func() nstest.Flow { return nstest.Flow{From: node, To: e.wire, Address: e.address(wireIP)} }
	toNode := func() nstest.Flow { return nstest.Flow{From: e.wire, To: node, Address: e.address(nodeIP)} }
	if alone := e.measure(fromNode())[0]; alone < atLeast(0.85*line) {
		t.Errorf("the node alone sends: got %.0f Mbit/s, want at least 85%% of %d Mbit/s", alone/mega, line/mega)
	}
	a := e.pod(0, 1, hardCap(500*mega), netdev.Private)
	b := e.pod(1, 2, hardCap(400*mega), netdev.Private)
	want := atLeast(0.8 * reserve / 2)
	if got := e.measure(fromNode(), e.fromPod(a), e.fromPod(b))[0]; got < want {
		t.Errorf("the node sends while pods send: got %.0f Mbit/s, want at least %.0f Mbit/s", got/mega, want/mega)
	}
	if got := e.measure(toNode(), e.toPod(a), e.toPod(b))[0]; got < want {
		t.Errorf("the node receives while pods receive: got %.0f Mbit/s, want at least %.0f Mbit/s", got/mega, want/mega)
	}
}

func TestNeighborDiscovery_isFastWhileShareIsFull(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	full := e.pod(0, 1, hardCap(10*mega), netdev.Private)
	other := e.pod(1, 2, hardCap(10*mega), netdev.Private)
	done := make(chan []float64)
	flow := e.fromPod(full)
	flow.Duration = 2 * time.Second
	go func() { done <- e.measure(flow) }()
	// The other pod does not have a neighbor entry for the wire yet, so these connections need ARP for IPv4 and neighbor
	// discovery for IPv6.
	for _, address := range []string{e.address(wireIP), e.address("fd00:20::fe")} {
		start := time.Now()
		e.measure(nstest.Flow{
			From: other.Namespace, To: e.wire, Address: address,
			Duration: 50 * time.Millisecond,
		})
		if took := time.Since(start); took > 600*time.Millisecond {
			t.Errorf("the first flow to %s took %s, want at most 600 ms", address, took)
		}
	}
	<-done
}

func TestPrivateMode_isolatesShares(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	a := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	b := e.pod(1, 2, hardCap(100*mega), netdev.Private)
	flow := nstest.Flow{
		From: a.Namespace, To: b.Namespace, Address: e.address(b.ip),
		Duration: duration, DialTimeout: 300 * time.Millisecond,
	}
	if rate, err := flow.Run(); err == nil {
		t.Errorf("a private share reached another share of the NIC, at %.0f Mbit/s", rate/mega)
	}
}

// During a handover, the second plugin takes over the queues, programs, and
// links of the first. Running pods keep their classes.
func TestNode_Manage_takesOverFromAnotherProcess(t *testing.T) {
	bpffs := nstest.MountBPFFS(t)
	e := newTestEnvAt(t, bpffs, netdev.NICConfig{})
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	second := *e
	second.node = newNode(t, netdev.Options{BPFFS: bpffs})
	for range 2 {
		if _, err := second.node.Manage(e.config); err != nil {
			t.Fatalf("Manage by the second process: %v", err)
		}
	}
	presence, err := second.node.Presence(p.attachment)
	if err != nil || presence != netdev.LinkPresent {
		t.Errorf("Presence returned %d and error %v, want %d", presence, err, netdev.LinkPresent)
	}
	e.expectRate("pod sends after the takeover", e.measure(e.fromPod(p))[0], 100*mega)
	if err := second.node.Restore(p.attachment, hardCap(100*mega)); err != nil {
		t.Fatalf("Restore by the second process: %v", err)
	}
	e.expectRate("pod receives after the takeover", e.measure(e.toPod(p))[0], 100*mega)
	q := second.pod(1, 2, hardCap(50*mega), netdev.Private)
	e.expectRate("new pod of the second process sends", e.measure(e.fromPod(q))[0], 50*mega)
}

// Manage and Restore repair what another program removed.
func TestNode_Manage_repairsNIC(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	if changed, err := e.node.Manage(e.config); err != nil || changed {
		t.Fatalf("Manage of an intact NIC returned changed %t and error %v, want no change", changed, err)
	}
	for name, remove := range map[string]func() error{
		"the programs": func() error {
			if _, err := classify.Detach(e.bpffs, e.nic.Index, nil); err != nil {
				return err
			}
			err := netlink.QdiscDel(&netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{
				LinkIndex: e.nic.Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}})
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
				return nil // the programs were attached by TCX
			}
			return err
		},
		"the root qdisc": func() error {
			return netlink.QdiscDel(netlink.NewHtb(netlink.QdiscAttrs{
				LinkIndex: e.nic.Index, Handle: netlink.MakeHandle(shape.Major, 0), Parent: netlink.HANDLE_ROOT}))
		},
		"the IFB device": func() error {
			link, err := netlink.LinkByName(shape.IFBName("nic0"))
			if err != nil {
				return err
			}
			return netlink.LinkDel(link)
		},
	} {
		if err := remove(); err != nil {
			t.Fatalf("remove %s: %v", name, err)
		}
		state, err := e.node.ReadAndBlock(p.attachment)
		if err != nil || state.Send != nil && state.Receive != nil {
			t.Errorf("Read without %s returned classes %+v and %+v, error %v; want a missing class",
				name, state.Send, state.Receive, err)
		}
		if changed, err := e.node.Manage(e.config); err != nil || !changed {
			t.Fatalf("Manage without %s returned changed %t and error %v, want a change", name, changed, err)
		}
		if err := e.node.Restore(p.attachment, hardCap(100*mega)); err != nil {
			t.Fatalf("Restore without %s: %v", name, err)
		}
		e.expectRate("pod sends after the repair of "+name, e.measure(e.fromPod(p))[0], 100*mega)
		e.expectRate("pod receives after the repair of "+name, e.measure(e.toPod(p))[0], 100*mega)
	}
}

func TestNode_Attach_namesMissingQueues(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	err := netlink.QdiscDel(netlink.NewHtb(netlink.QdiscAttrs{
		LinkIndex: e.nic.Index, Handle: netlink.MakeHandle(shape.Major, 0), Parent: netlink.HANDLE_ROOT}))
	if err != nil {
		t.Fatal(err)
	}
	_, err = e.node.Attach(nstest.New(t).Pod(), netdev.LinkSpec{
		Parent: e.nic.Index, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Mode: netdev.Private,
		Minor: shape.FirstMinor, Rates: hardCap(10 * mega),
	})
	if !errors.Is(err, shape.ErrQueuesMissing) {
		t.Errorf("Attach returned %v, want an error that says that the queues are missing", err)
	}
}

func TestNode_Manage_followsRenamedNIC(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	link, err := netlink.LinkByName("nic0")
	if err != nil {
		t.Fatal(err)
	}
	if err := rename(link, "nic7"); err != nil {
		t.Fatal(err)
	}
	renamed := e.config
	renamed.Name = "nic7"
	if _, err := e.node.Manage(renamed); err != nil {
		t.Fatalf("Manage: %v", err)
	}
	if err := e.node.Restore(p.attachment, hardCap(100*mega)); err != nil {
		t.Fatalf("Restore: %v", err)
	}
	e.expectRate("pod receives through the renamed NIC", e.measure(e.toPod(p))[0], 100*mega)
	if _, err := netlink.LinkByName(shape.IFBName("nic0")); err == nil {
		t.Error("the IFB device of the NIC's old name still exists")
	}
	e.nic.Name = "nic7"
}

// rename renames a link. Before Linux 6.2, the kernel renames only links that are
// down.
func rename(link netlink.Link, name string) error {
	err := netlink.LinkSetName(link, name)
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	if err := netlink.LinkSetDown(link); err != nil {
		return err
	}
	if err := netlink.LinkSetName(link, name); err != nil {
		return err
	}
	return netlink.LinkSetUp(link)
}

func TestNode_Manage_withoutEnforceRemovesQueuesOfAnotherProcess(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	other := newNode(t, netdev.Options{BPFFS: e.bpffs})
	config := e.config
	config.Enforce = false
	if changed, err := other.Manage(config); err != nil || !changed {
		t.Fatalf("Manage returned changed %t and error %v, want a change", changed, err)
	}
	conn, err := rtnl.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if owned, err := shape.New(conn, nil).Owned(e.nic.Index); err != nil || owned {
		t.Errorf("Owned returned %t and error %v, want the root qdisc removed", owned, err)
	}
}

func TestNode_Unmanage_removesSetupOfAnotherProcess(t *testing.T) {
	e := newTestEnv(t, netdev.NICConfig{})
	other := newNode(t, netdev.Options{BPFFS: e.bpffs})
	if found, err := other.Unmanage(e.nic.Name, e.nic.Index); err != nil || !found {
		t.Fatalf("Unmanage returned found %t and error %v, want it to find the setup", found, err)
	}
	if attached, err := classify.Detach(e.bpffs, e.nic.Index, nil); err != nil || attached {
		t.Errorf("Detach after Unmanage returned %t and error %v, want the programs removed", attached, err)
	}
	e.expectNoQueues()
}

// expectNoQueues fails the test if the NIC has queues of the driver, or an IFB device.
func (e *testEnv) expectNoQueues() {
	e.t.Helper()
	qdiscs, err := netlink.QdiscList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: e.nic.Index}})
	if err != nil {
		e.t.Fatal(err)
	}
	for _, q := range qdiscs {
		if q.Type() == "htb" {
			e.t.Errorf("qdisc %s still exists", q)
		}
	}
	if _, err := netlink.LinkByName(shape.IFBName(e.nic.Name)); err == nil {
		e.t.Error("the IFB device still exists")
	}
}

func TestNode_Manage_keepsForeignQdiscWithoutTakeOver(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	attrs := netlink.QdiscAttrs{
		LinkIndex: nic.Index,
		Handle:    netlink.MakeHandle(1, 0),
		Parent:    netlink.HANDLE_ROOT,
	}
	if err := netlink.QdiscAdd(netlink.NewHtb(attrs)); err != nil {
		t.Fatal(err)
	}
	node := newNode(t, netdev.Options{BPFFS: nstest.MountBPFFS(t)})
	config := netdev.NICConfig{
		Name: nic.Name, Index: nic.Index, MAC: nic.MAC, Enforce: true,
		Rates: shape.NICRates{Line: line, Reserve: reserve, MinShare: 10 * mega},
	}
	want := "root qdisc is not managed by this driver: nic0 has htb 1:0: remove it, or set takeOver for this network"
	if _, err := node.Manage(config); err == nil || err.Error() != want {
		t.Errorf("Manage without TakeOver returned %v, want %s", err, want)
	}
	config.TakeOver = true
	if _, err := node.Manage(config); err != nil {
		t.Errorf("Manage with TakeOver: %v", err)
	}
}
