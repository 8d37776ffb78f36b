// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trial_test

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/classify/trial"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/kernelcheck"
)

func TestMain(m *testing.M) { nstest.Main(m, nstest.Root) }

var errRefused = errors.New("refused")

func TestStrongest(t *testing.T) {
	for name, test := range map[string]struct {
		results []trial.Result
		want    classify.Key
		errs    []string
	}{
		"all keys pass": {
			results: []trial.Result{{Key: classify.KeyCookie}, {Key: classify.KeySocketCookie}, {Key: classify.KeyMAC}},
			want:    classify.KeyCookie,
		},
		"the strongest key fails": {
			results: []trial.Result{
				{Key: classify.KeyCookie, Err: errRefused}, {Key: classify.KeySocketCookie}, {Key: classify.KeyMAC},
			},
			want: classify.KeySocketCookie,
		},
		"a key in the middle fails": {
			results: []trial.Result{
				{Key: classify.KeyCookie}, {Key: classify.KeySocketCookie, Err: errRefused}, {Key: classify.KeyMAC},
			},
			want: classify.KeyCookie,
		},
		"only the weakest key passes": {
			results: []trial.Result{
				{Key: classify.KeyCookie, Err: errRefused}, {Key: classify.KeySocketCookie, Err: errRefused},
				{Key: classify.KeyMAC},
			},
			want: classify.KeyMAC,
		},
		"no key passes": {
			results: []trial.Result{
				{Key: classify.KeyCookie, Err: errRefused}, {Key: classify.KeyMAC, Err: errRefused},
			},
			errs: []string{"key NetnsCookie: refused", "key MAC: refused"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := trial.Strongest(test.results)
			if got.Key != test.want || (err == nil) != (test.errs == nil) {
				t.Errorf("Strongest returned %q and error %v, want %q", got.Key, err, test.want)
			}
			for _, want := range test.errs {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %v lacks %q", err, want)
				}
			}
		})
	}
}

// The address alone works on every kernel, so its trial must pass on every node that can load programs, however the
// network is configured.
func TestRun_keyMACPassesWithAnyNetworkConfiguration(t *testing.T) {
	for name, sysctls := range map[string]map[string]string{
		"default":             nil,
		"IPv6 disabled":       {"net/ipv6/conf/all/disable_ipv6": "1", "net/ipv6/conf/default/disable_ipv6": "1"},
		"strict reverse path": {"net/ipv4/conf/all/rp_filter": "1", "net/ipv4/conf/default/rp_filter": "1"},
		"no multicast loop or ARP": {
			"net/ipv4/conf/all/arp_ignore": "8", "net/ipv4/conf/default/arp_ignore": "8",
		},
	} {
		t.Run(name, func(t *testing.T) {
			nstest.New(t).Do(func() error {
				for path, value := range sysctls {
					if err := nstest.SetSysctl(path, value); err != nil {
						return err
					}
				}
				expectPassed(t, classify.KeyMAC)
				return nil
			})
		})
	}
}

// The lab knows what its kernels permit.
func TestRun_passesExpectedChecks(t *testing.T) {
	expected := kernelcheck.Expected()
	if len(expected) == 0 {
		t.Skipf("%s is not set: only the lab sets it", kernelcheck.Variable)
	}
	var results []trial.Result
	nstest.New(t).Do(func() (err error) {
		results, err = trial.Run(t.TempDir(), nil, classify.Keys()...)
		return err
	})
	best, err := trial.Strongest(results)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]error{
		kernelcheck.ForwardedByRoute: best.Routes, kernelcheck.ARPSender: best.ARP, kernelcheck.TCX: best.TCX,
	}
	for _, r := range results {
		got[string(r.Key)] = r.Err
	}
	for _, check := range expected {
		if check == kernelcheck.SenderLists {
			continue // known when the programs are loaded, as TestAttack_listedSenders does
		}
		if err, known := got[check]; err != nil || !known {
			t.Errorf("check %s, known: %t: got %v, want it to pass", check, known, err)
		}
	}
}

