// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

const header = "apiVersion: config.dra-shared.dev/v1alpha1\nkind: DriverConfig\n"

func TestLoad_defaults(t *testing.T) {
	c, err := Load([]byte(header + "networks: [{name: storage, interfaces: [\"nic*\"]}]"))
	if err != nil {
		t.Fatal(err)
	}
	want := Network{
		Name: "storage", Interfaces: []string{"nic*"}, Shares: ptr.To[int32](128),
		Enforcement: EnforcementShape, Shaping: ShapingSingleQueue, LinkDown: TaintNoSchedule, Identity: IdentityEnforce,
		DuplicateAddressDetection: DuplicateAddressReport,
		Allow: Allow{
			Modes: []v1alpha1.Mode{v1alpha1.ModePrivate}, Burst: []v1alpha1.Burst{v1alpha1.BurstGuaranteed},
		},
		Policy: Policy{Default: quantity("100M"), Min: quantity("10M"), Step: quantity("10M")},
	}
	if diff := cmp.Diff(want, c.Networks[0]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestLoad_namesInvalidNetworkFields(t *testing.T) {
	for field, value := range map[string]string{
		"identity":           "identity: Drop",
		"multicast":          "multicast: 100m",
		"overhead":           "overhead: 257",
		"resourceName":       "resourceName: storage",
		"allow.addresses[0]": "allow: {addresses: [10.20.0]}",
		"allow.macs[0]":      "allow: {macs: [\"01:00:5e:00:00:01\"]}",
		"allow.vlans[1]":     "allow: {vlans: [1, 4095]}",
		"allow.dhcp[0]":      "allow: {dhcp: [IPv6]}",
		"dhcp[0]: Forbidden: IPv4: not in allow.dhcp":            "dhcp: [IPv4]",
		"allow.sysctls[0]":                                       "allow: {sysctls: [net.ipv4.ip_forward]}",
		"allow.node: Forbidden: only links with the mode Bridge": "allow: {node: true}",
		"shaping: Forbidden: MultiQueue: shares cannot borrow":   "allow: {burst: [Guaranteed, Line]}, shaping: MultiQueue",
		"shaping: Unsupported value: \"PerQueue\"":               "shaping: PerQueue",
		"allow.node: Forbidden: requires enforcement Shape":      "allow: {node: true, modes: [Bridge]}, enforcement: None",
	} {
		_, err := Load([]byte(header + "networks: [{name: a, interfaces: [x], bandwidth: 1G, " + value + "}]"))
		if err == nil || !strings.Contains(err.Error(), "networks[0]."+field) {
			t.Errorf("%s: error %v, want one for networks[0].%s", value, err, field)
		}
	}
}

func TestLoad_acceptsZeroForwardedRate(t *testing.T) {
	if _, err := Load([]byte(header + "networks: [{name: a, interfaces: [x], bandwidth: 1G, forwarded: 0}]")); err != nil {
		t.Error(err)
	}
}

func TestLoad_defaultBandwidthIsAtLeastMin(t *testing.T) {
	c, err := Load([]byte(header + "networks: [{name: storage, interfaces: [\"nic*\"], policy: {min: 1G}}]"))
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Networks[0].Policy.Default.String(); got != "1G" {
		t.Errorf("default %s, want 1G", got)
	}
}

func TestDecode_setsOnlyGivenFields(t *testing.T) {
	c, err := Decode([]byte(header + "networks: [{name: storage}]"))
	want := &DriverConfig{
		TypeMeta: metav1.TypeMeta{APIVersion: APIVersion, Kind: Kind},
		Networks: []Network{{Name: "storage"}},
	}
	if diff := cmp.Diff(want, c); err != nil || diff != "" {
		t.Errorf("error %v (-want +got):\n%s", err, diff)
	}
}

func quantity(text string) *resource.Quantity {
	q := resource.MustParse(text)
	return &q
}

func TestLoad_invalidNetwork(t *testing.T) {
	for _, tc := range []struct{ name, networks, want string }{
		{"unknown field", `[{name: a, interfaces: [x], bandwith: 1G}]`, `unknown field "networks[0].bandwith"`},
		{"name that is not a DNS label", `[{name: A_b, interfaces: [x]}]`, `networks[0].name: Invalid value: "A_b"`},
		{"duplicate field", `[{name: a, interfaces: [x], shares: 1, shares: 2}]`, `key "shares" already set in map`},
		{"string in place of a number", `[{name: a, interfaces: [x], shares: "1"}]`,
			`networks.shares: got a string, want an integer (int32): does the value lack quotes`},
		{"duplicate name", `[{name: a, interfaces: [x]}, {name: a, interfaces: [z]}]`,
			`networks[1].name: Duplicate value: "a"`},
		{"no interfaces", `[{name: a}]`, `networks[0].interfaces: Required value: name at least one NIC`},
		{"invalid pattern", `[{name: a, interfaces: ["x["]}]`, `networks[0].interfaces[0]: Invalid value: "x["`},
		{"suffix m in place of M", `[{name: a, interfaces: [x], bandwidth: 100m}]`,
			`networks[0].bandwidth: Invalid value: "100m": ` +
				`must be a whole number of bits per second, at least 8, such as 100M or 10G`},
		{"reserve above bandwidth", `[{name: a, interfaces: [x], bandwidth: 1G, reserve: 2G}]`,
			`networks[0].reserve: Invalid value: "2G": must be less than bandwidth, 1G`},
		{"forwarded and reserve exceed bandwidth",
			`[{name: a, interfaces: [x], bandwidth: 1G, reserve: 200M, forwarded: 800M}]`,
			`networks[0].forwarded: Invalid value: "800M": must, together with reserve, be less than bandwidth, 1G`},
		{"fraction as forwarded", `[{name: a, interfaces: [x], forwarded: 100m}]`,
			`networks[0].forwarded: Invalid value: "100m": must be a whole number of bits per second`},
		{"too many shares", `[{name: a, interfaces: [x], shares: 5000}]`,
			`networks[0].shares: Invalid value: 5000: must be between 1 and 3000`},
		{"default between steps", `[{name: a, interfaces: [x], policy: {default: 15M}}]`,
			`networks[0].policy.default: Invalid value: "15M": must be min, 10M, plus a multiple of step, 10M`},
		{"default below min", `[{name: a, interfaces: [x], policy: {default: 5M}}]`,
			`networks[0].policy.default: Invalid value: "5M": must not be less than min, 10M`},
		{"unknown enforcement", `[{name: a, interfaces: [x], enforcement: Police}]`,
			`networks[0].enforcement: Unsupported value: "Police": supported values: "Shape", "None"`},
		{"unknown mode", `[{name: a, interfaces: [x], allow: {modes: [Vepa]}}]`,
			`networks[0].allow.modes[0]: Unsupported value: "Vepa"`},
		{"subnet without a prefix length", `[{name: a, interfaces: [x], allow: {subnets: [10.20.0.0]}}]`,
			`networks[0].allow.subnets[0]: Invalid value: "10.20.0.0": must be a network, such as 10.20.0.0/16`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Load([]byte(header + "networks: " + tc.networks))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got  %v\nwant %s", err, tc.want)
			}
		})
	}
	_, err := Load([]byte("apiVersion: v1\nkind: ConfigMap"))
	if err == nil || !strings.Contains(err.Error(), `want "config.dra-shared.dev/v1alpha1", "DriverConfig"`) {
		t.Errorf("different kind: %v", err)
	}
}

