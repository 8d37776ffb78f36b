// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"errors"
	"testing"

	"k8s.io/klog/v2/ktesting"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/nic"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// leftByPredecessor returns a kind that shares no NIC, on a node with a NIC that has the queues of an earlier plugin.
// While the result of fails is true, the kernel refuses to remove them. owned reports whether the NIC has them.
func leftByPredecessor(t *testing.T, fails func() bool) (kind *nic.Kind, owned func() bool) {
	t.Helper()
	nic0, _ := nstest.NIC(t, "nic0", 1500)
	htb := shape.New(nstest.Current(t).Socket, nil)
	rates := shape.NICRates{Line: 1e9, Reserve: 1e8, MinShare: 1e6}
	if _, err := htb.Setup(nic0.Name, nic0.Index, shape.OneTree, rates, false); err != nil {
		t.Fatal(err)
	}
	node, err := netdev.NewNode(netdev.Options{
		BPFFS: t.TempDir(), Failpoints: func(name string, operation func() error) error {
			if name == "remove queues" && fails() {
				return errors.New("device or resource busy")
			}
			return operation()
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = node.Close() })
	kind, err = nic.New(nic.Options{
		Node: node, Inventory: netdev.NewInventory("/sys"), Config: &config.DriverConfig{},
	})
	if err != nil {
		t.Fatal(err)
	}
	return kind, func() bool {
		has, err := htb.Owned(nic0.Index)
		if err != nil {
			t.Fatal(err)
		}
		return has
	}
}

func TestRefresh_removesQueuesAgainAfterFailure(t *testing.T) {
	failing := true
	kind, owned := leftByPredecessor(t, func() bool { return failing })
	_, ctx := ktesting.NewTestContext(t)
	for _, failing = range []bool{true, true, false} {
		if _, err := kind.Refresh(ctx, nil); err != nil {
			t.Fatal(err)
		}
		if owned() != failing {
			t.Errorf("the NIC has the queues of the earlier plugin: %t, want %t", !failing, failing)
		}
	}
}

func TestCleanup_removesQueuesAgainAfterFailure(t *testing.T) {
	failing := true
	kind, owned := leftByPredecessor(t, func() bool { return failing })
	_, ctx := ktesting.NewTestContext(t)
	if _, err := kind.Refresh(ctx, nil); err != nil {
		t.Fatal(err)
	}
	failing = false
	if err := kind.Cleanup(ctx); err != nil {
		t.Error(err)
	}
	if owned() {
		t.Error("the NIC has the queues of the earlier plugin")
	}
}
