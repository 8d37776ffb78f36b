// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// discard is the port of a service that ignores what it receives.
const discard = 9

// experimental is an EtherType for experiments (IEEE Std 802). The node ignores frames that have it.
const experimental = 0x88b5

// errFiltered is wrapped by the error of a trial if the node drops its datagrams before they reach a link.
var errFiltered = errors.New("a firewall of the node drops what the node sends through " + nicName + " and " +
	peerName + ": permit output through links whose names start with " + linkPrefix)

// send sends a frame through a link with a socket of this namespace: a datagram or, if the node does not send
// datagrams, a frame of a packet socket. Firewalls do not see packet sockets, which need CAP_NET_RAW. Both show whether
// the programs know the sender: the kernel gives a frame its sending socket, and every kind of socket has the namespace
// that the programs read at the same place.
func send(link int) error {
	datagramErr := sendDatagrams(link)
	if datagramErr == nil {
		return nil
	}
	if err := sendFrame(link); err != nil {
		return errors.Join(fmt.Errorf("send with a packet socket, which needs CAP_NET_RAW: %w", err), datagramErr)
	}
	return nil
}

// sendDatagrams sends datagrams through a link, to multicast addresses that are reserved for experiments (RFC 3692, RFC
// 4727). It does not need an address, route, or capability. It tries IPv4 and IPv6, because a node may have only one of
// them, and returns an error if neither was sent.
func sendDatagrams(link int) error {
	err4 := sendIPv4(link)
	err6 := sendIPv6(link)
	if err4 == nil || err6 == nil {
		return nil
	}
	err := errors.Join(fmt.Errorf("send over IPv4: %w", err4), fmt.Errorf("send over IPv6: %w", err6))
	if errors.Is(err, unix.EPERM) { // from netfilter, or a BPF program of a cgroup
		return fmt.Errorf("%w: %w", err, errFiltered)
	}
	return err
}

// sendFrame sends a frame to all receivers on a link.
func sendFrame(link int) error {
	to := &unix.SockaddrLinklayer{
		Ifindex: link, Protocol: networkOrder(experimental), Halen: 6, Addr: [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
	}
	return sendDatagram(unix.AF_PACKET, to, func(int) error { return nil })
}

// networkOrder returns a number as the kernel expects it in the address of a packet socket.
func networkOrder(n uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, n))
}

func sendIPv4(link int) error {
	to := &unix.SockaddrInet4{Port: discard, Addr: [4]byte{224, 0, 0, 254}}
	return sendDatagram(unix.AF_INET, to, func(fd int) error {
		return unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, unix.IP_MULTICAST_IF, &unix.IPMreqn{Ifindex: int32(link)})
	})
}

func sendIPv6(link int) error {
	to := &unix.SockaddrInet6{Port: discard, ZoneId: uint32(link), Addr: [16]byte{0: 0xff, 1: 0x02, 14: 0x01, 15: 0x14}}
	return sendDatagram(unix.AF_INET6, to, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_IF, link)
	})
}

// sendDatagram sends a datagram with a socket that configure has set up.
func sendDatagram(family int, to unix.Sockaddr, configure func(fd int) error) error {
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	if err := configure(fd); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	return os.NewSyscallError("sendto", unix.Sendto(fd, []byte("dra-shared trial"), 0, to))
}
