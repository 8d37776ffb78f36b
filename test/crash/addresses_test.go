// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint/failpointtest"
)

// pooledAddresses are all addresses of the pool, one for each pod of a lifecycle. An address that a
// lifecycle loses is missing in the next one. The last one is reserved for the claim that names it.
var pooledAddresses = []string{"10.20.9.1/16", "10.20.9.2/16", "10.20.9.3/16"}

// A plugin that is killed at any step of assigning or returning an address neither assigns it twice
// nor loses it.
func TestPlugin_killedWhileAssigningAddresses(t *testing.T) {
	e := newTestEnv(t)
	e.must("create the pool", e.api.AddPool(&network.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: "three", UID: "three"},
		Spec: network.AddressPoolSpec{
			Network: "storage", Default: true, Subnet: "10.20.0.0/16", Ranges: []string{"10.20.9.1-10.20.9.3"},
			Reserved: []string{"10.20.9.3"},
		},
	}))
	e.way = e.strongest()
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
	for _, name := range []string{"POST addressblocks", "DELETE addressblocks", "write attach record", "create link"} {
		if killed[name] == 0 {
			t.Errorf("no plugin was killed at %q", name)
		}
	}
}

func concernsAddress(p failpointtest.Point) bool {
	for _, part := range []string{"addressblocks", "attach record", "addresses", "create link", "delete link"} {
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
	e.must("delete the blocks, which the node takes again", e.api.DeleteBlocks())
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
			n := (i + attempts) % len(pods) // another pod is next after one for which the plugin was killed
			if err := pods[n].hook(ctx, e.dir, claims[n], 200*time.Millisecond); err != nil {
				return err
			}
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
