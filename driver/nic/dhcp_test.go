// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/netdev/dhcp"
)

func testLease() dhcp.Lease {
	return dhcp.Lease{
		Times:   dhcp.Times{Renew: time.Minute, Rebind: 90 * time.Second, Expires: 2 * time.Minute},
		Address: netip.MustParsePrefix("10.20.8.1/16"), Server: netip.MustParseAddr("10.20.0.1"),
		ServerMAC: net.HardwareAddr{2, 0, 0, 0, 0, 9},
		Routes: []dhcp.Route{
			{Destination: netip.MustParsePrefix("10.30.0.0/16"), Gateway: netip.MustParseAddr("10.20.0.1")},
			{Destination: netip.MustParsePrefix("10.31.0.0/16")},
		},
		Nameservers: []netip.Addr{netip.MustParseAddr("10.20.0.53")},
	}
}

var comparable = []cmp.Option{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmpopts.EquateEmpty(),
}

// The record of a lease contains everything that the next plugin needs.
func TestSetLease_recordsLease(t *testing.T) {
	for name, lease := range map[string]dhcp.Lease{
		"with an end": testLease(),
		"without end": func() dhcp.Lease {
			l := testLease()
			l.Times = dhcp.Times{Renew: dhcp.Never, Rebind: dhcp.Never, Expires: dhcp.Never}
			return l
		}(),
	} {
		link := attach.Link{Sources: []string{"fd00::5"}, DHCP: &attach.Lease{ClientID: []byte{1}}}
		setLease(&link, lease)
		if diff := cmp.Diff(lease, leaseOf(link), comparable...); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff([]string{"fd00::5", "10.20.8.1"}, link.Sources); diff != "" {
			t.Errorf("%s: addresses that the link may use (-want +got):\n%s", name, diff)
		}
	}
}

func TestSetLease_endsLease(t *testing.T) {
	link := attach.Link{Sources: []string{"fd00::5"}, DHCP: &attach.Lease{ClientID: []byte{1}, Hostname: "web-0"}}
	setLease(&link, testLease())
	for range 2 { // a failed attempt to get another one changes nothing
		setLease(&link, dhcp.Lease{})
		want := attach.Link{
			Sources: []string{"fd00::5"},
			DHCP:    &attach.Lease{ClientID: []byte{1}, Hostname: "web-0", Last: "10.20.8.1/16"},
		}
		if diff := cmp.Diff(want, link, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

func TestRefuseLease(t *testing.T) {
	for _, tc := range []struct {
		subnets []string
		want    string
	}{
		{nil, ""},
		{[]string{"10.20.0.0/16"}, ""},
		{[]string{"10.20.0.0/24"}, "DHCP server 10.20.0.1 (MAC address 02:00:00:00:00:09) leases 10.20.8.1/16: " +
			`network "a" allows addresses in [10.20.0.0/24]`},
		{[]string{"fd00::/64"}, "allows addresses in [fd00::/64]"},
	} {
		err := refuseLease(&config.Network{Name: "a", Allow: config.Allow{Subnets: tc.subnets}}, testLease())
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("subnets %v: got error %v, want %q", tc.subnets, err, tc.want)
		}
	}
}

// fakePools are the AddressPools of a cluster.
type fakePools struct {
	ipam.API
	pools []network.AddressPool
}

func (f fakePools) ListPools(context.Context, metav1.ListOptions) (*network.AddressPoolList, error) {
	return &network.AddressPoolList{Items: f.pools}, nil
}

// A pool may assign the address to another pod, also on another node.
func TestKind_refusePooled(t *testing.T) {
	pool := network.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: "office"},
		Spec: network.AddressPoolSpec{
			Network: "storage", Subnet: "10.20.0.0/16", Ranges: []string{"10.20.8.0/24"}, BlockSize: ptr.To(int32(16)),
		},
	}
	for _, tc := range []struct{ network, address, want string }{
		{"storage", "10.20.8.1", `an AddressPool of network "storage" has the address 10.20.8.1`},
		{"storage", "10.20.9.1", ""},
		{"other", "10.20.8.1", ""},
	} {
		k := newKind(t, Options{
			AddressPools: &ipam.Options{API: fakePools{pools: []network.AddressPool{pool}}, Node: "n1"},
		})
		err := k.refusePooled(t.Context(), tc.network, netip.MustParseAddr(tc.address))
		var inUse addressInUseError
		if errors.As(err, &inUse) != (tc.want != "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s on network %s: got error %v, want an addressInUseError with %q", tc.address, tc.network, err, tc.want)
		}
	}
	err := newKind(t, Options{}).refusePooled(t.Context(), "storage", netip.MustParseAddr("10.20.8.1"))
	if err != nil {
		t.Errorf("without AddressPools: got error %v", err)
	}
}

