// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"encoding/json"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

const header = `"apiVersion": "dra-shared.dev/v1alpha1", "kind": "NetworkAttachment"`

// permissiveNetwork returns a network that allows every value.
func permissiveNetwork() AllowedNetwork {
	return AllowedNetwork{
		Network: "storage", Modes: []Mode{ModePrivate, ModeBridge}, Bursts: []Burst{BurstGuaranteed, BurstLine}, MTU: 9000,
		Subnets: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")},
		DHCP:    []IPFamily{IPv4},
	}
}

// check decodes, merges, defaults, and validates parameters as the plugin does.
func check(parameters string, allowed AllowedNetwork) error {
	a, err := DecodeAs[*NetworkAttachment]([]byte(parameters))
	if err != nil {
		return err
	}
	a = MergeNetworkAttachments(nil, a)
	SetDefaultsNetworkAttachment(a)
	return a.ValidateFor(allowed).ToAggregate()
}

func TestNetworkAttachment_valid(t *testing.T) {
	for _, fields := range []string{
		``,
		`, "interfaceName": "data-0.x_Y"`,
		`, "addressPools": ["office"], "keepAddresses": true`,
		`, "keepAddresses": true`,
		`, "dhcp": ["IPv4"], "addresses": ["fd00::5/64"], "policyRules": [{"table": 100, "source": "10.20.0.0/16"}], ` +
			`"routes": [{"destination": "10.30.0.0/16", "gateway": "10.20.0.1"}]`,
		`, "dhcp": []`,
		`, "routes": [{"destination": "0.0.0.0/0", "table": 100}, {"destination": "0.0.0.0/0"}], ` +
			`"policyRules": [{"table": 100}, ` +
			`{"source": "10.20.0.0/16", "destination": "10.30.0.0/16", "table": 256, "priority": 100}]`,
		`, "neighbors": [{"address": "10.20.0.7", "mac": "02:00:00:00:00:07"}, ` +
			`{"address": "fd00::7", "mac": "02:00:00:00:00:07"}]`,
		`, "addresses": ["10.20.0.5/24"], "keepAddresses": false`,
		`, "mode": "Bridge", "mtu": 9000, "bandwidth": {"burst": "Line"}`,
		`, "addresses": ["10.20.0.5/24", "fd00::5/64"], "routes": [` +
			`{"destination": "10.30.0.0/16", "gateway": "10.20.0.1"}, {"destination": "fd01::/64", "gateway": "fe80::1"}]`,
		`, "addresses": ["10.20.0.0/31", "10.20.0.9/32", "fd00::/127"], "routes": [{"destination": "0.0.0.0/0"}]`,
	} {
		if err := check(`{`+header+fields+`}`, permissiveNetwork()); err != nil {
			t.Errorf("{%s}: %v", fields, err)
		}
	}
}

func TestNetworkAttachment_invalid(t *testing.T) {
	for _, tc := range invalidCases(t, "NetworkAttachment") {
		t.Run(tc.Name, func(t *testing.T) {
			if err := check(tc.Parameters, permissiveNetwork()); err == nil || !strings.Contains(err.Error(), tc.Want) {
				t.Errorf("got  %v\nwant %s", err, tc.Want)
			}
		})
	}
}

// invalidCase is an entry of testdata/wrong.yaml, which the tests of admission also
// use.
type invalidCase struct {
	Name, Kind, Parameters, Want string
	OnDevice                     bool
}

func invalidCases(t *testing.T, kind string) (cases []invalidCase) {
	t.Helper()
	raw, err := os.ReadFile("testdata/wrong.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(raw, &cases); err != nil {
		t.Fatal(err)
	}
	cases = slices.DeleteFunc(cases, func(c invalidCase) bool { return c.Kind != kind })
	if len(cases) < 10 {
		t.Fatalf("testdata/wrong.yaml has only %d cases of kind %s", len(cases), kind)
	}
	return cases
}

