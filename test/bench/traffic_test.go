// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
	"github.com/dra-shared/dra-driver-shared/test/measure"
)

const (
	mtu = 1500
	// wireBytes and payloadBytes are the sizes of a full frame without its checksum, and of the
	// part of it that TCP with timestamps delivers. Limits count frames.
	wireBytes, payloadBytes = mtu + 14, mtu - 52
	flowPort                = ":5001"
	// fast is a limit in bits per second that no sender here reaches.
	fast = 40e9
)

// pair is two pods with the same limit, and a host that both are connected to.
type pair struct {
	measured, neighbor endpoint
	host               *nstest.Namespace
}

// endpoint is a pod, its address, and the address of the host in the pod's network.
type endpoint struct {
	*nstest.Namespace
	address, host string
}

// limiter is a way to limit pods.
type limiter struct {
	name string
	// setUp returns pods with a limit in bits per second.
	setUp func(b *testing.B, limit uint64) pair
	// receives reports whether it also limits the frames that pods receive.
	receives bool
}

var limiters = []limiter{
	{"none", unlimited, false},
	{"driver", func(b *testing.B, limit uint64) pair { return shares(b, limit, false) }, true},
	{"driver-multi-queue", func(b *testing.B, limit uint64) pair { return shares(b, limit, true) }, true},
	{"tbf-in-pod", bucketInPod, false},
	{"cni-bandwidth", cniBandwidth, true},
}

// BenchmarkTraffic measures what pods send and receive within a limit. Its metrics:
//
//   - send-error-%, receive-error-%: the difference between the rate over 4 s and the limit
//   - send-first-second-%: the rate of the first second, in percent of the limit
//   - own-p99-µs: the round trip of a datagram of the pod that sends as fast as it can
//   - neighbor-p99-µs: the round trip of a datagram of another pod at the same time
//   - one-to-eight-flows-%: the rate of the pod with one TCP flow, in percent of another pod's rate with eight
//   - cpu-ms/Gbit: processor time of the machine for each Gbit that arrives, including sender and receiver
//   - kpps: small datagrams that a pod sends without reaching its limit, in thousands per second
//   - two-senders: the datagrams that two pods send at the same time, as a multiple of one pod's datagrams
func BenchmarkTraffic(b *testing.B) {
	for _, l := range limiters {
		for _, limit := range []uint64{100e6, 1e9} {
			b.Run(fmt.Sprintf("limiter=%s/limit=%dM", l.name, limit/1e6), func(b *testing.B) {
				for range b.N {
					l.measureRates(b, l.setUp(b, limit), limit)
				}
			})
		}
		b.Run(fmt.Sprintf("limiter=%s/limit=none", l.name), func(b *testing.B) {
			for range b.N {
				measureUnlimited(b, l.setUp(b, fast))
			}
		})
	}
}

func (l limiter) measureRates(b *testing.B, p pair, limit uint64) {
	b.Helper()
	percent := func(rate float64) float64 { return rate * 100 / float64(limit) }
	if l.name != "none" {
		b.ReportMetric(percent(p.measured.send(b, p.host, time.Second)), "send-first-second-%")
	}
	var own, neighbor measure.Latencies
	var sent float64
	var all sync.WaitGroup
	all.Go(func() { sent = p.measured.send(b, p.host, 4*time.Second) })
	all.Go(func() { p.measured.pingFor(b, p.host, 3*time.Second, &own) })
	all.Go(func() { p.neighbor.pingFor(b, p.host, 3*time.Second, &neighbor) })
	all.Wait()
	b.ReportMetric(float64(own.Percentile(99))/1e3, "own-p99-µs")
	b.ReportMetric(float64(neighbor.Percentile(99))/1e3, "neighbor-p99-µs")
	b.ReportMetric(p.oneToEightFlows(b), "one-to-eight-flows-%")
	if l.name == "none" {
		return
	}
	b.ReportMetric(percent(sent)-100, "send-error-%")
	if l.receives {
		b.ReportMetric(percent(p.measured.receive(b, p.host, 4*time.Second))-100, "receive-error-%")
	}
}

// oneToEightFlows returns the rate of a pod that sends one TCP flow to the host, in percent of the rate of another pod
// that sends eight at the same time.
func (p pair) oneToEightFlows(b *testing.B) float64 {
	b.Helper()
	const many, firstPort = 8, 5002
	rates := make([]float64, 1+many)
	var all sync.WaitGroup
	for i := range rates {
		pod := p.neighbor
		if i == 0 {
			pod = p.measured
		}
		all.Go(func() {
			rates[i] = frameRate(b, nstest.Flow{
				From: pod.Namespace, To: p.host, Duration: 3 * time.Second,
				Address: net.JoinHostPort(pod.host, strconv.Itoa(firstPort+i)),
			})
		})
	}
	all.Wait()
	sum := 0.0
	for _, rate := range rates[1:] {
		sum += rate
	}
	return 100 * rates[0] / sum
}

