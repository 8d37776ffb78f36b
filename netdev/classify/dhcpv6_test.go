// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// serverRange are the addresses that the DHCPv6 server of the test leases.
var serverRange = netip.MustParsePrefix("fd00:20::77:0/120")

// A DHCPv6 client of the pod, here ISC's dhclient, leases an address from a server on the network, here
// dnsmasq. The link may use the address if the policy of the NIC has the addresses of the server.
func TestIdentity_addressesOfDHCPv6Server(t *testing.T) {
	paths := programs(t, "dnsmasq", "dhclient")
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	dir := t.TempDir()
	e.wire.Do(func() error {
		return runUntilEnd(t, paths[0], "-k", "--conf-file=/dev/null", "--user=root", "--port=0", "--interface=wire",
			"--bind-interfaces", "--pid-file=", "--dhcp-range=fd00:20::77:1,fd00:20::77:ff,64,120",
			"--dhcp-leasefile="+filepath.Join(dir, "leases"), "--log-facility=-")
	})
	eventually.Eventually(t, 20*time.Second, "the kernel has checked the link-local address", p.hasLinkLocal)
	p.Do(func() error { // without a script, it leases the address, and does not configure it
		return runUntilEnd(t, paths[1], "-6", "-d", "-sf", "/bin/true", "-lf", filepath.Join(dir, "client"),
			"-pf", filepath.Join(dir, "client.pid"), "net1")
	})
	var leased netip.Addr
	eventually.Eventually(t, 20*time.Second, "the client has a lease", func() (err error) {
		leased, err = leasedIn(filepath.Join(dir, "client"))
		return err
	})
	p.configure(leased)
	if err := e.reachWire(p, leased); err == nil {
		t.Errorf("the link sends from the leased address %s, which the policy does not have", leased)
	}
	e.config.Policy.Addresses = []netip.Prefix{serverRange}
	e.manage()
	// The kernel of the pod first forgets that it has not found the wire.
	eventually.Eventually(t, 20*time.Second, "the link sends from the leased address "+leased.String(), func() error {
		return e.reachWire(p, leased)
	})
}

// programs returns the paths of programs. It skips the test if one is not installed; make
// prerequisites-dhcp installs them.
func programs(t *testing.T, names ...string) (paths []string) {
	t.Helper()
	for _, name := range names {
		path, err := exec.LookPath(name)
		if err != nil {
			path, err = exec.LookPath("/usr/sbin/" + name)
		}
		if err != nil {
			t.Skipf("%v: run `make prerequisites-dhcp`", err)
		}
		paths = append(paths, path)
	}
	return paths
}

// runUntilEnd starts a program in the current namespace, and ends it with the test.
func runUntilEnd(t *testing.T, path string, args ...string) error {
	command := exec.Command(path, args...)
	var output strings.Builder
	command.Stdout, command.Stderr = &output, &output
	if err := command.Start(); err != nil {
		return err
	}
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
		if t.Failed() {
			t.Logf("%s:\n%s", path, output.String())
		}
	})
	return nil
}

var leasedAddress = regexp.MustCompile(`iaaddr (\S+) \{`)

// leasedIn returns the address that a client has written to its file.
func leasedIn(file string) (netip.Addr, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return netip.Addr{}, err
	}
	found := leasedAddress.FindSubmatch(raw)
	if found == nil {
		return netip.Addr{}, fmt.Errorf("%s has no address: %s", file, raw)
	}
	return netip.ParseAddr(string(found[1]))
}

// hasLinkLocal returns an error unless the pod can bind sockets to the link-local address of its link.
func (p *pod) hasLinkLocal() (failed error) {
	p.Do(func() error {
		link, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		addresses, err := netlink.AddrList(link, netlink.FAMILY_V6)
		failed = fmt.Errorf("the link has the addresses %v", addresses)
		for _, a := range addresses {
			if a.IP.IsLinkLocalUnicast() && a.Flags&unix.IFA_F_TENTATIVE == 0 {
				failed = nil
			}
		}
		return err
	})
	return failed
}

// configure adds an address to the link of a pod, without asking the network for it.
func (p *pod) configure(address netip.Addr) {
	p.Do(func() error {
		link, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(link, &netlink.Addr{
			IPNet: &net.IPNet{IP: address.AsSlice(), Mask: net.CIDRMask(128, 128)}, Flags: unix.IFA_F_NODAD,
		})
	})
}

// reachWire connects a pod to the wire from an address.
func (e *testEnv) reachWire(p *pod, from netip.Addr) (failed error) {
	e.t.Helper()
	to := e.address("fd00:20::fe")
	e.wire.Do(func() error {
		listener, err := net.Listen("tcp", to)
		if err == nil {
			e.t.Cleanup(func() { _ = listener.Close() })
		}
		return err
	})
	p.Do(func() error {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice()}, Timeout: 3 * time.Second}
		conn, err := dialer.Dial("tcp", to)
		if failed = err; failed == nil {
			return conn.Close()
		}
		return nil
	})
	return failed
}
