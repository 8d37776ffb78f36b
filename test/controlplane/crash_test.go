// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint/failpointtest"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// The controller is killed before and after each of its writes in the lifecycle
// of a PodGroup. Its successor must finish the lifecycle and leave nothing behind.
func TestController_killedBetweenAnyTwoWrites(t *testing.T) {
	const (
		minWrites = 6
		attempts  = 3 // the controller batches writes, so their number differs between lifecycles
	)
	e := requireTestEnv(t)
	recorded := newFailingClient(failpointtest.Point{})
	e.runLifecycle(t, recorded)
	t.Logf("the controller makes %d writes: %v", recorded.killer.Total(), recorded.operations)
	if recorded.killer.Total() < minWrites {
		t.Fatalf("the controller makes %d writes for a PodGroup, want at least %d: does the client wrap every write?",
			recorded.killer.Total(), minWrites)
	}
	killed := map[string]bool{} // "before" or "after" and the operation
	kill := func(p failpointtest.Point) {
		for range attempts {
			c := newFailingClient(p)
			e.runLifecycle(t, c)
			if c.killedAt != "" {
				killed[side(p)+c.killedAt] = true
				t.Logf("killed the controller %swrite %d, %s", side(p), p.N, c.killedAt)
				return
			}
		}
	}
	for n := 1; n <= recorded.killer.Total(); n++ {
		kill(failpointtest.Point{N: n})
		kill(failpointtest.Point{N: n, After: true})
	}
	// The order of writes varies, so the numbers may have missed an operation.
	for operation := range recorded.operations {
		for _, p := range []failpointtest.Point{{Name: operation, N: 1}, {Name: operation, N: 1, After: true}} {
			if !killed[side(p)+operation] {
				kill(p)
			}
			if !killed[side(p)+operation] {
				t.Errorf("the controller was not killed %sany write %q", side(p), operation)
			}
		}
	}
	t.Logf("killed the controller at %d kinds of points", len(killed))
}

func side(p failpointtest.Point) string {
	if p.After {
		return "after "
	}
	return "before "
}

// failingClient makes the controller's writes failpoints. After the kill, all
// writes of the controller fail.
type failingClient struct {
	killer failpointtest.Killer
	killed chan struct{} // closed at the kill

	mu         sync.Mutex
	operations map[string]int // number of writes
	killedAt   string         // the operation
}

var errKilled = errors.New("the test has killed the controller")

func newFailingClient(p failpointtest.Point) *failingClient {
	f := &failingClient{killed: make(chan struct{}), operations: map[string]int{}}
	f.killer = failpointtest.Killer{
		Point: p,
		Kill: func(operation string) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.killedAt = operation
			close(f.killed)
			return errKilled
		},
		Record: func(operation string, _ int) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.operations[operation]++
		},
	}
	return f
}

func (f *failingClient) do(operation string, write func() error) error {
	select {
	case <-f.killed:
		return errKilled
	default:
		return f.killer.Inject(operation, write)
	}
}

// new is a client.NewClientFunc.
func (f *failingClient) new(c *rest.Config, o client.Options) (client.Client, error) {
	inner, err := client.NewWithWatch(c, o)
	if err != nil {
		return nil, err
	}
	return interceptor.NewClient(inner, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			return f.do(fmt.Sprintf("create %T", o), func() error { return c.Create(ctx, o, opts...) })
		},
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			return f.do(fmt.Sprintf("delete %T", o), func() error { return c.Delete(ctx, o, opts...) })
		},
		Patch: func(
			ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption,
		) error {
			return f.do(fmt.Sprintf("patch %T", o), func() error { return c.Patch(ctx, o, p, opts...) })
		},
		SubResourcePatch: func(
			ctx context.Context, c client.Client, sub string, o client.Object, p client.Patch,
			opts ...client.SubResourcePatchOption,
		) error {
			operation := fmt.Sprintf("patch %T/%s", o, sub)
			return f.do(operation, func() error { return c.SubResource(sub).Patch(ctx, o, p, opts...) })
		},
	}), nil
}

