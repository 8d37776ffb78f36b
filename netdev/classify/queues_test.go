// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// queuePerShare runs all tests of the package on NICs with an HTB qdisc per transmit queue. Tests that borrow
// bandwidth, and tests of the node's own traffic, expect one for the whole NIC.
var queuePerShare = flag.Bool("queue-per-share", false, "give NICs four transmit queues, and shares a home queue")

// withXPS is another way to run them: the kernel would send all frames through one queue.
var withXPS = flag.Bool("xps", false, "with -queue-per-share, make XPS choose one transmit queue for all frames")

// nicQueues is how many transmit queues a NIC with home queues has.
const nicQueues = 4

// trees returns the trees of the NIC.
func (e *testEnv) trees() shape.Trees {
	trees, _ := e.node.Trees(e.nic.Index)
	return trees
}

// newQueuesEnv returns a testEnv with home queues on its NIC. It skips the test if the kernel does not steer frames to
// them.
func newQueuesEnv(t *testing.T) *testEnv {
	t.Helper()
	e := newTestEnv(t, netdev.NICConfig{QueuePerShare: true, Policy: enforced().Policy})
	if trees, reason := e.node.Trees(e.nic.Index); reason != nil {
		if !errors.Is(reason, unix.ENOENT) && !errors.Is(reason, unix.EOPNOTSUPP) {
			t.Fatalf("the NIC has no queue per share, although the kernel has act_skbedit: %v", reason)
		}
		t.Skipf("the kernel does not steer frames to queues: %v", reason)
	} else if trees != nicQueues {
		t.Fatalf("the NIC has %d trees, want %d", trees, nicQueues)
	}
	return e
}

// strays returns how many frames reached a queue without their class, on the NIC and its IFB device: the frames that
// such a queue dropped, and the bytes of unidentified frames.
func (e *testEnv) strays() (frames, unidentifiedBytes uint64) {
	e.t.Helper()
	ifb, err := netlink.LinkByName(shape.IFBName(e.nic.Name))
	if err != nil {
		e.t.Fatal(err)
	}
	shaper := shape.New(nstest.Current(e.t).Socket, nil)
	for _, dev := range []int{e.nic.Index, ifb.Attrs().Index} {
		dropped, err := shaper.Strays(dev, e.trees())
		if err != nil {
			e.t.Fatal(err)
		}
		frames += dropped
		unidentified, err := shaper.ReadClass(dev, e.trees().Class(shape.UnidentifiedMinor))
		if err != nil || unidentified == nil {
			e.t.Fatalf("read the class of unidentified frames: %v, %v", unidentified, err)
		}
		unidentifiedBytes += unidentified.SentBytes
	}
	return frames, unidentifiedBytes
}

// expectNoStrays fails the test if frames reached queues without their classes during f.
func (e *testEnv) expectNoStrays(f func()) {
	e.t.Helper()
	framesBefore, bytesBefore := e.strays()
	f()
	if frames, bytes := e.strays(); frames != framesBefore || bytes != bytesBefore {
		e.t.Errorf("%d frames and %d bytes came to a queue other than that of their class, want none",
			frames-framesBefore, bytes-bytesBefore)
	}
}

// setXPS makes the kernel send the frames of every CPU through one queue of the NIC.
func (e *testEnv) setXPS(queue int) {
	e.t.Helper()
	sysfs := e.t.TempDir()
	if err := unix.Mount("sysfs", sysfs, "sysfs", 0, ""); err != nil {
		e.t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(sysfs, unix.MNT_DETACH) }()
	file := filepath.Join(sysfs, "class/net", e.nic.Name, fmt.Sprintf("queues/tx-%d/xps_cpus", queue))
	if err := os.WriteFile(file, []byte("3"), 0o644); err != nil { // the first two CPUs
		e.t.Fatal(err)
	}
}

