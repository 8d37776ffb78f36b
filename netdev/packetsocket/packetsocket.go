// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package packetsocket configures packet sockets (packet(7)).
//
// A socket without a protocol does not receive anything. SetFilter before Bind, which sets the protocol, keeps out
// packets that the filter does not accept.
package packetsocket

import (
	"os"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// SetFilter makes a socket receive only the packets that a program accepts.
func SetFilter(fd int, program []bpf.Instruction) error {
	raw, err := bpf.Assemble(program)
	if err != nil {
		return err
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	return os.NewSyscallError("set filter", unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}))
}

// Bind makes a socket receive the packets of a protocol (an Ethernet type, as unix.ETH_P_IP) on the
// link with an interface index in the socket's network namespace.
func Bind(fd int, protocol uint16, index int) error {
	return os.NewSyscallError("bind", unix.Bind(fd, Address(protocol, index, nil)))
}

// Address returns the address of the host with a MAC address on a link's network, or of the link itself if mac is nil.
func Address(protocol uint16, index int, mac []byte) *unix.SockaddrLinklayer {
	const swapped = 8 // bits; the kernel expects network byte order
	address := &unix.SockaddrLinklayer{
		Protocol: protocol<<swapped | protocol>>swapped, Ifindex: index, Halen: uint8(len(mac)),
	}
	copy(address.Addr[:], mac)
	return address
}
