// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package scale_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// benchmarked are the numbers of shares that the benchmarks run with. What they report depends on the machine; the
// messages that TestNode_messages_doNotDependOnShareCount counts do not.
var benchmarked = []int{10, 1000, 3000}

// BenchmarkAttach compares Node.Attach with the least netlink requests that create the
// same link and the same class next to the same number of shares.
func BenchmarkAttach(b *testing.B) {
	links := 0 // links of the last attempts may still exist
	each(b, func(b *testing.B, node *testNode, shares int) {
		var attach, floor []time.Duration
		for b.Loop() {
			measured, other := node.spec(shares), node.spec(shares+1)
			measured.MAC, other.MAC = numberedMAC(links), numberedMAC(links+1)
			address := netip.AddrFrom4([4]byte{10, 31, byte(links >> 8), byte(links)})
			measured.Addresses = []netip.Prefix{netip.PrefixFrom(address, 16)}
			links += 2
			attach = append(attach, measure(b, func(pod *nstest.Namespace) error {
				_, err := node.Attach(pod.Pod(), measured)
				return err
			}))
			floor = append(floor, measure(b, func(pod *nstest.Namespace) error { return node.attachMinimal(pod, other) }))
		}
		a, f := median(attach), median(floor)
		b.ReportMetric(float64(a.Microseconds()), "attach-p50-µs")
		b.ReportMetric(float64(f.Microseconds()), "floor-p50-µs")
		b.ReportMetric(float64(a)/float64(f), "attach/floor")
	})
}

// BenchmarkRead measures the read of one share, as for a claim's status. The pod does not have another share. It
// reports the median as well, because the kernel is busy with new links for a while after others were created, for
// example to detect duplicate addresses.
func BenchmarkRead(b *testing.B) {
	each(b, func(b *testing.B, node *testNode, shares int) {
		spec := node.spec(shares)
		spec.MAC = numberedMAC(shares)
		pod := nstest.New(b)
		defer pod.Close()
		a := node.attach(pod, spec)
		var reads []time.Duration
		for b.Loop() {
			start := time.Now()
			if _, err := node.ReadAndBlock(a); err != nil {
				b.Fatal(err)
			}
			reads = append(reads, time.Since(start))
		}
		b.StopTimer()
		b.ReportMetric(float64(median(reads).Microseconds()), "read-p50-µs")
		if err := node.Detach(a); err != nil {
			b.Fatal(err)
		}
	})
}

// BenchmarkCompare measures the comparison of all shares, as at a restart or a resync.
func BenchmarkCompare(b *testing.B) {
	each(b, func(b *testing.B, node *testNode, _ int) {
		for b.Loop() {
			if differ := node.compare(); differ != 0 {
				b.Fatalf("%d shares differ", differ)
			}
		}
	})
}

// each runs a benchmark with each number of shares.
func each(b *testing.B, run func(b *testing.B, node *testNode, shares int)) {
	node := newTestNode(b)
	for _, shares := range benchmarked {
		node.fill(shares)
		b.Run(fmt.Sprintf("shares=%d", shares), func(b *testing.B) { run(b, node, shares) })
	}
}

// measure returns how long attach takes with a new pod.
func measure(b *testing.B, attach func(pod *nstest.Namespace) error) time.Duration {
	b.Helper()
	pod := nstest.New(b)
	defer pod.Close()
	start := time.Now()
	if err := attach(pod); err != nil {
		b.Fatal(err)
	}
	return time.Since(start)
}

// numberedMAC returns an address that no share of the NIC has.
func numberedMAC(n int) net.HardwareAddr {
	return binary.BigEndian.AppendUint32([]byte{2, 1}, uint32(n))
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// attachMinimal creates a link and its class without any check, with requests that do
// not depend on package netdev.
func (n *testNode) attachMinimal(pod *nstest.Namespace, spec netdev.LinkSpec) error {
	host := n.floorConn()
	create := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	create.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	create.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated("net1")))
	create.AddData(nl.NewRtAttr(unix.IFLA_LINK, nl.Uint32Attr(uint32(spec.Parent))))
	create.AddData(nl.NewRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(pod.File.Fd()))))
	create.AddData(nl.NewRtAttr(unix.IFLA_ADDRESS, spec.MAC))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.ZeroTerminated("macvlan"))
	info.AddRtAttr(nl.IFLA_INFO_DATA, nil).AddRtAttr(nl.IFLA_MACVLAN_MODE, nl.Uint32Attr(uint32(spec.Mode)))
	create.AddData(info)
	if err := host.Do(create); err != nil {
		return err
	}
	get := nl.NewNetlinkRequest(unix.RTM_GETLINK, 0)
	get.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	get.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated("net1")))
	answer, err := pod.Socket.Get(get)
	if err != nil {
		return err
	}
	index := nl.DeserializeIfInfomsg(answer[0].Data).Index
	err = shape.New(host, nil).SetClass(n.nic.Index, n.ifb(), shape.OneTree, n.config().Rates, spec.Minor, spec.Rates)
	if err != nil {
		return err
	}
	address := nl.NewNetlinkRequest(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	msg := nl.NewIfAddrmsg(unix.AF_INET)
	msg.Index, msg.Prefixlen = uint32(index), uint8(spec.Addresses[0].Bits())
	address.AddData(msg)
	address.AddData(nl.NewRtAttr(unix.IFA_LOCAL, spec.Addresses[0].Addr().AsSlice()))
	up := nl.NewNetlinkRequest(unix.RTM_NEWLINK, 0)
	link := nl.NewIfInfomsg(unix.AF_UNSPEC)
	link.Index, link.Flags, link.Change = index, unix.IFF_UP, unix.IFF_UP
	up.AddData(link)
	return pod.Socket.Do(address, up)
}

// floorConn returns a socket of the node other than the socket of the Node.
func (n *testNode) floorConn() *rtnl.Conn {
	if n.floor == nil {
		n.floor = nstest.Current(n.t).Socket
	}
	return n.floor
}

// ifb returns the index of the NIC's IFB device.
func (n *testNode) ifb() int {
	n.t.Helper()
	if n.ifbIndex == 0 {
		link, err := netlink.LinkByName(shape.IFBName(n.nic.Name))
		if err != nil {
			n.t.Fatal(err)
		}
		n.ifbIndex = link.Attrs().Index
	}
	return n.ifbIndex
}
