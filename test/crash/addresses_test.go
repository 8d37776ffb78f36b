// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint/failpointtest"
)

// pooledAddresses are all addresses of the pool, one for each pod of a lifecycle. An address that a
// lifecycle loses is missing in the next one. The last one is reserved for the claim that names it.
var pooledAddresses = []string{"10.20.9.1/16", "10.20.9.2/16", "10.20.9.3/16"}

// A plugin that is killed at any step of assigning or returning an address does not assign it twice or lose it.
func TestPlugin_killedWhileAssigningAddresses(t *testing.T) {
	e := newTestEnv(t)
	e.addPool()
	e.runAddresses(nil)
	file := e.path("failpoints")
	e.runAddresses(func(c *pluginConfig) { c.Record = file })
	killed := map[string]int{}
	for _, point := range e.readPoints(file) {
		if !concernsAddress(point) {
			continue
		}
		for _, after := range []bool{false, true} {
			point.After = after
			if e.runAddresses(func(c *pluginConfig) { c.Kill = point }) {
				killed[point.Name]++
			}
			if t.Failed() {
				t.Fatalf("the lifecycle failed after the plugin was killed %s", point)
			}
		}
	}
	t.Logf("killed plugins, by operation: %v", killed)
	for _, name := range []string{"POST addressblocks", "DELETE addressblocks", "write attachment record", "create link"} {
		if killed[name] == 0 {
			t.Errorf("no plugin was killed at %q", name)
		}
	}
}

// addPool creates the pool with pooledAddresses.
func (e *testEnv) addPool() {
	e.t.Helper()
	e.must("create the pool", e.api.AddPool(&network.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: "three", UID: "three"},
		Spec: network.AddressPoolSpec{
			Network: "storage", Default: true, Subnet: "10.20.0.0/16", Ranges: []string{"10.20.9.1-10.20.9.3"},
			Reserved: []string{"10.20.9.3"},
		},
	}))
	e.way = e.strongest()
}

// A plugin that finds out, when it starts, that the node has lost an address blocks the link with it
// before it serves. If the API server is unavailable, the link stays unchanged.
func TestPlugin_blocksLinksWithLostAddressesBeforeServing(t *testing.T) {
	e := newTestEnv(t)
	e.addPool()
	// restart starts a plugin while requests for the resources fail, and reports whether it has blocked or
	// unblocked a link before it served.
	restart := func(unavailable ...string) bool {
		t.Helper()
		e.kill()
		e.api.Refuse(func(r *http.Request) error {
			if slices.ContainsFunc(unavailable, func(s string) bool { return strings.Contains(r.URL.Path, s) }) {
				return apierrors.NewServiceUnavailable("unavailable")
			}
			return nil
		})
		file := e.path(fmt.Sprintf("failpoints-%d", e.instance))
		e.start(func(c *pluginConfig) { c.Pools, c.Record = true, file })
		raw, err := os.ReadFile(file)
		e.must("read the operations of the plugin", err)
		return strings.Contains(string(raw), "block link in map")
	}
	restart()
	claim, pod := e.claim("lost"), e.sandbox("lost")
	e.must("prepare the claim", e.prepare(t.Context(), claim))
	e.must("attach the claim", pod.hook(t.Context(), e.dir, claim, 10*time.Second))
	e.kill()
	e.api.DeleteBlocks()

	if restart("addressblocks", "addresspools") {
		t.Error("the API server is unavailable: the plugin has changed whether the link is blocked")
	}
	if !restart("addresspools") { // so that the node cannot take the address again
		t.Error("the node has lost the address: the plugin served before it blocked the link")
	}
	e.awaitReason(claim, v1alpha1.ReasonAddressLost)
	e.api.Refuse(nil)
	e.awaitReason(claim, v1alpha1.ReasonAttached)
}

// Attaching a pod fails after its link has got the address, and the link cannot be removed. No other
// pod gets the address, even from the next plugin.
func TestPlugin_keepsAddressOfRemainingLink(t *testing.T) {
	e := newTestEnv(t)
	e.addPool()
	e.start(func(c *pluginConfig) { c.Pools, c.Fail = true, []string{"put sender in map", "delete link"} })
	first, second := e.claim("first"), e.claim("second")
	e.must("prepare the claims", e.prepare(t.Context(), first, second))
	one, other := e.sandbox("one"), e.sandbox("other")
	e.mustFail("attach the first claim", "the link may remain in the pod",
		one.hook(t.Context(), e.dir, first, 200*time.Millisecond))
	e.must("the record remains", e.attachedPods(1))
	e.kill()
	e.start(func(c *pluginConfig) { c.Pools = true })
	e.must("attach the second claim", other.hook(t.Context(), e.dir, second, 10*time.Second))
	e.must("compare the addresses", differ([]*sandbox{one, other}))
	e.must("attach the first claim again", one.hook(t.Context(), e.dir, first, 10*time.Second))
	e.must("compare the addresses again", differ([]*sandbox{one, other}))
}

