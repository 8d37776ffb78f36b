// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package dad_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/dad"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

func TestMain(m *testing.M) { nstest.Main(m, nstest.User) }

// wait is how long the tests wait for answers. Hosts in namespaces answer immediately.
const wait = 2 * time.Second

// target returns a target with the MAC address of a link that does not exist.
func target(address string) dad.Target {
	return dad.Target{Address: netip.MustParseAddr(address), MAC: net.HardwareAddr{2, 0, 0, 0, 0, 9}}
}

func TestDetect(t *testing.T) {
	found, wire := nstest.NIC(t, "nic0", 1500, "10.0.0.1/24", "fd00::1/64")
	nic := dad.NIC{Index: found.Index, MAC: found.MAC}
	other := wire.Interface("wire").HardwareAddr
	t.Run("finds the host that has an address", func(t *testing.T) {
		// IPv6 starts some time after the link is up.
		eventually.Eventually(t, 30*time.Second, "both addresses have the holder "+other.String(), func() error {
			start := time.Now()
			got, err := dad.Detect(t.Context(), nic, []dad.Target{target("10.0.0.1"), target("fd00::1")}, wait)
			if err != nil {
				return err
			}
			for _, address := range []string{"10.0.0.1", "fd00::1"} {
				if mac := got[netip.MustParseAddr(address)]; !bytes.Equal(mac, other) {
					return fmt.Errorf("holder of %s: got %s", address, mac)
				}
			}
			if d := time.Since(start); d >= wait {
				t.Errorf("Detect returned after %s although all addresses had answers, want less than %s", d, wait)
			}
			return nil
		})
	})
	t.Run("finds only addresses that a host has", func(t *testing.T) {
		targets := []dad.Target{target("10.0.0.1"), target("10.0.0.2"), target("fd00::1"), target("fd00::2")}
		got, err := dad.Detect(t.Context(), nic, targets, 300*time.Millisecond)
		if err != nil || len(got) != 2 {
			t.Errorf("got holders %v and error %v, want those of 10.0.0.1 and fd00::1", got, err)
		}
	})
	t.Run("ignores the link that has the address", func(t *testing.T) {
		targets := []dad.Target{
			{Address: netip.MustParseAddr("10.0.0.1"), MAC: other}, {Address: netip.MustParseAddr("fd00::1"), MAC: other},
		}
		got, err := dad.Detect(t.Context(), nic, targets, 300*time.Millisecond)
		if err != nil || len(got) != 0 {
			t.Errorf("got holders %v and error %v, want none", got, err)
		}
	})
	t.Run("teaches no host an address", func(t *testing.T) {
		if _, err := dad.Detect(t.Context(), nic, []dad.Target{target("10.0.0.1")}, wait); err != nil {
			t.Fatal(err)
		}
		wire.Do(func() error {
			entries, err := netlink.NeighList(wire.Interface("wire").Index, netlink.FAMILY_V4)
			for _, e := range entries {
				t.Errorf("the other host learned the neighbor %s", e.String())
			}
			return err
		})
	})
	t.Run("ends with its context", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := dad.Detect(ctx, nic, []dad.Target{target("10.0.0.2")}, time.Hour)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got error %v, want %v", err, context.DeadlineExceeded)
		}
	})
	t.Run("names the missing capability", func(t *testing.T) {
		nstest.WithoutCapabilities(t, func() error {
			_, err := dad.Detect(t.Context(), nic, []dad.Target{target("10.0.0.1")}, wait)
			if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "CAP_NET_RAW") {
				t.Errorf("got error %v, want %v with CAP_NET_RAW", err, unix.EPERM)
			}
			return nil
		}, unix.CAP_NET_RAW)
	})
}

// Two hosts that are about to get the same address find each other by their probes.
func TestDetect_otherProbe(t *testing.T) {
	found, wire := nstest.NIC(t, "nic0", 1500)
	nic := dad.NIC{Index: found.Index, MAC: found.MAC}
	far := wire.Interface("wire")
	targets := []dad.Target{target("10.0.0.7"), target("fd00::7")}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		wire.Do(func() error {
			for ctx.Err() == nil {
				_, err := dad.Detect(ctx, dad.NIC{Index: far.Index, MAC: far.HardwareAddr}, targets, 20*time.Millisecond)
				if err != nil && ctx.Err() == nil {
					return err
				}
			}
			return nil
		})
	}()
	got, err := dad.Detect(t.Context(), nic, targets, 10*time.Second)
	cancel()
	<-done
	if err != nil || len(got) != len(targets) {
		t.Errorf("got holders %v and error %v, want %s for both addresses", got, err, far.HardwareAddr)
	}
}
