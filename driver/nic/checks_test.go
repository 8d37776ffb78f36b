// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/classify/trial"
	resourceapi "k8s.io/api/resource/v1"
)

func TestMissingCookie_namesRemedy(t *testing.T) {
	const held = "this node identifies senders by address only: a pod with CAP_NET_RAW can send as another pod and " +
		"exceed its grant"
	for name, test := range map[string]struct {
		results []trial.Result
		want    string
	}{
		"only the address was permitted": {
			results: []trial.Result{{Key: classify.KeyMAC}},
			want:    held,
		},
		"the last way with a cookie is the one to repair": {
			results: []trial.Result{
				{Key: classify.KeyCookie, Err: errors.New("unknown func")},
				{Key: classify.KeySocketCookie, Err: errors.Join(errors.New("refused"), errors.New("denied"))},
				{Key: classify.KeyMAC},
			},
			want: held + "; identifying them by NetnsCookieOfSocket failed: refused; denied",
		},
		"the plugin does not have CAP_PERFMON": {
			results: []trial.Result{
				{Key: classify.KeyCookie, Err: errors.New("unknown func")},
				{Key: classify.KeySocketCookie, Err: fmt.Errorf("refused: %w", classify.ErrNoPerfmon)},
				{Key: classify.KeyMAC},
			},
			want: held + "; identifying them by NetnsCookieOfSocket failed: refused: the process does not have CAP_PERFMON: " +
				"set plugin.perfmon=true in the chart's values",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := cookieMessage(test.results); got != test.want {
				t.Errorf("cookieMessage: got %q, want %q", got, test.want)
			}
		})
	}
}

func TestChecks_includeRoutesAndAttachPointOfKeyInUse(t *testing.T) {
	refused := errors.New("permission denied")
	results := []trial.Result{
		{Key: classify.KeyCookie, Err: refused, Routes: refused},
		{Key: classify.KeySocketCookie, AttachPoint: classify.AttachTCX},
		{Key: classify.KeyMAC, AttachPoint: classify.AttachClsact, Routes: refused, ARP: refused, Lists: refused},
	}
	for key, want := range map[classify.Key]bool{classify.KeySocketCookie: true, classify.KeyMAC: false} {
		got := checks(results, key)
		wantLast := []check{{"ForwardedByRoute", want}, {"ARPSender", want}, {"SenderLists", want}, {"TCX", want}}
		if len(got) != 7 || !slices.Equal(got[3:], wantLast) {
			t.Errorf("checks with key %s in use: got %+v, want %+v after the keys", key, got, wantLast)
		}
	}
}

func TestPublish_includesChecksOfKernel(t *testing.T) {
	devices, problems := plan([]netdev.NIC{virtual("nic0")},
		load(t, `[{name: storage, interfaces: ["nic*"], bandwidth: 1G}]`))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	d := devices[0]
	d.checks = []check{
		{"NetnsCookie", true}, {"ForwardedByRoute", false}, {"ARPSender", false}, {"SenderLists", true}, {"TCX", true},
	}
	attributes := d.publish().Attributes
	for name, want := range map[resourceapi.QualifiedName]bool{
		"tcx": true, "forwardedByRoute": false, "arpSender": false, "senderLists": true,
	} {
		if got := attributes[name].BoolValue; got == nil || *got != want {
			t.Errorf("attribute %s: got %v, want %v", name, attributes[name], want)
		}
	}
	if got, want := passedKernelChecks(d.checks), "NetnsCookie, SenderLists, TCX"; got != want {
		t.Errorf("passedKernelChecks: got %q, want %q", got, want)
	}
	d.checks = nil
	if value, published := d.publish().Attributes["tcx"]; published {
		t.Errorf("attribute tcx without enforcement: got %v, want none", value)
	}
}
