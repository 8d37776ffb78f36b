package controlplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/test/simnode"
)

// What Kubernetes' own controllers are known to get wrong about claims that many
// pods share must not become the bug of whoever has a PodGroup.
func TestKnownBugsOfKubernetes(t *testing.T) {
	e := requireTestEnv(t)
	e.controller(t, nil)
	for name, scenario := range map[string]func(*testing.T){
		"pods that are gone leave room":                         e.podsThatAreGoneLeaveRoom,
		"pods that have ended cost nothing":                     e.podsThatHaveEndedCostNothing,
		"pods that have ended cost nothing whoever they are of": e.podsThatHaveEndedCostNothingWhoeverTheyAreOf,
		"pods that have ended cost a held claim nothing":        e.podsThatHaveEndedCostAHeldClaimNothing,
		"pods that end with their group keep nothing":           e.podsThatEndWithTheirGroupKeepNothing,
		"each group has one claim":                              e.eachGroupHasOneClaim,
		"the status has all claims and rests":                   e.theStatusHasAllClaimsAndRests,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they wait, most of the time
			scenario(t)
		})
	}
}

// runs creates pods of a group, and waits until all of the namespace run.
func (e *testEnv) runs(ctx context.Context, t *testing.T, ns, group string, from, to int) {
	t.Helper()
	if err := simnode.Parallel(to-from, func(i int) error { return e.client.Create(ctx, e.pod(ns, group, from+i)) }); err != nil {
		t.Fatal(err)
	}
	e.eventually(ctx, t, "pods run", func() error {
		for i := from; i < to; i++ {
			pod := e.pod(ns, group, i)
			if err := e.client.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
				return err
			}
			if pod.Status.Phase != corev1.PodRunning {
				return fmt.Errorf("%s is %s", pod.Name, pod.Status.Phase)
			}
		}
		return nil
	})
}

// succeed lets a pod end, as its kubelet would.
func (e *testEnv) succeed(ctx context.Context, t *testing.T, pod *corev1.Pod) {
	t.Helper()
	if err := e.client.Status().Patch(ctx, pod, client.RawPatch(types.StrategicMergePatchType, []byte(`{"status":{"phase":"Succeeded"}}`))); err != nil {
		t.Fatal(err)
	}
}

