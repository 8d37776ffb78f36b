// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// linkState is a link of 100 to 200 bit/s as the kernel has it.
func linkState(addresses ...string) netdev.LinkState {
	rates := &shape.Rates{Floor: 100, Ceil: 200}
	link := netdev.LinkState{
		Exists:  true,
		Up:      true,
		Name:    "net1",
		MAC:     net.HardwareAddr{2, 0, 0, 0, 0, 1},
		MTU:     9000,
		Send:    rates,
		Receive: rates,
	}
	for _, a := range addresses {
		link.Addresses = append(link.Addresses, netip.MustParsePrefix(a))
	}
	return link
}

// podState is an attachment on a NIC with enforcement None, so its state does not depend on a node.
func podState(t *testing.T, pod string, link netdev.LinkState) driver.PodState {
	t.Helper()
	devices, problems := plan(
		[]netdev.NIC{virtual("nic0")},
		load(t, `[{name: a, interfaces: [nic0], bandwidth: 1G, enforcement: None}]`),
	)
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	p := v1alpha1.NetworkAttachment{Routes: []v1alpha1.Route{{Destination: "10.30.0.0/16", Gateway: "10.20.0.1"}}}
	state := newKind(t, Options{}).state(devices[0], record.Share{}, p, netdev.Attachment{Name: "net1"}, link)
	return driver.PodState{Pod: attach.Pod{UID: pod, Namespace: "ns", Name: pod}, State: state}
}

func TestStatusData_oneLink(t *testing.T) {
	data := newKind(t, Options{}).StatusData([]driver.PodState{podState(t, "p", linkState("10.20.0.5/16"))}, 0)
	got, err := yaml.Marshal(data)
	if err != nil {
		t.Fatal(err)
	}
	const want = `apiVersion: dra-shared.dev/v1alpha1
bandwidth:
  receive:
    ceiling: 200
    guaranteed: 100
  send:
    ceiling: 200
    guaranteed: 100
cniVersion: 1.1.0
interfaces:
- mac: "02:00:00:00:00:01"
  mtu: 9000
  name: net1
ips:
- address: 10.20.0.5/16
  interface: 0
kind: NetworkStatus
network: a
pod: ns/p
routes:
- dst: 10.30.0.0/16
  gw: 10.20.0.1
`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("status data (-want +got):\n%s", diff)
	}
}

func TestWithNameservers(t *testing.T) {
	linked := podState(t, "p", linkState("10.20.0.5/16")).State
	got := withNameservers(linked, []string{"10.20.0.2"})
	want := &v1alpha1.CNIDNS{Nameservers: []string{"10.20.0.2"}}
	if status := networkStatusOf(driver.PodState{State: got}); !reflect.DeepEqual(status.DNS, want) {
		t.Errorf("got dns %v in the status, want %v", status.DNS, want)
	}
	if values := got.Attributes[v1alpha1.AttributeNameservers].StringValues; !slices.Equal(values, want.Nameservers) {
		t.Errorf("got the attribute %v, want %v", values, want.Nameservers)
	}
	if gone := withNameservers(driver.State{}, []string{"10.20.0.2"}); gone.Attributes != nil || gone.Data != nil {
		t.Errorf("got %+v for a link that is gone, want no nameservers", gone)
	}
}

// The API server accepts at most 10 KiB of data per device (KEP-4817).
func TestStatusData_manyPodsIsBounded(t *testing.T) {
	var addresses []string
	for i := range 20 {
		addresses = append(addresses, fmt.Sprintf("fd00:1111:2222:3333:4444:5555:6666:%04x/128", 0x7000+i))
	}
	var attachments []driver.PodState
	for i := range 300 {
		attachments = append(
			attachments,
			podState(t, fmt.Sprintf("%s-%03d", strings.Repeat("long", 60), 299-i), linkState(addresses...)),
		)
	}
	raw, err := json.Marshal(newKind(t, Options{}).StatusData(attachments, 1))
	if err != nil {
		t.Fatal(err)
	}
	if len(raw) > 10<<10 {
		t.Errorf("status data of 300 pods has %d bytes, want at most 10 KiB", len(raw))
	}
	for _, want := range []string{`"pods":301,"attached":300,"failed":1`, `"truncated":true`,
		`"first":[{"pod":"ns/` + strings.Repeat("long", 60) + `-000"`} {
		if !strings.Contains(string(raw), want) {
			t.Errorf("status data of 300 pods lacks %s: %.300s", want, raw)
		}
	}
	if n := len(attachments[0].NetworkData.IPs); n != maxAddresses {
		t.Errorf("network data has %d addresses, want %d", n, maxAddresses)
	}
}

