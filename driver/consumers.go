// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
)

// podConsumers returns the pods for which a claim is reserved.
func podConsumers(claim *resourceapi.ResourceClaim) (pods []attach.Pod) {
	for _, c := range claim.Status.ReservedFor {
		if claimref.IsPodEntry(c) {
			pods = append(pods, attach.Pod{UID: string(c.UID), Namespace: claim.Namespace, Name: c.Name})
		}
	}
	return pods
}

// observePods asks the API server about the pods of a claim. It forgets the
// failures of pods that no longer use the claim, because no event announces the
// end of a pod that was never attached. It notes the pods whose containers do
// not reference the claim.
func (d *Driver) observePods(ctx context.Context, recorded *record.Claim, shares []share, states []shareState) error {
	claim, err := d.currentClaim(ctx, recorded)
	if claim == nil || err != nil {
		return err
	}
	pods, err := d.reservedPods(ctx, claim)
	if err != nil {
		return err
	}
	using, err := d.podsUsing(ctx, claim, shares)
	if err != nil {
		return err
	}
	d.failures.keepOnly(shares, using)
	for i := range states {
		if states[i].attacher != nil && len(states[i].attachments) == 0 {
			states[i].unreferenced = unreferencedPods(pods, claim.Name, states[i].Request)
			if !d.hasJustDetached(claim.UID) && states[i].attacher.Attaches(states[i].Share) {
				states[i].hookNotRun = podsWithoutHook(pods, claim.Name, states[i].Request, d.options.NodeName)
			}
		}
	}
	return nil
}

// reservedPods gets the pods for which a claim is reserved and that exist.
func (d *Driver) reservedPods(ctx context.Context, claim *resourceapi.ResourceClaim) (pods []*corev1.Pod, err error) {
	for _, consumer := range podConsumers(claim) {
		pod, err := d.getPod(ctx, consumer)
		if apierrors.IsForbidden(err) {
			// The rest of the status does not depend on this.
			d.degraded(
				ctx,
				params.DegradedPodsNotReadable,
				"the plugin does not detect pods whose containers do not reference their claim: may the plugin get pods?",
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

// podsUsing returns the UIDs of the pods that use a claim. If the claim is
// reserved for an object that represents pods, such as a PodGroup, they include
// the pods to which attaching failed and that still exist.
func (d *Driver) podsUsing(
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
	for _, failed := range d.failures.pods(shares) {
		pod, err := d.getPod(ctx, failed)
		if err != nil && !apierrors.IsForbidden(err) {
			return nil, err
		}
		if pod != nil || err != nil { // without the right to get pods, the pod counts as existing
			using[failed.UID] = true
		}
	}
	return using, nil
}

// getPod gets a pod, or nil if it is gone.
func (d *Driver) getPod(ctx context.Context, ref attach.Pod) (*corev1.Pod, error) {
	pod, err := d.options.Client.CoreV1().Pods(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && string(pod.UID) != ref.UID {
		return nil, nil
	}
	return pod, err
}

// unreferencedPods returns the pods of which no container references the request.
func unreferencedPods(pods []*corev1.Pod, claim, request string) (unreferenced []attach.Pod) {
	for _, pod := range pods {
		if !referencesRequest(pod, claim, request) {
			unreferenced = append(unreferenced, attach.Pod{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name})
		}
	}
	return unreferenced
}

// referencesRequest reports whether a container of the pod references a request of the
// claim, or the whole claim, in resources.claims. It returns true if the pod
// itself does not name the claim, as with extended resources and PodGroups:
// then there is nothing to compare with.
func referencesRequest(pod *corev1.Pod, claim, request string) bool {
	return len(claimref.Entries(pod, claim)) == 0 || len(containersReferencing(pod, claim, request)) > 0
}

// containersReferencing returns the names of the containers that reference a request of the
// claim, or the whole claim.
func containersReferencing(pod *corev1.Pod, claim, request string) (names []string) {
	entries := claimref.Entries(pod, claim)
	request, _, _ = strings.Cut(request, "/") // containers reference a request without its subrequest
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for _, c := range containers {
			references := func(r corev1.ResourceClaim) bool {
				return slices.Contains(entries, r.Name) && (r.Request == "" || r.Request == request)
			}
			if slices.ContainsFunc(c.Resources.Claims, references) {
				names = append(names, c.Name)
			}
		}
	}
	return names
}

// podWithoutHook is a pod whose runtime does not run the hook.
type podWithoutHook struct {
	attach.Pod
	container    string
	runtimeClass string // "" is the runtime's default
}

// podsWithoutHook returns the pods of the node in which a container that references the
// request runs. The caller knows that the share is attached to no pod: with the hook,
// no such container would have started.
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
			p := attach.Pod{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name}
			without = append(without, podWithoutHook{p, statuses[running].Name, ptr.Deref(pod.Spec.RuntimeClassName, "")})
		}
	}
	return without
}

// detachLag is the time for which the status of a pod may show containers of a
// sandbox that has ended.
const detachLag = resyncInterval

// hasJustDetached reports whether a share of the claim was detached within detachLag.
func (d *Driver) hasJustDetached(claim types.UID) bool {
	at, ok := d.detached.Load(claim)
	if !ok {
		return false
	}
	if last, ok := at.(time.Time); ok && time.Since(last) < detachLag {
		return true
	}
	d.detached.Delete(claim)
	return false
}
