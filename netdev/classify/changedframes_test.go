// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"bytes"
	"encoding/binary"
	"net"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// ringFrameSize is the size of a slot of a transmit ring, in bytes.
const ringFrameSize = 2048

// transmitRing is a packet socket that sends from memory that it shares with the kernel (PACKET_TX_RING).
type transmitRing struct {
	fd   int
	slot []byte // the only one: its header (struct tpacket2_hdr) and the frame
}

func newTransmitRing(t *testing.T, ns *nstest.Namespace, link string) *transmitRing {
	t.Helper()
	r := &transmitRing{}
	ns.Do(func() (err error) {
		index, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		if r.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.SetsockoptInt(r.fd, unix.SOL_PACKET, unix.PACKET_VERSION, unix.TPACKET_V2); err != nil {
			return err
		}
		request := unix.TpacketReq{Block_size: 4096, Block_nr: 1, Frame_size: ringFrameSize, Frame_nr: 2}
		if err := unix.SetsockoptTpacketReq(r.fd, unix.SOL_PACKET, unix.PACKET_TX_RING, &request); err != nil {
			return err
		}
		if r.slot, err = unix.Mmap(r.fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
			return err
		}
		return unix.Bind(r.fd, &unix.SockaddrLinklayer{Ifindex: index.Index})
	})
	t.Cleanup(func() {
		_ = unix.Munmap(r.slot)
		_ = unix.Close(r.fd)
	})
	return r
}

// frame returns the bytes of the frame in the ring.
func (r *transmitRing) frame() []byte { return r.slot[unix.SizeofTpacket2Hdr:ringFrameSize] }

// send sends a frame, and returns when it waits in a queue.
func (r *transmitRing) send(t *testing.T, frame []byte) {
	t.Helper()
	copy(r.frame(), frame)
	binary.NativeEndian.PutUint32(r.slot[4:], uint32(len(frame)))
	binary.NativeEndian.PutUint32(r.slot, unix.TP_STATUS_SEND_REQUEST)
	if err := unix.Sendto(r.fd, nil, unix.MSG_DONTWAIT, nil); err != nil {
		t.Fatal(err)
	}
	runtime.KeepAlive(r)
}

// A pod can change what a frame in its memory contains after the programs have checked it, while the frame waits in the
// queue of the share.
func TestAttack_frameThatChangesInQueue(t *testing.T) {
	attackerMAC, victimMAC := net.HardwareAddr{2, 0, 0, 0, 0, 1}, net.HardwareAddr{2, 0, 0, 0, 0, 2}
	for _, tc := range []struct {
		name      string
		frame     func(mac net.HardwareAddr, ip string) []byte
		keepsRest bool // whether the kernel copies the whole frame
	}{
		{"the source address of IPv4", func(_ net.HardwareAddr, ip string) []byte {
			return classify.Ether(attackerMAC, 0x0800, classify.IPv4(ip, 17, 0, classify.UDP(5000, 5001)))
		}, false},
		{"the address of an ARP answer", func(_ net.HardwareAddr, ip string) []byte {
			return classify.Ether(attackerMAC, 0x0806, classify.ARP(2, attackerMAC, ip, wireIP))
		}, false},
		{"the address of a DHCP client", func(mac net.HardwareAddr, _ string) []byte {
			return classify.Ether(attackerMAC, 0x0800, classify.IPv4("10.20.0.1", 17, 0, classify.DHCP(mac, "0.0.0.0")))
		}, false},
		{"an option of neighbor discovery", func(mac net.HardwareAddr, _ string) []byte {
			return classify.Ether(attackerMAC, 0x86dd, classify.IPv6("fd00:20::1", unix.IPPROTO_ICMPV6,
				classify.ND(136, "fd00:20::1", classify.Option(2, mac))))
		}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newTestEnv(t, enforced())
			attacker, victim := e.pod(0, 1, hardCap(mega), netdev.Private), e.pod(1, 2, hardCap(mega), netdev.Private)
			if !bytes.Equal(attacker.attachment.MAC, attackerMAC) || !bytes.Equal(victim.attachment.MAC, victimMAC) {
				t.Fatalf("the pods have the addresses %s and %s", attacker.attachment.MAC, victim.attachment.MAC)
			}
			wire := listen(t, e.wire, "wire")
			ring := newTransmitRing(t, attacker.Namespace, "net1")
			// The end looks like an option of neighbor discovery of 24 bytes. The programs do not read what it contains.
			end := func(number int) []byte { return append(append([]byte{200, 3}, marker(number)...), make([]byte, 7)...) }
			sent, changed := tc.frame(attackerMAC, attacker.ip), tc.frame(victimMAC, victim.ip)
			if _, err := attacker.Flood("net1", e.datagramOf(attacker), false, 50*time.Millisecond); err != nil {
				t.Fatal(err)
			}
			ring.send(t, append(bytes.Clone(sent), end(1)...))
			copy(ring.frame(), append(bytes.Clone(changed), end(2)...))
			arrived := wire.receive([]byte("attack 0000000"), 5*time.Second)
			if arrived == nil {
				t.Fatal("the frame did not arrive")
			}
			if !bytes.Equal(arrived[:len(sent)], sent) {
				t.Errorf("the frame arrived with\n%x, want\n%x", arrived[:len(sent)], sent)
			}
			if !tc.keepsRest && !bytes.Contains(arrived, marker(2)) {
				t.Error("the end of the frame has not changed: did the frame wait in a queue?")
			}
		})
	}
}