func measureUnlimited(b *testing.B, p pair) {
	b.Helper()
	const duration = 3 * time.Second
	before := measure.BusyTime()
	rate := p.measured.send(b, p.host, duration)
	busy := measure.BusyTime() - before
	b.ReportMetric(rate/1e9, "Gbit/s")
	b.ReportMetric(busy.Seconds()*1e3/(rate*duration.Seconds()/1e9), "cpu-ms/Gbit")
	one := p.measured.datagrams(b, duration)
	b.ReportMetric(float64(one)/duration.Seconds()/1e3, "kpps")
	var first, second uint64
	var both sync.WaitGroup
	both.Go(func() { first = p.measured.datagrams(b, duration) })
	both.Go(func() { second = p.neighbor.datagrams(b, duration) })
	both.Wait()
	b.ReportMetric(float64(first+second)/float64(one), "two-senders")
}

// send returns the rate of the pod's frames that arrive at the host, in bits per second.
func (e endpoint) send(b *testing.B, host *nstest.Namespace, duration time.Duration) float64 {
	b.Helper()
	return frameRate(b, nstest.Flow{From: e.Namespace, To: host, Address: e.host + flowPort, Duration: duration})
}

// receive returns the rate of the host's frames that arrive at the pod, in bits per second.
func (e endpoint) receive(b *testing.B, host *nstest.Namespace, duration time.Duration) float64 {
	b.Helper()
	return frameRate(b, nstest.Flow{From: host, To: e.Namespace, Address: e.address + flowPort, Duration: duration})
}

func frameRate(b *testing.B, f nstest.Flow) float64 {
	payload, err := f.Run()
	if err != nil {
		b.Error(err)
	}
	return payload * wireBytes / payloadBytes
}

// pingFor measures round trips of datagrams to the host, one each millisecond.
func (e endpoint) pingFor(b *testing.B, host *nstest.Namespace, duration time.Duration, round *measure.Latencies) {
	var client net.Conn
	var echo net.PacketConn
	nstest.RunIn(b, host.File, func() (err error) {
		echo, err = net.ListenPacket("udp", e.host+":0")
		return err
	})
	defer echo.Close()
	nstest.RunIn(b, e.File, func() (err error) {
		client, err = net.Dial("udp", echo.LocalAddr().String())
		return err
	})
	defer client.Close()
	go func() {
		buf := make([]byte, 64)
		for {
			n, from, err := echo.ReadFrom(buf)
			if err != nil {
				return // pingFor has ended
			}
			_, _ = echo.WriteTo(buf[:n], from) // a lost answer counts as slow
		}
	}()
	buf := make([]byte, 64)
	next := time.NewTicker(time.Millisecond)
	defer next.Stop()
	for end := time.Now().Add(duration); time.Now().Before(end); <-next.C {
		err := round.Time(func() error {
			if _, err := client.Write(buf); err != nil {
				return err
			}
			_ = client.SetReadDeadline(time.Now().Add(time.Second))
			_, err := client.Read(buf)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return nil // lost: it counts as 1 s
			}
			return err
		})
		if err != nil {
			b.Error(err)
			return
		}
	}
}

// datagrams sends small datagrams to the host as fast as possible, and returns how many the
// pod's link sent.
func (e endpoint) datagrams(b *testing.B, duration time.Duration) (count uint64) {
	b.Helper()
	sent := func() (n uint64) {
		if err := inPod(e.Namespace, func(_ *netlink.Handle, link netlink.Link) error {
			n = link.Attrs().Statistics.TxPackets
			return nil
		}); err != nil {
			b.Fatal(err)
		}
		return n
	}
	before := sent()
	nstest.RunIn(b, e.File, func() error {
		const discard = ":9"
		conn, err := net.Dial("udp", e.host+discard)
		if err != nil {
			return err
		}
		defer conn.Close()
		buf := make([]byte, 18)
		for end := time.Now().Add(duration); time.Now().Before(end); {
			for range 100 {
				_, _ = conn.Write(buf) // the host refuses datagrams at this port
			}
		}
		return nil
	})
	return sent() - before
}

// transmitQueues is the number of transmit queues of a NIC.
const transmitQueues = 4

// macvlans returns pods with macvlans on a NIC, which attach creates.
func macvlans(
	b *testing.B, attach func(nic netdev.NIC, pod *nstest.Namespace, mac net.HardwareAddr, ip netip.Prefix),
) pair {
	b.Helper()
	const host = "10.60.0.1"
	nic, wire := nstest.NICWithQueues(b, "nic0", mtu, transmitQueues, host+"/16")
	pod := func(n byte) endpoint {
		ns, ip := nstest.New(b), netip.AddrFrom4([4]byte{10, 60, 1, n})
		attach(nic, ns, net.HardwareAddr{2, 8, 0, 0, 0, n}, netip.PrefixFrom(ip, 16))
		return endpoint{ns, ip.String(), host}
	}
	return pair{measured: pod(1), neighbor: pod(2), host: wire}
}