// runLifecycle takes a PodGroup, with a claim from a template and a claim by
// name, from its creation to its end. When the controller is killed, another one
// continues.
func (e *testEnv) runLifecycle(t *testing.T, f *failingClient) {
	t.Helper()
	ctx := t.Context()
	ns := e.createNamespace(t, "lifecycle")
	byName := fabricClaim(ns, "kept")
	e.create(t, byName)
	finish := e.startSucceededController(t, f)

	// The webhook does not answer while no controller runs, so creation is repeated.
	kept := corev1.PodResourceClaim{Name: "kept", ResourceClaimName: ptr.To("kept")}
	var pg *scheduling.PodGroup
	eventually.Eventually(t, timeout, "the PodGroup is created", func() (err error) {
		claim := scheduling.PodGroupResourceClaim{Name: kept.Name, ResourceClaimName: kept.ResourceClaimName}
		pg, err = e.createGroup(ctx, ns, "group", claim)
		return err
	})
	for i := range 3 {
		pod := newPod(ns, "group", i)
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, kept)
		eventually.Eventually(t, timeout, "pod "+pod.Name+" is created", func() error {
			return client.IgnoreAlreadyExists(e.client.Create(ctx, pod.DeepCopy()))
		})
	}
	e.awaitRunning(t, ns, 3)
	eventually.Eventually(t, timeout, "the PodGroup's two conditions are True", func() error {
		if err := e.client.Get(ctx, client.ObjectKeyFromObject(pg), pg); err != nil {
			return err
		}
		return checkConditions(pg.Status.Conditions, 2)
	})
	e.deletePods(t, ns)
	e.delete(t, pg)
	eventually.Eventually(t, timeout, "the claim by name is deallocated", func() error {
		if err := e.client.Get(ctx, client.ObjectKeyFromObject(byName), byName); err != nil {
			return err
		}
		if byName.Status.Allocation != nil || len(byName.Status.ReservedFor) > 0 {
			return fmt.Errorf("it is allocated: %t, reserved for %v", byName.Status.Allocation != nil, byName.Status.ReservedFor)
		}
		return nil
	})
	e.delete(t, byName)
	e.awaitEmpty(t, ns)
	finish()
}

// killAtEachWrite calls run once without a failure, and then kills the controller before and after the first writes of
// each kind. It fails if the controller does not make a write of a kind in required.
func (e *testEnv) killAtEachWrite(t *testing.T, run func(*testing.T, *failingClient), required ...string) {
	t.Helper()
	const first = 3 // later writes of a kind differ only in their object
	recorded := newFailingClient(failpointtest.Point{})
	run(t, recorded)
	t.Logf("the controller makes %d writes: %v", recorded.killer.Total(), recorded.operations)
	for _, operation := range required {
		if recorded.operations[operation] == 0 {
			t.Errorf("the controller makes no write %q: does the client wrap every write?", operation)
		}
	}
	for operation, count := range recorded.operations {
		for n := 1; n <= min(count, first); n++ {
			for _, after := range []bool{false, true} {
				c := newFailingClient(failpointtest.Point{Name: operation, N: n, After: after})
				run(t, c)
				t.Logf("killed the controller at write %d, %s, after it: %t: %t", n, operation, after, c.killedAt != "")
			}
		}
	}
}

// The controller is killed before and after each kind of write in the lifecycle of a StatefulSet with claims per
// ordinal. Its successor finishes the lifecycle.
func TestReplicas_controllerKilledBetweenAnyTwoWrites(t *testing.T) {
	e := requireLWSTests(t)
	run := func(t *testing.T, f *failingClient) {
		ns := e.createNamespace(t, "replicas-crash")
		finish := e.startSucceededController(t, f)
		set := annotatedSet(ns, 2)
		eventually.Eventually(t, timeout, "the StatefulSet is created", func() error {
			return client.IgnoreAlreadyExists(e.client.Create(t.Context(), set))
		})
		e.awaitRunning(t, ns, 2)
		before := e.awaitClaimsOfReplicas(t, ns, "0", "1")
		e.scale(t, set, 1)
		if after := e.awaitClaimsOfReplicas(t, ns, "0"); after["0"] != before["0"] {
			t.Errorf("the claim of ordinal 0 is %s, want %s", after["0"], before["0"])
		}
		e.delete(t, set)
		e.awaitEmpty(t, ns)
		finish()
	}
	e.killAtEachWrite(t, run, "create *v1.ResourceClaim", "delete *v1.ResourceClaim", "patch *v1.ResourceClaim/status")
}

// The controller is killed before and after each kind of write while the claims of a PodGroup and of
// a holder are released and allocated again. Its successor releases them.
func TestRelease_controllerKilledBetweenAnyTwoWrites(t *testing.T) {
	e := requireLWSTests(t)
	if e.native {
		t.Skip("admission refuses releases of PodGroups, and Kubernetes creates its own PodGroup for the Job")
	}
	run := func(t *testing.T, f *failingClient) {
		ns := e.createNamespace(t, "release-crash")
		finish := e.startSucceededController(t, f)
		var pg *scheduling.PodGroup
		eventually.Eventually(t, timeout, "the PodGroup is created", func() (err error) {
			pg, err = e.createGroup(t.Context(), ns, "train")
			return err
		})
		claim := fabricClaim(ns, "team")
		claim.Annotations = map[string]string{scheduling.ReservedForAnnotation: "batch/jobs/train"}
		e.createRetrying(t, claim)
		release := map[string]string{
			scheduling.ReleaseAnnotation: "OnCompletion,OnSuspension", scheduling.WorkloadAnnotation: "batch/jobs/train",
		}
		eventually.Eventually(t, timeout, "the PodGroup is annotated", func() error {
			if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(pg), pg); err != nil {
				return err
			}
			return e.tryAnnotate(t, pg, release)
		})
		job := groupJob(ns)
		team := corev1.PodResourceClaim{Name: "team", ResourceClaimName: &claim.Name}
		job.Spec.Template.Spec.ResourceClaims = append(job.Spec.Template.Spec.ResourceClaims, team)
		e.createRetrying(t, job)
		for _, suspended := range []bool{true, false, true} {
			if suspended {
				e.awaitRunning(t, ns, 2)
				e.awaitAllocated(t, ns, 2)
			}
			e.setSuspended(t, job, suspended)
			if suspended {
				e.awaitNoPods(t, ns)
				e.awaitAllocated(t, ns, 0)
			}
		}
		e.delete(t, job, pg, claim)
		e.awaitEmpty(t, ns)
		finish()
	}
	e.killAtEachWrite(t, run, "patch *v1.ResourceClaim/status")
}

