// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"strings"
	"testing"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

// newKind builds a kind. It sets required options that o lacks: a Node without a connection to the kernel, and an
// empty configuration.
func newKind(t *testing.T, o Options) *Kind {
	t.Helper()
	if o.Node == nil {
		o.Node = &netdev.Node{}
	}
	if o.Inventory == nil {
		o.Inventory = netdev.NewInventory("/sys")
	}
	if o.Config == nil {
		o.Config = &config.DriverConfig{}
	}
	k, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestNew_refusesIncompleteOptions(t *testing.T) {
	for want, change := range map[string]func(*Options){
		"":                             func(*Options) {},
		"Node is required":             func(o *Options) { o.Node = nil },
		"Inventory is required":        func(o *Options) { o.Inventory = nil },
		"Config is required":           func(o *Options) { o.Config = nil },
		"AddressPools.API is required": func(o *Options) { o.AddressPools = &ipam.Options{} },
		"AddressPools.OnLost must not be set": func(o *Options) {
			o.AddressPools = &ipam.Options{API: fakePools{}, OnLost: func(ipam.Lost) {}}
		},
	} {
		o := Options{Node: &netdev.Node{}, Inventory: netdev.NewInventory("/sys"), Config: &config.DriverConfig{}}
		change(&o)
		_, err := New(o)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want %q", err, want)
		}
	}
}