func TestQueues_framesStayOnHomeQueue(t *testing.T) {
	for _, xps := range []bool{false, true} {
		t.Run(fmt.Sprintf("XPS %t", xps), func(t *testing.T) {
			e := newQueuesEnv(t)
			var pods []*pod
			var sockets []net.Conn // which remember a queue
			for i := range 6 {     // two of them share a queue with another
				p := e.pod(i, i+1, hardCap(20*mega), netdev.Private)
				pods, sockets = append(pods, p), append(sockets, p.dial(t))
			}
			if xps {
				e.setXPS(2)
			}
			e.expectNoStrays(func() {
				for i, p := range pods {
					before := e.sentBytes(i)
					sendTwenty(t, sockets[i])
					e.sendInManyWays(p)
					if e.sentBytes(i) == before {
						t.Errorf("the class of share %d has sent nothing", i)
					}
				}
			})
		})
	}
}

// dial returns a socket of the pod that has sent a datagram to the wire.
func (p *pod) dial(t *testing.T) (conn net.Conn) {
	t.Helper()
	nstest.RunIn(t, p.File, func() (err error) {
		conn, err = net.Dial("udp", net.JoinHostPort(wireIP, "9"))
		return err
	})
	t.Cleanup(func() { _ = conn.Close() })
	sendTwenty(t, conn)
	return conn
}

func sendTwenty(t *testing.T, conn net.Conn) {
	t.Helper()
	for range 20 {
		if _, err := conn.Write(make([]byte, 1000)); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
	}
}

// sendInManyWays sends frames of a pod, which has its own addresses, with several kinds of sockets, and
// receives some.
func (e *testEnv) sendInManyWays(p *pod) {
	e.t.Helper()
	flow, back := e.fromPod(p), e.toPod(p)
	other := e.trees().Class(shape.FirstMinor + 1)
	flow.Priority, flow.Duration, back.Duration = int(int32(other)), 300*time.Millisecond, 300*time.Millisecond
	e.measure(flow, back)
	flood := e.datagramOf(p)
	for _, bypass := range []bool{false, true} {
		if _, err := p.Flood("net1", flood, bypass, 100*time.Millisecond); err != nil {
			e.t.Fatal(err)
		}
	}
	for name, open := range map[string]func() (nstest.Sender, error){
		"SO_MARK and SO_PRIORITY": func() (nstest.Sender, error) {
			return nstest.NewMarkSender(p.Namespace, "net1", 1, int(int32(other)))
		},
		"SO_TXTIME": func() (nstest.Sender, error) { return nstest.NewTimeSender(p.Namespace, "net1") },
		"io_uring":  func() (nstest.Sender, error) { return nstest.NewRingSender(p.Namespace, "net1") },
		"AF_XDP":    func() (nstest.Sender, error) { return nstest.NewXDPSender(p.Namespace, "net1") },
	} {
		sender, err := open()
		if isUnsupported(err) {
			e.t.Logf("this kernel does not let a pod send by %s: %v", name, err)
			continue
		}
		if err == nil {
			err = errors.Join(sendFor(sender, flood, 100*time.Millisecond), sender.Close())
		}
		if err != nil {
			e.t.Fatalf("send by %s: %v", name, err)
		}
	}
}

// datagramOf returns the frame of a large datagram from a pod, which has its own addresses, to the wire.
func (e *testEnv) datagramOf(p *pod) []byte {
	datagram := frame(p.attachment.MAC, e.wireMAC())
	copy(datagram[14:], classify.IPv4(p.ip, 17, 0, append(classify.UDP(5000, 5001), make([]byte, 1400)...)))
	return datagram
}

// Without the filter, the frames of a flow leave through a queue that the kernel chooses: the tests above
// would see that.
func TestQueues_framesStrayWithoutFilter(t *testing.T) {
	e := newQueuesEnv(t)
	e.setXPS(2)
	p := e.pod(0, 1, hardCap(20*mega), netdev.Private) // at home in queue 0
	removeSteering(t, e.nic.Index)
	before, _ := e.strays()
	flood := e.datagramOf(p)
	rate := e.arrivalRate(func() error {
		_, err := p.Flood("net1", flood, false, 300*time.Millisecond)
		return err
	})
	if after, _ := e.strays(); after == before {
		t.Error("no frame came to another queue")
	}
	e.expectAtMost("a flood through another queue", rate, mega)
	if changed, err := e.node.Manage(e.config); err != nil || !changed {
		t.Errorf("Manage returned %t and error %v, want it to repair the filter", changed, err)
	}
	e.expectNoStrays(func() { e.sendInManyWays(p) })
}

