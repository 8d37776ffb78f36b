// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package dhcp

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/packetsocket"
)

var broadcast = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// Conn sends and receives the messages of one link through a packet socket, so the link does not need an address. It is
// the raw connection of nclient4: packets begin with the IP header.
type Conn struct {
	file  *os.File
	raw   syscall.RawConn
	index int // of the link, in the namespace of the socket

	mu sync.Mutex
	// to is the MAC address that packets are sent to.
	to net.HardwareAddr
	// macs are the MAC addresses that answers came from, by server identifier.
	macs map[netip.Addr]net.HardwareAddr
}

var _ net.PacketConn = (*Conn)(nil)

// NewConn returns a connection for the link with an interface index in socket's namespace. socket is a packet socket of
// type SOCK_DGRAM without a protocol. NewConn duplicates the descriptor, which remains the caller's.
func NewConn(socket *os.File, index int) (*Conn, error) {
	fd, err := unix.FcntlInt(socket.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	c, err := newConn(fd, index)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return c, nil
}

func newConn(fd, index int) (*Conn, error) {
	if err := unix.SetNonblock(fd, true); err != nil { // before os.NewFile, which then supports deadlines
		return nil, os.NewSyscallError("set nonblocking", err)
	}
	if err := packetsocket.SetFilter(fd, answers); err != nil {
		return nil, err
	}
	if err := packetsocket.Bind(fd, unix.ETH_P_IP, index); err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "dhcp")
	raw, err := file.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &Conn{file: file, raw: raw, index: index, to: broadcast, macs: map[netip.Addr]net.HardwareAddr{}}, nil
}

// answers is a filter that accepts UDP datagrams to the port of DHCP clients.
var answers = []bpf.Instruction{
	bpf.LoadAbsolute{Off: 9, Size: 1}, // protocol
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_UDP, SkipTrue: 6},
	bpf.LoadAbsolute{Off: 6, Size: 2}, // fragment
	bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: 0x1fff, SkipTrue: 4},
	bpf.LoadMemShift{Off: 0}, // size of the header
	bpf.LoadIndirect{Off: 2, Size: 2},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: dhcpv4.ClientPort, SkipTrue: 1},
	bpf.RetConstant{Val: 1 << 16},
	bpf.RetConstant{Val: 0},
}

// sendTo makes the connection send packets to a MAC address, until the next call.
func (c *Conn) sendTo(mac net.HardwareAddr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.to = mac
}

// macOf returns the MAC address that a server's last answer came from, or nil. It belongs to the server or to a relay.
func (c *Conn) macOf(server netip.Addr) net.HardwareAddr {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.macs[server]
}

// ReadFrom implements net.PacketConn.
func (c *Conn) ReadFrom(packet []byte) (n int, from net.Addr, err error) {
	var sender unix.Sockaddr
	rawErr := c.raw.Read(func(fd uintptr) bool {
		n, sender, err = unix.Recvfrom(int(fd), packet, 0)
		return !errors.Is(err, unix.EAGAIN)
	})
	if rawErr != nil {
		return 0, nil, rawErr
	}
	if err != nil {
		return 0, nil, os.NewSyscallError("recvfrom", err)
	}
	if link, ok := sender.(*unix.SockaddrLinklayer); ok && link.Halen == 6 {
		c.remember(packet[:n], link.Addr[:6])
	}
	return n, c.LocalAddr(), nil
}

// remember records the MAC address that a server's answer came from. The filter has checked the headers.
func (c *Conn) remember(packet []byte, mac []byte) {
	const udpSize = 8
	header := int(packet[0]&0xf) * 4
	if len(packet) < header+udpSize {
		return
	}
	message, err := dhcpv4.FromBytes(packet[header+udpSize:])
	if err != nil {
		return
	}
	if server, ok := netip.AddrFromSlice(message.ServerIdentifier().To4()); ok {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.macs[server] = append(net.HardwareAddr(nil), mac...)
	}
}

// WriteTo implements net.PacketConn. It ignores the address; see sendTo.
func (c *Conn) WriteTo(packet []byte, _ net.Addr) (int, error) {
	c.mu.Lock()
	to := c.to
	c.mu.Unlock()
	return len(packet), c.send(packet, unix.ETH_P_IP, to)
}

func (c *Conn) send(packet []byte, protocol uint16, to net.HardwareAddr) (err error) {
	address := packetsocket.Address(protocol, c.index, to)
	rawErr := c.raw.Write(func(fd uintptr) bool {
		err = unix.Sendto(int(fd), packet, 0, address)
		return !errors.Is(err, unix.EAGAIN)
	})
	return errors.Join(rawErr, os.NewSyscallError("sendto", err))
}

// Announce sends gratuitous ARP (RFC 5227, section 3) for an address of the link. Hosts on the network then replace the
// MAC address that the address had in another pod.
func (c *Conn) Announce(mac net.HardwareAddr, address netip.Addr) error {
	ip := address.As4()
	packet := []byte{0, 1, 8, 0, 6, 4, 0, 1} // Ethernet, IPv4, sizes of the addresses, request
	packet = append(append(packet, mac...), ip[:]...)
	packet = append(append(packet, make([]byte, 6)...), ip[:]...)
	return c.send(packet, unix.ETH_P_ARP, broadcast)
}

// Close implements net.PacketConn.
func (c *Conn) Close() error { return c.file.Close() }

// LocalAddr implements net.PacketConn. The address does not mean anything.
func (c *Conn) LocalAddr() net.Addr { return &net.UDPAddr{Port: dhcpv4.ClientPort} }

// SetDeadline implements net.PacketConn.
func (c *Conn) SetDeadline(t time.Time) error { return c.file.SetDeadline(t) }

// SetReadDeadline implements net.PacketConn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.file.SetReadDeadline(t) }

// SetWriteDeadline implements net.PacketConn.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.file.SetWriteDeadline(t) }
