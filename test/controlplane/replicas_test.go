// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// awaitClaimsOfReplicas waits until the replicas with these ordinals, and no others, hold one claim each. It returns
// the names of the claims by the ordinals.
func (e *testEnv) awaitClaimsOfReplicas(t *testing.T, ns string, want ...string) map[string]string {
	t.Helper()
	names := map[string]string{}
	condition := fmt.Sprintf("the replicas %v hold a claim each", want)
	e.awaitClaims(t, ns, condition, func(all []resourceapi.ResourceClaim) error {
		clear(names)
		for _, c := range all {
			isSet := func(r resourceapi.ResourceClaimConsumerReference) bool { return r.Resource == "statefulsets" }
			if c.Status.Allocation == nil || !slices.ContainsFunc(c.Status.ReservedFor, isSet) {
				return fmt.Errorf("claim %s is allocated: %t, reserved for %v", c.Name, c.Status.Allocation != nil,
					c.Status.ReservedFor)
			}
			names[c.Annotations[scheduling.ReplicaAnnotation]] = c.Name
		}
		if got := slices.Sorted(maps.Keys(names)); len(all) != len(got) || !slices.Equal(got, want) {
			return fmt.Errorf("%d claims, of the replicas %v", len(all), got)
		}
		return nil
	})
	return names
}

// podsOfClaims returns the names of the pods of a namespace by the claims that they use.
func (e *testEnv) podsOfClaims(t *testing.T, ns string) map[string][]string {
	t.Helper()
	var pods corev1.PodList
	if err := e.client.List(t.Context(), &pods, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	users := map[string][]string{}
	for i := range pods.Items {
		for _, claim := range claimref.Names(&pods.Items[i]) {
			users[claim] = append(users[claim], pods.Items[i].Name)
			slices.Sort(users[claim])
		}
	}
	return users
}

// Each ordinal of a StatefulSet has its own claim, which stays when the pod is replaced. It is deleted when the
// StatefulSet is scaled below the ordinal, or is deleted.
func TestReplicas_claimOfEachOrdinal(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "ordinals")
	set := annotatedSet(ns, 3)
	e.create(t, set)
	e.awaitRunning(t, ns, 3)
	before := e.awaitClaimsOfReplicas(t, ns, "0", "1", "2")
	users := e.podsOfClaims(t, ns)
	for replica, claim := range before {
		if want := []string{"web-" + replica}; !slices.Equal(users[claim], want) {
			t.Errorf("pods that use claim %s: got %v, want %v", claim, users[claim], want)
		}
	}
	e.delete(t, &corev1.Pod{ObjectMeta: objectMeta(ns, "web-1")})
	e.awaitRunning(t, ns, 3)
	if after := e.awaitClaimsOfReplicas(t, ns, "0", "1", "2"); !maps.Equal(before, after) {
		t.Errorf("claims after a pod was replaced: got %v, want %v", after, before)
	}
	e.scale(t, set, 1)
	e.awaitClaimsOfReplicas(t, ns, "0")
	e.scale(t, set, 2)
	e.awaitRunning(t, ns, 2)
	e.awaitClaimsOfReplicas(t, ns, "0", "1")
	e.delete(t, set)
	e.awaitEmpty(t, ns)
}

func TestReplicas_deniedAtAdmission(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "denied-replicas")
	for annotation, want := range map[string]string{
		"[{name: net}]": "set resourceClaimTemplateName, to use a ResourceClaimTemplate, or spec",
		"[{name: net, resourceClaimTemplateName: t, deletionPolicy: OnDeletion}]": "deletionPolicy: Forbidden: " +
			"the claims of a replica are deleted when it is scaled away",
		"[{name: net, resourceClaimTemplateName: t, containers: [none]}]": `containers[0]: Not found: "none"`,
	} {
		set := statefulSet(ns, 1)
		set.Spec.Template.Annotations = map[string]string{scheduling.ReplicaClaimsAnnotation: annotation}
		if err := e.client.Create(t.Context(), set); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("annotation %s: got error %v, want %q", annotation, err, want)
		}
	}
	pod := newPod(ns, "web", 0)
	pod.Annotations = map[string]string{scheduling.ReplicaClaimsAnnotation: "[" + inlineFabric + "]"}
	const want = "only pods of StatefulSets and LeaderWorkerSets share claims of a replica"
	if err := e.client.Create(t.Context(), pod); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("pod without a StatefulSet: got error %v, want %q", err, want)
	}
	set := statefulSet(ns, 1)
	e.create(t, set)
	annotate := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{%q:%q}}}}}`,
		scheduling.ReplicaClaimsAnnotation, "["+inlineFabric+"]")
	err := e.client.Patch(t.Context(), set, client.RawPatch(types.MergePatchType, annotate))
	if want := "cannot be changed, because pods may use the claims: delete the StatefulSet"; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("annotation added later: got error %v, want %q", err, want)
	}
}

// lwsController is the real controller of LeaderWorkerSets with its webhooks and its own rights.
var lwsController = otherController{
	name: "lws", account: "lws-controller-manager",
	service: "lws-webhook-service", port: 9445, secret: "lws-webhook-server-cert",
	certificates: "/tmp/lws-webhook-server/serving-certs",
}

func (e *testEnv) startLWS(t *testing.T) {
	t.Helper()
	e.startOther(t, lwsController, func(ctx context.Context) error {
		return e.client.Create(ctx, leaderWorkerSet(t, "default", 1, ""), client.DryRunAll)
	})
}

// leaderWorkerSet returns the LeaderWorkerSet "serve" with groups of one leader and two workers. leader is the
// annotation of the leaders. If it is empty, they have the annotation of the workers.
func leaderWorkerSet(t *testing.T, ns string, replicas int, leader string) *unstructured.Unstructured {
	t.Helper()
	entry := "[" + strings.TrimSuffix(inlineFabric, "}") + ", containers: [lead, work]}]"
	if leader == "" {
		leader = entry
	}
	text := fmt.Sprintf(`
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {namespace: %q, name: serve}
spec:
  replicas: %d
  leaderWorkerTemplate:
    size: 3
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      metadata: {annotations: {scheduling.dra-shared.dev/replica-claims: %q}}
      spec:
        terminationGracePeriodSeconds: 1
        containers: [{name: lead, image: none}]
    workerTemplate:
      metadata: {annotations: {scheduling.dra-shared.dev/replica-claims: %q}}
      spec:
        terminationGracePeriodSeconds: 1
        containers: [{name: work, image: none}]