// A program of another owner, such as Cilium, that ends the processing of frames (TC_ACT_OK) keeps the filter from
// choosing their queue: the NIC then keeps one queue, or, if it has shares already, the condition names the program.
func TestQueues_otherProgramEndsProcessing(t *testing.T) {
	for name, tc := range map[string]struct {
		attach attachForeign
		cause  string
	}{
		"a filter":      {asFilter, "filter bpf of priority 1"},
		"a TCX program": {byTCX(link.Tail()), "TCX program "},
	} {
		t.Run(name, func(t *testing.T) {
			e := newQueuesEnv(t)
			e.setXPS(2)
			remove := tc.attach(t, e, sent, newProgram(t, pass))
			e.manage()
			if trees, reason := e.node.Trees(e.nic.Index); trees != shape.OneTree || reason == nil ||
				!strings.Contains(reason.Error(), "other programs run before the driver's queue filter") {
				t.Errorf("before the NIC has shares: it has %d trees for the reason %v, want one", trees, reason)
			}
			if err := remove(); err != nil {
				t.Fatal(err)
			}
			e.manage()
			if trees, reason := e.node.Trees(e.nic.Index); trees != nicQueues {
				t.Fatalf("without the program, the NIC has %d trees for the reason %v, want %d", trees, reason, nicQueues)
			}
			p := e.pod(0, 1, hardCap(20*mega), netdev.Private) // at home in queue 0
			e.expectMissed(p, sent, "before the program is attached", "")
			remove = tc.attach(t, e, sent, newProgram(t, pass))
			e.expectMissed(p, sent, "with the program", tc.cause)
			if err := remove(); err != nil {
				t.Fatal(err)
			}
			e.expectMissed(p, sent, "after the program was detached", "")
		})
	}
}

// removeSteering removes the filter that takes the queue of a frame from its class.
func removeSteering(t *testing.T, index int) {
	t.Helper()
	link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
	filters, err := netlink.FilterList(link, netlink.HANDLE_MIN_EGRESS)
	if err != nil {
		t.Fatal(err)
	}
	removed := false
	for _, f := range filters {
		if f.Attrs().Priority == classify.SteerPriority {
			removed = true
			if err := netlink.FilterDel(f); err != nil {
				t.Fatal(err)
			}
		}
	}
	if !removed {
		t.Fatal("the NIC has no filter that steers frames")
	}
}

// measureSent returns how many bits per second the classes of the shares 0 to shares-1 and the whole NIC
// send while f runs.
func (e *testEnv) measureSent(shares int, f func()) (rates []float64, sum float64) {
	e.t.Helper()
	traffic := func() uint64 {
		t, err := e.node.Traffic(e.nic.Index)
		if err != nil {
			e.t.Fatal(err)
		}
		return t.Sent
	}
	before := make([]uint64, shares)
	for i := range before {
		before[i] = e.sentBytes(i)
	}
	all, start := traffic(), time.Now()
	f()
	elapsed := time.Since(start).Seconds()
	for i := range before {
		rates = append(rates, float64(e.sentBytes(i)-before[i])*8/elapsed)
	}
	return rates, float64(traffic()-all) * 8 / elapsed
}