func TestDriverConfig_NetworkOf(t *testing.T) {
	c, err := Load([]byte(header + `networks: [{name: a, interfaces: ["nic[0-1]", mgmt]}, {name: b, interfaces: ["*"]}]`))
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		nic    string
		uplink bool
		want   string
	}{
		{"nic0", false, "a"}, {"nic7", false, "b"}, {"eth0", true, ""}, {"mgmt", true, "a"},
	} {
		got := ""
		if n := c.NetworkOf(tc.nic, tc.uplink); n != nil {
			got = n.Name
		}
		if got != tc.want {
			t.Errorf("%s (uplink %t): network %q, want %q", tc.nic, tc.uplink, got, tc.want)
		}
	}
}

func FuzzLoad(f *testing.F) {
	f.Add([]byte(header + `networks: [{name: a, interfaces: ["nic*"], bandwidth: 10G, reserve: 1G, ` +
		`allow: {modes: [Bridge], subnets: [10.0.0.0/8]}, policy: {min: 1M, step: 1M, default: 5M}}]`))
	f.Add([]byte(header + `accelerators: [{name: a, match: {vendor: 10de}, capacity: {memory: 8Gi, c: 1}, ` +
		`policy: {memory: {default: 1Gi, min: 1Gi, step: 1Gi}, c: {default: 0, values: [0, 500m]}}, ` +
		`edits: {environment: {A: "$$${memory.Mi}"}, mounts: [{hostPath: "/run/${pciBusID}", containerPath: /x}]}}]`))
	f.Add([]byte(header + `fabrics: [{name: a, nodeSelector: {x: y}, capacity: {c: 3}, ` +
		`policy: {c: {default: 1, min: 1, max: 3, step: 2}}}]`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := Load(raw)
		if err != nil {
			return
		}
		for i := range c.Networks {
			c.Networks[i].Allowed(1500) // must not panic
		}
		c.NetworkOf("nic0", false)
		for _, a := range c.Accelerators {
			values := map[string]string{}
			for _, name := range append(a.variables(), append(shareVariables, VariablePCIBusID)...) {
				values[name] = "1"
			}
			if _, err := a.Edits.Expand(values); err != nil {
				t.Errorf("Load accepted edits that cannot be expanded: %v", err)
			}
		}
	})
}
