// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"
)

// askInterval is the time between two requests for the same address.
const askInterval = 500 * time.Millisecond

// record sends ARP requests for each address of a subnet repeatedly, and prints each MAC address that
// uses one. It ends at a signal. It fails if a MAC address uses an address again after another one has
// used it: every link has its own MAC address, so two links used the address at the same time.
func record(args []string) error {
	if len(args) != 2 {
		return errUsage
	}
	link, err := net.InterfaceByName(args[0])
	if err != nil {
		return err
	}
	subnet, err := netip.ParsePrefix(args[1])
	if err != nil {
		return err
	}
	own, err := addressOf(link)
	if err != nil {
		return err
	}
	fd, err := openARP(link)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	users, next := addressUsers{}, time.Now()
	for ctx.Err() == nil {
		if time.Now().After(next) {
			next = time.Now().Add(askInterval)
			if err := askAll(fd, link, own, subnet); err != nil {
				return err
			}
		}
		frame := make([]byte, arpSize)
		n, _, err := syscall.Recvfrom(fd, frame, 0)
		if errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return os.NewSyscallError("recvfrom", err)
		}
		if n == arpSize {
			users.add(subnet, frame)
		}
	}
	return users.report()
}

// addressUsers are the MAC addresses that have used an address, in the order of their first frames.
type addressUsers map[netip.Addr][]string

// add evaluates the sender of an ARP frame. It appends one that is not the last user of its address,
// even if it has used the address before.
func (u addressUsers) add(subnet netip.Prefix, frame []byte) {
	mac, address := net.HardwareAddr(frame[8:14]).String(), netip.AddrFrom4([4]byte(frame[14:18]))
	if !subnet.Contains(address) || len(u[address]) > 0 && u[address][len(u[address])-1] == mac {
		return
	}
	u[address] = append(u[address], mac)
	fmt.Println(address, mac)
}

// report prints the number of links that have used addresses. It returns an error that names the addresses
// that several links used at the same time.
func (u addressUsers) report() (failed error) {
	links := 0
	for address, macs := range u {
		links += len(macs)
		distinct := slices.Clone(macs)
		slices.Sort(distinct)
		if len(slices.Compact(distinct)) < len(macs) {
			failed = errors.Join(failed, fmt.Errorf("address %s was used by several links at the same time: %v", address, macs))
		}
	}
	fmt.Printf("%d links used %d addresses\n", links, len(u))
	return failed
}

// arpSize is the size of an ARP frame for IPv4 on Ethernet, without the Ethernet header.
const arpSize = 28

// openARP opens a packet socket for the ARP frames of a link.
func openARP(link *net.Interface) (fd int, err error) {
	const protocol = syscall.ETH_P_ARP<<8&0xff00 | syscall.ETH_P_ARP>>8 // in network byte order
	fd, err = syscall.Socket(syscall.AF_PACKET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, protocol)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	wait := syscall.NsecToTimeval(int64(askInterval / 4))
	err = errors.Join(
		syscall.Bind(fd, &syscall.SockaddrLinklayer{Protocol: protocol, Ifindex: link.Index}),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &wait),
	)
	return fd, err
}

// askAll sends an ARP request for each address of a subnet.
func askAll(fd int, link *net.Interface, own netip.Addr, subnet netip.Prefix) error {
	to := &syscall.SockaddrLinklayer{
		Protocol: syscall.ETH_P_ARP<<8&0xff00 | syscall.ETH_P_ARP>>8, Ifindex: link.Index, Halen: 6,
		Addr: [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
	}
	for address := subnet.Masked().Addr(); subnet.Contains(address); address = address.Next() {
		frame := append([]byte{0, 1, 8, 0, 6, 4, 0, 1}, link.HardwareAddr...) // Ethernet, IPv4, sizes, request
		frame = append(frame, own.AsSlice()...)
		frame = append(append(frame, make([]byte, 6)...), address.AsSlice()...)
		if err := syscall.Sendto(fd, frame, 0, to); err != nil {
			return os.NewSyscallError("sendto", err)
		}
	}
	return nil
}

// addressOf returns the IPv4 address of a link.
func addressOf(link *net.Interface) (netip.Addr, error) {
	all, err := link.Addrs()
	if err != nil {
		return netip.Addr{}, err
	}
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() {
			return p.Addr(), nil
		}
	}
	return netip.Addr{}, fmt.Errorf("%s has no IPv4 address", link.Name)
}
