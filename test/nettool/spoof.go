// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"
)

// spoof sends 10 UDP datagrams through an interface from an address that the interface may not have, as a pod with
// CAP_NET_RAW can. It succeeds even if the kernel drops them afterwards.
func spoof(args []string) error {
	if len(args) != 3 {
		return errUsage
	}
	source, err := netip.ParseAddr(args[1])
	if err != nil {
		return err
	}
	destination, err := netip.ParseAddr(args[2])
	if err != nil {
		return err
	}
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, syscall.IPPROTO_RAW)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer syscall.Close(fd)
	if err := syscall.SetsockoptString(fd, syscall.SOL_SOCKET, syscall.SO_BINDTODEVICE, args[0]); err != nil {
		return os.NewSyscallError("bind to "+args[0], err)
	}
	packet := datagram(source.As4(), destination.As4())
	for range 10 {
		err := syscall.Sendto(fd, packet, 0, &syscall.SockaddrInet4{Addr: destination.As4()})
		if err != nil && !errors.Is(err, syscall.ENOBUFS) { // what sendto returns when the frame is dropped
			return fmt.Errorf("send from %s to %s: %w", source, destination, err)
		}
	}
	return nil
}

// datagram returns an IPv4 packet with an empty UDP datagram. The kernel fills in the
// length and the checksum of the IPv4 header (raw(7)).
func datagram(source, destination [4]byte) []byte {
	const ttl, udp = 64, 17
	packet := []byte{0x45, 0, 0, 0, 0, 0, 0, 0, ttl, udp, 0, 0}
	packet = append(append(packet, source[:]...), destination[:]...)
	packet = binary.BigEndian.AppendUint16(packet, 9) // ports: discard
	packet = binary.BigEndian.AppendUint16(packet, 9)
	packet = binary.BigEndian.AppendUint16(packet, 8) // length
	return binary.BigEndian.AppendUint16(packet, 0)   // no checksum
}
