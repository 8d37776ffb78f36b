// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// groupPods returns a template for pods of the PodGroup "train".
func groupPods() corev1.PodTemplateSpec {
	pod := newPod("", "train", 0)
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: pod.Annotations}, Spec: pod.Spec}
	template.Spec.RestartPolicy = corev1.RestartPolicyNever
	return template
}

// groupJob returns a Job with two pods of the PodGroup "train".
func groupJob(ns string) *batchv1.Job {
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "train"},
		Spec:       batchv1.JobSpec{Parallelism: ptr.To[int32](2), Completions: ptr.To[int32](2), Template: groupPods()},
	}
}

// createReleasedGroup creates the PodGroup "train" with a value of the release annotation. Its workload is the Job
// "train".
func (e *testEnv) createReleasedGroup(t *testing.T, ns, release string) *scheduling.PodGroup {
	t.Helper()
	pg := e.mustCreateGroup(t, ns, "train")
	annotations := map[string]string{scheduling.ReleaseAnnotation: release}
	if strings.Contains(release, "On") {
		annotations[scheduling.WorkloadAnnotation] = "batch/jobs/train"
	}
	e.annotate(t, pg, annotations)
	return pg
}

// annotate sets annotations of an object.
func (e *testEnv) annotate(t *testing.T, o client.Object, annotations map[string]string) {
	t.Helper()
	if err := e.tryAnnotate(t, o, annotations); err != nil {
		t.Fatalf("annotate %T %s: %v", o, o.GetName(), err)
	}
}

func (e *testEnv) tryAnnotate(t *testing.T, o client.Object, annotations map[string]string) error {
	t.Helper()
	before, ok := o.DeepCopyObject().(client.Object)
	if !ok {
		t.Fatalf("%T is not an object", o)
	}
	o.SetAnnotations(annotations)
	return e.client.Patch(t.Context(), o, client.MergeFrom(before))
}

// awaitReserved waits until the condition Reserved of a PodGroup has the reason.
func (e *testEnv) awaitReserved(t *testing.T, pg *scheduling.PodGroup, reason string) {
	t.Helper()
	eventually.Eventually(t, timeout, "the condition Reserved has the reason "+reason, func() error {
		if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(pg), pg); err != nil {
			return err
		}
		c := meta.FindStatusCondition(pg.Status.Conditions, scheduling.ConditionReserved)
		if c == nil || c.Reason != reason {
			return fmt.Errorf("got %+v", c)
		}
		return nil
	})
}

// allocated returns a check that a namespace has one claim, and that the claim is
// allocated if want is true, and not otherwise.
func allocated(want bool) func([]resourceapi.ResourceClaim) error {
	return func(claims []resourceapi.ResourceClaim) error {
		if len(claims) != 1 {
			return fmt.Errorf("got %d claims, want one", len(claims))
		}
		if got := claims[0].Status.Allocation != nil; got != want {
			return fmt.Errorf("claim %s is allocated: %t, and reserved for %v",
				claims[0].Name, got, claims[0].Status.ReservedFor)
		}
		return nil
	}
}