// Check does not depend on a device: it must refuse exactly the parameters that the node
// refuses for every device.
func TestCheck_isIndependentOfDevice(t *testing.T) {
	for _, tc := range append(invalidCases(t, "NetworkAttachment"), invalidCases(t, "AcceleratorShare")...) {
		if err := Check([]byte(tc.Parameters)); (err == nil) != tc.OnDevice {
			t.Errorf("%s: got error %v, want an error: %t", tc.Name, err, !tc.OnDevice)
		}
	}
}

// The addresses and the routes of one link can be in two sets of parameters. Check accepts both, and the node refuses
// a gateway outside the subnets of the merged addresses.
func TestCheck_parametersInTwoSets(t *testing.T) {
	const routes = `, "routes": [{"destination": "10.30.0.0/16", "gateway": "10.20.0.1"}]`
	for _, tc := range []struct{ name, addresses, want string }{
		{"gateway in the subnet", `, "addresses": ["10.20.0.5/16"]`, ""},
		{"gateway outside the subnet", `, "addresses": ["10.21.0.5/16"]`, `routes[0].gateway: Invalid value: "10.20.0.1"`},
		{"no address", `, "addresses": []`, `routes[0].gateway: Invalid value: "10.20.0.1"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, fields := range []string{routes, tc.addresses} {
				if err := Check([]byte(`{` + header + fields + `}`)); err != nil {
					t.Errorf("Check of {%s}: %v", fields, err)
				}
			}
			merged := MergeNetworkAttachments(decodeAttachment(t, routes), decodeAttachment(t, tc.addresses))
			SetDefaultsNetworkAttachment(merged)
			err := merged.ValidateFor(permissiveNetwork()).ToAggregate()
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("merged: got error %v, want %q", err, tc.want)
			}
		})
	}
}

func TestNetworkAttachment_ValidateFor(t *testing.T) {
	narrow := AllowedNetwork{
		Network: "storage", Modes: []Mode{ModePrivate}, Bursts: []Burst{BurstGuaranteed},
		Subnets: []netip.Prefix{netip.MustParsePrefix("10.20.0.0/16")},
	}
	for _, tc := range []struct{ name, fields, want string }{
		{"mode", `, "mode": "Bridge"`, `mode: Forbidden: Bridge: network "storage" allows Private`},
		{"burst", `, "bandwidth": {"burst": "Line"}`,
			`bandwidth.burst: Forbidden: Line: network "storage" allows Guaranteed`},
		{"DHCP", `, "dhcp": ["IPv4"]`, `dhcp[0]: Forbidden: IPv4: network "storage" allows none: its allow.dhcp is empty`},
		{"address outside the subnets", `, "addresses": ["10.20.0.5/24", "10.21.0.5/24"]`,
			`addresses[1]: Forbidden: 10.21.0.5/24: network "storage" allows addresses in 10.20.0.0/16`},
		{"network wider than the subnet", `, "addresses": ["10.20.0.5/8"]`,
			`addresses[0]: Forbidden: 10.20.0.5/8: network "storage" allows addresses in 10.20.0.0/16: ` +
				`the prefix length must be at least 16`},
		{"address of the other family", `, "addresses": ["fd00::5/64"]`, `addresses[0]: Forbidden`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := check(`{`+header+tc.fields+`}`, narrow); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got  %v\nwant %s", err, tc.want)
			}
		})
	}
	t.Run("without subnets", func(t *testing.T) {
		narrow := narrow
		narrow.Subnets = nil
		err := check(`{`+header+`, "addresses": ["10.20.0.5/24"]}`, narrow)
		if err == nil || !strings.Contains(err.Error(), "allows none: its allow.subnets is empty") {
			t.Errorf("got %v", err)
		}
	})
}

func TestMergeNetworkAttachments(t *testing.T) {
	class := decodeAttachment(t, `, "mode": "Bridge", "mtu": 4000, "interfaceName": "fromclass", `+
		`"addresses": ["10.20.0.5/24"], "bandwidth": {"burst": "Line"}`)
	before := class.DeepCopy()
	for _, tc := range []struct{ name, claim, want string }{
		{"fields of the claim win", `, "interfaceName": "fromclaim", "addresses": ["10.20.0.6/24"]`,
			`, "mode": "Bridge", "mtu": 4000, "interfaceName": "fromclaim", ` +
				`"addresses": ["10.20.0.6/24"], "bandwidth": {"burst": "Line"}`},
		{"DHCP replaces the addresses of the class", `, "dhcp": ["IPv4"]`,
			`, "mode": "Bridge", "mtu": 4000, "interfaceName": "fromclass", "dhcp": ["IPv4"], "bandwidth": {"burst": "Line"}`},
		{"an empty list replaces that of the class", `, "addresses": []`,
			`, "mode": "Bridge", "mtu": 4000, "interfaceName": "fromclass", "addresses": [], "bandwidth": {"burst": "Line"}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := MergeNetworkAttachments(class, decodeAttachment(t, tc.claim))
			if diff := cmp.Diff(decodeAttachment(t, tc.want), got); diff != "" {
				t.Errorf("merged (-want +got):\n%s", diff)
			}
			SetDefaultsNetworkAttachment(got)
			if diff := cmp.Diff(before, class); diff != "" {
				t.Errorf("merging and defaulting changed the parameters of the class:\n%s", diff)
			}
		})
	}
}