// A plugin is killed after a link got its address and before the plugin recorded the link. Another pod of the same
// claim, which attaches first afterward, does not get the address.
func TestPlugin_keepsAddressOfUnrecordedLink(t *testing.T) {
	e := newTestEnv(t)
	e.addPool()
	e.start(func(c *pluginConfig) {
		c.Pools = true
		c.Kill = failpointtest.Point{Name: "write attachment record", N: 2}
	})
	claim := e.claim("shared")
	e.must("prepare the claim", e.prepare(t.Context(), claim))
	one, other := e.sandbox("one"), e.sandbox("other")
	// Under load, connecting to the plugin takes some time.
	if err := one.hook(t.Context(), e.dir, claim, 2*time.Second); err == nil || e.running() {
		t.Fatalf("the plugin was not killed while it attached the first pod, which returned error %v", err)
	}
	one.mustLink(t)
	e.start(func(c *pluginConfig) { c.Pools = true })
	e.must("attach the other pod", other.hook(t.Context(), e.dir, claim, 10*time.Second))
	e.must("compare the addresses", differ([]*sandbox{one, other}))
	e.must("attach the first pod again", one.hook(t.Context(), e.dir, claim, 10*time.Second))
	e.must("compare the addresses again", differ([]*sandbox{one, other}))
	e.must("both pods are attached", e.attachedPods(2))
}

// The network gets another name while a claim is prepared. Later pods of the claim get addresses of its pool, and the
// node keeps both for them.
func TestPlugin_assignsAddressesAfterNetworkWasRenamed(t *testing.T) {
	e := newTestEnv(t)
	e.addPool()
	e.start(func(c *pluginConfig) { c.Pools = true })
	claim := e.claim("shared")
	e.must("prepare the claim", e.prepare(t.Context(), claim))
	one, other := e.sandbox("one"), e.sandbox("other")
	e.must("attach the first pod", one.hook(t.Context(), e.dir, claim, 10*time.Second))
	e.kill()
	e.start(func(c *pluginConfig) { c.Pools, c.Network = true, "renamed" })
	e.must("attach the other pod", other.hook(t.Context(), e.dir, claim, 10*time.Second))
	e.must("compare the addresses", differ([]*sandbox{one, other}))
	e.kill()
	e.start(func(c *pluginConfig) { c.Pools, c.Network = true, "renamed" })
	e.awaitReason(claim, v1alpha1.ReasonAttached)
	records, err := attach.OpenRecords(e.path("run"), attach.AnyBoot, nil).List()
	e.must("read the records", err)
	for _, r := range records {
		if link, err := r.Link(); err != nil || link.Network != "storage" {
			t.Errorf("pod %s has an address of network %q (error %v), want that of the pool, storage",
				r.Pod.Name, link.Network, err)
		}
	}
}

// The attachment record of a running pod is corrupt. The node does not assign its link's address to another pod or
// return it to the pool, and garbage collection keeps the record although the claim was deleted: the pod may run until
// the kubelet has stopped it. Afterward, the address is free.
func TestPlugin_keepsAddressOfCorruptRecord(t *testing.T) {
	e := newTestEnv(t)
	e.must("create the pool", e.api.AddPool(&network.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: "single", UID: "single"},
		Spec: network.AddressPoolSpec{Network: "storage", Default: true, Subnet: "10.20.0.0/16",
			Ranges: []string{"10.20.9.1-10.20.9.3"}, BlockSize: ptr.To(int32(1))},
	}))
	e.way = e.strongest()
	restart := func() {
		e.kill()
		e.start(func(c *pluginConfig) { c.Pools, c.AddressWait = true, time.Second })
	}
	restart()
	first, second := e.claim("first"), e.claim("second")
	e.must("prepare the claims", e.prepare(t.Context(), first, second))
	one, two := e.sandbox("one"), e.sandbox("two")
	e.must("attach the first claim", one.hook(t.Context(), e.dir, first, 10*time.Second))
	address, err := one.address()
	e.must("address of the link", err)
	e.eventually("the node has an address for the next pod", func() error { return e.hasBlocks(2, address) })
	e.corrupt("run/attached", string(first.UID)+"_*")
	e.deleteClaim("first")
	restart()
	e.awaitCollection()
	e.must("attach the second claim", two.hook(t.Context(), e.dir, second, 10*time.Second))
	e.must("compare the addresses", differ([]*sandbox{one, two}))
	two.end()
	e.must("unprepare the second claim", e.unprepare(t.Context(), second))
	// The corrupt record may contain either of the first two addresses.
	e.eventually("the node keeps both addresses and a standby one", func() error { return e.hasBlocks(3, address) })

	one.end()
	e.must("unprepare the first claim", e.unprepare(t.Context(), first))
	restart()
	e.eventually("the node returns the address of the pod that is gone", func() error { return e.hasBlocks(0) })
}

