// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/podgroups"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
	"github.com/dra-shared/dra-driver-shared/test/simnode"
)

// A group has more pods than one claim can be reserved for. It grows to 1,000 and 1,200
// pods, shrinks to 100, and is deleted.
func TestShards_groupOfThousandPods(t *testing.T) {
	e := requireTestEnv(t)
	ctx := t.Context()
	e.startController(t, nil)
	ns := e.createNamespace(t, "thousand")
	pg := e.mustCreateGroup(t, ns, "big")
	start := time.Now()
	e.growGroup(t, ns, 0, 1000)
	t.Logf("1000 pods run after %s", time.Since(start).Round(100*time.Millisecond))
	e.checkOneDevice(t, ns)
	e.growGroup(t, ns, 1000, 1200)
	n := e.checkOneDevice(t, ns)
	t.Logf("1200 pods have %d claims", n)
	if e.native != (n == 1) {
		t.Errorf("1200 pods have %d claims, native mode: %t; want one claim in native mode only", n, e.native)
	}

	// The controller removes the claims without pods, but keeps the group's device.
	err := simnode.Parallel(1100, func(i int) error {
		return client.IgnoreNotFound(e.client.Delete(ctx, newPod(ns, "big", 100+i)))
	})
	if err != nil {
		t.Fatalf("delete 1100 pods: %v", err)
	}
	eventually.Eventually(t, 2*time.Minute, "100 pods and their shards are left", func() error {
		pods, used, err := e.claimsInUse(ctx, ns)
		if err != nil {
			return err
		}
		left, err := e.claims(ctx, ns)
		if err == nil && (pods != 100 || len(left) > len(used)+1) {
			err = fmt.Errorf("%d pods use %d of %d claims, want at most one unused claim", pods, len(used), len(left))
		}
		return err
	})
	e.deletePods(t, ns)
	e.delete(t, pg)
	e.awaitEmpty(t, ns)
}

// growGroup creates pods of group big and waits until to pods run.
func (e *testEnv) growGroup(t *testing.T, ns string, from, to int) {
	t.Helper()
	create := func(i int) error { return e.createPod(t.Context(), newPod(ns, "big", from+i)) }
	if err := simnode.Parallel(to-from, create); err != nil {
		t.Fatalf("create pods %d to %d: %v", from, to-1, err)
	}
	e.awaitRunning(t, ns, to)
}

// claimsInUse returns the number of pods of a namespace and, by claim, how many
// of them use it.
func (e *testEnv) claimsInUse(ctx context.Context, ns string) (pods int, used map[string]int, err error) {
	var list corev1.PodList
	if err := e.client.List(ctx, &list, client.InNamespace(ns)); err != nil {
		return 0, nil, err
	}
	used = map[string]int{}
	for i := range list.Items {
		used[claimName(&list.Items[i])]++
	}
	return len(list.Items), used, nil
}

// claimName returns the name of the pod's first claim.
func claimName(pod *corev1.Pod) string {
	return ptr.Deref(pod.Spec.ResourceClaims[0].ResourceClaimName, "")
}

