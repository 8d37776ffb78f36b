// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"k8s.io/klog/v2/ktesting"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/nic"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// Trials that fail take seconds, during which the plugin holds locks. It has two minutes to start, however
// many NICs the node has.
func TestTrials_repeatedOncePerRefresh(t *testing.T) {
	const nics = 6
	for i := range nics {
		nstest.NIC(t, fmt.Sprintf("nic%d", i), 1500)
	}
	trials, fails := 0, true
	node, err := netdev.NewNode(netdev.Options{
		BPFFS: nstest.MountBPFFS(t),
		Failpoints: func(name string, operation func() error) error {
			if name == "add trial links" {
				if trials++; fails {
					return errInjected
				}
			}
			return operation()
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	networks := pluginConfig{Interfaces: `"nic*"`}
	c, err := config.Load([]byte(networks.driverConfig()))
	if err != nil {
		t.Fatal(err)
	}
	kind, err := nic.New(nic.Options{Node: node, Inventory: netdev.NewInventory("/sys"), Config: c})
	if err != nil {
		t.Fatal(err)
	}
	_, ctx := ktesting.NewTestContext(t)
	for _, step := range []struct {
		name             string
		do               func(context.Context) error
		fails            bool
		trials, problems int
	}{
		{"check before a handover", func(ctx context.Context) error {
			if err := kind.CheckTakeover(ctx, nil); err == nil {
				return errors.New("got no error")
			}
			return nil
		}, true, 1, 0},
		{"first refresh", refresh(kind), true, 1, nics},
		{"second refresh", refresh(kind), true, 1, nics},
		{"refresh after the repair", refresh(kind), false, 1, 0},
		{"further refresh", refresh(kind), false, 0, 0},
	} {
		trials, fails = 0, step.fails
		if err := step.do(ctx); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		if problems := kind.Problems(); trials != step.trials || len(problems) != step.problems {
			t.Errorf("%s: %d trials, want %d; problems: %v, want %d", step.name, trials, step.trials, problems, step.problems)
		}
	}
}

func refresh(kind *nic.Kind) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := kind.Refresh(ctx, nil)
		return err
	}
}