// floodAll sends as much as each pod can, and the node through the NIC.
func (e *testEnv) floodAll(pods []*pod, duration time.Duration) {
	e.t.Helper()
	var floods sync.WaitGroup
	for _, p := range pods {
		flood := frame(p.attachment.MAC, e.wireMAC())
		copy(flood[14:], classify.IPv4(p.ip, 17, 0, append(classify.UDP(5000, 5001), make([]byte, 1400)...)))
		floods.Go(func() {
			if _, err := p.Flood("net1", flood, false, duration); err != nil {
				e.t.Error(err)
			}
		})
	}
	own := frame(e.nic.MAC, e.wireMAC())
	floods.Go(func() {
		if _, err := nstest.Current(e.t).Flood(e.nic.Name, own, false, duration); err != nil {
			e.t.Error(err)
		}
	})
	floods.Wait()
}

// Each share's receive rate is exact, too.
func TestQueues_limitReceivingShares(t *testing.T) {
	const tolerance = 1.02
	e := newQueuesEnv(t)
	ifb, err := netlink.LinkByName(shape.IFBName(e.nic.Name))
	if err != nil {
		t.Fatal(err)
	}
	grants := []uint64{4 * mega, 2 * mega, mega, mega, mega}
	var pods []*pod
	for i, grant := range grants {
		pods = append(pods, e.pod(i, i+1, hardCap(grant), netdev.Private))
	}
	flood := func(duration time.Duration) {
		var floods sync.WaitGroup
		for _, p := range pods {
			datagram := classify.EtherTo(p.attachment.MAC, e.wireMAC(), 0x0800,
				classify.IPv4(wireIP, 17, 0, append(classify.UDP(5000, 5001), make([]byte, 1400)...)))
			floods.Go(func() {
				if _, err := e.wire.Flood("wire", datagram, false, duration); err != nil {
					t.Error(err)
				}
			})
		}
		floods.Wait()
	}
	received := func(share int) uint64 { return e.bytesOf(ifb.Attrs().Index, share) }
	const warmUp, measured = 500 * time.Millisecond, 4 * time.Second
	flood(warmUp) // which fills the queues: the bursts at the start of a flood do not count
	expectRates(t, grants, tolerance, func() (rates []float64) {
		var before []uint64
		for i := range grants {
			before = append(before, received(i))
		}
		start := time.Now()
		flood(measured)
		elapsed := time.Since(start).Seconds()
		for i := range grants {
			rates = append(rates, float64(received(i)-before[i])*8/elapsed)
		}
		return rates
	})
}

// The rate of each share is exact, and the sum over all queues, with the traffic of the node, is at most
// the line.
func TestQueues_limitSharesAndLine(t *testing.T) {
	const slowLine, tolerance = 20 * mega, 1.02 // a line that an emulated machine can fill
	e := newQueuesEnv(t)
	e.config.Rates.Line, e.config.Rates.Reserve, e.config.Rates.MinShare = slowLine, 4*mega, mega/2
	if _, err := e.node.Manage(e.config); err != nil {
		t.Fatal(err)
	}
	grants := []uint64{8 * mega, 4 * mega, 2 * mega, mega, mega}
	var pods []*pod
	for i, grant := range grants {
		borrows := shape.Rates{Floor: grant, Ceil: slowLine} // what it must not
		pods = append(pods, e.pod(i, i+1, borrows, netdev.Private))
	}
	const warmUp, measured = 500 * time.Millisecond, 4 * time.Second
	e.floodAll(pods, warmUp) // which fills the queues: the bursts at the start of a flood do not count
	expectRates(t, append(grants, slowLine), tolerance, func() []float64 {
		rates, sum := e.measureSent(len(pods), func() { e.floodAll(pods, measured) })
		return append(rates, sum)
	})
}

// expectRates fails the test if a rate is more than the wanted one times the tolerance, or, in each of several
// attempts, if one is less than the wanted one divided by it.
func expectRates(t *testing.T, want []uint64, tolerance float64, measure func() []float64) {
	t.Helper()
	for attempt, slow := 0, true; slow && attempt < attempts(); attempt++ {
		rates := measure()
		t.Logf("rates: %.2f Mbit/s, want %.2f", inMega(rates), inMega(floats(want)))
		slow = false
		for i, rate := range rates {
			if rate > float64(want[i])*tolerance {
				t.Errorf("rate %d is %.2f Mbit/s, want at most %.2f", i, rate/mega, float64(want[i])/mega)
			}
			slow = slow || rate < float64(want[i])/tolerance
		}
		if slow && attempt == attempts()-1 {
			t.Error("a rate is too low in each attempt")
		}
	}
}