// The first claim of a group with shards is deleted. It is the primary shard, which
// accounts for the device, so it must stay until the pods of all shards are deleted.
func TestShards_firstClaimDeleted(t *testing.T) {
	e := requireTestEnv(t)
	if e.native {
		t.Skip("native mode has no shards")
	}
	ctx := t.Context()
	e.startController(t, nil)
	ns := e.createNamespace(t, "first")
	pg := e.mustCreateGroup(t, ns, "big")
	e.growGroup(t, ns, 0, 300)
	leavesStaleEntries, err := claims.ClusterLeavesStaleEntries(e.kube.Discovery())
	if err != nil {
		t.Fatal(err)
	}
	first := e.countingClaim(t, ns)
	var pods corev1.PodList
	if err := e.client.List(ctx, &pods, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	deletePods := func(ofFirst bool) {
		t.Helper()
		for i := range pods.Items {
			if (claimName(&pods.Items[i]) == first.Name) == ofFirst {
				e.delete(t, &pods.Items[i])
			}
		}
	}
	e.delete(t, first.DeepCopy())
	deletePods(true)
	eventually.Eventually(t, time.Minute, "only the group holds the first claim", func() error {
		return e.checkHeldByGroupOnly(t, first, pg, leavesStaleEntries)
	})
	deletePods(false)
	eventually.Eventually(t, time.Minute, "the first claim is deleted", func() error {
		var now resourceapi.ResourceClaim
		err := e.client.Get(ctx, client.ObjectKeyFromObject(first), &now)
		if err == nil && now.UID == first.UID {
			err = fmt.Errorf("it exists and is reserved for %d objects", len(now.Status.ReservedFor))
		}
		return client.IgnoreNotFound(err)
	})
	e.delete(t, pg)
	e.awaitEmpty(t, ns)
}

// countingClaim returns the group's claim that counts as a group on the device.
func (e *testEnv) countingClaim(t *testing.T, ns string) *resourceapi.ResourceClaim {
	t.Helper()
	all, err := e.claims(t.Context(), ns)
	if err != nil || len(all) < 2 {
		t.Fatalf("got %d claims and error %v, want at least two claims", len(all), err)
	}
	for i := range all {
		if counts(&all[i]) {
			return &all[i]
		}
	}
	t.Fatalf("none of %d claims counts as a group", len(all))
	return nil
}

// counts reports whether an allocated claim consumes the fabric's capacity groups.
func counts(claim *resourceapi.ResourceClaim) bool {
	consumed := claim.Status.Allocation.Devices.Results[0].ConsumedCapacity["groups"]
	return !consumed.IsZero()
}

// checkHeldByGroupOnly returns an error while a pod uses the claim. It fails the test immediately if the group no
// longer holds the claim.
func (e *testEnv) checkHeldByGroupOnly(
	t *testing.T, claim *resourceapi.ResourceClaim, pg *scheduling.PodGroup, leavesStaleEntries bool,
) error {
	t.Helper()
	var now resourceapi.ResourceClaim
	if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(claim), &now); err != nil {
		return err
	}
	isGroup := func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == pg.UID }
	held := slices.ContainsFunc(now.Status.ReservedFor, isGroup)
	if now.UID != claim.UID || now.Status.Allocation == nil || !held {
		t.Fatalf("the group does not hold the first claim while other shards have pods: %v", now.Status)
	}
	_, used, err := e.claimsInUse(t.Context(), claim.Namespace)
	if err != nil {
		return err
	}
	if n := used[claim.Name]; n > 0 {
		return fmt.Errorf("%d pods use it", n)
	}
	// Before Kubernetes 1.36, stale entries of pods stay as long as the group's entry.
	if n := len(now.Status.ReservedFor); !leavesStaleEntries && n > 1 {
		return fmt.Errorf("it is reserved for %d objects", n)
	}
	return nil
}

// checkOneDevice checks that all claims of a namespace are allocated the same
// device, that one of them counts as a group, and that none has too many
// entries. It returns the number of claims.
func (e *testEnv) checkOneDevice(t *testing.T, ns string) int {
	t.Helper()
	all, err := e.claims(t.Context(), ns)
	if err != nil {
		t.Fatal(err)
	}
	devices, counting := map[string]bool{}, 0
	for i := range all {
		c := &all[i]
		if c.Status.Allocation == nil {
			t.Errorf("claim %s is not allocated", c.Name)
			continue
		}
		result := c.Status.Allocation.Devices.Results[0]
		devices[result.Pool+"/"+result.Device] = true
		if counts(c) {
			counting++
		}
		const most = resourceapi.ResourceClaimReservedForMaxSize
		if n := len(c.Status.ReservedFor); n > most {
			t.Errorf("claim %s is reserved for %d objects, want at most %d", c.Name, n, most)
		}
	}
	if len(devices) != 1 || counting != 1 {
		t.Errorf("%d claims have devices %v, and %d count as groups; want one device and one counting claim",
			len(all), devices, counting)
	}
	return len(all)
}