func unlimited(b *testing.B, _ uint64) pair {
	return macvlans(b, func(nic netdev.NIC, pod *nstest.Namespace, mac net.HardwareAddr, ip netip.Prefix) {
		if err := addMacvlan(nic, pod, mac, ip); err != nil {
			b.Fatal(err)
		}
	})
}

// shares attaches shares as the node plugin does. With multiQueue, each has a home queue.
func shares(b *testing.B, limit uint64, multiQueue bool) pair {
	var n *netdev.Node
	minor := uint16(shape.FirstMinor)
	return macvlans(b, func(nic netdev.NIC, pod *nstest.Namespace, mac net.HardwareAddr, ip netip.Prefix) {
		if n == nil {
			n = enforcingNode(b, nic, multiQueue)
		}
		_, err := n.Attach(pod.Pod(), netdev.LinkSpec{
			Parent: nic.Index, Name: linkName, MAC: mac, Mode: netdev.Private, Addresses: []netip.Prefix{ip},
			Minor: minor, Rates: shape.Rates{Floor: limit, Ceil: limit}, SegmentBytes: shape.SegmentBytes(limit, mtu),
		})
		if err != nil {
			b.Fatal(err)
		}
		minor++
	})
}

// enforcingNode returns a node that limits the shares of a NIC. It skips the benchmark if the kernel cannot give
// shares home queues.
func enforcingNode(b *testing.B, nic netdev.NIC, multiQueue bool) *netdev.Node {
	n, err := netdev.NewNode(netdev.Options{BPFFS: nstest.MountBPFFS(b)})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_, _ = n.Unmanage(nic.Name, nic.Index) // the namespace ends anyway
		_ = n.Close()
	})
	_, err = n.Manage(netdev.NICConfig{
		Name: nic.Name, Index: nic.Index, MAC: nic.MAC, Enforce: true,
		Rates:         shape.NICRates{Line: 3 * fast, Reserve: 1e9, MinShare: 1e6},
		QueuePerShare: multiQueue,
	})
	if err != nil {
		b.Fatal(err)
	}
	if _, reason := n.Trees(nic.Index); multiQueue && reason != nil {
		b.Skipf("the kernel does not steer frames to queues: %v", reason)
	}
	return n
}

// burst is the size of the token bucket in the pod and of the CNI plugin bandwidth, in bytes:
// what the limit permits in 4 ms, the tick of many kernels.
func burst(limit uint64) uint32 { return max(uint32(limit/8*4/1000), 32<<10) }

func bucketInPod(b *testing.B, limit uint64) pair {
	return macvlans(b, func(nic netdev.NIC, pod *nstest.Namespace, mac net.HardwareAddr, ip netip.Prefix) {
		if err := addMacvlan(nic, pod, mac, ip); err != nil {
			b.Fatal(err)
		}
		err := inPod(pod, func(h *netlink.Handle, link netlink.Link) error {
			const latency = 25 // ms; from the CNI plugin bandwidth
			return h.QdiscAdd(&netlink.Tbf{
				QdiscAttrs: netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Parent: netlink.HANDLE_ROOT},
				Rate:       limit / 8, Buffer: bufferTime(limit), Limit: uint32(limit/8*latency/1000) + burst(limit),
			})
		})
		if err != nil {
			b.Fatal(err)
		}
	})
}

// bufferTime is how long burst takes at the limit, in ticks of the kernel's packet scheduler.
func bufferTime(limit uint64) uint32 {
	return uint32(float64(burst(limit)) * 1e6 / float64(limit/8) * netlink.TickInUsec())
}

// cniBandwidth limits pods by the CNI plugins ptp and bandwidth. Each pod has a veth to the
// node, which is the host.
func cniBandwidth(b *testing.B, limit uint64) pair {
	b.Helper()
	plugins := newCNI(b, fmt.Sprintf(`[
		{"type": "ptp", "mtu": %d, "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.61.0.0/16"}]]}},
		{"type": "bandwidth", "ingressRate": %d, "ingressBurst": %d, "egressRate": %[3]d, "egressBurst": %[4]d}]`,
		mtu, b.TempDir(), limit, uint64(burst(limit))*8))
	pod := func(n int) endpoint {
		ns := nstest.New(b)
		id := "pod-" + strconv.Itoa(n)
		if err := plugins.add(b.Context(), id, ns); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = plugins.del(context.Background(), id, ns) }) // b.Context() has ended
		return endpoint{ns, fmt.Sprintf("10.61.0.%d", n+1), "10.61.0.1"}
	}
	return pair{measured: pod(1), neighbor: pod(2), host: nstest.Current(b)}
}