func (e *testEnv) setSuspended(t *testing.T, job *batchv1.Job, suspended bool) {
	t.Helper()
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"suspend":%t}}`, suspended))
	if err := e.client.Patch(t.Context(), job, patch); err != nil {
		t.Fatal(err)
	}
}

// A PodGroup releases its claim when its Job is suspended, holds it again when the Job is resumed, and releases it when
// the Job is complete, although the terminal pods exist.
func TestRelease_podGroupOfJob(t *testing.T) {
	e := requireTestEnv(t)
	if e.native {
		t.Skip("refused in native mode: see TestRelease_deniedAtAdmission")
	}
	e.startController(t, nil)
	ns := e.createNamespace(t, "release")
	pg := e.createReleasedGroup(t, ns, "OnCompletion,OnSuspension")
	job := groupJob(ns)
	e.create(t, job)
	for range 2 {
		e.awaitRunning(t, ns, 2)
		e.awaitReserved(t, pg, scheduling.ReasonHeld)
		e.setSuspended(t, job, true)
		e.awaitReserved(t, pg, scheduling.ReasonReleased)
		e.awaitClaims(t, ns, "the claim of the suspended Job is not allocated", allocated(false))
		e.setSuspended(t, job, false)
	}
	e.awaitRunning(t, ns, 2)
	e.awaitReserved(t, pg, scheduling.ReasonHeld)
	e.endPods(t, job, corev1.PodSucceeded)
	e.awaitReserved(t, pg, scheduling.ReasonReleased)
	e.awaitClaims(t, ns, "the claim of the complete Job is not allocated", allocated(false))
	e.delete(t, job, pg)
	e.awaitEmpty(t, ns)
}

// Without the annotation, a PodGroup without pods keeps its claim (KEP-5729).
func TestRelease_podGroupKeepsClaim(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "keep")
	pg := e.mustCreateGroup(t, ns, "train")
	e.createRunningPods(t, ns, "train", 0, 2)
	e.awaitReserved(t, pg, scheduling.ReasonHeld)
	e.deletePods(t, ns)
	e.awaitNoPods(t, ns)
	e.awaitClaims(t, ns, "the claim is allocated", allocated(true))
	e.awaitReserved(t, pg, scheduling.ReasonHeld)
	e.delete(t, pg)
	e.awaitEmpty(t, ns)
}

func (e *testEnv) awaitNoPods(t *testing.T, ns string) {
	t.Helper()
	eventually.Eventually(t, timeout, "the pods are deleted", func() error {
		_, pods, err := e.countPods(t.Context(), ns)
		if err == nil && pods > 0 {
			err = fmt.Errorf("%d pods exist", pods)
		}
		return err
	})
}

// The claims of a PodGroup, and of an object that holds one, are released after a time without pods.
func TestRelease_afterTimeWithoutPods(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	if !e.native {
		ns := e.createNamespace(t, "unused")
		pg := e.createReleasedGroup(t, ns, "Unused=2s")
		e.createRunningPods(t, ns, "train", 0, 1)
		e.awaitReserved(t, pg, scheduling.ReasonHeld)
		e.deletePods(t, ns)
		e.awaitReserved(t, pg, scheduling.ReasonReleased)
		e.awaitClaims(t, ns, "the unused claim is not allocated", allocated(false))
		e.createRunningPods(t, ns, "train", 1, 2)
		e.awaitReserved(t, pg, scheduling.ReasonHeld)
	}
	ns := e.createNamespace(t, "unused-held")
	e.createJob(t, ns)
	claim := fabricClaim(ns, "team")
	claim.Annotations = map[string]string{
		scheduling.ReservedForAnnotation: "batch/jobs/train", scheduling.ReleaseAnnotation: "Unused=2s",
	}
	pod := newPodWithClaim(ns, "user", 0, claim.Name)
	e.create(t, claim, pod)
	e.awaitHeldState(t, claim, "True HolderFound: allocated as long as batch/jobs/train exists; "+
		"released earlier if no pod uses the claim and 2s have passed", true)
	e.deletePods(t, ns)
	e.awaitClaims(t, ns, "the unused claim is not allocated", allocated(false))
}

// By default, an object without replicas releases the claim that it holds; with OnDeletion, it keeps it.
func TestRelease_heldByStatefulSet(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	for release, keeps := range map[string]bool{"": false, scheduling.ReleaseOnDeletion: true} {
		ns := e.createNamespace(t, "replicas")
		claim := fabricClaim(ns, "team")
		claim.Annotations = map[string]string{scheduling.ReservedForAnnotation: "apps/statefulsets/web"}
		if release != "" {
			claim.Annotations[scheduling.ReleaseAnnotation] = release
		}
		set := statefulSet(ns, 1)
		set.Spec.Template.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "fabric", ResourceClaimName: &claim.Name}}
		e.create(t, claim, set)
		e.awaitRunning(t, ns, 1)
		eventually.Eventually(t, timeout, "the StatefulSet holds the claim", func() error {
			_, reserved, err := e.heldState(t.Context(), claim)
			if err == nil && !reserved {
				err = errors.New("it has no entry")
			}
			return err
		})
		e.scale(t, set, 0)
		e.awaitNoPods(t, ns)
		e.awaitClaims(t, ns, fmt.Sprintf("the claim stays allocated: %t", keeps), allocated(keeps))
		e.scale(t, set, 1)
		e.awaitRunning(t, ns, 1)
		e.awaitClaims(t, ns, "the claim is allocated for the next pod", allocated(true))
	}
}

// statefulSet returns the StatefulSet "web".
func statefulSet(ns string, replicas int32) *appsv1.StatefulSet {
	labels := map[string]string{"app": "web"}
	return &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "web"},
		Spec: appsv1.StatefulSetSpec{
			Replicas: &replicas, ServiceName: "web", Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					TerminationGracePeriodSeconds: ptr.To[int64](1),
					Containers:                    []corev1.Container{{Name: "work", Image: "none"}},
				},
			},
		},
	}
}

func (e *testEnv) scale(t *testing.T, o client.Object, replicas int) {
	t.Helper()
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas))
	if err := e.client.Patch(t.Context(), o, patch); err != nil {
		t.Fatalf("scale %T %s to %d: %v", o, o.GetName(), replicas, err)
	}
}

func TestRelease_deniedAtAdmission(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "denied")
	pg := e.mustCreateGroup(t, ns, "train")
	claim := fabricClaim(ns, "team")
	e.create(t, claim)
	for _, tc := range []struct {
		object      client.Object
		annotations map[string]string
		want        string
	}{
		{pg, map[string]string{scheduling.ReleaseAnnotation: "Sometimes"}, `"Sometimes" is unknown`},
		{pg, map[string]string{scheduling.WorkloadAnnotation: "batch/jobs/train"}, "has an effect only with OnCompletion"},
		{claim, map[string]string{scheduling.ReleaseAnnotation: "Unused=1h"},
			"has an effect only on a claim that an object holds"},
	} {
		err := e.tryAnnotate(t, tc.object, tc.annotations)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("annotate with %v: got error %v, want %q", tc.annotations, err, tc.want)
		}
	}
	err := e.tryAnnotate(t, pg, map[string]string{scheduling.ReleaseAnnotation: "Unused=1h"})
	const want = "in native mode, Kubernetes reserves the claims for its own PodGroup"
	if denied := err != nil && strings.Contains(err.Error(), want); denied != e.native || err != nil && !denied {
		t.Errorf("release after a time, native mode %t: got error %v", e.native, err)
	}
}