func floats(numbers []uint64) (f []float64) {
	for _, n := range numbers {
		f = append(f, float64(n))
	}
	return f
}

func inMega(rates []float64) (scaled []float64) {
	for _, r := range rates {
		scaled = append(scaled, r/mega)
	}
	return scaled
}

// restored restores the attachments of pods if the NIC has changed. The pods' shares are numbered from 0.
func (e *testEnv) restored(node *netdev.Node, pods []*pod, rates shape.Rates) (changed bool) {
	e.t.Helper()
	changed, err := node.Manage(e.config)
	if err != nil {
		e.t.Fatal(err)
	}
	if !changed {
		return false
	}
	for i, p := range pods {
		if err := node.Restore(p.attachment, rates); err != nil {
			e.t.Fatalf("restore share %d: %v", i, err)
		}
	}
	return true
}

// expectEnforced fails the test unless a snapshot has the rates of all pods.
func (e *testEnv) expectEnforced(node *netdev.Node, pods []*pod, rates shape.Rates) {
	e.t.Helper()
	snapshot, err := node.Snapshot()
	if err != nil {
		e.t.Fatal(err)
	}
	for i, p := range pods {
		send, receive, err := snapshot.Rates(p.attachment)
		if err != nil || send == nil || receive == nil || *send != rates || *receive != rates {
			e.t.Errorf("share %d: the kernel enforces %v and %v (error %v), want %v", i, send, receive, err, rates)
		}
	}
}

func (e *testEnv) somePods(number int, rates shape.Rates) (pods []*pod) {
	e.t.Helper()
	for i := range number {
		pods = append(pods, e.pod(i, i+1, rates, netdev.Private))
	}
	return pods
}

// A later process finds the homes of shares without a record.
func TestQueues_surviveRestart(t *testing.T) {
	rates := hardCap(20 * mega)
	e := newQueuesEnv(t)
	pods := e.somePods(6, rates)
	later := newNode(t, netdev.Options{BPFFS: e.bpffs})
	e.restored(later, pods, rates)
	if trees, reason := later.Trees(e.nic.Index); trees != nicQueues || reason != nil {
		t.Errorf("after the restart, the NIC has %d trees because of %v, want %d", trees, reason, nicQueues)
	}
	e.expectEnforced(later, pods, rates)
	e.expectNoStrays(func() { e.sendInManyWays(pods[5]) })
	earlier := e.node
	e.node = later
	defer func() { e.node = earlier }() // which the end of the test uses
	pods = append(pods, e.pod(6, 7, rates, netdev.Private))
	e.expectEnforced(later, pods, rates)
}

// After "ethtool -L", the shares of the queues that are gone move to others.
func TestQueues_followEthtool(t *testing.T) {
	rates := hardCap(20 * mega)
	e := newQueuesEnv(t)
	pods := e.somePods(6, rates)
	for _, tc := range []struct{ queues, trees int }{{2, 2}, {4, 2}, {1, 1}} { // more queues wait for the last share
		if err := nstest.SetTransmitQueues(e.nic.Name, uint32(tc.queues)); err != nil {
			t.Fatal(err)
		}
		e.restored(e.node, pods, rates)
		if got := e.trees(); got != shape.Trees(tc.trees) {
			t.Fatalf("the NIC with %d queues has %d trees, want %d", tc.queues, got, tc.trees)
		}
		e.expectEnforced(e.node, pods, rates)
		e.expectNoStrays(func() {
			e.sendInManyWays(pods[2])
			e.sendInManyWays(pods[3])
		})
		e.expectRate("a share that has moved", e.measure(e.fromPod(pods[3]))[0], 20*mega)
	}
}

