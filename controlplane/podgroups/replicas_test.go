// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"strconv"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

func TestReplicaOfPod(t *testing.T) {
	for pod, want := range map[string]int{
		"web-0": 0, "web-12": 12, "web-3-2": 3, "web-a-1": -1, "web-x": -1, "web--1": -1, "web": -1, "webs-1": -1,
		"other-1": -1,
	} {
		got, ok := ReplicaOfPod("web", pod)
		if !ok {
			got = -1
		}
		if got != want {
			t.Errorf("pod %s of StatefulSet web: got replica %d, want %d", pod, got, want)
		}
	}
}

// testSet returns the StatefulSet "web" with the ordinals 1 and 2, and a claim from testTemplate for each.
func testSet() *appsv1.StatefulSet {
	return &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: testNamespace, Name: "web", UID: "set-uid"},
		Spec: appsv1.StatefulSetSpec{
			Replicas: ptr.To[int32](2), Ordinals: &appsv1.StatefulSetOrdinals{Start: 1},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
				scheduling.ReplicaClaimsAnnotation: "[{name: net, resourceClaimTemplateName: template}]",
			}}},
		},
	}
}

// replicaClaim returns the claim of a replica of testSet, which is held.
func replicaClaim(replica int) *resourceapi.ResourceClaim {
	owner := ReplicaOwner(testNamespace, "web", "set-uid", replica)
	claim := claims.Generate(owner, "net", 0, testTemplate("class"))
	claim.UID = types.UID(claim.Name)
	claim.Finalizers = []string{deleteProtection}
	claim.Status.Allocation = &resourceapi.AllocationResult{}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{owner.Reference()}
	return claim
}

// replicaPod returns the pod of a replica of testSet.
func replicaPod(replica int) *corev1.Pod {
	pod := testPod("web-"+strconv.Itoa(replica), replicaClaim(replica).Name)
	pod.Labels[scheduling.GroupUIDLabel] = "set-uid"
	return pod
}

func TestReplicaReconciler_states(t *testing.T) {
	now := metav1.Now()
	for _, tc := range []struct {
		name   string
		change func(*appsv1.StatefulSet) // nil: the StatefulSet does not exist
		with   []client.Object
		want   map[int]string // by the replica
	}{
		{"the first pod is created", func(*appsv1.StatefulSet) {}, []client.Object{replicaPod(1)},
			map[int]string{0: "absent", 1: "present", 2: "absent"}},
		{"the pods are gone", func(*appsv1.StatefulSet) {}, []client.Object{replicaClaim(1), replicaClaim(2)},
			map[int]string{1: "held", 2: "held"}},
		{"replicas are scaled away", func(s *appsv1.StatefulSet) { s.Spec.Replicas = ptr.To[int32](1) },
			[]client.Object{replicaClaim(0), replicaClaim(1), replicaClaim(2)},
			map[int]string{0: "released", 1: "held", 2: "released"}},
		{"it is being deleted", func(s *appsv1.StatefulSet) {
			s.DeletionTimestamp, s.Finalizers = &now, []string{metav1.FinalizerDeleteDependents}
		}, []client.Object{replicaClaim(1), replicaPod(1)}, map[int]string{1: "released"}},
		{"it does not exist", nil, []client.Object{replicaClaim(1), replicaClaim(2)},
			map[int]string{1: "released", 2: "released"}},
		{"another one has its name", func(s *appsv1.StatefulSet) { s.UID = "other" }, []client.Object{replicaClaim(1)},
			map[int]string{1: "released"}},
		{"it is for the workers of a leader", func(s *appsv1.StatefulSet) {
			s.OwnerReferences = []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Pod", Name: "leader", UID: "leader", Controller: ptr.To(true),
			}}
		}, []client.Object{replicaPod(1)}, map[int]string{1: "absent"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			objects := append([]client.Object{testTemplate("class")}, tc.with...)
			if tc.change != nil {
				set := testSet()
				tc.change(set)
				objects = append(objects, set)
			}
			c := reconcileReplicas(t, objects...)
			for replica, want := range tc.want {
				if got := describe(t, c, replicaClaim(replica).Name); got != want {
					t.Errorf("claim of replica %d: got %s, want %s", replica, got, want)
				}
			}
		})
	}
}

// reconcileReplicas reconciles testSet once.
func reconcileReplicas(t *testing.T, objects ...client.Object) client.Client {
	t.Helper()
	e := newTestEnv(t)
	builder := fake.NewClientBuilder().WithScheme(e.client.Scheme()).WithObjects(objects...).
		WithStatusSubresource(&resourceapi.ResourceClaim{}).
		WithInterceptorFuncs(interceptor.Funcs{Create: createWithUID, List: listWithPhaseSelector})
	for _, i := range append(indexes(), replicaIndexes()...) {
		builder = builder.WithIndex(i.object, i.field, i.keys)
	}
	c := builder.Build()
	r := &ReplicaReconciler{Reconciler: Reconciler{
		Client: cached(c), APIReader: c, Mode: mode.Bridge, Driver: testDriver, Events: e.recorder,
	}}
	request := ctrl.Request{NamespacedName: client.ObjectKeyFromObject(testSet())}
	if _, err := r.Reconcile(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	return c
}
