// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"encoding/binary"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// BenchmarkAttach measures Node.Attach, and the minimum of netlink requests
// that create the same link. The ratio of the two does not depend on the speed
// of the machine.
func BenchmarkAttach(b *testing.B) {
	nic, _ := nstest.NIC(b, "nic0", 1500)
	node := newNode(b, nic)
	host, err := rtnl.Open()
	if err != nil {
		b.Fatal(err)
	}
	defer host.Close()
	var attachTimes, floorTimes []time.Duration
	for i := 0; b.Loop(); i++ {
		spec := netdev.LinkSpec{
			Parent: nic.Index, MAC: numberedMAC(2 * i), Mode: netdev.Private,
			Addresses: prefixes("10.20.0.5/24"),
		}
		pod := nstest.New(b)
		start := time.Now()
		attach(b, node, pod, spec)
		attachTimes = append(attachTimes, time.Since(start))
		pod.Close()

		spec.MAC = numberedMAC(2*i + 1)
		pod = nstest.New(b)
		start = time.Now()
		attachMinimal(b, host, pod, spec)
		floorTimes = append(floorTimes, time.Since(start))
		pod.Close()
	}
	a, f := median(attachTimes), median(floorTimes)
	b.ReportMetric(float64(a.Microseconds()), "attach-p50-µs")
	b.ReportMetric(float64(f.Microseconds()), "floor-p50-µs")
	b.ReportMetric(float64(a)/float64(f), "attach/floor")
}

func numberedMAC(n int) net.HardwareAddr {
	return append(net.HardwareAddr{2, 0}, binary.BigEndian.AppendUint32(nil, uint32(n))...)
}

// attachMinimal creates, configures, and brings up a link without any check.
func attachMinimal(b *testing.B, host *rtnl.Conn, pod *nstest.Namespace, spec netdev.LinkSpec) {
	b.Helper()
	if err := host.Do(netdev.CreateRequest(spec, "net1", int(pod.File.Fd()))); err != nil {
		b.Fatal(err)
	}
	answer, err := pod.Socket.Get(netdev.GetLinkByNameRequest("net1"))
	if err != nil {
		b.Fatal(err)
	}
	index := int(nl.DeserializeIfInfomsg(answer[0].Data).Index)
	requests := append(netdev.AddressRequests(index, spec), netdev.UpRequests(index, spec)...)
	requests = append([]*nl.NetlinkRequest{netdev.ConfigureRequest(index, "net1", spec)}, requests...)
	if err := pod.Socket.Do(requests...); err != nil {
		b.Fatal(err)
	}
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}