// users of a namespace's one claim are the names of the pods that it is reserved for.
func (e *testEnv) users(ctx context.Context, ns string) ([]string, error) {
	claims, err := e.claims(ctx, ns)
	if err == nil && len(claims) != 1 {
		err = fmt.Errorf("%d claims", len(claims))
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, r := range claims[0].Status.ReservedFor {
		if r.Resource == "pods" && r.APIGroup == "" {
			names = append(names, r.Name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// Pods come and go for as long as the group lives: those that are gone must not
// take the room of those that come (kubernetes/kubernetes#136406).
func (e *testEnv) podsThatAreGoneLeaveRoom(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	ns := e.namespace(t, "room")
	if _, err := e.group(ctx, ns, "group"); err != nil {
		t.Fatal(err)
	}
	e.runs(ctx, t, ns, "group", 0, 200)
	if err := simnode.Parallel(199, func(i int) error { return e.client.Delete(ctx, e.pod(ns, "group", i)) }); err != nil {
		t.Fatal(err)
	}
	e.eventually(ctx, t, "the claim is reserved for the pod that is left", func() error {
		names, err := e.users(ctx, ns)
		if err == nil && !e.native && !slices.Equal(names, []string{"group-00199"}) {
			err = fmt.Errorf("it is reserved for %d pods: %v", len(names), names)
		}
		return err
	})
	e.runs(ctx, t, ns, "group", 200, 400)
}

// A pod that has ended and is still there makes the resource claim controller
// reserve its claim, and take that back, for ever (kubernetes/kubernetes#141274).
func (e *testEnv) podsThatHaveEndedCostNothing(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	ns := e.namespace(t, "ended")
	pg, err := e.group(ctx, ns, "group")
	if err != nil {
		t.Fatal(err)
	}
	e.runs(ctx, t, ns, "group", 0, 3)
	e.succeed(ctx, t, e.pod(ns, "group", 0))
	e.quiet(ctx, t, ns, "one pod of three has ended")
	e.succeed(ctx, t, e.pod(ns, "group", 1))
	e.succeed(ctx, t, e.pod(ns, "group", 2))
	e.quiet(ctx, t, ns, "all have ended")
	e.runs(ctx, t, ns, "group", 3, 5)
	e.quiet(ctx, t, ns, "others run")
	if err := e.client.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	e.eventually(ctx, t, "the claim is reserved for the group alone", func() error {
		claims, err := e.claims(ctx, ns)
		if err == nil && (len(claims) != 1 || len(claims[0].Status.ReservedFor) != 1) {
			err = fmt.Errorf("%d claims, reserved for %v", len(claims), claims[0].Status.ReservedFor)
		}
		return err
	})
	if err := e.client.Delete(ctx, pg); err != nil {
		t.Fatal(err)
	}
	e.nothingLeft(ctx, t, ns)
}

// The same for a claim that any object holds, whose pods are in no group.
func (e *testEnv) podsThatHaveEndedCostAHeldClaimNothing(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	ns := e.namespace(t, "held")
	holder := e.job(ctx, t, ns)
	claim, pod := e.heldClaim(ctx, t, ns, "batch/jobs/train")
	another := e.pod(ns, "user", 1)
	another.Annotations, another.Spec.ResourceClaims = nil, pod.Spec.ResourceClaims
	if err := e.client.Create(ctx, another); err != nil {
		t.Fatal(err)
	}
	pods := []*corev1.Pod{pod, another}
	reservedFor := func(count int) {
		t.Helper()
		e.eventually(ctx, t, fmt.Sprintf("the claim is reserved for %d", count), func() error {
			err := e.client.Get(ctx, client.ObjectKeyFromObject(claim), claim)
			if err == nil && len(claim.Status.ReservedFor) != count {
				err = fmt.Errorf("it is for %v", claim.Status.ReservedFor)
			}
			return err
		})
	}
	reservedFor(3)
	e.succeed(ctx, t, pods[0])
	e.quiet(ctx, t, ns, "one of two pods has ended")
	e.succeed(ctx, t, pods[1])
	e.quiet(ctx, t, ns, "both have ended")
	if err := e.client.Delete(ctx, pods[0]); err != nil {
		t.Fatal(err)
	}
	reservedFor(2)
	if err := e.client.Delete(ctx, holder, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
		t.Fatal(err)
	}
	reservedFor(0)
}

// The same for a claim by name that two groups and a pod of none share: none of
// them looks after its own pods only, also not when one of the groups goes.
func (e *testEnv) podsThatHaveEndedCostNothingWhoeverTheyAreOf(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	ns := e.namespace(t, "shared")
	if err := e.client.Create(ctx, fabricClaim(ns, "team")); err != nil {
		t.Fatal(err)
	}
	var pods []*corev1.Pod
	use := func(name, group string) {
		t.Helper()
		pod := e.pod(ns, name, 0)
		pod.Annotations = map[string]string{scheduling.GroupAnnotation: group}
		if group == "" {
			pod.Annotations = nil
		}
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "team", ResourceClaimName: ptr.To("team")}}
		if err := e.client.Create(ctx, pod); err != nil {
			t.Fatal(err)
		}
		pods = append(pods, pod)
	}
	groups := map[string]*scheduling.PodGroup{}
	for _, name := range []string{"a", "b"} {
		pg, err := e.group(ctx, ns, name, scheduling.PodGroupResourceClaim{Name: "team", ResourceClaimName: ptr.To("team")})
		if err != nil {
			t.Fatal(err)
		}
		groups[name] = pg
		use("of-"+name, name)
	}
	if !e.native { // there Kubernetes holds the claim, and this is its own
		use("alone", "")
	}
	e.eventually(ctx, t, "pods run", func() error {
		running, _, err := e.running(ctx, ns)
		if err == nil && running != len(pods) {
			err = fmt.Errorf("%d of %d", running, len(pods))
		}
		return err
	})
	for _, pod := range pods {
		e.succeed(ctx, t, pod)
	}
	e.quiet(ctx, t, ns, "the pods of all have ended")
	if err := e.client.Delete(ctx, groups["a"]); err != nil {
		t.Fatal(err)
	}
	e.eventually(ctx, t, "group a goes", func() error {
		err := e.client.Get(ctx, client.ObjectKeyFromObject(groups["a"]), groups["a"])
		if err == nil {
			return errors.New("it is there")
		}
		return client.IgnoreNotFound(err)
	})
	e.quiet(ctx, t, ns, "one group has gone, and its pods have not")
	if err := e.client.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	if err := e.client.Delete(ctx, groups["b"]); err != nil {
		t.Fatal(err)
	}
	e.eventually(ctx, t, "the claim is free", func() error {
		claims, err := e.claims(ctx, ns)
		if err != nil {
			return err
		}
		for _, c := range claims {
			if c.Name == "team" && c.Status.Allocation == nil && len(c.Status.ReservedFor) == 0 {
				return nil
			}
		}
		return fmt.Errorf("%v", claims)
	})
}

// What keeps pods that have ended quiet goes with their group, also if they end
// while it does.
func (e *testEnv) podsThatEndWithTheirGroupKeepNothing(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	ns := e.namespace(t, "together")
	const groups, each = 30, 3
	for i := range groups {
		name := fmt.Sprintf("g%02d", i)
		if _, err := e.group(ctx, ns, name); err != nil {
			t.Fatal(err)
		}
		e.runs(ctx, t, ns, name, 0, each)
	}
	if err := e.client.DeleteAllOf(ctx, &scheduling.PodGroup{}, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	if err := simnode.Parallel(groups*each, func(i int) error {
		pod := e.pod(ns, fmt.Sprintf("g%02d", i/each), i%each)
		return e.client.Status().Patch(ctx, pod, client.RawPatch(types.StrategicMergePatchType, []byte(`{"status":{"phase":"Succeeded"}}`)))
	}); err != nil {
		t.Fatal(err)
	}
	e.eventually(ctx, t, "no claim is left", func() error {
		claims, err := e.claims(ctx, ns)
		if err == nil && len(claims) > 0 {
			err = fmt.Errorf("%d are, the first reserved for %v", len(claims), claims[0].Status.ReservedFor)
		}
		return err
	})
}

// quietFor is how long nobody must write a claim for it to count as left alone:
// the loop that is looked for writes many times in a second.
const quietFor = 2 * time.Second

// quiet waits until nobody writes the claims of a namespace any more.
func (e *testEnv) quiet(ctx context.Context, t *testing.T, ns, when string) {
	t.Helper()
	var last string
	var since time.Time
	e.within(ctx, t, 20*time.Second, when+": nobody writes the claim", func() error {
		claims, err := e.claims(ctx, ns)
		if err != nil {
			return err
		}
		var now strings.Builder
		for _, c := range claims {
			fmt.Fprintf(&now, "%s at %s, reserved for %v; ", c.Name, c.ResourceVersion, c.Status.ReservedFor)
		}
		if now.String() != last {
			last, since = now.String(), time.Now()
		}
		if time.Since(since) < quietFor {
			return fmt.Errorf("%s", last)
		}
		return nil
	})
}

// Many groups in a moment have one claim each (kubernetes/kubernetes#140217).
func (e *testEnv) eachGroupHasOneClaim(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	ns := e.namespace(t, "burst")
	const count = 300
	if err := simnode.Parallel(count, func(i int) error {
		_, err := e.group(ctx, ns, fmt.Sprintf("g%03d", i))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	e.eventually(ctx, t, "all have a claim", func() error {
		var list scheduling.PodGroupList
		if err := e.client.List(ctx, &list, client.InNamespace(ns)); err != nil {
			return err
		}
		for i := range list.Items {
			if len(list.Items[i].Status.ResourceClaimStatuses) != 1 {
				return fmt.Errorf("%s has none", list.Items[i].Name)
			}
		}
		return nil
	})
	claims, err := e.claims(ctx, ns)
	if err != nil {
		t.Fatal(err)
	}
	owners := map[types.UID]int{}
	for _, c := range claims {
		owners[c.OwnerReferences[0].UID]++
	}
	if len(claims) != count || len(owners) != count {
		t.Errorf("%d claims of %d groups for %d groups: %v", len(claims), len(owners), count, slices.Max(slices.Collect(maps.Values(owners))))
	}
}

// The names of several claims are in the status together, and stay
// (kubernetes/kubernetes#138407).
func (e *testEnv) theStatusHasAllClaimsAndRests(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	ns := e.namespace(t, "several")
	pg, err := e.group(ctx, ns, "group", scheduling.PodGroupResourceClaim{Name: "second", ResourceClaimTemplateName: ptr.To("fabric")},
		scheduling.PodGroupResourceClaim{Name: "third", ResourceClaimTemplateName: ptr.To("fabric")})
	if err != nil {
		t.Fatal(err)
	}
	pod := e.pod(ns, "group", 0)
	for _, name := range []string{"second", "third", "own", "other"} {
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: name, ResourceClaimTemplateName: ptr.To("fabric")})
	}
	if err := e.client.Create(ctx, pod); err != nil {
		t.Fatal(err)
	}
	var last string
	var since time.Time
	e.eventually(ctx, t, "all names are there, and nobody writes them any more", func() error {
		for _, o := range []client.Object{pg, pod} {
			if err := e.client.Get(ctx, client.ObjectKeyFromObject(o), o); err != nil {
				return err
			}
		}
		if now := pg.ResourceVersion + " " + pod.ResourceVersion; now != last {
			last, since = now, time.Now()
		}
		if len(pg.Status.ResourceClaimStatuses) != 3 || len(pod.Status.ResourceClaimStatuses) != 2 || pod.Status.Phase != corev1.PodRunning || time.Since(since) < quietFor {
			return fmt.Errorf("PodGroup: %v, pod %s: %v, unchanged for %s", pg.Status.ResourceClaimStatuses, pod.Status.Phase, pod.Status.ResourceClaimStatuses, time.Since(since))
		}
		return nil
	})
}
