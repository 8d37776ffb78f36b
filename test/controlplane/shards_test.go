package controlplane

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/test/simnode"
)

// More pods share one device than one claim can be reserved for: 1,000, then
// more, then few, then none.
func TestAThousandPodsOfOneGroup(t *testing.T) {
	e := requireTestEnv(t)
	ctx := context.Background()
	e.controller(t, nil)
	ns := e.namespace(t, "thousand")
	pg, err := e.group(ctx, ns, "big")
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	grow := func(from, to int) {
		t.Helper()
		if err := simnode.Parallel(to-from, func(i int) error { return e.client.Create(ctx, e.pod(ns, "big", from+i)) }); err != nil {
			t.Fatal(err)
		}
		e.allRun(ctx, t, ns, to)
	}
	grow(0, 1000)
	t.Logf("1000 pods run after %s", time.Since(start).Round(100*time.Millisecond))
	checkOneDevice(ctx, t, e, ns)
	grow(1000, 1200)
	n := checkOneDevice(ctx, t, e, ns)
	t.Logf("1200 pods have %d claims", n)
	if native := e.native; native != (n == 1) {
		t.Errorf("%d claims, native mode %t", n, native)
	}

	// What nobody uses any more goes; the group keeps its device.
	if err := simnode.Parallel(1100, func(i int) error {
		return client.IgnoreNotFound(e.client.Delete(ctx, e.pod(ns, "big", 100+i)))
	}); err != nil {
		t.Fatal(err)
	}
	e.within(ctx, t, 2*time.Minute, "shards go", func() error {
		_, all, err := e.running(ctx, ns)
		if err != nil {
			return err
		}
		left, err := e.claims(ctx, ns)
		used := map[string]bool{}
		var pods corev1.PodList
		if err := e.client.List(ctx, &pods, client.InNamespace(ns)); err != nil {
			return err
		}
		for i := range pods.Items {
			used[*pods.Items[i].Spec.ResourceClaims[0].ResourceClaimName] = true
		}
		if err == nil && (all != 100 || len(left) > len(used)+1) {
			err = fmt.Errorf("%d pods, %d claims, of which they use %d", all, len(left), len(used))
		}
		return err
	})
	if err := e.client.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	if err := e.client.Delete(ctx, pg); err != nil {
		t.Fatal(err)
	}
	e.nothingLeft(ctx, t, ns)
}

func (e *testEnv) allRun(ctx context.Context, t *testing.T, ns string, pods int) {
	t.Helper()
	e.within(ctx, t, 3*time.Minute, "pods run", func() error {
		running, _, err := e.running(ctx, ns)
		if err == nil && running != pods {
			err = fmt.Errorf("%d of %d pods run", running, pods)
		}
		return err
	})
}