// The rack of a group fails: its node is cordoned, and the group's pods are deleted. New pods, including pods of other
// shards, must run in the other rack, on one fabric.
func TestShards_groupLeavesFailedRack(t *testing.T) {
	e := requireTestEnv(t)
	if e.native {
		t.Skip("Kubernetes reserves the claims of a group in native mode")
	}
	const size = 250 // two claims
	e.startControllerWith(t, e.twoRacks(t), nil)
	ns := e.createNamespace(t, "racks")
	pg := e.mustCreateGroup(t, ns, "big")
	e.growGroup(t, ns, 0, size)
	e.checkOneDevice(t, ns)
	failed := e.rackOf(t, ns)

	e.cordonRack(t, failed)
	e.deletePods(t, ns)
	start := time.Now()
	e.createRunningPods(t, ns, "big", size, 2*size)
	t.Logf("%d pods run in the other rack after %s", size, time.Since(start).Round(100*time.Millisecond))
	e.checkLeftRack(t, pg, failed)
}

// checkLeftRack checks that the pods of a group run in a rack other than the failed one, on one fabric. It deletes
// them and the group.
func (e *testEnv) checkLeftRack(t *testing.T, pg *scheduling.PodGroup, failed string) {
	t.Helper()
	e.checkOneDevice(t, pg.Namespace)
	if rack := e.rackOf(t, pg.Namespace); rack == failed {
		t.Errorf("the pods run in rack %s, whose nodes are cordoned", rack)
	}
	e.deletePods(t, pg.Namespace)
	e.delete(t, pg)
	e.awaitEmpty(t, pg.Namespace)
}

