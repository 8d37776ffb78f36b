// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package dhcp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"golang.org/x/sys/unix"
)

// Client identifies the client of a lease to servers.
type Client struct {
	// MAC is the address of the link.
	MAC net.HardwareAddr
	// ID is the client identifier (option 61; see ID). A server gives the same address to it.
	ID []byte
	// Hostname is the name that the server may enter into DNS (option 12).
	Hostname string
}

// Route is a route that the server names.
type Route struct {
	Destination netip.Prefix
	Gateway     netip.Addr
}

// Lease is an address that a server has leased, with its options.
type Lease struct {
	Times
	Address netip.Prefix
	// Server is the identifier of the server: one of its addresses. ServerMAC is the MAC address that its answers came
	// from: the server's or a relay's.
	Server    netip.Addr
	ServerMAC net.HardwareAddr
	// Routes are the classless static routes (option 121) except a default route.
	Routes      []Route
	Nameservers []netip.Addr
}

// ErrRefused means that the server refused a request (DHCPNAK): the client may no longer use its
// address.
var ErrRefused = errors.New("the DHCP server refused the address")

// errNoAnswer means that no server answered.
var errNoAnswer = errors.New("no DHCP server answered")

// firstTimeout is how long the client waits for the first answer; it doubles with each repetition
// (RFC 2131, section 4.1, which has 4 s for the first). A pod waits for its first lease.
const firstTimeout = time.Second

// client returns the client of nclient4 for an exchange that sends from source. The caller closes it,
// which closes conn.
func (c Client) client(conn *Conn, source netip.Addr) (*nclient4.Client, error) {
	from := &net.UDPAddr{Port: dhcpv4.ClientPort}
	if source.IsValid() {
		from.IP = source.AsSlice()
	}
	anyAddress := &net.UDPAddr{Port: dhcpv4.ClientPort}
	udp := udpConn{
		PacketConn: nclient4.NewBroadcastUDPConn(conn, anyAddress), writer: nclient4.NewBroadcastUDPConn(conn, from),
	}
	timeout := firstTimeout + spread(firstTimeout/4, rand.Float64()) //nolint:gosec // only spreads requests
	return nclient4.NewWithConn(udp, c.MAC, nclient4.WithTimeout(timeout), nclient4.WithRetry(-1))
}

// udpConn receives datagrams to any address, and sends them from one.
type udpConn struct {
	net.PacketConn
	writer net.PacketConn
}

// WriteTo implements net.PacketConn.
func (c udpConn) WriteTo(b []byte, to net.Addr) (int, error) { return c.writer.WriteTo(b, to) }

// requested are the options that the client asks for.
var requested = []dhcpv4.OptionCode{
	dhcpv4.OptionSubnetMask, dhcpv4.OptionClasslessStaticRoute, dhcpv4.OptionDomainNameServer,
	dhcpv4.OptionIPAddressLeaseTime, dhcpv4.OptionRenewTimeValue, dhcpv4.OptionRebindingTimeValue,
}

// options returns the options that all messages of the client contain.
func (c Client) options() []dhcpv4.Modifier {
	options := []dhcpv4.Modifier{dhcpv4.WithOption(dhcpv4.OptClientIdentifier(c.ID))}
	if c.Hostname != "" {
		options = append(options, dhcpv4.WithOption(dhcpv4.OptHostName(c.Hostname)))
	}
	return options
}

// Acquire leases an address, within the time of ctx. It closes conn.
func (c Client) Acquire(ctx context.Context, conn *Conn) (Lease, error) {
	conn.sendTo(broadcast)
	client, err := c.client(conn, netip.Addr{})
	if err != nil {
		return Lease{}, err
	}
	defer client.Close()
	// The link does not have an address that the server could send answers to.
	modifiers := append(c.options(), dhcpv4.WithBroadcast(true), dhcpv4.WithRequestedOptions(requested...))
	at := SinceBoot()
	answer, err := client.Request(ctx, modifiers...)
	if err != nil {
		return Lease{}, describe(err)
	}
	return newLease(at, answer.ACK, conn)
}

