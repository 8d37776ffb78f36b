// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/conformance/internal/probe"
)

// TestRequirements_musts fails if a must that the suite promises to test does not have a case.
func TestRequirements_musts(t *testing.T) {
	complete := []string{
		"DRA-NODE", "DRA-REGISTRATION", "DRA-PUBLISH", "DRA-SECURE",
		"ConsumableCapacity", "SharedDevices", "Status", "Health", "Metadata", "RollingUpdate", "AdminAccess",
		"WorkloadClaims", "DRA-NET", "DRA-ACCEL",
	}
	all, err := Requirements()
	if err != nil {
		t.Fatal(err)
	}
	musts := map[string]int{}
	for _, r := range all {
		if r.Level != Must || !slices.Contains(complete, r.Group()) {
			continue
		}
		musts[r.Group()]++
		if !r.Implemented() {
			t.Errorf("%s of %s is a must and has no case: %s", r.ID, r.Group(), r.Text)
		}
	}
	for _, group := range complete {
		if musts[group] == 0 {
			t.Errorf("%s has no must", group)
		}
	}
}

func TestReturned(t *testing.T) {
	nic := probe.Interface{Name: "nic0", MTU: 1500, Up: true, Address: "02:00:00:00:00:01",
		Addresses: []probe.Address{{Local: "192.0.2.1", Length: 24, Scope: "global"},
			{Local: "fe80::1", Length: 64, Scope: "link"}}}
	with := func(change func(*probe.Interface)) probe.Interface {
		changed := nic
		changed.Addresses = slices.Clone(nic.Addresses)
		change(&changed)
		return changed
	}
	for _, test := range []struct {
		name  string
		after []probe.Interface
		want  string // of the error; empty for none
	}{
		{"as before", []probe.Interface{nic}, ""},
		{"another interface too", []probe.Interface{{Name: "eth0"}, nic}, ""},
		{"another link-local address", []probe.Interface{
			with(func(i *probe.Interface) { i.Addresses[1].Local = "fe80::2" })}, ""},
		{"gone", nil, "no interface nic0"},
		{"down", []probe.Interface{with(func(i *probe.Interface) { i.Up = false })}, "up=false"},
		{"another MTU", []probe.Interface{with(func(i *probe.Interface) { i.MTU = 9000 })}, "mtu=9000"},
		{"address lost", []probe.Interface{with(func(i *probe.Interface) { i.Addresses = nil })}, "addresses=[]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := returned(probe.View{Interfaces: []probe.Interface{nic}}, probe.View{Interfaces: test.after})
			if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("got error %v, want %q", err, test.want)
			}
		})
	}
}

func TestConfigured_applied(t *testing.T) {
	nic := probe.Interface{Name: "net1", MTU: 1400, Addresses: []probe.Address{
		{Local: "192.0.2.1", Length: 24, Scope: "global"}, {Local: "fe80::1", Length: 64, Scope: "link"}}}
	full := Configured{Interface: "net1", MTU: 1400, Addresses: []string{"192.0.2.1/24"},
		Routes: []string{"10.1.0.0/16 via 192.0.2.254"}}
	with := func(change func(*Configured)) Configured {
		c := full
		change(&c)
		return c
	}
	for _, test := range []struct {
		name string
		c    Configured
		want string // of the error; empty for none
	}{
		{"all as configured", full, ""},
		{"only the name is configured", Configured{Interface: "net1"}, ""},
		{"another name", with(func(c *Configured) { c.Interface = "net2" }), "not net2"},
		{"another MTU", with(func(c *Configured) { c.MTU = 9000 }), "want 9000"},
		{"an address is missing", with(func(c *Configured) { c.Addresses = []string{"192.0.2.1/24", "fd00::1/64"} }),
			"want [192.0.2.1/24 fd00::1/64]"},
		{"an address more", with(func(c *Configured) { c.Addresses = []string{} }), "want []"},
		{"a route is missing", with(func(c *Configured) { c.Routes = []string{"10.2.0.0/16"} }), `without "10.2.0.0/16"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := test.c.applied([]probe.Interface{{Name: "eth0"}, nic}, []string{"10.0.0.0/8", full.Routes[0]})
			if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("got error %v, want %q", err, test.want)
			}
		})
	}
}

func TestOffered(t *testing.T) {
	slice := func(node string, devices ...string) (s resourceapi.ResourceSlice) {
		s.Spec.Pool.Name = "pool"
		if node != "" {
			s.Spec.NodeName = ptr.To(node)
		}
		for _, d := range devices {
			s.Spec.Devices = append(s.Spec.Devices, resourceapi.Device{Name: d})
		}
		return s
	}
	for _, test := range []struct {
		name string
		all  []resourceapi.ResourceSlice
		want bool
	}{
		{"on the node", []resourceapi.ResourceSlice{slice("a", "other"), slice("a", "nic0")}, true},
		{"on all nodes", []resourceapi.ResourceSlice{slice("", "nic0")}, true},
		{"on another node", []resourceapi.ResourceSlice{slice("b", "nic0")}, false},
		{"not published", []resourceapi.ResourceSlice{slice("a", "other")}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := offered(test.all, resourceapi.DeviceRequestAllocationResult{Pool: "pool", Device: "nic0"}, "a")
			if (err == nil) != test.want {
				t.Errorf("got error %v, want success %t", err, test.want)
			}
		})
	}
}

func TestGained(t *testing.T) {
	ordinary := probe.View{Devices: []probe.Node{{Path: "/dev/null", Number: "c:1:3"}}, Mounts: []string{"/etc/hosts"},
		Env: []string{"HOSTNAME=a", "PATH=/bin"}}
	one := ordinary
	one.Devices = append(slices.Clone(ordinary.Devices), probe.Node{Path: "/dev/gpu0", Number: "c:195:0"})
	one.Env = []string{"GPU=0", "HOSTNAME=b", "PATH=/bin"}
	g := gained(one, ordinary)
	if len(g.devices) != 1 || g.devices[0].Path != "/dev/gpu0" || len(g.mounts) != 0 ||
		!slices.Equal(g.env, []string{"GPU=0"}) {
		t.Errorf("got %+v, want the device node /dev/gpu0 and the variable GPU=0", g)
	}
	if same := gained(ordinary, ordinary); !same.empty() {
		t.Errorf("of the same view: got %+v, want nothing", same)
	}
	both := g.and(gain{env: []string{"GPU=0", "X=1"}})
	if len(both.devices) != 0 || !slices.Equal(both.env, []string{"GPU=0"}) {
		t.Errorf("in common: got %+v, want the variable GPU=0", both)
	}
}
