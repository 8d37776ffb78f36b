// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// discard is the port of a service that ignores what it receives.
const discard = 9

// send sends a datagram through a link, to multicast addresses that are reserved
// for experiments (RFC 3692, RFC 4727). It needs no address, route, or
// capability. It tries IPv4 and IPv6, because a node may have only one of them,
// and returns an error if neither was sent.
func send(link int) error {
	err4 := sendIPv4(link)
	err6 := sendIPv6(link)
	if err4 == nil || err6 == nil {
		return nil
	}
	return errors.Join(fmt.Errorf("send over IPv4: %w", err4), fmt.Errorf("send over IPv6: %w", err6))
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
