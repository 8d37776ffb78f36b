// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package dhcp_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev/dhcp"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m, nstest.User) }

const subnet = `
subnet 10.20.0.0 netmask 255.255.0.0 {
  range 10.20.8.1 10.20.8.3;
  option domain-name-servers 10.20.0.53;
  option rfc3442 24, 10, 30, 1, 10, 20, 0, 1, 0, 10, 20, 0, 1;
  option routers 10.20.0.1;
}
`

const settings = `
authoritative;
ping-check off;
option rfc3442 code 121 = array of integer 8;
`

// pod is a namespace with a link.
type pod struct {
	ns     *nstest.Namespace
	link   *net.Interface
	socket *os.File
	client dhcp.Client
}

// newPod creates a macvlan of a NIC in a namespace. The macvlan is up and does not have an address.
func newPod(t *testing.T, nic int, uid string) *pod {
	t.Helper()
	p := &pod{ns: nstest.New(t)}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex, attrs.Namespace = "net1", nic, netlink.NsFd(p.ns.File.Fd())
	if err := netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE}); err != nil {
		t.Fatal(err)
	}
	p.ns.Do(func() (err error) {
		if err = nstest.ConfigureLink("net1"); err != nil {
			return err
		}
		p.socket, err = dhcp.OpenSocket()
		return err
	})
	t.Cleanup(func() { p.socket.Close() })
	p.link = p.ns.Interface("net1")
	p.client = dhcp.Client{MAC: p.link.HardwareAddr, ID: dhcp.ID(uid, "claim", "share"), Hostname: "web-0"}
	return p
}

