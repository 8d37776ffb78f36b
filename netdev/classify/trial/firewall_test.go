// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trial_test

import (
	"errors"
	"fmt"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/classify/trial"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// firewalls are the programs that dropOutput runs.
var firewalls = []string{"iptables", "ip6tables"}

// requireFirewall skips the test if the machine lacks one of firewalls.
func requireFirewall(t *testing.T) {
	t.Helper()
	for _, program := range firewalls {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%v: install the package iptables", err)
		}
	}
}

// dropOutput makes netfilter drop what sockets of the current namespace send, as the rules of CIS benchmarks
// and the policies of Calico for hosts do.
func dropOutput() error {
	for _, program := range firewalls {
		if out, err := exec.Command(program, "-w", "-P", "OUTPUT", "DROP").CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", program, err, out)
		}
	}
	return nil
}

// A firewall decides about IP packets of the node, and not about how the kernel identifies their sender.
func TestRun_behindFirewall(t *testing.T) {
	requireFirewall(t)
	var open, filtered []trial.Result
	for _, r := range []struct {
		results  *[]trial.Result
		firewall bool
	}{{&open, false}, {&filtered, true}} {
		nstest.New(t).Do(func() (err error) {
			if r.firewall {
				err = dropOutput()
			}
			if err == nil {
				*r.results, err = trial.Run(t.TempDir(), nil, classify.Keys()...)
			}
			return err
		})
	}
	for i, want := range open {
		got := filtered[i]
		if (got.Err == nil) != (want.Err == nil) || got.AttachPoint != want.AttachPoint {
			t.Errorf("key %s: got attach point %s and error %v, want the same as without a firewall: attach point %s and "+
				"error %v",
				got.Key, got.AttachPoint, got.Err, want.AttachPoint, want.Err)
		}
		// Only a packet of IP has a route.
		if want.Routes == nil && !errors.Is(got.Routes, trial.ErrFiltered) {
			t.Errorf("key %s, routes: got error %v, want one that wraps ErrFiltered", got.Key, got.Routes)
		}
		if (got.ARP == nil) != (want.ARP == nil) {
			t.Errorf("key %s, ARP: got error %v, want %v", got.Key, got.ARP, want.ARP)
		}
	}
}

// Steering to queues does not depend on a firewall either.
func TestSteer_behindFirewall(t *testing.T) {
	requireFirewall(t)
	steer := func() error { return trial.Steer(t.TempDir(), nil, classify.AttachClsact) }
	var unfiltered error
	nstest.New(t).Do(func() error {
		unfiltered = steer()
		return nil
	})
	if unfiltered != nil {
		t.Skipf("the kernel does not steer frames: %v", unfiltered)
	}
	nstest.New(t).Do(func() error { return errors.Join(dropOutput(), steer()) })
}

// Without CAP_NET_RAW, no frame passes a firewall. The trial must say so, and not wait for a frame of each
// key at each attach point: the plugin holds locks meanwhile, and has little time to start.
func TestRun_behindFirewallWithoutNetRaw(t *testing.T) {
	requireFirewall(t)
	start := time.Now()
	nstest.New(t).Do(func() error {
		results, err := trial.Run(t.TempDir(), nil, classify.Keys()...)
		if err == nil {
			_, err = trial.Strongest(results)
		}
		return err
	})
	open := time.Since(start)
	ns := nstest.New(t)
	ns.Do(func() error { return dropOutput() })
	nstest.WithoutCapabilities(t, func() error {
		if err := unix.Setns(int(ns.File.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		start := time.Now()
		results, err := trial.Run(t.TempDir(), nil, classify.Keys()...)
		if err != nil {
			return err
		}
		if took, limit := time.Since(start), 2*trial.Patience+3*open; took > limit {
			t.Errorf("Run took %s, want at most %s", took, limit)
		}
		_, err = trial.Strongest(results)
		if !errors.Is(err, trial.ErrFiltered) {
			t.Errorf("got error %v, want one that wraps ErrFiltered", err)
		}
		t.Log(err)
		return nil
	}, unix.CAP_NET_RAW)
}