// The plugin does not have CAP_SYS_ADMIN.
func TestRun_tracesARPWithoutAdmin(t *testing.T) {
	try := func() error {
		results, err := trial.Run(t.TempDir(), nil, classify.Keys()...)
		if err != nil {
			return err
		}
		best, err := trial.Strongest(results)
		return errors.Join(err, best.ARP)
	}
	var asRoot error
	nstest.New(t).Do(func() error {
		asRoot = try()
		return nil
	})
	if asRoot != nil {
		kernelcheck.Skip(t, kernelcheck.ARPSender, asRoot)
	}
	nstest.WithoutCapabilities(t, try, unix.CAP_SYS_ADMIN)
}

// Without CAP_PERFMON, the kernel does not let a program read its memory.
func TestRun_withoutPerfmon(t *testing.T) {
	nstest.New(t).Do(func() error {
		lock := t.TempDir()
		results, err := trial.Run(lock, nil, classify.Keys()...)
		if err != nil || len(results) != len(classify.Keys()) {
			return fmt.Errorf("Run returned %v and error %w, want a result for each key", results, err)
		}
		t.Logf("this node: %v", results)
		return nil
	})
	nstest.WithoutCapabilities(t, func() error {
		results, err := trial.Run(t.TempDir(), nil, classify.KeySocketCookie, classify.KeyMAC)
		if err != nil || len(results) != 2 || results[0].Err == nil || results[1].Err != nil {
			t.Errorf("Run without CAP_PERFMON returned %v and error %v, want only key MAC to pass", results, err)
		}
		for _, r := range results {
			if r.Routes == nil {
				t.Errorf("Run without CAP_PERFMON recognized frames by route with key %s", r.Key)
			}
		}
		return nil
	}, unix.CAP_PERFMON, unix.CAP_SYS_ADMIN)
}

// A kernel that lets the program read the cookie from a socket lets it read the route.
func TestRun_recognizesRoutesIfKeySocketCookieWorks(t *testing.T) {
	nstest.New(t).Do(func() error {
		results, err := trial.Run(t.TempDir(), nil, classify.KeySocketCookie)
		if err != nil || len(results) != 1 {
			return fmt.Errorf("Run returned %v and error %w, want one result", results, err)
		}
		if r := results[0]; (r.Err == nil) != (r.Routes == nil) {
			t.Errorf("the key: error %v; routes: error %v; want both to pass or neither", r.Err, r.Routes)
		}
		return nil
	})
}

func TestRun_replacesLinksOfInterruptedTrial(t *testing.T) {
	nstest.New(t).Do(func() error {
		for _, link := range []netlink.Link{
			&netlink.Veth{LinkAttrs: attrs("dra-trial0"), PeerName: "dra-trial1"},
			&netlink.Ifb{LinkAttrs: attrs("ifb-dra-trial0")},
		} {
			if err := netlink.LinkAdd(link); err != nil {
				return err
			}
		}
		expectPassed(t, classify.KeyMAC)
		return nil
	})
}

func attrs(name string) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name = name
	return a
}

// expectPassed fails the test unless the trial of a key passes and does not leave a link.
func expectPassed(t *testing.T, key classify.Key) {
	t.Helper()
	results, err := trial.Run(t.TempDir(), nil, key)
	if err != nil || len(results) != 1 || results[0].Err != nil {
		t.Errorf("Run returned %v and error %v, want key %s to pass", results, err, key)
	}
	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if l.Name != "lo" {
			t.Errorf("link %s is left over from the trial", l.Name)
		}
	}
}

// Steer must return an error on a kernel without act_skbedit, and must not leave links on any kernel.
func TestSteer(t *testing.T) {
	for _, point := range classify.AttachPoints() {
		err := trial.Steer(t.TempDir(), nil, point)
		switch {
		case errors.Is(err, unix.ENOENT):
			t.Logf("%s: the kernel does not steer frames: %v", point, err)
		case errors.Is(err, ebpf.ErrNotSupported):
			t.Logf("%s: the kernel does not have the attach point: %v", point, err)
		case err != nil:
			t.Errorf("%s: %v", point, err)
		}
		links, err := netlink.LinkList()
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range links {
			if trial.IsLink(l.Attrs().Name) {
				t.Errorf("%s: the trial left the link %s", point, l.Attrs().Name)
			}
		}
	}
}
