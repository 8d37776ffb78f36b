package v1alpha1

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const header = `"apiVersion": "dra-shared.dev/v1alpha1", "kind": "NetworkAttachment"`

func everything() AllowedNetwork {
	return AllowedNetwork{Network: "storage", Modes: []Mode{ModePrivate, ModeBridge}, Bursts: []Burst{BurstGuaranteed, BurstLine}, MTU: 9000,
		Subnets: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}}
}

// check decodes, completes and validates as the plugin does.
func check(parameters string, allowed AllowedNetwork) error {
	a, err := DecodeAs[*NetworkAttachment]([]byte(parameters))
	if err != nil {
		return err
	}
	a = MergeNetworkAttachments(nil, a)
	a.Default()
	return a.ValidateFor(allowed).ToAggregate()
}

func TestGoodParametersAreAccepted(t *testing.T) {
	for _, fields := range []string{
		``,
		`, "interfaceName": "data-0.x_Y"`,
		`, "mode": "Bridge", "mtu": 9000, "bandwidth": {"burst": "Line"}`,
		`, "addresses": ["10.20.0.5/24", "fd00::5/64"], "routes": [{"destination": "10.30.0.0/16", "gateway": "10.20.0.1"}, {"destination": "fd01::/64", "gateway": "fe80::1"}]`,
		`, "addresses": ["10.20.0.0/31", "10.20.0.9/32", "fd00::/127"], "routes": [{"destination": "0.0.0.0/0"}]`,
	} {
		if err := check(`{`+header+fields+`}`, everything()); err != nil {
			t.Errorf("{%s}: %v", fields, err)
		}
	}
}

