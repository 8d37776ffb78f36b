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
	for _, tc := range corpus(t, "NetworkAttachment") {
		t.Run(tc.Name, func(t *testing.T) {
			if err := check(tc.Parameters, everything()); err == nil || !strings.Contains(err.Error(), tc.Want) {
				t.Errorf("got  %v\nwant %s", err, tc.Want)
			}
		})
	}
}

// wrong is a case of testdata/wrong.yaml, from which admission is tested too.
type wrong struct {
	Name, Kind, Parameters, Want string
	OnDevice                     bool
}

func corpus(t *testing.T, kind string) (cases []wrong) {
	t.Helper()
	raw, err := os.ReadFile("testdata/wrong.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(raw, &cases); err != nil {
		t.Fatal(err)
	}
	cases = slices.DeleteFunc(cases, func(w wrong) bool { return w.Kind != kind })
	if len(cases) < 10 {
		t.Fatalf("%d cases of kind %s", len(cases), kind)
	}
	return cases
}

// What the node would refuse for every device is refused without one too.
func TestWhatIsWrongByItselfNeedsNoDevice(t *testing.T) {
	for _, tc := range append(corpus(t, "NetworkAttachment"), corpus(t, "AcceleratorShare")...) {
		if err := Check([]byte(tc.Parameters)); (err == nil) != tc.OnDevice {
			t.Errorf("%s: %v", tc.Name, err)
		}
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
