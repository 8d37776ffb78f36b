// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/conformance/internal/probe"
)

// Names of the containers of a pod. They run one after the other, except second and main.
const (
	// firstContainer references all claims of the pod and reports what it has.
	firstContainer = "first"
	// secondContainer references no claim and reports what it has.
	secondContainer = "second"
	mainContainer   = "main"
)

// podsPerCase is the number of pods that a case has time for.
const podsPerCase = 8

// restartLimit is how long the kubelet may take to restart a driver that was killed.
const restartLimit = 2 * time.Minute

// limit returns the time that a case may take.
func (c Config) limit(q Requirement) time.Duration {
	if q.ID == slowCase && c.caseTimeout == defaultCaseTimeout {
		return 115 * time.Second
	}
	if c.Pods.Image != "" && q.Way == Kubelet {
		return podsPerCase * c.Pods.Timeout.Duration
	}
	if c.Kubelet != "" {
		return c.caseTimeout + restartLimit
	}
	return c.caseTimeout
}

// podOptions describe a pod of a case.
type podOptions struct {
	// claims are indexes of Config.Pods.Claims, modulo their number; specs are specs of more.
	claims []int
	specs  []resourceapi.ResourceClaimSpec
	// command is the command of the main container, as arguments of dra-conformance container;
	// inspect if it is empty.
	command []string
	// hostNetwork puts the pod into the network namespace of the node.
	hostNetwork bool
	// anyNode lets the scheduler choose the node.
	anyNode bool
	// restart lets the kubelet start the pod again; it does not have a second container.
	restart bool
}

// canRunPods skips the case unless the suite may start pods.
func (s *suite) canRunPods() {
	if s.config.Pods.Image == "" {
		s.skip("needs pods of a cluster: set kubelet, pods.image, and pods.claims")
	}
}

// startPod creates a pod with its claims, and does not wait for it.
func (s *suite) startPod(ctx context.Context, o podOptions) *corev1.Pod {
	s.canRunPods()
	p := s.newPod(o)
	var specs []resourceapi.ResourceClaimSpec
	for _, index := range o.claims {
		specs = append(specs, s.config.Pods.Claims[index%len(s.config.Pods.Claims)])
	}
	for i, spec := range append(specs, o.specs...) {
		created, err := s.client.ResourceV1().ResourceClaims(p.Namespace).Create(ctx, &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(p.Name, "-", i)}, Spec: spec,
		}, metav1.CreateOptions{})
		s.must(err, "create a claim of pods")
		s.podClaims = append(s.podClaims, created)
		name := fmt.Sprint("claim-", i)
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims,
			corev1.PodResourceClaim{Name: name, ResourceClaimName: &created.Name})
		named := corev1.ResourceClaim{Name: name}
		for _, c := range []*corev1.Container{&p.Spec.InitContainers[0], &p.Spec.Containers[0]} {
			c.Resources.Claims = append(c.Resources.Claims, named)
		}
	}
	created, err := s.client.CoreV1().Pods(p.Namespace).Create(ctx, p, metav1.CreateOptions{})
	s.must(err, "create a pod")
	s.pods = append(s.pods, created)
	return created
}

func (s *suite) newPod(o podOptions) *corev1.Pod {
	container := func(name string, command ...string) corev1.Container {
		return corev1.Container{
			Name: name, Image: s.config.Pods.Image, ImagePullPolicy: corev1.PullIfNotPresent,
			Command: append([]string{"/bin/dra-conformance", "container"}, command...),
		}
	}
	if len(o.command) == 0 {
		o.command = []string{"inspect"}
	}
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.config.Namespace, Name: "conformance-" + rand.String(8)},
		Spec: corev1.PodSpec{
			InitContainers: []corev1.Container{container(firstContainer, "inspect")},
			Containers:     []corev1.Container{container(mainContainer, o.command...), container(secondContainer, "inspect")},
			RestartPolicy:  corev1.RestartPolicyNever, HostNetwork: o.hostNetwork,
			Tolerations:                   []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			AutomountServiceAccountToken:  ptr.To(false),
			EnableServiceLinks:            ptr.To(false),
			TerminationGracePeriodSeconds: ptr.To(int64(5)),
		},
	}
	if o.restart {
		p.Spec.RestartPolicy, p.Spec.Containers = corev1.RestartPolicyAlways, p.Spec.Containers[:1]
	}
	if !o.anyNode {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{
					{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{s.config.Node}},
				}}},
			},
		}}
	}
	return p
}

// view waits until a container of a pod has ended, and returns what it had.
func (s *suite) view(ctx context.Context, p *corev1.Pod, container string) (v probe.View) {
	message := s.containerEnds(ctx, p, container)
	s.must(json.Unmarshal([]byte(message), &v), "the message of container %s of pod %s: %q", container, p.Name, message)
	return v
}

// containerEnds waits until a container has ended, and returns its message. It ends the
// case if the container failed.
func (s *suite) containerEnds(ctx context.Context, p *corev1.Pod, container string) (message string) {
	s.waitForPod(ctx, p, "container "+container+" has not ended", func(now *corev1.Pod) bool {
		t := containerStatus(now, container).State.Terminated
		if t == nil {
			return false
		}
		if t.ExitCode != 0 {
			s.fatal("container %s of pod %s failed: %s %s", container, p.Name, t.Reason, t.Message)
		}
		message = t.Message
		return true
	})
	return message
}