// Somebody deletes the first claim of a group that has further ones: those are on
// its device and do not count, so it stays until their pods have gone.
func TestTheFirstClaimIsDeletedUnderFurtherOnes(t *testing.T) {
	e := requireTestEnv(t)
	if e.native {
		t.Skip("one claim serves all pods")
	}
	ctx := context.Background()
	e.controller(t, nil)
	ns := e.namespace(t, "first")
	pg, err := e.group(ctx, ns, "big")
	if err != nil {
		t.Fatal(err)
	}
	const pods = 300
	if err := simnode.Parallel(pods, func(i int) error { return e.client.Create(ctx, e.pod(ns, "big", i)) }); err != nil {
		t.Fatal(err)
	}
	e.allRun(ctx, t, ns, pods)
	var first resourceapi.ResourceClaim
	var list corev1.PodList
	if err := e.client.List(ctx, &list, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	all, err := e.claims(ctx, ns)
	if err != nil || len(all) < 2 {
		t.Fatalf("%d claims, %v", len(all), err)
	}
	stay, err := claims.ClusterLeavesStaleEntries(e.cluster.Discovery())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range all {
		if q := c.Status.Allocation.Devices.Results[0].ConsumedCapacity["groups"]; !q.IsZero() {
			first = c
		}
	}
	if err := e.client.Delete(ctx, &first); err != nil {
		t.Fatal(err)
	}
	remove := func(of func(claim string) bool) {
		t.Helper()
		for i := range list.Items {
			if of(*list.Items[i].Spec.ResourceClaims[0].ResourceClaimName) {
				if err := e.client.Delete(ctx, &list.Items[i]); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	remove(func(claim string) bool { return claim == first.Name })
	e.within(ctx, t, time.Minute, "the group holds the first claim, and no pod does", func() error {
		var now resourceapi.ResourceClaim
		if err := e.client.Get(ctx, client.ObjectKeyFromObject(&first), &now); err != nil {
			return err
		}
		holds := slices.ContainsFunc(now.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool { return r.UID == pg.UID })
		if now.UID != first.UID || now.Status.Allocation == nil || !holds {
			t.Fatalf("the first claim was given up: %v", now.Status)
		}
		var pods corev1.PodList
		if err := e.client.List(ctx, &pods, client.InNamespace(ns)); err != nil {
			return err
		}
		for i := range pods.Items {
			if *pods.Items[i].Spec.ResourceClaims[0].ResourceClaimName == first.Name {
				return fmt.Errorf("pod %s is there", pods.Items[i].Name)
			}
		}
		// Before Kubernetes 1.36 their entries stay as long as the group's.
		if n := len(now.Status.ReservedFor); !stay && n > 1 {
			return fmt.Errorf("it is reserved for %d", n)
		}
		return nil
	})
	remove(func(claim string) bool { return claim != first.Name })
	e.within(ctx, t, time.Minute, "it goes", func() error {
		var now resourceapi.ResourceClaim
		err := e.client.Get(ctx, client.ObjectKeyFromObject(&first), &now)
		if err == nil && now.UID == first.UID {
			err = fmt.Errorf("it is there, reserved for %d", len(now.Status.ReservedFor))
		}
		return client.IgnoreNotFound(err)
	})
	if err := e.client.Delete(ctx, pg); err != nil {
		t.Fatal(err)
	}
	e.nothingLeft(ctx, t, ns)
}

// checkOneDevice checks that all claims of a namespace are on one device, that one
// of them counts, and that no more pods are in one than there is room for. It
// returns how many there are.
func checkOneDevice(ctx context.Context, t *testing.T, e *testEnv, ns string) int {
	t.Helper()
	all, err := e.claims(ctx, ns)
	if err != nil {
		t.Fatal(err)
	}
	devices, counting := map[string]bool{}, 0
	for _, c := range all {
		if c.Status.Allocation == nil {
			t.Errorf("claim %s is not allocated", c.Name)
			continue
		}
		result := c.Status.Allocation.Devices.Results[0]
		devices[result.Pool+"/"+result.Device] = true
		if q := result.ConsumedCapacity["groups"]; !q.IsZero() {
			counting++
		}
		if len(c.Status.ReservedFor) > resourceapi.ResourceClaimReservedForMaxSize {
			t.Errorf("claim %s is reserved for %d", c.Name, len(c.Status.ReservedFor))
		}
	}
	if len(devices) != 1 || counting != 1 {
		t.Errorf("%d claims are on devices %v, and %d count as groups", len(all), devices, counting)
	}
	return len(all)
}

// Who takes a fabric is counted.
func TestZeroSharesAreNotForUsers(t *testing.T) {
	e := requireTestEnv(t)
	ctx := context.Background()
	e.controller(t, nil)
	ns := e.namespace(t, "zero")
	zero := &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"groups": resource.MustParse("0")}}
	qualified := &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{driver + "/groups": resource.MustParse("0")}}
	class := "fabric." + driver
	for name, request := range map[string]resourceapi.DeviceRequest{
		"exactly":        {Name: "f", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class, Capacity: zero}},
		"by its domain":  {Name: "f", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class, Capacity: qualified}},
		"an alternative": {Name: "f", FirstAvailable: []resourceapi.DeviceSubRequest{{Name: "a", DeviceClassName: class}, {Name: "b", DeviceClassName: class, Capacity: zero}}},
	} {
		spec := resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{request}}}
		meta := metav1.ObjectMeta{Namespace: ns, Name: "zero"}
		for _, o := range []client.Object{&resourceapi.ResourceClaim{ObjectMeta: meta, Spec: spec},
			&resourceapi.ResourceClaimTemplate{ObjectMeta: meta, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: spec}}} {
			if err := e.client.Create(ctx, o); err == nil || !strings.Contains(err.Error(), "would use a fabric without counting as a group: request 1") {
				t.Errorf("%s: a user's %T: %v", name, o, err)
			}
		}
	}
}