// The EndpointSlices of a Service need the addresses of all pods that share a claim.
func TestStatusData_listsAllPodsOfNode(t *testing.T) {
	for pods, describesLinks := range map[int]bool{20: true, 110: false} {
		var attachments []driver.PodState
		for i := range pods {
			name := fmt.Sprintf("web-frontend-production-5d4b8c7f9d-x%03d", i)
			attachments = append(attachments, podState(t, name, linkState(fmt.Sprintf("10.200.100.%d/16", 100+i))))
		}
		attachments[7].Ready = false
		got, ok := newKind(t, Options{}).StatusData(attachments, 0).(v1alpha1.NetworkStatusSummary)
		if !ok || got.Truncated || len(got.First) != pods {
			t.Fatalf("status of %d pods: got %d links, truncated %t, want all", pods, len(got.First), got.Truncated)
		}
		for i, link := range got.First {
			want := v1alpha1.PodNetworkStatus{
				Pod: "ns/" + attachments[i].Pod.Name, IPs: attachments[i].NetworkData.IPs, NotReady: i == 7,
			}
			if describesLinks {
				want.Interface, want.MAC = "net1", "02:00:00:00:00:01"
			}
			if diff := cmp.Diff(want, link); diff != "" {
				t.Errorf("status of %d pods: link %d (-want +got):\n%s", pods, i, diff)
			}
		}
		if raw, err := json.Marshal(got); err != nil || len(raw) > maxSummary {
			t.Errorf("status of %d pods: got %d bytes and error %v, want at most %d", pods, len(raw), err, maxSummary)
		}
	}
}

func TestState_linkIsMissing(t *testing.T) {
	state := podState(t, "p", netdev.LinkState{}).State
	if state.Exists || state.Ready || state.Reason != v1alpha1.ReasonLinkGone || state.NetworkData != nil ||
		!strings.Contains(state.Message, "the link net1 no longer exists in the pod") {
		t.Errorf("state of a link that is gone: %+v", state)
	}
	if len(state.Conditions) != 2 {
		t.Errorf("conditions of a link that is gone: %+v, want 2", state.Conditions)
	}
	for _, c := range state.Conditions {
		if c.Reason != v1alpha1.ReasonLinkGone || c.Status != "False" {
			t.Errorf("condition of a link that is gone: %+v", c)
		}
	}
}

func TestState_linkIsDown(t *testing.T) {
	link := linkState()
	link.Up = false
	state := podState(t, "p", link).State
	if !state.Exists || state.Ready || state.Reason != v1alpha1.ReasonLinkChanged {
		t.Errorf("state of a link that is down: %+v", state)
	}
}

func TestLimits_namesLimitOfForwardedFrames(t *testing.T) {
	uplink := virtual("nic0")
	uplink.Uplink = true
	devices, problems := plan([]netdev.NIC{uplink}, load(t, `[{name: a, interfaces: [nic0], bandwidth: 1G}]`))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	for recognized, want := range map[classify.Forwarded]bool{
		classify.ForwardedByRoute:   false,
		classify.ForwardedByAddress: true,
	} {
		message := enforcementMessage(devices[0], netdev.LinkState{}, recognized)
		if got := strings.Contains(message, "and with the address of nic0, including a share's, count as "+
			"forwarded by the node and share 100M bit/s"); got != want {
			t.Errorf("recognized by %d: message %q, want the bound: %t", recognized, message, want)
		}
	}
}