// Renew extends a lease, within the time of ctx. In the state Renewing, it asks the server that
// leased the address, and in the state Rebinding any server. The address of the lease stays the same: it
// ignores answers with another one. It closes conn.
func (c Client) Renew(ctx context.Context, conn *Conn, lease Lease, state State) (Lease, error) {
	to := &net.UDPAddr{IP: net.IPv4bcast, Port: dhcpv4.ServerPort}
	conn.sendTo(broadcast)
	if state == Renewing && len(lease.ServerMAC) > 0 {
		conn.sendTo(lease.ServerMAC)
		to.IP = lease.Server.AsSlice()
	}
	client, err := c.client(conn, lease.Address.Addr())
	if err != nil {
		return lease, err
	}
	defer client.Close()
	request, err := dhcpv4.New(append(c.options(),
		dhcpv4.WithHwAddr(c.MAC), dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest),
		dhcpv4.WithClientIP(lease.Address.Addr().AsSlice()), dhcpv4.WithRequestedOptions(requested...),
		dhcpv4.WithOption(dhcpv4.OptMaxMessageSize(nclient4.MaxMessageSize)))...)
	if err != nil {
		return lease, err
	}
	at := SinceBoot()
	isAnswer := func(m *dhcpv4.DHCPv4) bool { return answersRenewal(m, lease, state) }
	answer, err := client.SendAndRead(ctx, to, request, isAnswer)
	if err != nil {
		return lease, describe(err)
	}
	if answer.MessageType() == dhcpv4.MessageTypeNak {
		return lease, fmt.Errorf("%w %s: %q", ErrRefused, lease.Address.Addr(), answer.Message())
	}
	renewed, err := newLease(at, answer, conn)
	if err == nil && len(renewed.ServerMAC) == 0 {
		renewed.ServerMAC = lease.ServerMAC
	}
	return renewed, err
}

// answersRenewal reports whether a message answers the client of a lease and extends the lease. Other messages come
// from a server, host, or pod that did not lease the address:
//   - A server does not confirm an address other than the leased one (RFC 2131, section 4.4.5).
//   - In the state Renewing, the client has asked one server, so no other server can refuse.
func answersRenewal(m *dhcpv4.DHCPv4, lease Lease, state State) bool {
	switch m.MessageType() {
	case dhcpv4.MessageTypeAck:
		return m.YourIPAddr.Equal(lease.Address.Addr().AsSlice())
	case dhcpv4.MessageTypeNak:
		return state != Renewing || m.ServerIdentifier().Equal(lease.Server.AsSlice())
	default:
		return false
	}
}

// describe translates the errors of nclient4.
func describe(err error) error {
	var refused *nclient4.ErrNak
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nclient4.ErrNoResponse):
		return errNoAnswer
	case errors.As(err, &refused):
		return fmt.Errorf("%w %s: %q", ErrRefused, refused.Offer.YourIPAddr, refused.Nak.Message())
	}
	return err
}

// newLease returns the lease that a server confirmed (DHCPACK) after a request at a time.
func newLease(at time.Duration, ack *dhcpv4.DHCPv4, conn *Conn) (l Lease, err error) {
	address, ok := netip.AddrFromSlice(ack.YourIPAddr.To4())
	if !ok || address.IsUnspecified() || address.IsMulticast() || address.IsLoopback() || address.IsLinkLocalUnicast() {
		return l, fmt.Errorf("the DHCP server leases the address %s, which a link cannot have", ack.YourIPAddr)
	}
	bits, size := ack.SubnetMask().Size()
	if size != 32 || bits == 0 {
		return l, fmt.Errorf("the DHCP server leases %s with the subnet mask %s: check its subnet-mask",
			address, ack.SubnetMask())
	}
	l.Address = netip.PrefixFrom(address, bits)
	if l.Server, ok = netip.AddrFromSlice(ack.ServerIdentifier().To4()); !ok {
		return l, fmt.Errorf("the DHCP server that leases %s sent no server identifier (option 54)", address)
	}
	l.ServerMAC = conn.macOf(l.Server)
	if l.Times, err = newTimes(at, ack.IPAddressLeaseTime(0), ack.IPAddressRenewalTime(0),
		ack.IPAddressRebindingTime(0)); err != nil {
		return l, fmt.Errorf("address %s of DHCP server %s: %w", address, l.Server, err)
	}
	for _, r := range ack.ClasslessStaticRoute() {
		if route, ok := newRoute(r); ok {
			l.Routes = append(l.Routes, route)
		}
	}
	for _, ip := range ack.DNS() {
		if server, ok := netip.AddrFromSlice(ip.To4()); ok {
			l.Nameservers = append(l.Nameservers, server)
		}
	}
	return l, nil
}