func TestSetDefaultsNetworkAttachment(t *testing.T) {
	got := decodeAttachment(t, `, "addresses": [], "routes": [], "bandwidth": {}`)
	SetDefaultsNetworkAttachment(got)
	want := decodeAttachment(t, `, "mode": "Private", "bandwidth": {"burst": "Guaranteed"}`)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Decode must not merge or default.
func TestDecode_setsOnlyGivenFields(t *testing.T) {
	want := &NetworkAttachment{TypeMeta: TypeMeta(NetworkAttachmentKind)}
	if diff := cmp.Diff(want, decodeAttachment(t, ``)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func decodeAttachment(t *testing.T, fields string) *NetworkAttachment {
	t.Helper()
	a, err := DecodeAs[*NetworkAttachment]([]byte(`{` + header + fields + `}`))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// The plugin stores merged and defaulted parameters in claim records: if they are
// valid, they must be valid and equal after they are encoded and decoded again.
func FuzzParameters(f *testing.F) {
	f.Add([]byte(`{` + header + `}`))
	f.Add([]byte(`{` + header + `, "mode": "Bridge", "mtu": 9000, "addresses": ["10.20.0.5/24", "fd00::5/64"], ` +
		`"routes": [{"destination": "10.30.0.0/16", "gateway": "10.20.0.1"}], "bandwidth": {"burst": "Line"}}`))
	f.Add([]byte(`{` + header + `, "addresses": ["10.20.0.5%eth0/24"], ` +
		`"routes": [{"destination": "::/0", "gateway": "fe80::1%1"}]}`))
	f.Add([]byte(`{` + acceleratorHeader + `, "environment": {"A": "b"}, "deviceNodes": ["/dev/dri/card0"]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		p, err := Decode(raw)
		if err != nil {
			return
		}
		switch a := p.(type) {
		case *NetworkAttachment:
			a = MergeNetworkAttachments(nil, a)
			SetDefaultsNetworkAttachment(a)
			p = a
		case *AcceleratorShare:
			p = MergeAcceleratorShares(nil, a)
		}
		if p.Validate().ToAggregate() != nil {
			return
		}
		encoded, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		decoded, err := Decode(encoded)
		if err != nil {
			t.Fatalf("cannot decode the encoded parameters %s: %v", encoded, err)
		}
		if diff := cmp.Diff(p, decoded); diff != "" {
			t.Errorf("encoding and decoding changed %s (-before +after):\n%s", encoded, diff)
		}
		if err := decoded.Validate().ToAggregate(); err != nil {
			t.Errorf("%s is invalid after encoding and decoding: %v", encoded, err)
		}
	})
}