// hasBlocks returns an error unless there are so many AddressBlocks, which have all of the addresses.
func (e *testEnv) hasBlocks(n int, addresses ...string) error {
	var ranges []string
	for _, b := range e.api.Blocks() {
		ranges = append(ranges, b.Spec.Ranges...)
	}
	for _, address := range addresses {
		ip, _, _ := strings.Cut(address, "/")
		if !slices.Contains(ranges, ip+"-"+ip) {
			return fmt.Errorf("nodes have the addresses %v, want one of them to be %s", ranges, ip)
		}
	}
	if len(ranges) != n {
		return fmt.Errorf("nodes have the addresses %v, want %d", ranges, n)
	}
	return nil
}

// differ returns an error if links of the pods have the same address. Not all pods need a link.
func differ(pods []*sandbox) error {
	holders := map[string]string{}
	for _, pod := range pods {
		err := pod.do(func() error {
			addresses, err := net.InterfaceAddrs()
			for _, a := range addresses {
				p, ok := a.(*net.IPNet)
				if !ok || p.IP.To4() == nil {
					continue
				}
				if other, taken := holders[p.IP.String()]; taken && other != pod.name {
					return fmt.Errorf("pods %s and %s have the address %s", other, pod.name, p.IP)
				}
				holders[p.IP.String()] = pod.name
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func concernsAddress(p failpointtest.Point) bool {
	for _, part := range []string{"addressblocks", "attachment record", "addresses", "create link", "delete link"} {
		if strings.Contains(p.Name, part) {
			return true
		}
	}
	return false
}

// runAddresses takes two claims through attach and detach, and reports whether the plugin was killed
// on the way.
func (e *testEnv) runAddresses(change func(*pluginConfig)) (killed bool) {
	e.t.Helper()
	serve := func(change func(*pluginConfig)) {
		e.start(func(c *pluginConfig) {
			c.Pools = true
			if change != nil {
				change(c)
			}
		})
	}
	e.kill()
	e.api.DeleteBlocks() // the node takes them again
	serve(change)
	first := e.plugin
	retry := func(condition string, f func(context.Context) error) {
		e.t.Helper()
		e.eventually(condition, func() error {
			if !e.running() {
				serve(nil)
			}
			ctx, cancel := context.WithTimeout(e.t.Context(), 10*time.Second)
			defer cancel()
			return f(ctx)
		})
	}
	var claims []*resourceapi.ResourceClaim
	var pods []*sandbox
	for i := range pooledAddresses {
		claim := newClaim(fmt.Sprintf("addresses-%d-%d", e.instance, i))
		if i == len(pooledAddresses)-1 {
			claim = withStaticAddress(claim, pooledAddresses[i])
		}
		e.addClaim(claim)
		retry("prepare the claim", func(ctx context.Context) error { return e.prepare(ctx, claim) })
		claims, pods = append(claims, claim), append(pods, e.sandbox(claim.Name))
	}
	attempts := 0
	retry("attach the claims", func(ctx context.Context) error {
		attempts++
		for i := range pods {
			n := (i + attempts) % len(pods) // another pod is next after the plugin was killed for one
			if err := pods[n].hook(ctx, e.dir, claims[n], 200*time.Millisecond); err != nil {
				return err
			}
			e.must("compare the addresses", differ(pods)) // a killed plugin may have left a link
		}
		return nil
	})
	var addresses []string
	for _, pod := range pods {
		address, err := pod.address()
		e.must("address of the link", err)
		addresses = append(addresses, address)
	}
	slices.Sort(addresses)
	if !slices.Equal(addresses, pooledAddresses) {
		e.t.Errorf("the pods have the addresses %v, want %v", addresses, pooledAddresses)
	}
	for i, pod := range pods {
		pod.end()
		retry("the ended pod is not attached", func(context.Context) error { return e.attachedPods(len(pods) - i - 1) })
		retry("unprepare the claim", func(ctx context.Context) error { return e.unprepare(ctx, claims[i]) })
		e.deleteClaim(claims[i].Name)
	}
	retry("the node has no state of claims", func(context.Context) error { return e.nothingLeft() })
	return e.plugin != first
}
