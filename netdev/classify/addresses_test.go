// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"encoding/binary"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// secondaryAddress returns one of many addresses that no link has.
func secondaryAddress(number int) net.HardwareAddr {
	mac := net.HardwareAddr{0x06, 0, 0, 0, 0, 0}
	binary.BigEndian.PutUint32(mac[2:], uint32(number))
	return mac
}

// addSecondaryAddresses adds addresses with numbers from first to the pod's link, as a program with CAP_NET_RAW
// can. The link has them until remove is called.
func (p *pod) addSecondaryAddresses(t *testing.T, first, number int) (remove func()) {
	t.Helper()
	const perSocket = 2000 // the kernel compares an address with all others of the socket
	var sockets []int
	p.Do(func() error {
		link, err := net.InterfaceByName("net1")
		for i := 0; err == nil && i < number; i++ {
			if i%perSocket == 0 {
				var fd int
				if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
					return err
				}
				sockets = append(sockets, fd)
			}
			request := unix.PacketMreq{Ifindex: int32(link.Index), Type: unix.PACKET_MR_UNICAST, Alen: 6}
			copy(request.Address[:], secondaryAddress(first+i))
			err = unix.SetsockoptPacketMreq(
				sockets[len(sockets)-1], unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &request)
		}
		return err
	})
	return func() {
		t.Helper()
		var failed error
		for _, fd := range sockets {
			failed = errors.Join(failed, unix.Close(fd))
		}
		if failed != nil {
			t.Fatal(failed)
		}
	}
}

// A pod with CAP_NET_RAW can add addresses to its link, which the NIC then accepts. The node cannot tell them from
// addresses of hidden links.
func TestAttack_secondaryAddresses(t *testing.T) {
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	remove := p.addSecondaryAddresses(t, 0, 1)
	if !e.inspect(true) {
		t.Error("the NIC is not guarded while it accepts an address of no link")
	}
	link := listen(t, p.Namespace, "net1")
	sendRaw(e.wire, "wire", append(classify.EtherTo(secondaryAddress(0), e.wireMAC(), 0x0800,
		classify.IPv4(wireIP, 17, 0, classify.UDP(1, 2))), marker(1)...))
	if link.saw(marker(1), 200*time.Millisecond) {
		t.Error("the pod received a frame for the address")
	}
	remove()
	e.inspect(false)
	e.skip(10 * time.Second)
	if e.inspect(false) {
		t.Error("the NIC is still guarded 10 seconds after the address was removed")
	}
}

// Inspect runs every half second, so it must not take a processor's time if a pod adds many addresses: it lists the
// addresses twice, and does little for each.
func TestAttack_manySecondaryAddresses(t *testing.T) {
	const (
		number = 20_000
		most   = 4 // times the netlink library's time to list the addresses once
	)
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	remove := p.addSecondaryAddresses(t, 0, number)
	inspection, list := time.Hour, time.Hour
	for range 3 {
		start := time.Now()
		entries, err := netlink.NeighListExecute(netlink.Ndmsg{Family: unix.AF_BRIDGE, Index: uint32(e.nic.Index)})
		if err != nil || len(entries) < number {
			t.Fatalf("the NIC accepts %d addresses, want at least %d; error: %v", len(entries), number, err)
		}
		list = min(list, time.Since(start))
		e.skip(10 * time.Second) // the next call looks for the links again
		start = time.Now()
		if !e.inspect(true) {
			t.Fatal("the NIC is not guarded while it accepts addresses that no visible link has")
		}
		inspection = min(inspection, time.Since(start))
	}
	t.Logf("Inspect took %s with %d addresses, and listing them %s", inspection, number, list)
	if inspection > most*list {
		t.Errorf("Inspect took %s with %d addresses, want at most %d times as long as listing them, which took %s",
			inspection, number, most, list)
	}
	remove()
}

// addAndRemoveAddresses adds thousands of addresses to the pod's link and removes them, more than the programs
// remember: first hundreds at a time, then all together. It then waits until the NIC is no longer guarded.
func (e *testEnv) addAndRemoveAddresses(p *pod) {
	e.t.Helper()
	isGuarded := func() bool {
		_, guarded, err := e.node.Inspect(e.nic.Index)
		if err != nil {
			e.t.Fatal(err)
		}
		return guarded
	}
	const total = 9000
	for _, atOnce := range []int{900, total} {
		for first := 0; first < total; first += atOnce {
			remove := p.addSecondaryAddresses(e.t, first, atOnce)
			if !isGuarded() {
				e.t.Fatal("the NIC is not guarded while it accepts addresses that no visible link has")
			}
			remove()
			isGuarded()
		}
	}
	for range 100 { // the time may have doubled
		if !isGuarded() {
			return
		}
		e.skip(time.Second)
	}
	e.t.Fatal("the NIC is still guarded long after the pod removed the addresses")
}
