// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package claimpods

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// testEnv is a Watcher with an API server and the requests that it sends.
type testEnv struct {
	*testing.T
	*Watcher
	cluster  *fake.Clientset
	requests chan types.NamespacedName
}

func newTestEnv(t *testing.T, pods ...*corev1.Pod) *testEnv {
	t.Helper()
	e := &testEnv{T: t, cluster: fake.NewClientset(), requests: make(chan types.NamespacedName, 100)}
	for _, pod := range pods {
		e.create(pod)
	}
	e.Watcher = &Watcher{Cluster: e.cluster, Labels: "!" + scheduling.GroupUIDLabel}
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	if err := e.Source().Start(t.Context(), queue); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(queue.ShutDown)
	go func() {
		for {
			request, shutdown := queue.Get()
			if shutdown {
				return
			}
			e.requests <- request.NamespacedName
			queue.Done(request)
		}
	}()
	return e
}

// testPod returns a pod that uses the claims by name.
func testPod(namespace, name string, claims ...string) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(name)}}
	for _, claim := range claims {
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims,
			corev1.PodResourceClaim{Name: claim, ResourceClaimName: &claim})
	}
	return pod
}

// withTemplate returns the pod with a claim that Kubernetes generated from a template.
func withTemplate(pod *corev1.Pod, claim string) *corev1.Pod {
	pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims,
		corev1.PodResourceClaim{Name: claim, ResourceClaimTemplateName: ptr.To("template")})
	pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: claim, ResourceClaimName: &claim}}
	return pod
}

func (e *testEnv) create(pod *corev1.Pod) {
	e.Helper()
	if _, err := e.cluster.CoreV1().Pods(pod.Namespace).Create(e.Context(), pod, metav1.CreateOptions{}); err != nil {
		e.Fatal(err)
	}
}

func (e *testEnv) update(pod *corev1.Pod) {
	e.Helper()
	if _, err := e.cluster.CoreV1().Pods(pod.Namespace).Update(e.Context(), pod, metav1.UpdateOptions{}); err != nil {
		e.Fatal(err)
	}
}

func (e *testEnv) delete(pod *corev1.Pod) {
	e.Helper()
	if err := e.cluster.CoreV1().Pods(pod.Namespace).Delete(e.Context(), pod.Name, metav1.DeleteOptions{}); err != nil {
		e.Fatal(err)
	}
}

func claimNamed(namespace, name string) types.NamespacedName {
	return types.NamespacedName{Namespace: namespace, Name: name}
}

// expectPods checks the names of the pods that use a claim. Then it waits until the Watcher waits for changes: the fake
// API server does not send those that it gets between the Watcher's list and its watch.
func (e *testEnv) expectPods(claim types.NamespacedName, want ...string) {
	e.Helper()
	pods, err := e.Pods(e.Context(), claim)
	if err != nil {
		e.Fatal(err)
	}
	var got []string
	for _, pod := range pods {
		got = append(got, pod.Name)
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		e.Errorf("pods of claim %s: got %q, want %q", claim, got, want)
	}
	synctest.Wait()
}

// expectRequest waits for the next request.
func (e *testEnv) expectRequest(condition string, want types.NamespacedName) {
	e.Helper()
	select {
	case got := <-e.requests:
		if got != want {
			e.Errorf("request when %s: got %s, want %s", condition, got, want)
		}
	case <-time.After(10 * time.Second):
		e.Fatalf("no request when %s, want one for %s", condition, want)
	}
}

func TestWatcher_Pods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inGroup := testPod("a", "in-group", "shared")
		inGroup.Labels = map[string]string{scheduling.GroupUIDLabel: "1"}
		e := newTestEnv(t, testPod("a", "first", "shared"), testPod("a", "both", "shared", "own"), inGroup,
			withTemplate(testPod("a", "generated"), "of-template"), testPod("a", "none"), testPod("b", "other", "shared"))
		e.expectPods(claimNamed("a", "shared"), "both", "first")
		e.expectPods(claimNamed("a", "own"), "both")
		e.expectPods(claimNamed("a", "of-template"), "generated")
		e.expectPods(claimNamed("a", "unused"))
		e.expectPods(claimNamed("b", "shared"), "other")
		if stored := e.namespaces["a"].informer.GetStore().ListKeys(); slices.Contains(stored, "a/none") {
			t.Errorf("pods in the cache: got %q, want none that uses no claim", stored)
		}
	})
}

// A request is sent for each change that matters to a claim, and for no other claim.
func TestWatcher_sendsRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the delays of requests pass immediately
		e := newTestEnv(t, testPod("a", "old", "other"))
		claim := claimNamed("a", "shared")
		e.expectPods(claim)
		pod := withTemplate(testPod("a", "new", "other"), "shared")
		e.create(pod)
		e.expectRequest("a pod appears", claim)
		e.expectPods(claim, "new")
		for _, step := range []struct {
			condition string
			change    func()
		}{
			{"the pod is bound", func() { pod.Spec.NodeName = "node" }},
			{"the pod runs", func() { pod.Status.Phase = corev1.PodRunning }},
			{"the pod has ended", func() { pod.Status.Phase = corev1.PodSucceeded }},
		} {
			step.change()
			e.update(pod.DeepCopy())
			e.expectRequest(step.condition, claim)
		}
		e.delete(pod)
		e.expectRequest("the pod is deleted", claim)
		e.expectPods(claim)

		e.expectPods(claimNamed("a", "last"))
		e.create(testPod("a", "last", "other", "last"))
		e.expectRequest("a pod of another claim appears", claimNamed("a", "last"))
		if n := len(e.requests); n > 0 {
			t.Errorf("%d further requests, want none", n)
		}
	})
}

// The pods of a namespace are watched as long as one of its claims needs them.
func TestWatcher_Forget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the delays of requests pass immediately
		e := newTestEnv(t)
		first, second := claimNamed("a", "first"), claimNamed("a", "second")
		e.Forget(first) // Pods was not called for it
		e.expectPods(first)
		e.expectPods(second)
		e.Forget(first)
		if e.Watches(first) || !e.Watches(second) {
			t.Errorf("after the first of two claims was forgotten: watched: %t and %t, want the second",
				e.Watches(first), e.Watches(second))
		}
		e.create(testPod("a", "pod", "first", "second"))
		e.expectRequest("a pod of both claims appears", second)
		informer := e.namespaces["a"].informer
		e.Forget(second)
		if len(e.namespaces) != 0 {
			t.Errorf("namespaces after all claims were forgotten: got %v, want none", e.namespaces)
		}
		eventually.Eventually(t, 10*time.Second, "the watch of the namespace ends", func() error {
			if !informer.IsStopped() {
				return errors.New("the informer runs")
			}
			return nil
		})
		e.expectPods(second, "pod")
		e.delete(testPod("a", "pod"))
		e.expectRequest("the pod is deleted after the claim is needed again", second)
	})
}

func TestIsRelevant(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*corev1.Pod)
		want   bool
	}{
		"bound": {func(p *corev1.Pod) { p.Spec.NodeName = "node" }, true},
		"runs":  {func(p *corev1.Pod) { p.Status.Phase = corev1.PodRunning }, true},
		"has a new version": {func(p *corev1.Pod) {
			p.ResourceVersion, p.Annotations = "2", map[string]string{"a": "b"}
		}, false},
	} {
		before := testPod("a", "pod", "claim")
		after := before.DeepCopy()
		test.change(after)
		if got := isRelevant(before, after); got != test.want {
			t.Errorf("the pod %s: got %t, want %t", name, got, test.want)
		}
	}
}
