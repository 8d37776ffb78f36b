// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"cmp"
	"context"
	"encoding/json"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// A plugin may write only the status of its own devices in claims. Where the API server does not
// authorize the parts of a claim's status separately, the policy of the chart alone must enforce
// this.
func TestPolicy_claimStatus(t *testing.T) {
	e := requireTestEnv(t)
	granular := false
	t.Run("with the API server's defaults", func(t *testing.T) { granular = e.tryClaimStatus(t, false) })
	if !granular {
		return // the policy has refused every misuse already
	}
	t.Run("without granular authorization", func(t *testing.T) {
		t.Cleanup(func() { e.setGates(t, cmp.Or(os.Getenv(envGates), "default")) })
		e.setGates(t, "no-granular-status")
		if e.tryClaimStatus(t, true) {
			t.Error("the API server still authorizes the parts of a claim's status separately")
		}
	})
}

// setGates restarts the control plane with other feature gates.
func (e *testEnv) setGates(t *testing.T, gates string) {
	t.Helper()
	ctx := context.Background()
	if err := e.cluster.SetGates(ctx, gates); err != nil {
		t.Fatal(err)
	}
	e.awaitAPIServer(t)
}

// Names in claims of the test. The pool of a plugin's devices has the name of its
// node.
const (
	ownNode     = "sim-000"
	otherNode   = "sim-001"
	fabricPool  = "rack"
	otherDriver = "other.example.com"
)

// tryClaimStatus writes statuses of claims with the identity of the plugin on
// ownNode. If policyOnly is set, the chart's policy must have refused each misuse. It
// reports whether the API server has refused one of them on its own.
func (e *testEnv) tryClaimStatus(t *testing.T, policyOnly bool) (granular bool) {
	t.Helper()
	c := claimStatusTest{
		testEnv: e, ns: e.createNamespace(t, "status"), plugin: e.pluginClient(t, ownNode), policyOnly: policyOnly,
		own: result("own", driverName, ownNode), other: result("other", otherDriver, ownNode),
		fabric: result("fabric", driverName, fabricPool),
	}
	c.withOthers = []resourceapi.AllocatedDeviceStatus{entry(c.other, "before"), entry(c.fabric, "before")}
	t.Run("the plugin writes, changes, and removes its entry", c.writeOwnEntry)
	for _, m := range c.misuses(e.pluginClient(t, "")) {
		t.Run(m.name, func(t *testing.T) {
			if c.isRefusedByAPIServer(t, m) {
				granular = true
			}
		})
	}
	return granular
}

// claimStatusTest has what the writes of statuses need.
type claimStatusTest struct {
	*testEnv
	ns                 string
	plugin             kubernetes.Interface
	policyOnly         bool
	own, other, fabric resourceapi.DeviceRequestAllocationResult
	withOthers         []resourceapi.AllocatedDeviceStatus // the entries of the claim before the plugin writes
}

// writeOwnEntry expects that the plugin can write, change, and remove its entry, and that the others remain.
func (c *claimStatusTest) writeOwnEntry(t *testing.T) {
	claim := c.allocatedClaim(t, c.ns, ownNode, c.withOthers, c.own, c.other, c.fabric)
	for _, entries := range [][]resourceapi.AllocatedDeviceStatus{
		{entry(c.own, "first")}, {entry(c.own, "second")}, nil,
	} {
		if err := claimstatus.Apply(t.Context(), c.plugin, claim, "plugin", entries); err != nil {
			t.Fatalf("apply %d entries: %v", len(entries), err)
		}
		if err := c.client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim); err != nil {
			t.Fatal(err)
		}
		if got, want := len(claim.Status.Devices), len(c.withOthers)+len(entries); got != want {
			t.Fatalf("the claim has %d entries, want %d", got, want)
		}
	}
}

// claimStatusMisuse is a write that the plugin on ownNode may not make.
type claimStatusMisuse struct {
	name   string
	node   string // of the claim
	plugin kubernetes.Interface
	misuse func(*resourceapi.ResourceClaimStatus)
	want   string // message of the policy
}

// misuses returns writes of the plugin, and one with a token that does not name a node.
func (c *claimStatusTest) misuses(withoutNode kubernetes.Interface) []claimStatusMisuse {
	const (
		mayNotChange = "the plugin may change neither the allocation of a claim nor its reservations"
		mayOnlyWrite = "the plugin on node " + ownNode + " may write status.devices only for devices of driver " +
			driverName + " in pool " + ownNode
		namesNoNode = "the token does not name a node"
	)
	plugin, own, other, fabric := c.plugin, c.own, c.other, c.fabric
	return []claimStatusMisuse{
		{"deallocate the claim", ownNode, plugin, func(s *resourceapi.ResourceClaimStatus) {
			s.Allocation, s.ReservedFor, s.Devices = nil, nil, nil
		}, mayNotChange},
		{"allocate another device", ownNode, plugin, func(s *resourceapi.ResourceClaimStatus) {
			s.Allocation.Devices.Results[0].Device = "stolen"
		}, ""}, // an allocation is immutable
		{"reserve the claim for another pod", ownNode, plugin, func(s *resourceapi.ResourceClaimStatus) {
			reference := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "intruder", UID: "2"}
			s.ReservedFor = append(s.ReservedFor, reference)
		}, mayNotChange},
		{"remove the claim's reservation", ownNode, plugin, func(s *resourceapi.ResourceClaimStatus) {
			s.ReservedFor = nil
		}, mayNotChange},
		{"change the entry of another driver", ownNode, plugin, func(s *resourceapi.ResourceClaimStatus) {
			s.Devices[0] = entry(other, "forged")
		}, mayOnlyWrite},
		{"remove the entry of another driver", ownNode, plugin, func(s *resourceapi.ResourceClaimStatus) {
			s.Devices = s.Devices[1:]
		}, mayOnlyWrite},
		{"change the entry of a fabric", ownNode, plugin, func(s *resourceapi.ResourceClaimStatus) {
			s.Devices[1] = entry(fabric, "forged")
		}, mayOnlyWrite},
		{"write the entry of a device of another node", otherNode, plugin, func(s *resourceapi.ResourceClaimStatus) {
			s.Devices = append(s.Devices, entry(result("own", driverName, otherNode), "forged"))
		}, mayOnlyWrite},
		{"write with a token that names no node", ownNode, withoutNode, func(s *resourceapi.ResourceClaimStatus) {
			s.Devices = append(s.Devices, entry(own, "forged"))
		}, namesNoNode},
	}
}

