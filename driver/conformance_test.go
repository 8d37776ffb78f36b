// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/conformance"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/nic"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

// servedVariable makes the test binary the plugin of a node of the conformance suite.
const servedVariable = "DRIVER_TEST_SERVE"

// servePlugin runs the plugin that the variables of conformance.Config.Command describe, until
// SIGTERM. The node has the NIC that the file nic in STATE_DIR names.
func servePlugin() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	rest, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return err
	}
	rest.QPS = -1 // the API server belongs to the suite
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return err
	}
	state := os.Getenv("STATE_DIR")
	name, err := os.ReadFile(filepath.Join(state, "nic"))
	if err != nil {
		return err
	}
	node, err := netdev.NewNode(netdev.Options{BPFFS: state})
	if err != nil {
		return err
	}
	c, err := config.Load([]byte("apiVersion: config.dra-shared.dev/v1alpha1\nkind: DriverConfig\nnetworks: " +
		strings.ReplaceAll(oneNetwork, "nic0", strings.TrimSpace(string(name)))))
	if err != nil {
		return errors.Join(err, node.Close())
	}
	nics, err := nic.New(nic.Options{Node: node, Inventory: netdev.NewInventory("/sys"), Config: c})
	if err != nil {
		return errors.Join(err, node.Close())
	}
	d, err := driver.New(driver.Options{
		DriverName: os.Getenv("DRIVER_NAME"), NodeName: os.Getenv("NODE_NAME"), Client: client,
		Instance: os.Getenv("POD_UID"), RollingUpdate: true, Hook: "/hook", PluginDir: os.Getenv("PLUGIN_DIR"),
		RegistryDir: os.Getenv("REGISTRY_DIR"), CDIDir: os.Getenv("CDI_DIR"), RunDir: state,
		Kinds: []driver.Kind{nics},
	})
	if err != nil {
		return errors.Join(err, node.Close())
	}
	wait, err := d.Start(ctx)
	if err != nil {
		return errors.Join(err, node.Close())
	}
	return errors.Join(wait(), node.Close())
}

// Hooks of the conformance suite. The instances on the nodes of the suite run in one network
// namespace, so that each node has a separate NIC.
const (
	addNIC = `i=0
until ip link add "nic$i" mtu 9000 type veth peer name "wire$i"; do i=$((i+1)); [ $i -lt 9 ]; done
ip link set "wire$i" up && ip link set "nic$i" up && echo "nic$i" >"$STATE_DIR/nic"`
	deleteNIC  = `ip link delete "$(cat "$STATE_DIR/nic")"`
	removeNIC  = `n=$(cat "$STATE_DIR/nic"); ip link set "$n" down && ip link set "$n" name "gone-$n"`
	restoreNIC = `n=$(cat "$STATE_DIR/nic"); ip link set "gone-$n" name "$n" && ip link set "$n" up`
)

func TestConformance(t *testing.T) {
	loopback, err := netlink.LinkByName("lo") // to reach the suite's API server
	if err == nil {
		err = netlink.LinkSetUp(loopback)
	}
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	shell := func(script string) []string { return []string{"sh", "-euc", script} }
	twoNodes := true
	conformance.Test(t, conformance.Config{
		// `make conformance-report` sets these.
		Report: os.Getenv("CONFORMANCE_REPORT"),
		Implementation: conformance.Implementation{
			Organization: "dra-shared", Project: "dra-driver-shared", Version: os.Getenv("CONFORMANCE_VERSION"),
			URL: "https://github.com/dra-shared/dra-driver-shared",
		},
		Driver: driverName, Features: []string{"ConsumableCapacity", "SharedDevices", "RollingUpdate", "Status",
			"Health", "Metadata", "AdminAccess", "PrioritizedList", "WorkloadClaims", "DeviceTaints"},
		Parameters: []string{
			`{"apiVersion":"dra-shared.dev/v1alpha1","kind":"NetworkAttachment","interfaceName":"one"}`,
			`{"apiVersion":"dra-shared.dev/v1alpha1","kind":"NetworkAttachment","interfaceName":"two"}`,
			longParameters(t),
		},
		Command: []string{"env", servedVariable + "=1", program},
		RBAC:    []string{"../reports/drivers/dra-driver-shared/rbac.yaml"},
		Hooks: conformance.Hooks{
			Setup: shell(addNIC), Teardown: shell(deleteNIC),
			RemoveDevice: shell(removeNIC), RestoreDevice: shell(restoreNIC),
			// The CDI edits start a hook, which reads the parameters and the capacity in the record.
			Effect: shell(`grep -Eo '"(capacity|parameters)":\{[^}]*\}' "$PLUGIN_DIR/claims/$CLAIM_UID.json"`),
		},
		TwoNodes: &twoNodes,
	})
}

// longParameters returns parameters of more than 9 KiB.
func longParameters(t *testing.T) string {
	t.Helper()
	p := map[string]any{"apiVersion": v1alpha1.GroupVersion.String(), "kind": "NetworkAttachment"}
	var neighbors, routes, rules []any
	for i := range 64 {
		neighbors = append(neighbors, map[string]any{
			"address": fmt.Sprintf("fd00:1111:2222:3333:4444:5555:6666:%04x", 0x1000+i),
			"mac":     fmt.Sprintf("02:00:00:00:00:%02x", i),
		})
	}
	for i := range 32 {
		routes = append(routes, map[string]any{
			"destination": fmt.Sprintf("fd00:1111:2222:3333:4444:5555:%04x:0/112", 0x1000+i), "table": 1000 + i,
		})
	}
	for i := range 16 {
		rules = append(rules, map[string]any{
			"source":      fmt.Sprintf("fd00:1111:2222:3333:4444:5555:%04x:0/112", 0x1000+i),
			"destination": fmt.Sprintf("fd00:1111:2222:3333:4444:5555:%04x:0/112", 0x2000+i), "table": 1000 + i,
			"priority": 1000 + i,
		})
	}
	p["neighbors"], p["routes"], p["policyRules"] = neighbors, routes, rules
	raw, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}