// createRetrying creates an object although no controller may answer the webhooks.
func (e *testEnv) createRetrying(t *testing.T, o client.Object) {
	t.Helper()
	eventually.Eventually(t, timeout, fmt.Sprintf("%T %s is created", o, o.GetName()), func() error {
		return client.IgnoreAlreadyExists(e.client.Create(t.Context(), o))
	})
}

// awaitAllocated waits until want claims of a namespace are allocated.
func (e *testEnv) awaitAllocated(t *testing.T, ns string, want int) {
	t.Helper()
	e.awaitClaims(t, ns, fmt.Sprintf("%d claims are allocated", want), func(all []resourceapi.ResourceClaim) error {
		allocated := 0
		for i := range all {
			if all[i].Status.Allocation != nil {
				allocated++
			}
		}
		if allocated != want {
			return fmt.Errorf("%d of %d claims are", allocated, len(all))
		}
		return nil
	})
}

// startSucceededController starts a controller that writes with f, and its successor when
// it is killed. finish stops the controller that runs.
func (e *testEnv) startSucceededController(t *testing.T, f *failingClient) (finish func()) {
	t.Helper()
	stop := e.startController(t, f.new)
	done, stopped := make(chan struct{}), make(chan struct{})
	finish = sync.OnceFunc(func() {
		close(done)
		<-stopped
	})
	t.Cleanup(finish)
	go func() {
		defer close(stopped)
		select {
		case <-f.killed:
			stop()
			successor, err := e.runController(t, driverConfig(), nil)
			if err != nil {
				t.Errorf("start the successor of the killed controller: %v", err)
				return
			}
			<-done
			successor()
		case <-done:
			stop()
		}
	}()
	return finish
}

// checkConditions returns an error unless there are want conditions, all of them
// True.
func checkConditions(conditions []metav1.Condition, want int) error {
	for _, c := range conditions {
		if c.Status != metav1.ConditionTrue {
			return fmt.Errorf("condition %s is %s: %s", c.Type, c.Status, c.Message)
		}
	}
	if len(conditions) != want {
		return fmt.Errorf("got %d conditions, want %d", len(conditions), want)
	}
	return nil
}

// A controller that was killed may leave an entry of the PodGroup in a claim
// after the PodGroup and its pods are deleted. Its successor removes the entry.
func TestController_removesEntryOfDeletedGroup(t *testing.T) {
	e := requireTestEnv(t)
	stop := e.startController(t, nil)
	ns := e.createNamespace(t, "entry")
	pg := e.mustCreateGroup(t, ns, "group")
	e.createRunningPods(t, ns, "group", 0, 1)
	stop()
	claims, err := e.claims(t.Context(), ns)
	if err != nil || len(claims) != 1 {
		t.Fatalf("got %d claims and error %v, want one claim", len(claims), err)
	}
	claim := &claims[0]
	noFinalizers := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
	if err := e.client.Patch(t.Context(), pg, noFinalizers); err != nil {
		t.Fatalf("remove the finalizers of the PodGroup: %v", err)
	}
	entry := resourceapi.ResourceClaimConsumerReference{
		APIGroup: scheduling.GroupName, Resource: "pods", Name: "group-00000", UID: "left",
	}
	raw, err := json.Marshal([]resourceapi.ResourceClaimConsumerReference{entry})
	if err != nil {
		t.Fatal(err)
	}
	reservedFor := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"status":{"reservedFor":%s}}`, raw))
	if err := e.client.Status().Patch(t.Context(), claim, reservedFor); err != nil {
		t.Fatalf("write the entry into the claim: %v", err)
	}
	for _, o := range []client.Object{pg, newPod(ns, "group", 0), claim} {
		if err := client.IgnoreNotFound(e.client.Delete(t.Context(), o)); err != nil {
			t.Fatalf("delete %T: %v", o, err)
		}
	}
	e.startController(t, nil)
	e.awaitEmpty(t, ns)
}