func (p *pod) conn(t *testing.T) *dhcp.Conn {
	t.Helper()
	conn, err := dhcp.NewConn(p.socket, p.link.Index)
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

func (p *pod) acquire(t *testing.T) (dhcp.Lease, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	return p.client.Acquire(ctx, p.conn(t))
}

func (p *pod) renew(t *testing.T, lease dhcp.Lease, state dhcp.State, wait time.Duration) (dhcp.Lease, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	return p.client.Renew(ctx, p.conn(t), lease, state)
}

// address gives the link an address, as the driver does: the server's answers are for it.
func (p *pod) address(t *testing.T, address netip.Prefix) {
	t.Helper()
	p.ns.Do(func() error { return nstest.ConfigureLink("net1", address.String()) })
}

func TestClient_withServer(t *testing.T) {
	nic, wire := nstest.NIC(t, "nic1", 1500, "10.20.0.1/16")
	// Without the threshold, dhcpd extends no lease in the first quarter of its time, and rounds the rest of it.
	server := nstest.RunDHCPServer(t, wire,
		settings+"default-lease-time 60; max-lease-time 60; dhcp-cache-threshold 0;"+subnet)
	p := newPod(t, nic.Index, "6ba7b810-9dad-11d1-80b4-00c04fd430c8")
	before := dhcp.SinceBoot()
	lease, err := p.acquire(t)
	if err != nil {
		t.Fatal(err)
	}
	if want := netip.MustParsePrefix("10.20.8.0/30"); !want.Contains(lease.Address.Addr()) || lease.Address.Bits() != 16 {
		t.Errorf("got address %s, want one of %s with 16 bits", lease.Address, want)
	}
	if got, want := lease.Server.String(), "10.20.0.1"; got != want {
		t.Errorf("got server %s, want %s", got, want)
	}
	if got, want := lease.ServerMAC.String(), wire.Interface("wire").HardwareAddr.String(); got != want {
		t.Errorf("answers came from %s, want %s", got, want)
	}
	if len(lease.Routes) != 1 || lease.Routes[0].Destination.String() != "10.30.1.0/24" {
		t.Errorf("got routes %v, want the one to 10.30.1.0/24 and no default route", lease.Routes)
	}
	if len(lease.Nameservers) != 1 || lease.Nameservers[0].String() != "10.20.0.53" {
		t.Errorf("got nameservers %v, want 10.20.0.53", lease.Nameservers)
	}
	if got := lease.Expires - before; got < 55*time.Second || got > 61*time.Second {
		t.Errorf("the lease ends after %s, want 60s", got)
	}

	p.address(t, lease.Address)
	for _, state := range []dhcp.State{dhcp.Renewing, dhcp.Rebinding} {
		renewed, err := p.renew(t, lease, state, 10*time.Second)
		if err != nil {
			t.Fatalf("state %d: %v", state, err)
		}
		if renewed.Address != lease.Address || renewed.Expires <= lease.Expires {
			t.Errorf("state %d: got %s until %s, want %s until later than %s", state,
				renewed.Address, renewed.Expires, lease.Address, lease.Expires)
		}
		if renewed.ServerMAC.String() != lease.ServerMAC.String() {
			t.Errorf("state %d: answers came from %s, want %s", state, renewed.ServerMAC, lease.ServerMAC)
		}
		lease = renewed
	}

	if err := p.client.Release(nic.Index, lease); err != nil {
		t.Fatal(err)
	}
	server.AwaitLog("DHCPRELEASE of " + lease.Address.Addr().String())
}

func TestClient_Acquire_keepsAddressOfPod(t *testing.T) {
	nic, wire := nstest.NIC(t, "nic1", 1500, "10.20.0.1/16")
	nstest.RunDHCPServer(t, wire, settings+"default-lease-time 60;"+subnet)
	const uid = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
	first, err := newPod(t, nic.Index, uid).acquire(t)
	if err != nil {
		t.Fatal(err)
	}
	again, err := newPod(t, nic.Index, uid).acquire(t) // its sandbox has another MAC address
	if err != nil {
		t.Fatal(err)
	}
	other, err := newPod(t, nic.Index, "00000000-0000-0000-0000-000000000001").acquire(t)
	if err != nil {
		t.Fatal(err)
	}
	if again.Address != first.Address || other.Address == first.Address {
		t.Errorf("got %s, then %s for the same pod and %s for another", first.Address, again.Address, other.Address)
	}
}

func TestClient_Renew_refused(t *testing.T) {
	nic, wire := nstest.NIC(t, "nic1", 1500, "10.20.0.1/16")
	nstest.RunDHCPServer(t, wire, settings+"default-lease-time 60;"+subnet)
	p := newPod(t, nic.Index, "6ba7b810-9dad-11d1-80b4-00c04fd430c8")
	lease, err := p.acquire(t)
	if err != nil {
		t.Fatal(err)
	}
	other := newPod(t, nic.Index, "00000000-0000-0000-0000-000000000001")
	taken, err := other.acquire(t)
	if err != nil {
		t.Fatal(err)
	}
	lease.Address = taken.Address
	p.address(t, lease.Address)
	if _, err := p.renew(t, lease, dhcp.Rebinding, 10*time.Second); !errors.Is(err, dhcp.ErrRefused) {
		t.Errorf("got error %v, want %v", err, dhcp.ErrRefused)
	}
}

// runForger answers each request that arrives at the wire with messages, which get its transaction ID.
func runForger(t *testing.T, wire *nstest.Namespace, messages []*dhcpv4.DHCPv4) {
	t.Helper()
	var conn net.PacketConn
	wire.Do(func() (err error) {
		conn, err = net.ListenPacket("udp4", ":67")
		return err
	})
	t.Cleanup(func() { conn.Close() })
	go func() {
		buffer := make([]byte, 1500)
		for {
			n, _, err := conn.ReadFrom(buffer)
			if err != nil {
				return // the test has ended
			}
			request, err := dhcpv4.FromBytes(buffer[:n])
			if err != nil {
				continue
			}
			for _, m := range messages {
				m.TransactionID, m.ClientHWAddr = request.TransactionID, request.ClientHWAddr
				_, _ = conn.WriteTo(m.ToBytes(), &net.UDPAddr{IP: request.ClientIPAddr, Port: dhcpv4.ClientPort})
			}
		}
	}()
}

// answer returns an answer of a server to a client that renews its lease. address is empty for a DHCPNAK.
func answer(t *testing.T, server, address string) *dhcpv4.DHCPv4 {
	t.Helper()
	kind := dhcpv4.MessageTypeNak
	if address != "" {
		kind = dhcpv4.MessageTypeAck
	}
	m, err := dhcpv4.New(dhcpv4.WithMessageType(kind), dhcpv4.WithYourIP(net.ParseIP(address)),
		dhcpv4.WithServerIP(net.ParseIP(server)), dhcpv4.WithNetmask(net.CIDRMask(16, 32)), dhcpv4.WithLeaseTime(60),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.ParseIP(server))))
	if err != nil {
		t.Fatal(err)
	}
	m.OpCode = dhcpv4.OpcodeBootReply
	return m
}