func TestWrongParametersAreRefusedByFieldValueAndRemedy(t *testing.T) {
	for _, tc := range []struct{ name, parameters, want string }{
		{"another version", `{"apiVersion": "dra-shared.dev/v2", "kind": "NetworkAttachment"}`, `apiVersion: "dra-shared.dev/v2": want "dra-shared.dev/v1alpha1"`},
		{"another kind", `{"apiVersion": "dra-shared.dev/v1alpha1", "kind": "Network"}`, `kind: "Network": want "NetworkAttachment" or "AcceleratorShare"`},
		{"an accelerator's", `{"apiVersion": "dra-shared.dev/v1alpha1", "kind": "AcceleratorShare"}`, `kind: "AcceleratorShare": the device takes "NetworkAttachment": name the requests that each is for`},
		{"not an object", `[]`, `parameters are not an object`},
		{"unknown field", `{` + header + `, "bandwith": {}}`, `unknown field "bandwith"`},
		{"unknown field, deeper", `{` + header + `, "bandwidth": {"brust": "Line"}}`, `unknown field "bandwidth.brust"`},
		{"field twice", `{` + header + `, "mtu": 1500, "mtu": 1400}`, `duplicate field "mtu"`},
		{"wrong case", `{` + header + `, "MTU": 1500}`, `unknown field "MTU"`},
		{"wrong type", `{` + header + `, "mtu": "1500"}`, `mtu`},
		{"name too long", `{` + header + `, "interfaceName": "sixteen-letters-"}`, `interfaceName: Too long: may not be more than 15`},
		{"name with a slash", `{` + header + `, "interfaceName": "a/b"}`, `interfaceName: Invalid value: "a/b": must consist of letters`},
		{"name that every pod has", `{` + header + `, "interfaceName": "eth0"}`, `interfaceName: Invalid value: "eth0": is reserved: choose another, such as net1`},
		{"unknown mode", `{` + header + `, "mode": "Passthru"}`, `mode: Unsupported value: "Passthru": supported values: "Private", "Bridge"`},
		{"mtu too small", `{` + header + `, "mtu": 10}`, `mtu: Invalid value: 10: must be between 68 and 65535`},
		{"mtu too small for IPv6", `{` + header + `, "mtu": 1000, "addresses": ["fd00::5/64"]}`, `mtu: Invalid value: 1000: must be at least 1280 with an IPv6 address`},
		{"mtu above the NIC's", `{` + header + `, "mtu": 9001}`, `mtu: Invalid value: 9001: must not be larger than the NIC's, 9000`},
		{"no prefix length", `{` + header + `, "addresses": ["10.20.0.5"]}`, `addresses[0]: Invalid value: "10.20.0.5": must be an address with its prefix length`},
		{"a network's address", `{` + header + `, "addresses": ["10.20.0.0/16"]}`, `addresses[0]: Invalid value: "10.20.0.0/16": must be a host's address`},
		{"a broadcast address", `{` + header + `, "addresses": ["10.20.255.255/16"]}`, `must be a host's address`},
		{"a multicast address", `{` + header + `, "addresses": ["ff02::1/64"]}`, `must be a host's address`},
		{"IPv4 in IPv6", `{` + header + `, "addresses": ["::ffff:10.20.0.5/120"]}`, `must be a host's address`},
		{"an address twice", `{` + header + `, "addresses": ["10.20.0.5/16", "10.20.0.5/24"]}`, `addresses[1]: Duplicate value: "10.20.0.5/24"`},
		{"route without a network", `{` + header + `, "routes": [{"destination": "10.30.0.0"}]}`, `routes[0].destination: Invalid value: "10.30.0.0": must be a network`},
		{"route with host bits", `{` + header + `, "routes": [{"destination": "10.30.0.1/16"}]}`, `has bits beyond its prefix length: want 10.30.0.0/16`},
		{"route twice", `{` + header + `, "routes": [{"destination": "10.30.0.0/16"}, {"destination": "10.30.0.0/16"}]}`, `routes[1].destination: Duplicate value`},
		{"gateway that is nowhere", `{` + header + `, "addresses": ["10.20.0.5/16"], "routes": [{"destination": "10.30.0.0/16", "gateway": "10.99.0.1"}]}`, `routes[0].gateway: Invalid value: "10.99.0.1": must be on the network of one of the addresses`},
		{"gateway that is oneself", `{` + header + `, "addresses": ["10.20.0.5/16"], "routes": [{"destination": "10.30.0.0/16", "gateway": "10.20.0.5"}]}`, `and not one of them`},
		{"gateway of the other family", `{` + header + `, "routes": [{"destination": "10.30.0.0/16", "gateway": "fd00::1"}]}`, `is not of the same IP family`},
		{"unknown burst", `{` + header + `, "bandwidth": {"burst": "All"}}`, `bandwidth.burst: Unsupported value: "All": supported values: "Guaranteed", "Line"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := check(tc.parameters, everything()); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got  %v\nwant %s", err, tc.want)
			}
		})
	}
}

func TestWhatTheAdministratorDoesNotAllowIsForbidden(t *testing.T) {
	narrow := AllowedNetwork{Network: "storage", Modes: []Mode{ModePrivate}, Bursts: []Burst{BurstGuaranteed}, Subnets: []netip.Prefix{netip.MustParsePrefix("10.20.0.0/16")}}
	for _, tc := range []struct{ fields, want string }{
		{`, "mode": "Bridge"`, `mode: Forbidden: Bridge: network "storage" allows Private`},
		{`, "bandwidth": {"burst": "Line"}`, `bandwidth.burst: Forbidden: Line: network "storage" allows Guaranteed`},
		{`, "addresses": ["10.20.0.5/24", "10.21.0.5/24"]`, `addresses[1]: Forbidden: 10.21.0.5/24: network "storage" allows addresses in 10.20.0.0/16`},
		// A prefix that is wider than the subnet would put others on the link.
		{`, "addresses": ["10.20.0.5/8"]`, `addresses[0]: Forbidden`},
		{`, "addresses": ["fd00::5/64"]`, `addresses[0]: Forbidden`},
	} {
		if err := check(`{`+header+tc.fields+`}`, narrow); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("{%s}: got %v, want %s", tc.fields, err, tc.want)
		}
	}
	if err := check(`{`+header+`, "addresses": ["10.20.0.5/24"]}`, AllowedNetwork{Network: "storage", Modes: []Mode{ModePrivate}, Bursts: []Burst{BurstGuaranteed}}); err == nil || !strings.Contains(err.Error(), "allows addresses in none") {
		t.Errorf("without subnets: %v", err)
	}
}

func TestAClaimWinsOverItsClassFieldByField(t *testing.T) {
	class := decodeAttachment(t, `{`+header+`, "mode": "Bridge", "mtu": 4000, "interfaceName": "fromclass", "addresses": ["10.20.0.5/24"], "bandwidth": {"burst": "Line"}}`)
	claim := decodeAttachment(t, `{`+header+`, "interfaceName": "fromclaim", "addresses": ["10.20.0.6/24"]}`)
	want := decodeAttachment(t, `{`+header+`, "mode": "Bridge", "mtu": 4000, "interfaceName": "fromclaim", "addresses": ["10.20.0.6/24"], "bandwidth": {"burst": "Line"}}`)
	if diff := cmp.Diff(want, MergeNetworkAttachments(class, claim)); diff != "" {
		t.Errorf("merged (-want +got):\n%s", diff)
	}
}

func decodeAttachment(t *testing.T, raw string) *NetworkAttachment {
	t.Helper()
	a, err := DecodeAs[*NetworkAttachment]([]byte(raw))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// What is accepted must survive the way through a record: encoded, decoded and
// validated again it is the same.
func FuzzParameters(f *testing.F) {
	f.Add([]byte(`{` + header + `}`))
	f.Add([]byte(`{` + header + `, "mode": "Bridge", "mtu": 9000, "addresses": ["10.20.0.5/24", "fd00::5/64"], "routes": [{"destination": "10.30.0.0/16", "gateway": "10.20.0.1"}], "bandwidth": {"burst": "Line"}}`))
	f.Add([]byte(`{` + header + `, "addresses": ["10.20.0.5%eth0/24"], "routes": [{"destination": "::/0", "gateway": "fe80::1%1"}]}`))
	f.Add([]byte(`{` + acceleratorHeader + `, "environment": {"A": "b"}, "deviceNodes": ["/dev/dri/card0"]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		p, err := Decode(raw)
		if err != nil {
			return
		}
		switch a := p.(type) {
		case *NetworkAttachment:
			a = MergeNetworkAttachments(nil, a)
			a.Default()
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
		again, err := Decode(encoded)
		if err != nil {
			t.Fatalf("%s: %v", encoded, err)
		}
		if diff := cmp.Diff(p, again); diff != "" {
			t.Errorf("%s changed:\n%s", encoded, diff)
		}
		if err := again.Validate().ToAggregate(); err != nil {
			t.Errorf("%s: %v", encoded, err)
		}
	})
}