// The hook need not announce IPv6 addresses for a share that has none.
func TestKind_Edits_announceIPv6(t *testing.T) {
	const off = "--announce-ipv6=false"
	for parameters, want := range map[string]string{
		`{}`:                             "",
		`{"addresses": ["10.0.0.1/24"]}`: off,
		`{"addresses": ["10.0.0.1/24", "fd00::1/64"]}`:                "",
		`{"addresses": ["10.0.0.1/24"], "addressPools": ["fd00-64"]}`: "",
		`{"addressPools": ["ten"]}`:                                   "",
	} {
		share := record.Share{
			Request: "nic", ShareID: "s", Parameters: json.RawMessage(parameters),
			Capacity: map[string]resource.Quantity{v1alpha1.CapacityBandwidth: resource.MustParse("10M")},
		}
		edits, err := newKind(t, Options{}).Edits(share)
		if got := strings.Join(edits.Hook, " "); got != want || err != nil {
			t.Errorf("hook of a share with parameters %s: got arguments %q and error %v, want %q", parameters, got, err, want)
		}
	}
}

func TestKind_enforced(t *testing.T) {
	changed := func(change func(*device)) *device {
		devices, problems := plan([]netdev.NIC{virtual("nic0")}, load(t, `[{name: a, interfaces: [nic0], bandwidth: 1G}]`))
		if len(problems) > 0 {
			t.Fatal(problems)
		}
		change(devices[0])
		return devices[0]
	}
	const grant = 100 * 1000 * 1000
	granted := record.Share{ShareID: "id", Capacity: map[string]resource.Quantity{
		v1alpha1.CapacityBandwidth: *resource.NewQuantity(grant, resource.DecimalSI),
	}}
	rates := func(floor uint64) *shape.Rates { return &shape.Rates{Floor: floor, Ceil: floor} }
	link := func(send, receive *shape.Rates) netdev.LinkState {
		return netdev.LinkState{Exists: true, Up: true, Name: "net1", Send: send, Receive: receive}
	}
	hardCap := v1alpha1.NetworkAttachment{}
	for name, tc := range map[string]struct {
		change func(*device)
		share  record.Share
		link   netdev.LinkState
		reason string
		text   string // part of the message
	}{
		"a program in front takes frames": {
			func(d *device) { d.missed = "program 7 runs before" }, granted, link(rates(grant), rates(grant)),
			v1alpha1.ReasonFramesMissed, "NIC nic0: program 7 runs before",
		},
		"the kernel has no cookie": {
			func(*device) {}, granted, link(rates(grant), rates(grant)), v1alpha1.ReasonMAC, "",
		},
		"other rates in one direction": {
			func(*device) {}, granted, link(rates(grant), rates(grant/2)), v1alpha1.ReasonRateDiffers, "granted 100M",
		},
		"no class": {func(*device) {}, granted, link(nil, nil), v1alpha1.ReasonNotClassified, "net1"},
		"admin access": {
			func(*device) {}, record.Share{AdminAccess: true}, link(nil, nil), v1alpha1.ReasonAdminAccess, "have no grant",
		},
		"without enforcement": {
			func(d *device) { d.network.Enforcement = config.EnforcementNone }, granted, link(nil, nil),
			v1alpha1.ReasonEnforcementNone, `network "a"`,
		},
		"the NIC is missing": {
			func(d *device) { d.absent = true }, granted, link(nil, nil), v1alpha1.ReasonDeviceGone, "nic0",
		},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKind(t, Options{})
			c := k.enforcementCondition(changed(tc.change), tc.share, hardCap, tc.link)
			if c.Type != v1alpha1.ConditionBandwidthEnforced || c.Reason != tc.reason || !strings.Contains(c.Message, tc.text) {
				t.Errorf("condition %+v, want the reason %s and a message with %q", c, tc.reason, tc.text)
			}
			if want := tc.reason == v1alpha1.ReasonAdminAccess; (c.Status == "True") != want {
				t.Errorf("status %s for the reason %s", c.Status, c.Reason)
			}
		})
	}
}
