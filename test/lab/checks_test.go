// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"testing"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/test/kernelcheck"
)

const (
	old    = "6.1.0-56-cloud-amd64"
	recent = "6.12.117+deb12-cloud-amd64"
)

func TestExpectedChecks(t *testing.T) {
	memory := []string{
		v1alpha1.KernelCheckNetnsCookieOfSocket, v1alpha1.KernelCheckForwardedByRoute, v1alpha1.KernelCheckARPSender,
		v1alpha1.KernelCheckSenderLists,
	}
	for _, tc := range []struct {
		release   string
		arguments []string
		want      []string
	}{
		{old, nil, memory},
		{old, []string{confidentiality}, nil},
		{old, []string{"lockdown=integrity"}, memory},
		{recent, nil, slices.Concat(memory, []string{v1alpha1.KernelCheckTCX})},
		{recent, []string{"quiet", confidentiality}, []string{v1alpha1.KernelCheckTCX}},
		{"7.0.1-amd64", nil, slices.Concat(memory, []string{v1alpha1.KernelCheckTCX})},
	} {
		if got := expectedChecks(tc.release, tc.arguments); !slices.Equal(got, tc.want) {
			t.Errorf("%s %v: got %v, want %v", tc.release, tc.arguments, got, tc.want)
		}
	}
	if string(classify.KeySocketCookie) != kernelcheck.NetnsCookieOfSocket {
		t.Errorf("the check of the key %s is named %s", classify.KeySocketCookie, kernelcheck.NetnsCookieOfSocket)
	}
}

func TestCheckKey(t *testing.T) {
	for _, tc := range []struct {
		key       classify.Key
		arguments []string
		fails     bool
	}{
		{classify.KeyCookie, nil, false},
		{classify.KeySocketCookie, nil, false},
		{classify.KeyMAC, nil, true},
		{"", nil, true},
		{classify.KeyMAC, []string{confidentiality}, false},
		{"", []string{confidentiality}, true},
	} {
		if err := checkKey(string(tc.key), recent, tc.arguments); (err != nil) != tc.fails {
			t.Errorf("key %q, arguments %v: got error %v, want one: %t", tc.key, tc.arguments, err, tc.fails)
		}
	}
}
