// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

func load(t *testing.T, networks string) *config.DriverConfig {
	t.Helper()
	c, err := config.Load([]byte("apiVersion: config.dra-shared.dev/v1alpha1\nkind: DriverConfig\nnetworks: " + networks))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func virtual(name string) netdev.NIC {
	return netdev.NIC{Name: name, Index: 7, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 7}, MTU: 9000}
}

func TestPublish(t *testing.T) {
	devices, problems := plan(
		[]netdev.NIC{virtual("nic0")},
		load(t, `[{name: storage, interfaces: ["nic*"], bandwidth: 10G, resourceName: example.com/storage}]`),
	)
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	got, err := yaml.Marshal(devices[0].publish())
	if err != nil {
		t.Fatal(err)
	}
	const want = `allowMultipleAllocations: true
attributes:
  interfaceName:
    string: nic0
  k8s.cni.cncf.io/resourceName:
    string: example.com/storage
  kind:
    string: nic
  mac:
    string: "02:00:00:00:00:07"
  mtu:
    int: 9000
  network:
    string: storage
  speedMbps:
    int: 10000
capacity:
  bandwidth:
    requestPolicy:
      default: 100M
      validRange:
        min: 10M
        step: 10M
    value: 9900M
  shares:
    requestPolicy:
      default: "1"
      validValues:
      - "1"
    value: "128"
name: nic0
`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestDeviceName(t *testing.T) {
	hardware := netdev.NIC{Name: "ens1f0", Bus: "pci", PCIBusID: "0000:3b:00.0"}
	secondPort := netdev.NIC{Name: "ens1f0d1", Bus: "pci", PCIBusID: "0000:3b:00.0", Port: "d1"}
	representor := netdev.NIC{Name: "ens1f0r0", Bus: "pci", PCIBusID: "0000:3b:00.0", Port: "pf0vf0"}
	permanent := netdev.NIC{Name: "usb0", PermanentMAC: net.HardwareAddr{0xaa, 0xbb, 0xcc, 0, 0, 1}}
	seen := map[string]string{}
	for _, n := range []netdev.NIC{hardware, secondPort, representor, permanent, virtual("nic0"), virtual("Nic0"),
		virtual("a_b"), virtual("a.b"), virtual("-a"), virtual("ÿÿÿ"), virtual("___")} {
		name := deviceName(n)
		if problems := validation.IsDNS1123Label(name); len(problems) > 0 {
			t.Errorf("%s: %q is not a DNS label: %v", n.Name, name, problems)
		}
		if other, taken := seen[name]; taken {
			t.Errorf("%s and %s are both %s", n.Name, other, name)
		}
		seen[name] = n.Name
	}
	for want, n := range map[string]netdev.NIC{
		"pci-0000-3b-00-0": hardware, "pci-0000-3b-00-0-d1": secondPort, "pci-0000-3b-00-0-pf0vf0": representor,
		"mac-aa-bb-cc-00-00-01": permanent, "nic0": virtual("nic0"),
	} {
		if got := deviceName(n); got != want {
			t.Errorf("%s is %s, want %s", n.Name, got, want)
		}
	}
}

// A device keeps its name when another NIC that would have the same name comes or goes.
func TestNameUniquely(t *testing.T) {
	older := netdev.NIC{Name: "ens1a", Index: 7, Bus: "pci", PCIBusID: "0000:3b:00.0"}
	newer := netdev.NIC{Name: "ens1b", Index: 8, Bus: "pci", PCIBusID: "0000:3b:00.0"}
	name := func(known []string, nics ...netdev.NIC) (names []string) {
		var devices []*device
		for _, n := range nics {
			devices = append(devices, &device{name: deviceName(n), nic: n})
		}
		nameUniquely(devices, func(name string) bool { return slices.Contains(known, name) })
		for _, d := range devices {
			names = append(names, d.name)
		}
		return names
	}
	const plain, hashed = "pci-0000-3b-00-0", "pci-0000-3b-00-0-b7c426cd"
	for when, tc := range map[string]struct{ got, want []string }{
		"alone":                {name(nil, older), []string{plain}},
		"the other comes":      {name([]string{plain}, newer, older), []string{hashed, plain}},
		"the older goes":       {name([]string{plain, hashed}, newer), []string{hashed}},
		"the older comes back": {name([]string{plain, hashed}, older, newer), []string{plain, hashed}},
		"the newer alone":      {name(nil, newer), []string{plain}},
	} {
		if diff := cmp.Diff(tc.want, tc.got); diff != "" {
			t.Errorf("%s: names (-want +got):\n%s", when, diff)
		}
	}
}

func TestPlan_reportsNICsThatCannotBeShared(t *testing.T) {
	enslaved, up := virtual("nic1"), virtual("nic0")
	enslaved.Master, up.Carrier = "bond0", true
	offloaded := virtual("nic2")
	offloaded.MacvlanOffload = true
	switched, uplink := virtual("nic3"), virtual("nic4")
	switched.Master, uplink.Uplink = "ovs-system", true
	bonded := enslaved
	bonded.Uplink = true
	for _, tc := range []struct {
		nic            netdev.NIC
		networks, want string
		failure        bool
	}{
		{up, `[{name: a, interfaces: [nic0]}]`, `the link reports no speed: set bandwidth for network "a"`, true},
		{virtual("nic0"), `[{name: a, interfaces: [nic0]}]`,
			`the NIC has no carrier and reports no speed: connect the NIC`, false},
		{enslaved, `[{name: a, interfaces: [nic1], bandwidth: 1G}]`, `the NIC belongs to bond0`, true},
		{switched, `[{name: a, interfaces: [nic3], bandwidth: 1G}]`, `the NIC is a port of Open vSwitch`, true},
		{uplink, `[{name: a, interfaces: ["nic*"], bandwidth: 1G}]`, `list nic4 in interfaces of network "a"`, false},
		{bonded, `[{name: a, interfaces: ["nic*"], bandwidth: 1G}]`, `list bond0 in interfaces of network "a"`, false},
		{offloaded, `[{name: a, interfaces: [nic2], bandwidth: 1G}]`, `with "ethtool -K nic2 l2-fwd-offload off"`, true},
	} {
		_, problems := plan([]netdev.NIC{tc.nic}, load(t, tc.networks))
		if len(problems) != 1 || !strings.Contains(problems[0].err.Error(), tc.want) {
			t.Errorf("got %v, want %s", problems, tc.want)
			continue
		}
		if got := (survey{problems: problems}).ready() != nil; got != tc.failure {
			t.Errorf("%s: makes the plugin unready: %t, want %t", tc.want, got, tc.failure)
		}
	}
}

// A pattern may name the uplink of nodes that have further NICs. It is a problem only where the network has no other
// NIC, or where the NIC is known because it was shared before a default route depended on it.
func TestWithoutExpected(t *testing.T) {
	uplink, other := virtual("nic0"), virtual("nic1")
	uplink.Uplink, other.Index = true, 8
	networks := load(t, `[{name: a, interfaces: ["nic*"], bandwidth: 1G}]`)
	for _, tc := range []struct {
		name  string
		nics  []netdev.NIC
		known string
		want  int
	}{
		{"the only NIC", []netdev.NIC{uplink}, "", 1},
		{"next to another NIC", []netdev.NIC{uplink, other}, "", 0},
		{"next to another NIC, but known", []netdev.NIC{uplink, other}, "nic0", 1},
	} {
		planned, problems := plan(tc.nics, networks)
		got := withoutExpected(problems, planned, func(device string) bool { return device == tc.known })
		if len(got) != tc.want {
			t.Errorf("%s: got problems %v, want %d", tc.name, got, tc.want)
		}
	}
}

func TestPlan_permitsOffloadWithoutEnforcement(t *testing.T) {
	offloaded := virtual("nic0")
	offloaded.MacvlanOffload = true
	devices, problems := plan(
		[]netdev.NIC{offloaded},
		load(t, `[{name: a, interfaces: [nic0], bandwidth: 1G, enforcement: None}]`),
	)
	if len(devices) != 1 || len(problems) > 0 {
		t.Errorf("got %d devices and problems %v, want one device", len(devices), problems)
	}
}

// The API server's rules for a request policy (KEP-5075; validation of
// ResourceSlice in Kubernetes 1.37): one NIC that breaks them would take the
// whole slice with it.
func TestBandwidthPolicy_isValidForEverySpeed(t *testing.T) {
	for _, value := range []uint64{1, 8, 999, 5e6, 10e6, 15e6, 19e6, 20e6, 99e6, 900e6, 9900e6, 400e9, 1 << 61} {
		for _, policy := range []string{`{}`, `{min: 8, step: 8, default: 8}`, `{min: 1G, step: 1G, default: 5G}`,
			`{min: 3M, step: 7M, default: 10M}`} {
			t.Run(fmt.Sprint(value, policy), func(t *testing.T) {
				p := bandwidthPolicy(value, load(t, `[{name: a, interfaces: [x], policy: `+policy+`}]`).Networks[0].Policy)
				low, wanted := p.ValidRange.Min.Value(), p.Default.Value()
				if low < 0 || low > int64(value) || wanted < low || wanted > int64(value) {
					t.Errorf("of %d: min %d, default %d", value, low, wanted)
				}
				if p.ValidRange.Step != nil {
					if step := p.ValidRange.Step.Value(); step <= 0 || low+step > int64(value) || (wanted-low)%step != 0 {
						t.Errorf("of %d: min %d, default %d, step %d", value, low, wanted, step)
					}
				}
				if m := p.ValidRange.Max; m != nil && (m.Value() < low || wanted > m.Value() || m.Value() > int64(value)) {
					t.Errorf("of %d: min %d, default %d, max %d", value, low, wanted, m.Value())
				}
			})
		}
	}
}

func share(id, bandwidth string) record.Share {
	return record.Share{
		Name:     "claim-nic-" + id,
		Device:   "nic0",
		ShareID:  types.UID(id),
		Capacity: map[string]resource.Quantity{v1alpha1.CapacityBandwidth: resource.MustParse(bandwidth)},
	}
}

func TestAdmit(t *testing.T) {
	k := newKind(t, Options{})
	devices, _ := plan([]netdev.NIC{virtual("nic0")}, load(t, `[{name: a, interfaces: [nic0], bandwidth: 1G, shares: 3}]`))
	k.devices = map[string]*device{"nic0": devices[0]}
	whole := record.Share{Name: "c", Device: "nic0"}
	for _, tc := range []struct {
		name   string
		share  record.Share
		others []*record.Share
		want   string
	}{
		{"exactly the remaining bandwidth", share("a", "490M"), []*record.Share{new(share("b", "500M"))}, ""},
		{"one bit more", share("a", "490000001"), []*record.Share{new(share("b", "500M"))},
			"bandwidth 490000001: NIC nic0 has 990M bit/s to grant, and 500M are granted to other claims on this node"},
		{"a share too many", share("a", "10M"),
			[]*record.Share{new(share("b", "10M")), new(share("c", "10M")), new(share("d", "10M"))},
			"shares: NIC nic0 already has 3 shares, its limit"},
		{"without consumable capacity", whole, nil, "is the feature gate DRAConsumableCapacity on"},
		{"a fraction of a bit", share("a", "100m"), nil, "consumedCapacity.bandwidth 100m: want whole bits per second"},
		{"besides a share that only observes", share("a", "990M"), []*record.Share{{AdminAccess: true, Device: "nic0"}}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := k.Admit(tc.share, tc.others)
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

// What an administrator must do depends on whether the limits of running pods are still in force.
func TestDevice_unhealthyReason_namesLimitsInForce(t *testing.T) {
	for name, tc := range map[string]struct {
		err  error
		want string
	}{
		"a NIC that became a port of a bridge": {errors.New("the NIC belongs to br0"), "limits of its shares stay in force"},
		"another program replaced the root qdisc": {fmt.Errorf("manage nic0: %w", shape.ErrForeignQdisc),
			"nothing limits what its shares send"},
	} {
		t.Run(name, func(t *testing.T) {
			d := &device{name: "nic0", absent: true, unusable: tc.err}
			reason, message := d.unhealthyReason()
			if reason != v1alpha1.ReasonDeviceUnusable || !strings.Contains(message, tc.want) {
				t.Errorf("got %s: %s; want %s and %q", reason, message, v1alpha1.ReasonDeviceUnusable, tc.want)
			}
		})
	}
}

func TestDevice_debounceCarrier(t *testing.T) {
	start := time.Now()
	up, down := netdev.NIC{Up: true, Carrier: true}, netdev.NIC{Up: true}
	var old *device
	for i, step := range []struct {
		at    time.Duration
		nic   netdev.NIC
		down  bool
		again time.Duration
	}{
		{0, up, false, 0},
		{1 * time.Second, down, true, 0},
		{2 * time.Second, up, true, carrierStableTime},
		{4 * time.Second, up, true, 3 * time.Second}, // an event in between
		{5 * time.Second, down, true, 0},             // it flaps
		{6 * time.Second, up, true, carrierStableTime},
		{11 * time.Second, up, false, 0},
		{12 * time.Second, netdev.NIC{Carrier: true}, true, 0}, // set down by an administrator
	} {
		d := &device{nic: step.nic}
		if again := d.debounceCarrier(old, start.Add(step.at)); d.down != step.down || again != step.again {
			t.Errorf("step %d: down %t, again in %s; want %t, %s", i, d.down, again, step.down, step.again)
		}
		old = d
	}
}

func TestGuaranteed_scalesWithLink(t *testing.T) {
	for _, tc := range []struct{ line, reserve, granted, grant, want uint64 }{
		{10e9, 100e6, 9.9e9, 1e9, 1e9},
		{1e9, 100e6, 1.8e9, 200e6, 100e6},
		{1e9, 100e6, 0, 200e6, 200e6},
		{100e6, 0, 10e9, 10e6, 100e3},
	} {
		d := &device{line: tc.line, reserve: tc.reserve, granted: tc.granted}
		if got := d.guaranteed(tc.grant); got != tc.want {
			t.Errorf("%+v: guaranteed %d", tc, got)
		}
	}
}

func TestNewDevice_lineRate(t *testing.T) {
	c := load(t, `[{name: storage, interfaces: ["nic*"], bandwidth: 10G, reserve: 1G}]`)
	for _, tc := range []struct {
		name          string
		nic           netdev.NIC
		line, reserve uint64
	}{
		{"as configured", netdev.NIC{Name: "nic0", Bus: "pci", PCIBusID: "0000:3b:00.0", Speed: 10e9}, 10e9, 1e9},
		{"a slower link", netdev.NIC{Name: "nic0", Bus: "pci", PCIBusID: "0000:3b:00.0", Speed: 1e9}, 1e9, 100e6},
		{"a faster link", netdev.NIC{Name: "nic0", Bus: "pci", PCIBusID: "0000:3b:00.0", Speed: 25e9}, 10e9, 1e9},
		{"a virtual link", netdev.NIC{Name: "nic0", Speed: 10e6}, 10e9, 1e9},
	} {
		d, err := newDevice(tc.nic, newStack([]netdev.NIC{tc.nic}, c), &c.Networks[0])
		if err != nil || d.line != tc.line || d.reserve != tc.reserve {
			t.Errorf("%s: %+v, %v", tc.name, d, err)
		}
	}
}

func TestNewDevice_forwardedRate(t *testing.T) {
	uplink, other := netdev.NIC{Name: "x", Speed: 10e9, Uplink: true}, netdev.NIC{Name: "x", Speed: 10e9}
	slower := netdev.NIC{Name: "x", Bus: "pci", Speed: 1e9, Uplink: true}
	for _, tc := range []struct {
		name                 string
		nic                  netdev.NIC
		network              string // fields in addition to name and interfaces
		forwarded, bandwidth uint64
		err                  string
	}{
		{name: "an uplink", nic: uplink, forwarded: 1e9, bandwidth: 8.9e9},
		{name: "another NIC", nic: other, bandwidth: 9.9e9},
		{name: "configured", nic: other, network: "forwarded: 2G", forwarded: 2e9, bandwidth: 7.9e9},
		{name: "an uplink without the class", nic: uplink, network: "forwarded: 0", bandwidth: 9.9e9},
		{name: "an uplink that is slower than configured", nic: slower,
			network: "bandwidth: 10G, reserve: 1G, forwarded: 4G", forwarded: 400e6, bandwidth: 500e6},
		{name: "without enforcement", nic: uplink, network: "enforcement: None", bandwidth: 9.9e9},
		{name: "more than the link has", nic: uplink, network: "reserve: 1G, forwarded: 9G",
			err: `reserve and forwarded of network "a", 1G and 9G bit/s, leave nothing of the link's 10G bit/s`},
	} {
		c := load(t, `[{name: a, interfaces: [x], `+tc.network+`}]`)
		d, err := newDevice(tc.nic, newStack([]netdev.NIC{tc.nic}, c), &c.Networks[0])
		switch {
		case tc.err != "":
			if err == nil || !strings.Contains(err.Error(), tc.err) {
				t.Errorf("%s: error %v, want %s", tc.name, err, tc.err)
			}
		case err != nil || d.forwarded != tc.forwarded || d.bandwidth() != tc.bandwidth:
			t.Errorf("%s: %+v, %v; want %d forwarded, %d to grant", tc.name, d, err, tc.forwarded, tc.bandwidth)
		}
	}
}

func TestDevice_setShaping(t *testing.T) {
	for _, tc := range []struct {
		name                 string
		trees                shape.Trees
		reason               error
		shaping, singleQueue string
		ceil                 uint64 // of a share that may borrow
	}{
		{"one queue", shape.OneTree, nil, "htb", "", 990e6},
		{"one queue, and several are wanted", shape.OneTree, errors.New("no act_skbedit"), "htb", "no act_skbedit", 990e6},
		{"several queues", 4, nil, "htb-mq", "", 100e6},
	} {
		devices, problems := plan([]netdev.NIC{virtual("nic0")}, load(t,
			`[{name: storage, interfaces: ["nic*"], bandwidth: 990M, shaping: MultiQueue}]`))
		if len(problems) > 0 {
			t.Fatal(problems)
		}
		d := devices[0]
		if !d.nicConfig().QueuePerShare {
			t.Error("the configuration of the NIC does not ask for a queue per share")
		}
		d.setShaping(tc.trees, tc.reason)
		if d.shaping != tc.shaping || d.singleQueue != tc.singleQueue {
			t.Errorf("%s: shaping %q because of %q, want %q and %q",
				tc.name, d.shaping, d.singleQueue, tc.shaping, tc.singleQueue)
		}
		if got := d.publish().Attributes[v1alpha1.AttributeShaping].StringValue; got == nil || *got != tc.shaping {
			t.Errorf("%s: the attribute shaping is %v, want %q", tc.name, got, tc.shaping)
		}
		share := record.Share{ShareID: "1", Capacity: map[string]resource.Quantity{
			v1alpha1.CapacityBandwidth: resource.MustParse("100M"),
		}}
		borrows := v1alpha1.NetworkAttachment{Bandwidth: &v1alpha1.Bandwidth{Burst: v1alpha1.BurstLine}}
		rates, err := ratesOf(d, share, borrows)
		if want := (shape.Rates{Floor: 100e6, Ceil: tc.ceil}); err != nil || rates != want {
			t.Errorf("%s: the rates are %v and error %v, want %v", tc.name, rates, err, want)
		}
	}
}