`, ns, replicas, leader, entry)
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return o
}

// requireLWSTests skips a test that is too long for every run.
func requireLWSTests(t *testing.T) *testEnv {
	t.Helper()
	return requireOther(t, "lws")
}

// The leader and the workers of each replica of a LeaderWorkerSet share a claim. It stays when the group is recreated.
// It is deleted when the LeaderWorkerSet is scaled below the replica, or is deleted.
func TestLWS_claimsOfEachReplica(t *testing.T) {
	e := requireLWSTests(t)
	e.startController(t, nil)
	e.startLWS(t)
	ns := e.createNamespace(t, "lws")
	set := leaderWorkerSet(t, ns, 2, "")
	e.create(t, set)
	e.awaitRunning(t, ns, 6)
	before := e.awaitClaimsOfReplicas(t, ns, "0", "1")
	users := e.podsOfClaims(t, ns)
	for replica, claim := range before {
		leader := "serve-" + replica
		if want := []string{leader, leader + "-1", leader + "-2"}; !slices.Equal(users[claim], want) {
			t.Errorf("pods that use claim %s: got %v, want %v", claim, users[claim], want)
		}
	}

	leader := &corev1.Pod{ObjectMeta: objectMeta(ns, "serve-1")}
	if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(leader), leader); err != nil {
		t.Fatal(err)
	}
	former := leader.UID
	e.delete(t, &corev1.Pod{ObjectMeta: objectMeta(ns, "serve-1-2")}) // the group is recreated
	eventually.Eventually(t, timeout, "the leader is replaced", func() error {
		err := e.client.Get(t.Context(), client.ObjectKeyFromObject(leader), leader)
		if err == nil && leader.UID == former {
			err = fmt.Errorf("pod %s has UID %s", leader.Name, leader.UID)
		}
		return err
	})
	e.awaitRunning(t, ns, 6)
	if after := e.awaitClaimsOfReplicas(t, ns, "0", "1"); !maps.Equal(before, after) {
		t.Errorf("claims after a group was recreated: got %v, want %v", after, before)
	}

	e.scale(t, set, 1)
	e.awaitClaimsOfReplicas(t, ns, "0")
	e.scale(t, set, 2)
	e.awaitRunning(t, ns, 6)
	e.awaitClaimsOfReplicas(t, ns, "0", "1")
	foreground := client.PropagationPolicy("Foreground")
	if err := e.client.Delete(t.Context(), set, foreground); err != nil {
		t.Fatal(err)
	}
	e.awaitDeleted(t, set)
	e.awaitEmpty(t, ns)
	if !e.used.has(ofLeaderWorkerSets) {
		t.Errorf("the controller has not used the right to %s", ofLeaderWorkerSets)
	}
}

// The leader and the workers must list the same claims. A user without the right to create claims cannot use the
// controller of LeaderWorkerSets to create them.
func TestLWS_deniedAtAdmission(t *testing.T) {
	e := requireLWSTests(t)
	e.startController(t, nil)
	e.startLWS(t)
	err := e.client.Create(t.Context(), leaderWorkerSet(t, "default", 1, "["+inlineFabric+"]"), client.DryRunAll)
	if want := "differs from the one of leaderTemplate"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("different annotations: got error %v, want %q", err, want)
	}
	author := e.clientOf(t, lwsController.user())
	for _, o := range []client.Object{leaderWorkerSet(t, "default", 1, ""), annotatedSet("default", 1)} {
		err := author.Create(t.Context(), o, client.DryRunAll)
		want := `user "` + lwsController.user() + `" may not create ResourceClaims`
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%T: got error %v, want %q", o, err, want)
		}
	}
}

// annotatedSet returns the StatefulSet "web" with a claim to the fabric for each ordinal.
func annotatedSet(ns string, replicas int32) *appsv1.StatefulSet {
	set := statefulSet(ns, replicas)
	set.Spec.Template.Annotations = map[string]string{scheduling.ReplicaClaimsAnnotation: "[" + inlineFabric + "]"}
	return set
}
