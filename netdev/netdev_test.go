// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

func TestMain(m *testing.M) { nstest.Main(m, nstest.User) }

// newNode returns a Node that manages nics without enforcement.
func newNode(t testing.TB, nics ...netdev.NIC) *netdev.Node {
	t.Helper()
	node, err := netdev.NewNode(netdev.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = node.Close() })
	for _, n := range nics {
		if _, err := node.Manage(netdev.NICConfig{Name: n.Name, Index: n.Index, MAC: n.MAC}); err != nil {
			t.Fatal(err)
		}
	}
	return node
}

func attach(t testing.TB, node *netdev.Node, pod *nstest.Namespace, spec netdev.LinkSpec) netdev.Attachment {
	t.Helper()
	a, err := node.Attach(pod.Pod(), spec)
	if err != nil {
		t.Fatalf("Attach: %v", err)
	}
	return a
}

func read(t testing.TB, node *netdev.Node, a netdev.Attachment) netdev.LinkState {
	t.Helper()
	state, err := node.ReadAndBlock(a)
	if err != nil {
		t.Fatalf("Read: %v", err)
	}
	return state
}

func prefixes(texts ...string) (p []netip.Prefix) {
	for _, text := range texts {
		p = append(p, netip.MustParsePrefix(text))
	}
	return p
}

func mac(n byte) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, n} }

func TestActiveFeatures(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	features, err := netdev.ActiveFeatures(nic.Index)
	if err != nil {
		t.Fatal(err)
	}
	if !features["tx-checksum-ip-generic"] || features["l2-fwd-offload"] {
		t.Errorf("active features of a veth: %v; want tx-checksum-ip-generic, not l2-fwd-offload", features)
	}
	if _, err := netdev.ActiveFeatures(nic.Index + 1000); !errors.Is(err, unix.ENODEV) {
		t.Errorf("features of a link that does not exist: error %v, want ENODEV", err)
	}
}

func TestMAC(t *testing.T) {
	base := netdev.MAC("claim", "device", "share", "pod", 1)
	if base[0] != 0x02 || len(base) != 6 {
		t.Errorf("MAC returned %s, want a locally administered unicast address", base)
	}
	if again := netdev.MAC("claim", "device", "share", "pod", 1); again.String() != base.String() {
		t.Errorf("MAC returned %s and then %s for the same arguments", base, again)
	}
	for _, other := range []net.HardwareAddr{
		netdev.MAC("claimd", "evice", "share", "pod", 1),
		netdev.MAC("claim", "device", "share", "pod", 2),
		netdev.MAC("claim", "device", "", "sharepod", 1),
	} {
		if other.String() == base.String() {
			t.Errorf("MAC returned %s for different arguments", base)
		}
	}
}

// The driver cannot recreate a link that a running pod has lost, because the
// kernel does not permit this request. See docs/dev/limits.md.
func TestKernel_doesNotSetAddressesByNamespaceID(t *testing.T) {
	nic, _ := nstest.NIC(t, "nic0", 1500)
	node, pod := newNode(t, nic), nstest.New(t)
	a := attach(t, node, pod, netdev.LinkSpec{Parent: nic.Index, MAC: mac(1), Mode: netdev.Private, Name: "data0"})
	conn, err := rtnl.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	refused := netdev.AddressByNamespaceID(conn, a.NSID, a.Index, prefixes("10.20.0.5/16")[0])
	state := read(t, node, a)
	t.Logf("RTM_NEWADDR with IFA_TARGET_NETNSID %d and index %d returned %v; the link has addresses %v",
		a.NSID, a.Index, refused, state.Addresses)
	if len(state.Addresses) > 0 {
		t.Error("this kernel sets addresses by namespace ID: the driver could recreate links that pods have lost")
	}
}