// All pods of the first claim end, new pods use another claim, and then the group's rack fails. The new pods must run
// in the other rack.
func TestShards_groupWithTerminalPodsLeavesFailedRack(t *testing.T) {
	e := requireTestEnv(t)
	if e.native {
		t.Skip("Kubernetes reserves the claims of a group in native mode")
	}
	const size = 250 // two claims
	e.startControllerWith(t, e.twoRacks(t), nil)
	ns := e.createNamespace(t, "ended")
	pg := e.mustCreateGroup(t, ns, "big")
	e.growGroup(t, ns, 0, size)
	failed, first := e.rackOf(t, ns), e.countingClaim(t, ns)
	var pods corev1.PodList
	if err := e.client.List(t.Context(), &pods, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	var active []client.Object
	for i := range pods.Items {
		if claimName(&pods.Items[i]) == first.Name {
			e.setSucceeded(t, &pods.Items[i])
		} else {
			active = append(active, &pods.Items[i])
		}
	}
	e.cordonRack(t, failed)
	e.delete(t, active...)
	for _, pod := range active {
		e.awaitDeleted(t, pod)
	}
	const replaced = 10
	e.createRunningPods(t, ns, "big", size, size+replaced)
	e.checkLeftRack(t, pg, failed)
}

// No node has room for a group. The pods of its first claim are deleted, and only pods of the second claim wait. They
// must run when a node has room. Later pods use the first claim again, and the same device.
func TestShards_podsOfSecondClaimOnly(t *testing.T) {
	e := requireTestEnv(t)
	if e.native {
		t.Skip("native mode has no shards")
	}
	ctx := t.Context()
	e.startControllerWith(t, e.twoRacks(t), nil)
	ns := e.createNamespace(t, "second")
	pg := e.mustCreateGroup(t, ns, "big")
	undoA, undoB := e.cordonRack(t, "a"), e.cordonRack(t, "b")
	const size = 250 // two claims
	err := simnode.Parallel(size, func(i int) error { return e.createPod(ctx, newPod(ns, "big", i)) })
	if err != nil {
		t.Fatal(err)
	}
	var pods corev1.PodList
	if err := e.client.List(ctx, &pods, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	first, ofSecond := claims.Name(podgroups.Owner(pg), "fabric", 0), 0
	for i := range pods.Items {
		if claimName(&pods.Items[i]) == first {
			e.delete(t, &pods.Items[i])
		} else {
			ofSecond++
		}
	}
	if ofSecond == 0 {
		t.Fatal("all pods use the first claim, want a second one")
	}
	undoA()
	undoB()
	e.awaitRunning(t, ns, ofSecond)
	e.checkOneDevice(t, ns)
	e.createRunningPods(t, ns, "big", size, size+ofSecond)
	if _, used, err := e.claimsInUse(ctx, ns); err != nil || used[first] == 0 {
		t.Errorf("later pods use the claims %v and error %v, want the claim %s", used, err, first)
	}
	e.checkOneDevice(t, ns)
	e.deletePods(t, ns)
	e.delete(t, pg)
	e.awaitEmpty(t, ns)
}

// twoRacks divides the simulated nodes into the racks a and b until the test ends, and returns a configuration with a
// fabric for each.
func (e *testEnv) twoRacks(t *testing.T) *config.DriverConfig {
	t.Helper()
	racks := &config.DriverConfig{}
	for _, rack := range []string{"a", "b"} {
		racks.Fabrics = append(racks.Fabrics, config.Fabric{
			Name: rack, NodeSelector: map[string]string{"rack": rack}, Groups: groupsOnFabric,
		})
		first := firstOfRack(rack)
		e.setRack(t, rack, first, first+nodesOfRack)
	}
	return racks
}

// cordonRack makes the nodes of a rack unschedulable until the test ends or the caller calls undo.
func (e *testEnv) cordonRack(t *testing.T, rack string) (undo func()) {
	t.Helper()
	first := firstOfRack(rack)
	return e.cordon(t, first, first+nodesOfRack)
}

const nodesOfRack = 12

// firstOfRack returns the number of the first simulated node of a rack.
func firstOfRack(rack string) int { return int(rack[0]-'a') * nodesOfRack }

// setRack gives the simulated nodes from to to-1 the label of a rack until the test
// ends.
func (e *testEnv) setRack(t *testing.T, rack string, from, to int) {
	t.Helper()
	label := fmt.Sprintf(`{"metadata":{"labels":{"rack":%q}}}`, rack)
	e.patchNodes(t, from, to, label, `{"metadata":{"labels":{"rack":null}}}`)
}

// cordon makes the simulated nodes from to to-1 unschedulable until the test ends or the caller calls
// undo.
func (e *testEnv) cordon(t *testing.T, from, to int) (undo func()) {
	t.Helper()
	return e.patchNodes(t, from, to, `{"spec":{"unschedulable":true}}`, `{"spec":{"unschedulable":null}}`)
}

// patchNodes applies patch to the simulated nodes from to to-1, and the patch undo when
// the test ends or the caller calls restore.
func (e *testEnv) patchNodes(t *testing.T, from, to int, patch, undo string) (restore func()) {
	t.Helper()
	apply := func(patch string) {
		t.Helper()
		err := simnode.Parallel(to-from, func(i int) error {
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("sim-%03d", from+i)}}
			return e.client.Patch(context.Background(), node, client.RawPatch(types.MergePatchType, []byte(patch)))
		})
		if err != nil {
			t.Errorf("patch nodes %d to %d: %v", from, to-1, err)
		}
	}
	apply(patch)
	restore = sync.OnceFunc(func() { apply(undo) })
	t.Cleanup(restore)
	return restore
}

// rackOf returns the rack that the pods of a namespace run in.
func (e *testEnv) rackOf(t *testing.T, ns string) string {
	t.Helper()
	var pods corev1.PodList
	if err := e.client.List(t.Context(), &pods, client.InNamespace(ns)); err != nil || len(pods.Items) == 0 {
		t.Fatalf("list pods: %d, %v", len(pods.Items), err)
	}
	node := &corev1.Node{}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil {
			if err := e.client.Get(t.Context(), client.ObjectKey{Name: pod.Spec.NodeName}, node); err != nil {
				t.Fatal(err)
			}
		}
	}
	return node.Labels["rack"]
}