func TestKind_configureDHCP(t *testing.T) {
	opens := func(context.Context, attach.Record) (attach.Sockets, error) { return attach.Sockets{}, nil }
	ipv4 := []v1alpha1.IPFamily{v1alpha1.IPv4}
	for _, tc := range []struct {
		name    string
		network []v1alpha1.IPFamily
		claim   v1alpha1.NetworkAttachment
		closed  bool
		want    bool
		err     string
	}{
		{name: "the claim asks for it", claim: v1alpha1.NetworkAttachment{DHCP: ipv4}, want: true},
		{name: "neither asks for it"},
		{name: "the default of the network", network: ipv4, want: true},
		{name: "the claim declines", network: ipv4, claim: v1alpha1.NetworkAttachment{DHCP: []v1alpha1.IPFamily{}}},
		{name: "the claim has an address", network: ipv4,
			claim: v1alpha1.NetworkAttachment{Addresses: []string{"10.20.0.5/24"}}},
		{name: "the claim names a pool", network: ipv4, claim: v1alpha1.NetworkAttachment{AddressPools: []string{"office"}}},
		{name: "no opener", network: ipv4, closed: true, want: true, err: "set plugin.dhcp in the chart"},
		{name: "a kept address", network: ipv4, claim: v1alpha1.NetworkAttachment{KeepAddresses: ptr.To(true)}, want: true,
			err: "keepAddresses: Forbidden"},
	} {
		var o Options
		if !tc.closed {
			o.OpenSockets = opens
		}
		k := newKind(t, o)
		err := k.configureDHCP(t.Context(), "default", &config.Network{Name: "a", DHCP: tc.network}, &tc.claim)
		if got := len(tc.claim.DHCP) > 0; got != tc.want {
			t.Errorf("%s: the link leases an address: %t, want %t", tc.name, got, tc.want)
		}
		if (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: got error %v, want %q", tc.name, err, tc.err)
		}
	}
}

func TestWithLease(t *testing.T) {
	d := &device{network: &config.Network{Name: "storage"}}
	leased := attach.Link{Name: "net1", DHCP: &attach.Lease{Address: "10.20.8.1/16"}}
	expired := attach.Link{Name: "net1", DHCP: &attach.Lease{Last: "10.20.8.1/16"}}
	for _, tc := range []struct {
		name   string
		link   attach.Link
		before driver.State
		want   string
	}{
		{"without DHCP", attach.Link{}, driver.State{Ready: true}, ""},
		{"leased", leased, driver.State{Ready: true}, ""},
		{"expired", expired, driver.State{Ready: true}, v1alpha1.ReasonLeaseExpired},
		{
			"expired, and the link is down", expired,
			driver.State{Reason: v1alpha1.ReasonLinkChanged}, v1alpha1.ReasonLinkChanged,
		},
	} {
		got := withLease(tc.before, tc.link, d, "")
		if got.Reason != tc.want || got.Ready != (tc.want == "") {
			t.Errorf("%s: got %+v, want the reason %q", tc.name, got, tc.want)
		}
	}
	message := withLease(driver.State{Ready: true}, expired, d, "no server answered").Message
	for _, part := range []string{"net1", "10.20.8.1/16", `"storage"`, "no server answered"} {
		if !strings.Contains(message, part) {
			t.Errorf("the message does not name %s: %s", part, message)
		}
	}
}

// A plugin that cannot renew the leases of an earlier one says so before they end.
func TestKind_Warnings_leasesWithoutOpener(t *testing.T) {
	for _, tc := range []struct {
		name   string
		opens  bool
		leases leaseStates
		want   bool
	}{
		{name: "leases", leases: leaseStates{dhcp.Bound: 1}, want: true},
		{name: "no leases", leases: leaseStates{}},
		{name: "leases that it renews", opens: true, leases: leaseStates{dhcp.Bound: 1}},
	} {
		var o Options
		if tc.opens {
			o.OpenSockets = func(context.Context, attach.Record) (attach.Sockets, error) { return attach.Sockets{}, nil }
		}
		k := newKind(t, o)
		k.leases.Store(&tc.leases)
		warned := false
		for _, w := range k.Warnings() {
			warned = warned || w.Reason == v1alpha1.EventReasonLeasesNotRenewed
		}
		if warned != tc.want {
			t.Errorf("%s: warned: %t, want %t", tc.name, warned, tc.want)
		}
	}
}

func TestHostname(t *testing.T) {
	for pod, want := range map[string]string{
		"web-0":                        "web-0",
		strings.Repeat("a", 63):        strings.Repeat("a", 63),
		strings.Repeat("a", 64):        strings.Repeat("a", 63),
		strings.Repeat("a", 62) + "-b": strings.Repeat("a", 62),
	} {
		if got := hostname(pod); got != want {
			t.Errorf("pod %s: got %s, want %s", pod, got, want)
		}
	}
}
