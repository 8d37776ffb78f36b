// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/measure"
)

// node is a node with a NIC that other pods have macvlans on.
type node struct {
	b      *testing.B
	nic    netdev.NIC
	others int
	next   int // number of the next link
}

func newNode(b *testing.B) *node {
	b.Helper()
	nic, _ := nstest.NIC(b, "nic0", 1500)
	return &node{b: b, nic: nic}
}

// fill creates macvlans until the NIC has count of them. They are in few namespaces, because
// the kernel creates them faster there.
func (n *node) fill(count int) {
	n.b.Helper()
	const perNamespace = 100
	var crowd *nstest.Namespace
	for ; n.others < count; n.others++ {
		if crowd == nil || n.others%perNamespace == 0 {
			crowd = nstest.New(n.b)
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex, attrs.HardwareAddr = fmt.Sprintf("o%d", n.others), n.nic.Index, n.mac()
		attrs.Namespace = netlink.NsFd(crowd.File.Fd())
		link := &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE}
		if err := netlink.LinkAdd(link); err != nil {
			n.b.Fatal(err)
		}
		crowd.Do(func() error { return nstest.ConfigureLink(attrs.Name) })
	}
}

// mac returns an unused address.
func (n *node) mac() net.HardwareAddr {
	n.next++
	return binary.BigEndian.AppendUint32([]byte{2, 7}, uint32(n.next))
}

// BenchmarkKernel measures how long the kernel takes to create and delete the link of a pod
// next to the links of other pods. No way to attach a link can be faster.
func BenchmarkKernel(b *testing.B) {
	n := newNode(b)
	n.benchmark(func(b *testing.B, parallel int) {
		specs := make([]net.HardwareAddr, b.N)
		for i := range specs {
			specs[i] = n.mac()
		}
		lifecycle{
			start: func(_ context.Context, i int, pod *nstest.Namespace) error {
				address := netip.AddrFrom4([4]byte{10, 50, byte(i / 250), byte(1 + i%250)})
				return addMacvlan(n.nic, pod, specs[i], netip.PrefixFrom(address, 16))
			},
			end: func(_ context.Context, _ int, pod *nstest.Namespace) error { return deleteLink(pod) },
		}.measure(b, parallel)
	})
}

// BenchmarkCNI measures the CNI plugins macvlan and host-local.
func BenchmarkCNI(b *testing.B) {
	n := newNode(b)
	plugins := newCNI(b, fmt.Sprintf(`[{"type": "macvlan", "master": "nic0", "mode": "private", "ipam": {
		"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.50.0.0/16"}]]}}]`, b.TempDir()))
	n.benchmark(func(b *testing.B, parallel int) {
		id := func(i int) string { return fmt.Sprintf("pod-%d-%d", parallel, i) }
		lifecycle{
			start: func(ctx context.Context, i int, pod *nstest.Namespace) error { return plugins.add(ctx, id(i), pod) },
			end:   func(ctx context.Context, i int, pod *nstest.Namespace) error { return plugins.del(ctx, id(i), pod) },
		}.measure(b, parallel)
	})
}

// benchmark runs a benchmark next to different numbers of other links, with different numbers
// of pods that start and end together.
func (n *node) benchmark(run func(b *testing.B, parallel int)) {
	for _, shares := range []int{10, 100, 1000, 2900} {
		n.b.Run(fmt.Sprintf("shares=%d", shares), func(b *testing.B) {
			n.fill(shares)
			for _, parallel := range []int{1, 8, 32} {
				b.Run(fmt.Sprintf("parallel=%d", parallel), func(b *testing.B) { run(b, parallel) })
			}
		})
	}
}

// lifecycle has the functions that attach the link of pod i and detach it. Pods are
// numbered from 0.
type lifecycle struct {
	start, end func(ctx context.Context, i int, pod *nstest.Namespace) error
}

func (l lifecycle) measure(b *testing.B, parallel int) {
	var starts, ends measure.Latencies
	pods := make([]*nstest.Namespace, b.N)
	for i := range pods {
		pods[i] = nstest.New(b)
		defer pods[i].Close()
	}
	b.ResetTimer()
	err := measure.InRounds(parallel, b.N, func(i int, began time.Time) error {
		return starts.Since(began, func() error { return l.start(b.Context(), i, pods[i]) })
	}, func(i int, began time.Time) error {
		return ends.Since(began, func() error { return l.end(b.Context(), i, pods[i]) })
	})
	if err != nil {
		b.Fatal(err)
	}
	b.StopTimer()
	starts.Report(b, "start")
	ends.Report(b, "end")
}

// inPod calls do with the link of a pod.
func inPod(pod *nstest.Namespace, do func(h *netlink.Handle, link netlink.Link) error) error {
	h, err := netlink.NewHandleAt(netns.NsHandle(int(pod.File.Fd())))
	if err != nil {
		return err
	}
	defer h.Close()
	link, err := h.LinkByName(linkName)
	if err != nil {
		return err
	}
	return do(h, link)
}