// A NIC with shares keeps its trees.
func TestQueues_changeWithoutShares(t *testing.T) {
	rates := hardCap(20 * mega)
	e := newQueuesEnv(t)
	pods := e.somePods(2, rates)
	change := func(perShare bool, want shape.Trees) {
		t.Helper()
		e.config.QueuePerShare = perShare
		for _, node := range []*netdev.Node{e.node, newNode(t, netdev.Options{BPFFS: e.bpffs})} {
			e.restored(node, pods, rates)
			if got, reason := node.Trees(e.nic.Index); got != want {
				t.Fatalf("with QueuePerShare %t and %d shares: %d trees because of %v, want %d",
					perShare, len(pods), got, reason, want)
			}
			e.expectEnforced(node, pods, rates)
		}
	}
	release := func() {
		t.Helper()
		for _, p := range pods {
			if err := errors.Join(e.node.Detach(p.attachment), e.node.RemoveClass(e.nic.Index, p.attachment.Minor)); err != nil {
				t.Fatal(err)
			}
		}
		pods = nil
	}
	change(false, nicQueues)
	release()
	change(false, shape.OneTree)
	pods = e.somePods(2, rates)
	change(true, shape.OneTree)
	e.expectRate("a share of one tree", e.measure(e.fromPod(pods[1]))[0], 20*mega)
	release()
	change(true, nicQueues)
	pods = e.somePods(2, rates)
	e.expectEnforced(e.node, pods, rates)
	e.expectRate("a share that sends", e.measure(e.fromPod(pods[1]))[0], 20*mega)
	e.expectRate("a share that receives", e.measure(e.toPod(pods[1]))[0], 20*mega)
	e.expectNoStrays(func() { e.sendInManyWays(pods[1]) })
}

// Links that exchange frames use the hairpin, which has one tree, and the queues of the NIC.
func TestQueues_bridgedShares(t *testing.T) {
	e := newQueuesEnv(t)
	a, b := e.pod(0, 1, hardCap(20*mega), netdev.Bridge), e.pod(1, 2, hardCap(20*mega), netdev.Bridge)
	e.expectNoStrays(func() {
		e.expectRate("between shares", e.measure(nstest.Flow{
			From: a.Namespace, To: b.Namespace, Address: e.address(b.ip),
		})[0], 20*mega)
		e.expectRate("to the network", e.measure(e.fromPod(b))[0], 20*mega)
		e.expectRate("from the network", e.measure(e.toPod(b))[0], 20*mega)
	})
}

func TestQueues_singleQueueKeepsOneTree(t *testing.T) {
	nic, wire := nstest.NIC(t, "nic0", 1500, wireIP+"/16")
	e := newTestEnvOn(t, nstest.MountBPFFS(t), nic, wire, netdev.NICConfig{QueuePerShare: true})
	if trees, reason := e.node.Trees(nic.Index); trees != shape.OneTree || reason == nil {
		t.Errorf("a NIC with one queue has %d trees because of %v, want one tree and a reason", trees, reason)
	}
	p := e.pod(0, 1, hardCap(20*mega), netdev.Private)
	e.expectRate("pod sends", e.measure(e.fromPod(p))[0], 20*mega)
}

// The neighbor of a flooded queue has its rate.
func TestQueues_floodDoesNotSlowOtherQueue(t *testing.T) {
	e := newQueuesEnv(t)
	noisy, quiet := e.pod(0, 1, hardCap(20*mega), netdev.Private), e.pod(1, 2, hardCap(20*mega), netdev.Private)
	flood := frame(noisy.attachment.MAC, e.wireMAC())
	copy(flood[14:], classify.IPv4(noisy.ip, 17, 0, append(classify.UDP(5000, 5001), make([]byte, 1400)...)))
	before := e.sentBytes(1)
	errs := make(chan error, 1)
	go func() {
		_, err := noisy.Flood("net1", flood, false, 2*duration)
		errs <- err
	}()
	e.expectRate("the neighbor of a flood", e.measure(e.fromPod(quiet))[0], 20*mega)
	if err := <-errs; err != nil {
		t.Fatal(err)
	}
	if e.sentBytes(1) == before {
		t.Error("the class of the neighbor has sent nothing")
	}
}