// running waits until the main container runs.
func (s *suite) running(ctx context.Context, p *corev1.Pod) *corev1.Pod {
	return s.waitForPod(ctx, p, "container main does not run", func(now *corev1.Pod) bool {
		return containerStatus(now, mainContainer).State.Running != nil
	})
}

// waitForPod waits until a pod is as wanted, and returns it.
func (s *suite) waitForPod(
	ctx context.Context, p *corev1.Pod, problem string, wanted func(*corev1.Pod) bool,
) (now *corev1.Pod) {
	ctx, cancel := context.WithTimeout(ctx, s.config.Pods.Timeout.Duration)
	defer cancel()
	err := pollEvery(ctx, podInterval, func() (err error) {
		if now, err = s.client.CoreV1().Pods(p.Namespace).Get(ctx, p.Name, metav1.GetOptions{}); err != nil {
			return err
		}
		if !wanted(now) {
			return fmt.Errorf("%s after %s: %s", problem, s.config.Pods.Timeout, s.why(ctx, now))
		}
		return nil
	})
	s.must(err, "pod %s", p.Name)
	return now
}

// podInterval is the time between two requests for a pod.
const podInterval = 200 * time.Millisecond

// containerStatus returns the status of a container; its zero value if there is none yet.
func containerStatus(p *corev1.Pod, container string) corev1.ContainerStatus {
	for _, list := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for _, c := range list {
			if c.Name == container {
				return c
			}
		}
	}
	return corev1.ContainerStatus{}
}

// why describes why a pod does not run: conditions, waiting containers, and the last event.
func (s *suite) why(ctx context.Context, p *corev1.Pod) string {
	parts := []string{"phase " + string(p.Status.Phase)}
	for _, c := range p.Status.Conditions {
		if c.Status != corev1.ConditionTrue && c.Message != "" {
			parts = append(parts, fmt.Sprintf("%s: %s", c.Type, c.Message))
		}
	}
	for _, c := range append(p.Status.InitContainerStatuses, p.Status.ContainerStatuses...) {
		if c.State.Waiting != nil && c.State.Waiting.Message != "" {
			parts = append(parts, fmt.Sprintf("container %s: %s", c.Name, c.State.Waiting.Message))
		}
	}
	events, err := s.client.CoreV1().Events(p.Namespace).List(ctx, metav1.ListOptions{
		FieldSelector: "involvedObject.uid=" + string(p.UID) + ",type=Warning"})
	if err == nil && len(events.Items) > 0 { // the service account may not be allowed to list events
		last := events.Items[len(events.Items)-1]
		parts = append(parts, fmt.Sprintf("%s: %s", last.Reason, last.Message))
	}
	return strings.Join(parts, "; ")
}

// claimsOf returns the current claims of a pod.
func (s *suite) claimsOf(ctx context.Context, p *corev1.Pod) (all []*resourceapi.ResourceClaim) {
	for _, c := range p.Spec.ResourceClaims {
		now, err := s.client.ResourceV1().ResourceClaims(p.Namespace).Get(ctx, *c.ResourceClaimName, metav1.GetOptions{})
		s.must(err, "get claim %s of pod %s", *c.ResourceClaimName, p.Name)
		all = append(all, now)
	}
	return all
}

// endPods deletes the pods and the claims of the case, and ends the case on an error.
func (s *suite) endPods(ctx context.Context) {
	s.must(s.deletePods(ctx, metav1.DeleteOptions{}), "delete the pods of the case")
}

// deletePods deletes the pods of a case and then their claims, and waits until they are gone.
func (s *suite) deletePods(ctx context.Context, options metav1.DeleteOptions) error {
	ctx, cancel := context.WithTimeout(ctx, s.config.Pods.Timeout.Duration)
	defer cancel()
	pods, claims := s.client.CoreV1().Pods(s.config.Namespace), s.client.ResourceV1().ResourceClaims(s.config.Namespace)
	var errs []error
	for _, p := range s.pods {
		errs = append(errs, deleted(ctx, "pod "+p.Name, func() error {
			return pods.Delete(ctx, p.Name, options)
		}, func() error {
			_, err := pods.Get(ctx, p.Name, metav1.GetOptions{})
			return err
		}))
	}
	for _, c := range s.podClaims {
		errs = append(errs, deleted(ctx, "claim "+c.Name, func() error {
			return claims.Delete(ctx, c.Name, metav1.DeleteOptions{})
		}, func() error {
			_, err := claims.Get(ctx, c.Name, metav1.GetOptions{})
			return err
		}))
	}
	s.pods, s.podClaims = nil, nil
	return errors.Join(errs...)
}

// deleted deletes an object and waits until it no longer exists.
func deleted(ctx context.Context, what string, remove, get func() error) error {
	if err := remove(); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete %s: %w", what, err)
	}
	return pollEvery(ctx, podInterval, func() error {
		err := get()
		if apierrors.IsNotFound(err) {
			return nil
		}
		return cmp.Or(err, fmt.Errorf("%s still exists", what))
	})
}
