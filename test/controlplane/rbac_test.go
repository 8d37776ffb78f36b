// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint/failpointtest"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// checkedByAPIServer are rights that the API server checks during requests for
// other resources. The chart's comments explain each.
var checkedByAPIServer = []string{
	"patch resourceclaims/binding.resource.k8s.io",
	"arbitrary-node:patch resourceclaims/driver.resource.k8s.io",
	"update podgroups/finalizers.scheduling.dra-shared.dev",
	"update jobs/finalizers.batch",
	"update statefulsets/finalizers.apps",
}

// The controller uses these rights if the cluster has such objects; see
// TestJobSet_claimsOfEachJob and TestLWS_claimsOfEachReplica.
const (
	ofJobSets          = "get jobsets.jobset.x-k8s.io"
	ofLeaderWorkerSets = "get leaderworkersets.leaderworkerset.x-k8s.io"
)

// Rights that the controller uses in one mode only. It creates a PodGroup of
// Kubernetes in a dry run to detect the mode, and it patches pods to remove
// scheduling gates.
const (
	nativeOnly = " podgroups.scheduling.k8s.io"
	bridgeOnly = "patch pods"
)

// The other tests show that the chart gives the controller all the rights that it
// needs. This test shows that the controller uses all the rights that it has.
func TestRBAC_controllerUsesEveryPermission(t *testing.T) {
	e := requireTestEnv(t)
	// Earlier tests of the same run may have used the rights already.
	if !e.used.has("patch podgroups.scheduling.dra-shared.dev") {
		e.runLifecycle(t, newFailingClient(failpointtest.Point{}))
	}
	if !e.used.has("get pods") {
		t.Run("claim with a holder", func(t *testing.T) {
			e.startController(t, nil)
			e.terminalPodsOfHeldClaim(t)
		})
	}
	if !e.used.has("get cronjobs.batch") {
		t.Run("claims of Jobs", TestJobClaims_deniedAtCreation)
		t.Run("pods of no Job", TestJobClaims_refusesPodsWithoutJob)
	}
	if !e.used.has("get statefulsets.apps") {
		t.Run("claim that a StatefulSet holds", TestRelease_heldByStatefulSet)
	}
	t.Run("references to missing objects, and repeated events", func(t *testing.T) {
		e.startController(t, nil)
		e.useInvalidReferences(t)
	})
	t.Run("changed and removed fabrics", func(t *testing.T) {
		changed := driverConfig()
		changed.Fabrics[0].Groups++
		for _, c := range []*config.DriverConfig{changed, {}} {
			stop := e.startControllerWith(t, c, nil)
			condition := fmt.Sprintf("the controller publishes the %d configured fabrics", len(c.Fabrics))
			eventually.Eventually(t, timeout, condition, func() error { return e.checkPublished(t.Context(), c.Fabrics) })
			stop()
		}
	})
	t.Run("addresses of a lost node", func(t *testing.T) {
		e.startController(t, nil)
		e.loseNodeWithAddresses(t)
	})
	t.Run("a missing Lease", func(t *testing.T) {
		err := e.kube.CoordinationV1().Leases(system).Delete(t.Context(), driverName, metav1.DeleteOptions{})
		if client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
		e.startController(t, nil) // until it leads, which it can only with a Lease
	})
	granted := e.grantedRights(t)
	for _, right := range slices.Sorted(maps.Keys(granted)) {
		if !e.isUsed(right) {
			t.Errorf("the chart grants the controller the right to %s, which the controller does not use", right)
		}
	}
	for _, right := range checkedByAPIServer {
		if !granted[right] {
			t.Errorf("the test excepts the right to %s, which the chart does not grant", right)
		}
	}
}

// isUsed reports whether the controller has used the right, or needs it in a situation
// that the test does not create.
func (e *testEnv) isUsed(right string) bool {
	if right == ofJobSets || right == ofLeaderWorkerSets {
		return true
	}
	if e.native && right == bridgeOnly || !e.native && strings.HasSuffix(right, nativeOnly) {
		return true
	}
	// The controller lists only if the API server cannot stream the initial state of a watch.
	watch := strings.Replace(right, "list ", "watch ", 1)
	return e.used.has(right) || e.used.has(watch) || slices.Contains(checkedByAPIServer, right)
}

// loseNodeWithAddresses creates an AddressPool, and a block of a node that does not
// exist. It waits until the controller has returned the block.
func (e *testEnv) loseNodeWithAddresses(t *testing.T) {
	t.Helper()
	pool := &network.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: "office"},
		Spec:       network.AddressPoolSpec{Network: "storage", Subnet: "10.20.0.0/24"},
	}
	block := &network.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{Name: "storage-4-0a140001"},
		Spec: network.AddressBlockSpec{
			Network: "storage", Pool: "office", Node: "lost", Ranges: []string{"10.20.0.1-10.20.0.1"},
		},
	}
	e.create(t, pool, block)
	eventually.Eventually(t, timeout, "the block of the lost node is returned", func() error {
		if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(pool), pool); err != nil {
			return err
		}
		if pool.Status.Addresses != "254" || pool.Status.Blocks != 0 {
			return fmt.Errorf("the pool has %s addresses and %d blocks, want 254 and 0",
				pool.Status.Addresses, pool.Status.Blocks)
		}
		err := e.client.Get(t.Context(), client.ObjectKeyFromObject(block), block)
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("AddressBlock %s exists: %w", block.Name, err)
		}
		return nil
	})
	if err := e.client.Delete(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
}