// isRefusedByAPIServer expects that a write is refused and changes nothing. It reports whether the API server refused
// it on its own, before the policy, which must not be the case if policyOnly is set.
func (c *claimStatusTest) isRefusedByAPIServer(t *testing.T, m claimStatusMisuse) (granular bool) {
	t.Helper()
	device := c.own
	if m.node != ownNode {
		device = result("own", driverName, m.node)
	}
	claim := c.allocatedClaim(t, c.ns, m.node, c.withOthers, device, c.other, c.fabric)
	before := claim.ResourceVersion
	m.misuse(&claim.Status)
	err := updateStatus(t.Context(), m.plugin, claim)
	switch {
	case err == nil:
		t.Errorf("the API server accepts the write")
	case m.want == "" || strings.Contains(err.Error(), m.want):
	case c.policyOnly || !strings.Contains(err.Error(), "requires resource="):
		t.Errorf("got error %v, want the policy's: %s", err, m.want)
	default:
		granular = true
	}
	if err := c.client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim); err != nil {
		t.Fatal(err)
	}
	if claim.ResourceVersion != before {
		t.Error("the claim has changed")
	}
	return granular
}

// updateStatus replaces the status of a claim by a patch, which is the verb that the
// chart grants.
func updateStatus(ctx context.Context, plugin kubernetes.Interface, claim *resourceapi.ResourceClaim) error {
	// A merge patch removes the fields that are null.
	status := map[string]any{
		"allocation": claim.Status.Allocation, "reservedFor": claim.Status.ReservedFor, "devices": claim.Status.Devices,
	}
	patch, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		return err
	}
	_, err = plugin.ResourceV1().ResourceClaims(claim.Namespace).Patch(ctx, claim.Name, types.MergePatchType, patch,
		metav1.PatchOptions{}, "status")
	return err
}

// pluginClient returns a client with the identity of the plugin on a node. An empty
// node stands for a token that is not bound to a pod.
func (e *testEnv) pluginClient(t *testing.T, node string) kubernetes.Interface {
	t.Helper()
	c := rest.CopyConfig(e.config)
	c.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + system + ":dra-shared-plugin",
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:" + system, "system:authenticated"},
	}
	if node != "" {
		c.Impersonate.Extra = map[string][]string{"authentication.kubernetes.io/node-name": {node}}
	}
	plugin, err := kubernetes.NewForConfig(c)
	if err != nil {
		t.Fatal(err)
	}
	return plugin
}

// allocatedClaim creates a claim that is allocated on a node, and reserved.
func (e *testEnv) allocatedClaim(
	t *testing.T, ns, node string, entries []resourceapi.AllocatedDeviceStatus,
	results ...resourceapi.DeviceRequestAllocationResult,
) *resourceapi.ResourceClaim {
	t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: ns, GenerateName: "claim-"}}
	for _, r := range results {
		claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, resourceapi.DeviceRequest{
			Name: r.Request, Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "nic." + driverName},
		})
	}
	e.create(t, claim)
	onNode := corev1.NodeSelectorRequirement{
		Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node},
	}
	terms := []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{onNode}}}
	claim.Status = resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{
			Devices:      resourceapi.DeviceAllocationResult{Results: results},
			NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: terms},
		},
		// Kubernetes would remove the entry of a pod that does not exist.
		ReservedFor: []resourceapi.ResourceClaimConsumerReference{
			{APIGroup: "batch", Resource: "jobs", Name: "team", UID: "1"},
		},
		Devices: entries,
	}
	if err := e.client.Status().Update(t.Context(), claim); err != nil {
		t.Fatalf("allocate claim %s: %v", claim.Name, err)
	}
	return claim
}

// result returns the allocation result of a device for the request of its name.
func result(name, driver, pool string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: name, Driver: driver, Pool: pool, Device: name}
}

// entry returns an entry of status.devices.
func entry(r resourceapi.DeviceRequestAllocationResult, message string) resourceapi.AllocatedDeviceStatus {
	return claimstatus.NewEntry(r, nil, metav1.Condition{
		Type: "Ready", Status: metav1.ConditionTrue, Reason: "Test", Message: message, LastTransitionTime: metav1.Now(),
	})
}