// newRoute returns a route of the server. ok is false for a default route: a pod's default route belongs to the cluster
// network.
func newRoute(r *dhcpv4.Route) (route Route, ok bool) {
	destination, ok := netip.AddrFromSlice(r.Dest.IP.To4())
	bits, _ := r.Dest.Mask.Size()
	if !ok || bits == 0 {
		return route, false
	}
	gateway, ok := netip.AddrFromSlice(r.Router.To4())
	if !ok {
		return route, false
	}
	if gateway.IsUnspecified() { // the destination is on the link
		gateway = netip.Addr{}
	}
	return Route{Destination: netip.PrefixFrom(destination, bits).Masked(), Gateway: gateway}, true
}

// Decline reports to the server that another host has the address (DHCPDECLINE), so it leases another one. Decline
// closes conn.
func (c Client) Decline(conn *Conn, lease Lease) error {
	defer conn.Close()
	conn.sendTo(broadcast)
	message, err := dhcpv4.New(dhcpv4.WithHwAddr(c.MAC), dhcpv4.WithMessageType(dhcpv4.MessageTypeDecline),
		dhcpv4.WithOption(dhcpv4.OptClientIdentifier(c.ID)),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(lease.Server.AsSlice())),
		dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(lease.Address.Addr().AsSlice())))
	if err != nil {
		return err
	}
	udp := nclient4.NewBroadcastUDPConn(conn, &net.UDPAddr{Port: dhcpv4.ClientPort})
	_, err = udp.WriteTo(message.ToBytes(), &net.UDPAddr{IP: net.IPv4bcast, Port: dhcpv4.ServerPort})
	return err
}

// Release returns a lease to the server (DHCPRELEASE). Because the link and its namespace may no
// longer exist, it sends the message from the NIC with the interface index nic in this process's
// namespace, with the MAC address of the NIC. Servers do not answer the message.
func (c Client) Release(nic int, lease Lease) error {
	to := lease.ServerMAC
	if len(to) == 0 {
		to = broadcast
	}
	message, err := dhcpv4.New(dhcpv4.WithHwAddr(c.MAC), dhcpv4.WithMessageType(dhcpv4.MessageTypeRelease),
		dhcpv4.WithClientIP(lease.Address.Addr().AsSlice()),
		dhcpv4.WithOption(dhcpv4.OptClientIdentifier(c.ID)),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(lease.Server.AsSlice())))
	if err != nil {
		return err
	}
	socket, err := openSocket()
	if err != nil {
		return err
	}
	defer socket.Close()
	conn, err := NewConn(socket, nic)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.sendTo(to)
	udp := nclient4.NewBroadcastUDPConn(conn, &net.UDPAddr{IP: lease.Address.Addr().AsSlice(), Port: dhcpv4.ClientPort})
	_, err = udp.WriteTo(message.ToBytes(), &net.UDPAddr{IP: lease.Server.AsSlice(), Port: dhcpv4.ServerPort})
	return err
}

// openSocket opens a socket for NewConn in this thread's namespace.
func openSocket() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("open a packet socket: %w: does the plugin have CAP_NET_RAW?", err)
	}
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	return os.NewFile(uintptr(fd), "packet"), nil
}