// useInvalidReferences creates pods that refer to a template, a class, and a claim that do not exist, and a claim with
// a holder that the controller may not read. It changes the holder until the controller has repeated its event.
func (e *testEnv) useInvalidReferences(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	ns := e.createNamespace(t, "references")
	const missing = "does-not-exist"
	spec := fabricSpec()
	spec.Devices.Requests[0].Exactly.DeviceClassName = missing
	claim := fabricClaim(ns, "team")
	claim.Annotations = map[string]string{scheduling.ReservedForAnnotation: "apps/deployments/web"}
	template := &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "without-class"},
		Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: spec},
	}
	e.create(t, template, claim)
	for i, c := range []corev1.PodResourceClaim{
		{ResourceClaimTemplateName: ptr.To(missing)},
		{ResourceClaimTemplateName: &template.Name},
		{ResourceClaimName: ptr.To(missing)},
	} {
		pod := newPod(ns, "alone", i)
		pod.Annotations = nil
		c.Name = "fabric"
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{c}
		e.create(t, pod)
	}
	changes := 0
	eventually.Eventually(t, timeout, "the event HolderForbidden of claim team is a series", func() error {
		changes++
		holder := client.RawPatch(types.MergePatchType, fmt.Appendf(nil,
			`{"metadata":{"annotations":{%q:"apps/deployments/web-%d"}}}`, scheduling.ReservedForAnnotation, changes))
		if err := e.client.Patch(ctx, claim.DeepCopy(), holder); err != nil {
			return err
		}
		events, err := e.kube.EventsV1().Events(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, event := range events.Items {
			if event.Reason == v1alpha1.ReasonHolderForbidden && event.Series != nil {
				return nil
			}
		}
		return fmt.Errorf("none of %d events is a series with that reason", len(events.Items))
	})
}

// checkPublished returns an error unless there is one ResourceSlice for each
// fabric, with the fabric's number of groups.
func (e *testEnv) checkPublished(ctx context.Context, fabrics []config.Fabric) error {
	published, err := e.kube.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	if len(published.Items) != len(fabrics) {
		return fmt.Errorf("got %d ResourceSlices, want %d", len(published.Items), len(fabrics))
	}
	for i, fabric := range fabrics {
		devices := published.Items[i].Spec.Devices
		if len(devices) != 1 || len(devices[0].Capacity) != 1 {
			return fmt.Errorf("fabric %s: got devices %v, want one device with one capacity", fabric.Name, devices)
		}
		for name, c := range devices[0].Capacity {
			if c.Value.Value() != int64(fabric.Groups) {
				return fmt.Errorf("fabric %s: got capacity %s of %s, want %d", fabric.Name, &c.Value, name, fabric.Groups)
			}
		}
	}
	return nil
}

// grantedRights returns the rights that the chart grants the controller.
func (e *testEnv) grantedRights(t *testing.T) map[string]bool {
	t.Helper()
	const name = "dra-shared-controller"
	clusterRole, err := e.kube.RbacV1().ClusterRoles().Get(t.Context(), name, metav1.GetOptions{})
	role, roleErr := e.kube.RbacV1().Roles(system).Get(t.Context(), name, metav1.GetOptions{})
	if err := errors.Join(err, roleErr); err != nil {
		t.Fatalf("read the controller's roles: %v", err)
	}
	rights := map[string]bool{}
	for _, rule := range slices.Concat(clusterRole.Rules, role.Rules) {
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					rights[right(verb, resource, group)] = true
				}
			}
		}
	}
	if len(clusterRole.Rules) == 0 || len(role.Rules) == 0 {
		t.Fatalf("ClusterRole %s has %d rules and Role %s has %d, want some of each",
			name, len(clusterRole.Rules), name, len(role.Rules))
	}
	return rights
}

// right returns a right as VERB RESOURCE.GROUP.
func right(verb, resource, group string) string {
	return strings.TrimRight(verb+" "+resource+"."+group, ".")
}

// usedRights records the rights that requests have used, and how often.
type usedRights struct {
	mu     sync.Mutex
	rights map[string]int
}

func (u *usedRights) has(right string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.rights[right] > 0
}

// counts returns the number of requests by their rights.
func (u *usedRights) counts() map[string]int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return maps.Clone(u.rights)
}

// wrap returns a transport that records the rights of all requests that were not
// forbidden.
func (u *usedRights) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		response, err := next.RoundTrip(r)
		if err == nil && response.StatusCode != http.StatusForbidden {
			u.mu.Lock()
			defer u.mu.Unlock()
			if u.rights == nil {
				u.rights = map[string]int{}
			}
			u.rights[rightOf(r)]++
		}
		return response, err
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// rightOf returns the right that a request needs. The path is /api/v1/... or
// /apis/GROUP/VERSION/..., followed by
// [namespaces/NAME/]RESOURCE[/NAME[/SUBRESOURCE]].
func rightOf(r *http.Request) string {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	group := ""
	switch {
	case parts[0] == "api" && len(parts) > 2:
		parts = parts[2:]
	case parts[0] == "apis" && len(parts) > 3:
		group, parts = parts[1], parts[3:]
	default:
		return r.URL.Path // discovery
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		parts = parts[2:]
	}
	resource, named := parts[0], len(parts) > 1
	if len(parts) > 2 {
		resource += "/" + parts[2]
	}
	return right(verbOf(r, named), resource, group)
}

// verbOf returns the verb of a request. named reports whether the path ends in
// the name of an object.
func verbOf(r *http.Request, named bool) string {
	switch r.Method {
	case http.MethodPost:
		return "create"
	case http.MethodPut:
		return "update"
	case http.MethodPatch:
		return "patch"
	case http.MethodDelete:
		return "delete"
	}
	switch {
	case named:
		return "get"
	case r.URL.Query().Get("watch") != "":
		return "watch"
	default:
		return "list"
	}
}