// A client that extends a lease does not get another address (RFC 2131, section 4.4.5), and asks one server
// only. Other answers must not end the lease.
func TestClient_Renew_ignoresForeignAnswers(t *testing.T) {
	const server, own, foreign = "10.20.0.1", "10.20.8.1", "10.20.0.9"
	for name, tc := range map[string]struct {
		state   dhcp.State
		answers []*dhcpv4.DHCPv4
		want    error
	}{
		"another address first": {dhcp.Renewing, []*dhcpv4.DHCPv4{answer(t, server, foreign), answer(t, server, own)}, nil},
		"another address only":  {dhcp.Renewing, []*dhcpv4.DHCPv4{answer(t, server, foreign)}, dhcp.ErrNoAnswer},
		"rebinding, another address first": {dhcp.Rebinding,
			[]*dhcpv4.DHCPv4{answer(t, foreign, foreign), answer(t, foreign, own)}, nil},
		"another server refuses": {dhcp.Renewing, []*dhcpv4.DHCPv4{answer(t, foreign, ""), answer(t, server, own)}, nil},
		"the server refuses":     {dhcp.Renewing, []*dhcpv4.DHCPv4{answer(t, server, "")}, dhcp.ErrRefused},
		"rebinding, another server refuses": {dhcp.Rebinding, []*dhcpv4.DHCPv4{answer(t, foreign, "")},
			dhcp.ErrRefused},
	} {
		t.Run(name, func(t *testing.T) {
			nic, wire := nstest.NIC(t, "nic1", 1500, server+"/16")
			runForger(t, wire, tc.answers)
			p := newPod(t, nic.Index, "6ba7b810-9dad-11d1-80b4-00c04fd430c8")
			lease := dhcp.Lease{
				Address: netip.MustParsePrefix(own + "/16"), Server: netip.MustParseAddr(server),
				ServerMAC: wire.Interface("wire").HardwareAddr,
			}
			p.address(t, lease.Address)
			patience := 10 * time.Second
			if errors.Is(tc.want, dhcp.ErrNoAnswer) {
				patience = 300 * time.Millisecond
			}
			renewed, err := p.renew(t, lease, tc.state, patience)
			if !errors.Is(err, tc.want) || err == nil && renewed.Address != lease.Address {
				t.Errorf("got %s and error %v, want %s and %v", renewed.Address, err, lease.Address, tc.want)
			}
		})
	}
}

func TestClient_withoutServer(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic1", 1500, "10.20.0.1/16")
	p := newPod(t, nic.Index, "6ba7b810-9dad-11d1-80b4-00c04fd430c8")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := p.client.Acquire(ctx, p.conn(t)); !errors.Is(err, dhcp.ErrNoAnswer) {
		t.Errorf("got error %v, want %v", err, dhcp.ErrNoAnswer)
	}
	lease := dhcp.Lease{Address: netip.MustParsePrefix("10.20.8.1/16"), Server: netip.MustParseAddr("10.20.0.1")}
	if _, err := p.renew(t, lease, dhcp.Renewing, 100*time.Millisecond); !errors.Is(err, dhcp.ErrNoAnswer) {
		t.Errorf("got error %v, want %v", err, dhcp.ErrNoAnswer)
	}
}

func TestClient_Acquire_refusesShortLease(t *testing.T) {
	nic, wire := nstest.NIC(t, "nic1", 1500, "10.20.0.1/16")
	nstest.RunDHCPServer(t, wire, settings+"default-lease-time 5; max-lease-time 5; min-lease-time 5;"+subnet)
	_, err := newPod(t, nic.Index, "6ba7b810-9dad-11d1-80b4-00c04fd430c8").acquire(t)
	if err == nil || !strings.Contains(err.Error(), "leases for 5s") {
		t.Errorf("got error %v, want one about the lease of 5s", err)
	}
}

func TestClient_Decline(t *testing.T) {
	nic, wire := nstest.NIC(t, "nic1", 1500, "10.20.0.1/16")
	server := nstest.RunDHCPServer(t, wire, settings+"default-lease-time 60;"+subnet)
	p := newPod(t, nic.Index, "6ba7b810-9dad-11d1-80b4-00c04fd430c8")
	first, err := p.acquire(t)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.client.Decline(p.conn(t), first); err != nil {
		t.Fatal(err)
	}
	server.AwaitLog("DHCPDECLINE of " + first.Address.Addr().String())
	second, err := p.acquire(t)
	if err != nil {
		t.Fatal(err)
	}
	if second.Address == first.Address {
		t.Errorf("got %s again after it was declined", first.Address)
	}
}
