// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

// Kubernetes' scheduler does not schedule the pods of a PodGroup if they differ in one of these fields.
func TestPods_requiresSameSchedulingInNativePodGroup(t *testing.T) {
	const (
		early = "early" // does not have a native PodGroup yet
		prior = "prior" // has one of priority 1000
	)
	member := func(name string, change func(*corev1.Pod)) *corev1.Pod {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: name, CreationTimestamp: metav1.NewTime(time.Unix(1000, 0)),
		}}
		pod.Spec = corev1.PodSpec{
			SchedulerName: "default-scheduler", PriorityClassName: "high", Priority: ptr.To[int32](1000),
		}
		if change != nil {
			change(pod)
		}
		return pod
	}
	terminal := member("terminal", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })
	terminating := member("terminating", func(p *corev1.Pod) {
		p.DeletionTimestamp, p.Finalizers = ptr.To(metav1.Now()), []string{"example.com/keep"}
	})
	ofEarlier := member("of-earlier", func(p *corev1.Pod) { p.Labels = map[string]string{scheduling.GroupUIDLabel: "0"} })
	low := member("low", func(p *corev1.Pod) { p.Spec.PriorityClassName, p.Spec.Priority = "", nil })
	gang := func(p *corev1.Pod) { p.Spec.SchedulerName = "gang" }
	bePolite := func(p *corev1.Pod) {
		p.Spec.PriorityClassName, p.Spec.PreemptionPolicy = "polite", ptr.To(corev1.PreemptNever)
	}
	for _, tc := range []struct {
		name, group string
		pod         func(*corev1.Pod)
		members     []*corev1.Pod
		want        string
	}{
		{"the first pod", early, gang, nil, ""},
		{"the same", early, nil, []*corev1.Pod{member("m", nil)}, ""},
		{"another priority", early, func(p *corev1.Pod) {
			p.Spec.PriorityClassName, p.Spec.Priority = "low", ptr.To[int32](10)
		}, []*corev1.Pod{member("m", nil)},
			`spec.priorityClassName: "low" has priority 10, but the pods of PodGroup "early" have priority 1000, ` +
				`from the class "high"`},
		{"another scheduler", early, gang, []*corev1.Pod{member("m", nil)},
			`spec.schedulerName: "gang" differs from "default-scheduler", that of the pods of PodGroup "early"`},
		{"another scheduler, with a native PodGroup", prior, gang, []*corev1.Pod{member("m", nil)},
			`spec.schedulerName: "gang" differs from "default-scheduler"`},
		{"another policy", early, bePolite, []*corev1.Pod{member("m", nil)},
			`spec.preemptionPolicy: "Never", from the priority class "polite", differs from "PreemptLowerPriority", ` +
				`from the class "high" of the pods of PodGroup "early"`},
		{"the default policy", early, func(p *corev1.Pod) {
			p.Spec.PreemptionPolicy = ptr.To(corev1.PreemptLowerPriority)
		}, []*corev1.Pod{member("m", nil)}, ""},
		{"the default policy, and pods that do not preempt", prior, nil, []*corev1.Pod{member("m", bePolite)},
			`spec.preemptionPolicy: "PreemptLowerPriority"`},
		{"pods that have ended, are being deleted, or belong to an earlier PodGroup", early,
			gang, []*corev1.Pod{terminal, terminating, ofEarlier}, ""},
		{"the priority of the native PodGroup counts", prior, nil, []*corev1.Pod{low}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pods := newPods(t, mode.Native)
			c, ok := pods.Client.(client.Client)
			if !ok {
				t.Fatalf("%T cannot write", pods.Client)
			}
			uid := map[string]string{early: "3", prior: "4"}[tc.group]
			for _, m := range tc.members {
				m = m.DeepCopy()
				if m.Labels == nil {
					m.Labels = map[string]string{scheduling.GroupUIDLabel: uid}
				}
				if err := c.Create(t.Context(), m); err != nil {
					t.Fatal(err)
				}
				if m.Name == terminating.Name {
					if err := c.Delete(t.Context(), m); err != nil {
						t.Fatal(err)
					}
				}
			}
			pod := member("new", tc.pod)
			pod.Annotations = map[string]string{scheduling.GroupAnnotation: tc.group}
			raw, err := json.Marshal(pod)
			if err != nil {
				t.Fatal(err)
			}
			r := pods.Handle(t.Context(), review(t, "", string(raw)))
			message := ""
			if r.Result != nil {
				message = r.Result.Message
			}
			if r.Allowed != (tc.want == "") || !strings.Contains(message, tc.want) {
				t.Errorf("got allowed %t, %q, want %q", r.Allowed, message, tc.want)
			}
		})
	}
}
