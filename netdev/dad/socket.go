// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package dad

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/packetsocket"
)

// open returns a packet socket for the frames of the family on a NIC.
func (f family) open(nic NIC) (*os.File, error) {
	// Without a protocol, it does not receive anything until the filter is set.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("open a packet socket: %w: does the plugin have CAP_NET_RAW?", err)
	}
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := f.configure(fd, nic); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "packet"), nil
}

func (f family) configure(fd int, nic NIC) error {
	if !f.is4 {
		if err := packetsocket.SetFilter(fd, neighborDiscovery); err != nil {
			return err
		}
	}
	if f.group != nil {
		membership := unix.PacketMreq{Ifindex: int32(nic.Index), Type: unix.PACKET_MR_MULTICAST, Alen: uint16(len(f.group))}
		copy(membership.Address[:], f.group)
		if err := unix.SetsockoptPacketMreq(fd, unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &membership); err != nil {
			return os.NewSyscallError("join group", err)
		}
	}
	return packetsocket.Bind(fd, f.etherType, nic.Index)
}

// neighborDiscovery is a filter that accepts what parseNeighborDiscovery parses, and keeps the NIC's other IPv6 traffic
// from filling the socket.
var neighborDiscovery = []bpf.Instruction{
	bpf.LoadAbsolute{Off: ethernetSize + 6, Size: 1},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_ICMPV6, SkipTrue: 4},
	bpf.LoadAbsolute{Off: ethernetSize + ipv6Size, Size: 1},
	bpf.JumpIf{Cond: bpf.JumpEqual, Val: icmpv6Solicitation, SkipTrue: 1},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: icmpv6Advertisement, SkipTrue: 1},
	bpf.RetConstant{Val: maxFrame},
	bpf.RetConstant{Val: 0},
}