// A flooded queue delays the neighbors of its share no more than the same flood on the loopback link, which only uses
// processor time.
func TestQueues_latencyNextToFloodedQueue(t *testing.T) {
	const rate, tolerance = 8 * mega, 1.1
	e := newQueuesEnv(t)
	noisy, quiet := e.pod(0, 1, hardCap(rate), netdev.Private), e.pod(1, 2, hardCap(rate), netdev.Private)
	server, least := e.echo(), 1e9
	for round := 0; round < 8 && least > tolerance; round++ { // another process on the machine makes the times longer
		stop := flood(t, noisy.Namespace, "127.0.0.1", 2*rate)
		baseline := p99(e.roundTrips(quiet, server))
		stop()
		stop = flood(t, noisy.Namespace, wireIP, 2*rate)
		flooded := p99(e.roundTrips(quiet, server))
		stop()
		t.Logf("p99 next to a flood on the loopback link: %v, on the NIC: %v", baseline, flooded)
		least = min(least, float64(flooded)/float64(baseline))
	}
	if least > tolerance {
		t.Errorf("p99 of the round trips next to a flooded queue: got %.2f times that next to the same flood on the "+
			"loopback link, want at most %.1f", least, tolerance)
	}
}

// Two shares that send small datagrams gain as much by the second processor as without queues and programs.
func TestQueues_throughputScalesWithSenders(t *testing.T) {
	const want = 0.95
	e := newQueuesEnv(t)
	pods := []*pod{e.pod(0, 1, hardCap(line/2), netdev.Private), e.pod(1, 2, hardCap(line/2), netdev.Private)}
	shaped := e.gainOfSecondSender(pods)
	if _, err := e.node.Unmanage(e.nic.Name, e.nic.Index); err != nil {
		t.Fatal(err)
	}
	unshaped := e.gainOfSecondSender(pods)
	t.Logf("two senders send %.2f times as much as one, and %.2f times without queues and programs", shaped, unshaped)
	if shaped < want*unshaped {
		t.Errorf("two senders send %.2f times as much as one, want at least %.2f times the %.2f without queues and programs",
			shaped, want, unshaped)
	}
}

// gainOfSecondSender returns how much more the pods send together than the first one alone: the most of several
// measurements each, because another process on the machine makes them smaller.
func (e *testEnv) gainOfSecondSender(pods []*pod) float64 {
	e.t.Helper()
	const rounds, period = 6, 500 * time.Millisecond
	send := func(senders []*pod) float64 {
		sent := make([]int, len(senders))
		var all sync.WaitGroup
		for i, p := range senders {
			datagram := classify.EtherTo(e.wireMAC(), p.attachment.MAC, 0x0800,
				classify.IPv4(p.ip, 17, 0, classify.UDP(5000, 5001)))
			all.Go(func() {
				var err error
				if sent[i], err = p.Flood("net1", datagram, false, period); err != nil {
					e.t.Error(err)
				}
			})
		}
		all.Wait()
		sum := 0
		for _, n := range sent {
			sum += n
		}
		return float64(sum)
	}
	both, one := 0.0, 0.0
	for range rounds {
		both, one = max(both, send(pods)), max(one, send(pods[:1]))
	}
	return both / one
}

func TestNode_Unmanage_removesQueues(t *testing.T) {
	e := newQueuesEnv(t)
	e.somePods(2, hardCap(20*mega))
	if found, err := e.node.Unmanage(e.nic.Name, e.nic.Index); err != nil || !found {
		t.Fatalf("Unmanage returned found %t and error %v, want it to find the setup", found, err)
	}
	e.expectNoQueues()
	if steered, err := classify.Steered(e.nic.Index); err != nil || steered {
		t.Errorf("Steered returned %t and error %v, want the filter removed", steered, err)
	}
}
