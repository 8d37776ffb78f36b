// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// repeatedRequests are the requests that the controller repeats while no object changes. The leading replica
// renews its lease, and the controller polls for the mode, because no event announces a change of mode: by discovery,
// and once a minute by a dry run.
var repeatedRequests = []string{
	"get leases.coordination.k8s.io", "update leases.coordination.k8s.io", "create podgroups.scheduling.k8s.io",
	"/apis/scheduling.k8s.io/v1beta1",
}

// While no object changes, the controller does not make other requests, even if its claims wait for other components.
func TestController_makesNoRequestsAtRest(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	e.createWaitingClaims(t)
	const rest = 20 * time.Second // the longest period of requests was 15 s
	var before map[string]int
	var last []string
	quietSince := time.Now()
	eventually.Eventually(t, 2*time.Minute, fmt.Sprintf("the controller makes no requests for %s", rest), func() error {
		after := e.used.counts()
		made := newRequests(before, after)
		if len(made) > 0 || before == nil {
			quietSince, before, last = time.Now(), after, made
		}
		if passed := time.Since(quietSince); passed < rest {
			return fmt.Errorf("%s have passed since the last: %s", passed.Round(time.Second), strings.Join(last, ", "))
		}
		return nil
	})
}

// newRequests returns the requests that were made between two counts, without repeatedRequests and renewed watches.
func newRequests(before, after map[string]int) (made []string) {
	for request, n := range after {
		isWatch := strings.HasPrefix(request, "watch ")
		if n > before[request] && !isWatch && !slices.Contains(repeatedRequests, request) {
			made = append(made, fmt.Sprintf("%d times %s", n-before[request], request))
		}
	}
	return made
}

// createWaitingClaims creates claims with a terminal pod, without their holder, with a pod that does not start, and on
// a lost node.
func (e *testEnv) createWaitingClaims(t *testing.T) {
	t.Helper()
	ns := e.createNamespace(t, "rest-terminal")
	e.createJob(t, ns)
	claim, pod := e.createHeldClaim(t, ns, "batch/jobs/train")
	e.awaitHeldState(t, claim, holderFound, true)
	e.setSucceeded(t, pod)
	eventually.Eventually(t, timeout, "the terminal pod has the controller's entry", func() error {
		err := e.client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim)
		if err == nil && !slices.ContainsFunc(claim.Status.ReservedFor, claims.IsTerminalPodEntry) {
			err = fmt.Errorf("the claim is reserved for %v", claim.Status.ReservedFor)
		}
		return err
	})

	ns = e.createNamespace(t, "rest-missing")
	claim, _ = e.createHeldClaim(t, ns, "batch/jobs/train")
	e.awaitHeldState(t, claim, holderMissing+ns, false)

	ns = e.createNamespace(t, "rest-starting")
	claim = fabricClaim(ns, "rack")
	pod = newPodWithClaim(ns, "user", 0, claim.Name)
	e.create(t, claim, pod)
	e.awaitRunning(t, ns, 1)
	pending := client.RawPatch(types.StrategicMergePatchType, []byte(`{"status":{"phase":"Pending"}}`))
	if err := e.client.Status().Patch(t.Context(), pod, pending); err != nil {
		t.Fatalf("set pod %s to Pending: %v", pod.Name, err)
	}
	e.awaitReady(t, claim, metav1.ConditionFalse)

	e.createLostBlock(t, e.createNamespace(t, "rest-lost"), "rest")
}

// awaitReady waits for the status of the condition Ready of the claim's only device.
func (e *testEnv) awaitReady(t *testing.T, claim *resourceapi.ResourceClaim, want metav1.ConditionStatus) {
	t.Helper()
	eventually.Eventually(t, timeout, fmt.Sprintf("Ready of claim %s is %s", claim.Name, want), func() error {
		if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim); err != nil {
			return err
		}
		for _, d := range claim.Status.Devices {
			for _, c := range d.Conditions {
				if c.Type == "Ready" && c.Status == want {
					return nil
				}
			}
		}
		return fmt.Errorf("its devices have the status %+v", claim.Status.Devices)
	})
}

// createLostBlock creates an AddressBlock of a node that does not exist, and an allocated claim that names the node. It
// waits until the controller has marked the block as lost.
func (e *testEnv) createLostBlock(t *testing.T, ns, name string) (*resourceapi.ResourceClaim, *network.AddressBlock) {
	t.Helper()
	const node = "lost-with-claim"
	claim := e.allocatedClaim(t, ns, node, nil, result("nic", driverName, node))
	pool := &network.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       network.AddressPoolSpec{Network: name, Subnet: "10.30.0.0/24"},
	}
	block := &network.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{Name: name + "-4-0a1e0001"},
		Spec: network.AddressBlockSpec{
			Network: name, Pool: name, Node: node, Ranges: []string{"10.30.0.1-10.30.0.1"},
		},
	}
	e.create(t, pool, block)
	t.Cleanup(func() { // the test may have deleted some of them
		_ = e.client.Delete(context.Background(), block)
		_ = e.client.Delete(context.Background(), pool)
	})
	eventually.Eventually(t, timeout, "the controller has marked the block of the lost node", func() error {
		err := e.client.Get(t.Context(), client.ObjectKeyFromObject(block), block)
		if _, marked := block.Annotations[network.NodeLostAnnotation]; err == nil && !marked {
			err = errors.New("the block is not marked")
		}
		return err
	})
	return claim, block
}

// The block of a lost node returns when the last claim that names the node loses its devices.
func TestAddressPools_lostNodeWithClaim(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	claim, block := e.createLostBlock(t, e.createNamespace(t, "lost"), "lost")
	deallocate := client.RawPatch(types.MergePatchType, []byte(`{"status":{"allocation":null,"reservedFor":null}}`))
	if err := e.client.Status().Patch(t.Context(), claim, deallocate); err != nil {
		t.Fatalf("deallocate the claim: %v", err)
	}
	eventually.Eventually(t, 20*time.Second, "the block of the lost node is returned", func() error {
		err := e.client.Get(t.Context(), client.ObjectKeyFromObject(block), block)
		if err == nil {
			err = fmt.Errorf("AddressBlock %s exists", block.Name)
		}
		return client.IgnoreNotFound(err)
	})
}
