// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
)

// podConsumers returns the pods that a claim is reserved for.
func podConsumers(claim *resourceapi.ResourceClaim) (pods []attach.Pod) {
	for _, c := range claim.Status.ReservedFor {
		if claimref.IsPodEntry(c) {
			pods = append(pods, attach.Pod{UID: string(c.UID), Namespace: claim.Namespace, Name: c.Name})
		}
	}
	return pods
}

func podOf(pod *corev1.Pod) attach.Pod {
	return attach.Pod{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name}
}

// observePods completes the states of a claim's shares with information about pods that only the API server has. It
// also forgets the failures of pods that no longer use the claim: no kernel event announces the end of a pod without
// attachments.
func (o *observer) observePods(ctx context.Context, claim *record.Claim, shares []share, states []shareState) error {
	pods, err := o.consumersOf(ctx, claim, shares)
	if pods == nil || err != nil {
		return err
	}
	o.failures.keepOnly(shares, pods.using)
	o.detachments.forgetOld(claim.UID)
	for i := range states {
		o.addUnattached(&states[i], claim, pods.reserved)
	}
	return nil
}

// consumers are the pods of a claim according to the API server.
type consumers struct {
	// reserved are the existing pods that the claim is reserved for.
	reserved []*corev1.Pod
	// using are the UIDs of the pods that use the claim; see podsUsing.
	using map[string]bool
}

// consumersOf asks the API server for the pods of a claim. It returns nil if the claim is
// gone or deallocated.
func (o *observer) consumersOf(ctx context.Context, recorded *record.Claim, shares []share) (*consumers, error) {
	claim, err := o.apiClaims.current(ctx, recorded)
	if claim == nil || err != nil {
		return nil, err
	}
	reserved, err := o.reservedPods(ctx, claim)
	if err != nil {
		return nil, err
	}
	using, err := o.podsUsing(ctx, claim, shares)
	if err != nil {
		return nil, err
	}
	return &consumers{reserved, using}, nil
}

// addUnattached adds, to the state of a share that is not attached to any pod, the pods that will
// never get it: their containers do not reference the claim, or their runtime does not run the
// hook.
func (o *observer) addUnattached(state *shareState, claim *record.Claim, pods []*corev1.Pod) {
	if state.attacher == nil || len(state.attachments) > 0 || state.pending {
		return
	}
	state.unreferenced = unreferencedPods(pods, claim.Name, state.Request)
	if !o.detachments.isRecent(claim.UID) && state.attacher.Attaches(state.Share) {
		state.hookNotRun = podsWithoutHook(pods, claim.Name, state.Request, o.nodeName)
	}
}

// reservedPods gets the existing pods that a claim is reserved for.
func (o *observer) reservedPods(ctx context.Context, claim *resourceapi.ResourceClaim) (pods []*corev1.Pod, err error) {
	for _, consumer := range podConsumers(claim) {
		pod, err := o.getPod(ctx, consumer)
		if apierrors.IsForbidden(err) {
			// The rest of the status does not depend on the pods.
			o.degradations.report(
				ctx,
				v1alpha1.DegradedPodsNotReadable,
				"the plugin does not detect pods whose containers do not reference their claim: does its role permit getting pods?",
				err,
			)
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		if pod != nil {
			pods = append(pods, pod)
		}
	}
	return pods, nil
}

// podsUsing returns the UIDs of the pods that use a claim. If the claim is reserved for an object that represents
// pods, such as a PodGroup, they include existing pods with a failed attachment.
func (o *observer) podsUsing(
	ctx context.Context,
	claim *resourceapi.ResourceClaim,
	shares []share,
) (map[string]bool, error) {
	using := map[string]bool{}
	represented := false
	for _, c := range claim.Status.ReservedFor {
		if claimref.IsPodEntry(c) {
			using[string(c.UID)] = true
		} else {
			represented = true
		}
	}
	if !represented {
		return using, nil
	}
	for _, failed := range o.failures.pods(shares) {
		pod, err := o.getPod(ctx, failed)
		if err != nil && !apierrors.IsForbidden(err) {
			return nil, err
		}
		if pod != nil || err != nil { // without the right to get pods, the pod counts as existing
			using[failed.UID] = true
		}
	}
	return using, nil
}

// getPod gets a pod, or nil if it no longer exists.
func (o *observer) getPod(ctx context.Context, ref attach.Pod) (*corev1.Pod, error) {
	pod, err := o.client.CoreV1().Pods(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && string(pod.UID) != ref.UID {
		return nil, nil
	}
	return pod, err
}

// unreferencedPods returns the pods without a container that references the request.
func unreferencedPods(pods []*corev1.Pod, claim, request string) (unreferenced []attach.Pod) {
	for _, pod := range pods {
		if !referencesRequest(pod, claim, request) {
			unreferenced = append(unreferenced, podOf(pod))
		}
	}
	return unreferenced
}

// referencesRequest reports whether a container of the pod references a request of the claim, or the whole claim, in
// resources.claims. It returns true if the pod itself does not name the claim, as with extended resources and
// PodGroups, because there is nothing to compare with.
func referencesRequest(pod *corev1.Pod, claim, request string) bool {
	return len(claimref.Entries(pod, claim)) == 0 || len(containersReferencing(pod, claim, request)) > 0
}

// containersReferencing returns the names of the containers that reference a request of the
// claim, or the whole claim.
func containersReferencing(pod *corev1.Pod, claim, request string) (names []string) {
	entries := claimref.Entries(pod, claim)
	request, _, _ = strings.Cut(request, "/") // containers reference a request without its subrequest
	extended := containersWithExtendedResource(pod, claim, request)
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for _, c := range containers {
			references := func(r corev1.ResourceClaim) bool {
				return slices.Contains(entries, r.Name) && (r.Request == "" || r.Request == request)
			}
			if slices.ContainsFunc(c.Resources.Claims, references) || slices.Contains(extended, c.Name) {
				names = append(names, c.Name)
			}
		}
	}
	return names
}

// containersWithExtendedResource returns the names of the containers with extended resources that Kubernetes
// generated a claim for (KEP-5004), if they get the claim's request.
func containersWithExtendedResource(pod *corev1.Pod, claim, request string) (names []string) {
	status := pod.Status.ExtendedResourceClaimStatus
	if status == nil || status.ResourceClaimName != claim {
		return nil
	}
	for _, m := range status.RequestMappings {
		if m.RequestName == request {
			names = append(names, m.ContainerName)
		}
	}
	return names
}

// podWithoutHook is a pod with a runtime that does not run the hook.
type podWithoutHook struct {
	attach.Pod
	container    string
	runtimeClass string // "" is the runtime's default
}

// podsWithoutHook returns the node's pods with a running container that references the request. The caller knows that
// the share is not attached to any pod: with the hook, no such container would have started.
func podsWithoutHook(pods []*corev1.Pod, claim, request, node string) (without []podWithoutHook) {
	for _, pod := range pods {
		if pod.Spec.NodeName != node || pod.DeletionTimestamp != nil {
			continue
		}
		referencing := containersReferencing(pod, claim, request)
		statuses := slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses)
		running := slices.IndexFunc(statuses, func(s corev1.ContainerStatus) bool {
			return s.State.Running != nil && slices.Contains(referencing, s.Name)
		})
		if running >= 0 {
			class := ptr.Deref(pod.Spec.RuntimeClassName, "")
			without = append(without, podWithoutHook{podOf(pod), statuses[running].Name, class})
		}
	}
	return without
}
