package controlplane

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// A life of a group, with a claim from a template and one by name, under a
// controller that dies before or after each of its writes: the next one goes on,
// and nothing is left when it is over.
func TestKilledBetweenAnyTwoWrites(t *testing.T) {
	e := requireTestEnv(t)
	none := &death{}
	e.life(t, none)
	total := int(none.writes.Load())
	t.Logf("%d writes", total)
	if total < 6 {
		t.Fatalf("a life of a group has %d writes: does the failpoint client still wrap every write?", total)
	}
	for n := 1; n <= total; n++ {
		for _, after := range []bool{false, true} {
			d := &death{at: int64(n), after: after}
			e.life(t, d)
			t.Logf("died %t after write %d: %s", after, n, d.what)
		}
	}
}

// death ends a controller at one of its writes.
type death struct {
	at    int64 // the number of the write; 0: it lives
	after bool
	what  string

	writes atomic.Int64
	dead   atomic.Bool
	died   chan struct{}
}

var errDead = errors.New("the controller is dead")

// do is a write.
func (d *death) do(what string, write func() error) error {
	if d.dead.Load() {
		return errDead
	}
	if d.writes.Add(1) != d.at {
		return write()
	}
	if d.after {
		_ = write() // whoever would look at the result is dead
	}
	d.what = what
	d.dead.Store(true)
	close(d.died)
	return errDead
}

// client is one whose writes are the controller's failpoints.
func (d *death) client(c *rest.Config, o client.Options) (client.Client, error) {
	inner, err := client.NewWithWatch(c, o)
	if err != nil {
		return nil, err
	}
	return interceptor.NewClient(inner, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			return d.do(fmt.Sprintf("create %T", o), func() error { return c.Create(ctx, o, opts...) })
		},
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			return d.do(fmt.Sprintf("delete %T", o), func() error { return c.Delete(ctx, o, opts...) })
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			return d.do(fmt.Sprintf("patch %T", o), func() error { return c.Patch(ctx, o, p, opts...) })
		},
		SubResourcePatch: func(ctx context.Context, c client.Client, sub string, o client.Object, p client.Patch, opts ...client.SubResourcePatchOption) error {
			return d.do(fmt.Sprintf("patch %T/%s", o, sub), func() error { return c.SubResource(sub).Patch(ctx, o, p, opts...) })
		},
	}), nil
}

// life of a group, from its first pod to its end.
func (e *testEnv) life(t *testing.T, d *death) {
	t.Helper()
	ctx := context.Background()
	d.died = make(chan struct{})
	ns := e.namespace(t, "life")
	byName := fabricClaim(ns, "kept")
	if err := e.client.Create(ctx, byName); err != nil {
		t.Fatal(err)
	}
	stop := e.controller(t, d.client)
	over := make(chan struct{})
	revived := make(chan struct{})
	go func() {
		defer close(revived)
		select {
		case <-d.died:
			stop()
			stop = e.controller(t, nil)
		case <-over:
		}
	}()
	step := func(what string, do func() error) {
		t.Helper()
		e.within(ctx, t, time.Minute, what, do)
	}
	var pg *scheduling.PodGroup
	step("create the group", func() (err error) {
		pg, err = e.group(ctx, ns, "group", scheduling.PodGroupResourceClaim{Name: "kept", ResourceClaimName: ptr.To("kept")})
		return err
	})
	for i := range 3 {
		pod := e.pod(ns, "group", i)
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: "kept", ResourceClaimName: ptr.To("kept")})
		step("create a pod", func() error { return client.IgnoreAlreadyExists(e.client.Create(ctx, pod.DeepCopy())) })
	}
	step("pods run", func() error {
		running, _, err := e.running(ctx, ns)
		if err == nil && running != 3 {
			err = fmt.Errorf("%d of 3 pods run", running)
		}
		return err
	})
	step("claims are held", func() error {
		if err := e.client.Get(ctx, client.ObjectKeyFromObject(pg), pg); err != nil {
			return err
		}
		for _, c := range pg.Status.Conditions {
			if c.Status != metav1.ConditionTrue {
				return fmt.Errorf("%s: %s", c.Type, c.Message)
			}
		}
		if len(pg.Status.Conditions) != 2 {
			return errors.New("conditions are missing")
		}
		return nil
	})
	if err := e.client.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	if err := e.client.Delete(ctx, pg); err != nil {
		t.Fatal(err)
	}
	step("the claim that stays is free", func() error {
		if err := e.client.Get(ctx, client.ObjectKeyFromObject(byName), byName); err != nil {
			return err
		}
		if byName.Status.Allocation != nil || len(byName.Status.ReservedFor) > 0 {
			return fmt.Errorf("it is reserved for %v, allocated %t", byName.Status.ReservedFor, byName.Status.Allocation != nil)
		}
		return nil
	})
	if err := e.client.Delete(ctx, byName); err != nil {
		t.Fatal(err)
	}
	e.nothingLeft(ctx, t, ns)
	close(over)
	<-revived
	stop()
}

// What was written by a controller that knew less than the last pod did is found by
// the next one, also when all else of the group has gone.
func TestAnEntryThatIsLeftKeepsNoClaim(t *testing.T) {
	e := requireTestEnv(t)
	ctx := context.Background()
	stop := e.controller(t, nil)
	ns := e.namespace(t, "left")
	pg, err := e.group(ctx, ns, "group")
	if err != nil {
		t.Fatal(err)
	}
	e.runs(ctx, t, ns, "group", 0, 1)
	stop()
	claims, err := e.claims(ctx, ns)
	if err != nil || len(claims) != 1 {
		t.Fatalf("%d claims, %v", len(claims), err)
	}
	claim := &claims[0]
	if err := e.client.Patch(ctx, pg, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
		t.Fatal(err)
	}
	left := []resourceapi.ResourceClaimConsumerReference{{APIGroup: scheduling.GroupName, Resource: "pods", Name: "group-00000", UID: "left"}}
	if err := e.client.Status().Patch(ctx, claim, client.RawPatch(types.MergePatchType, []byte(`{"status":{"reservedFor":`+string(mustJSON(t, left))+`}}`))); err != nil {
		t.Fatal(err)
	}
	for _, o := range []client.Object{pg, e.pod(ns, "group", 0), claim} {
		if err := client.IgnoreNotFound(e.client.Delete(ctx, o)); err != nil {
			t.Fatal(err)
		}
	}
	e.controller(t, nil)
	e.nothingLeft(ctx, t, ns)
}

func mustJSON(t *testing.T, v any) []byte {
	t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// nothingLeft waits until a namespace has no group, claim or pod any more.
func (e *testEnv) nothingLeft(ctx context.Context, t *testing.T, ns string) {
	t.Helper()
	e.within(ctx, t, 2*time.Minute, "nothing is left", func() error {
		var groups scheduling.PodGroupList
		var pods corev1.PodList
		if err := errors.Join(e.client.List(ctx, &groups, client.InNamespace(ns)), e.client.List(ctx, &pods, client.InNamespace(ns))); err != nil {
			return err
		}
		claims, err := e.claims(ctx, ns)
		if err == nil && len(groups.Items)+len(pods.Items)+len(claims) > 0 {
			err = fmt.Errorf("%d PodGroups, %d pods, %d claims", len(groups.Items), len(pods.Items), len(claims))
			for _, c := range claims {
				err = fmt.Errorf("%w; %s reserved for %v", err, c.Name, c.Status.ReservedFor)
			}
		}
		return err
	})
}
