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

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
)

// podConsumers returns the pods for which a claim is reserved.
func podConsumers(claim *resourceapi.ResourceClaim) (pods []attach.Pod) {
	for _, c := range claim.Status.ReservedFor {
		if isPod(c) {
			pods = append(pods, attach.Pod{UID: string(c.UID), Namespace: claim.Namespace, Name: c.Name})
		}
	}
	return pods
}

func isPod(c resourceapi.ResourceClaimConsumerReference) bool {
	return c.APIGroup == "" && c.Resource == "pods"
}

// observePods asks the API server about the pods of a claim. It forgets the
// failures of pods that no longer use the claim, because no event announces the
// end of a pod that was never attached. It notes the pods whose containers do
// not list the claim.
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
				"PodsNotReadable",
				"the plugin does not detect pods whose containers do not list their claim: may the plugin get pods?",
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
		if isPod(c) {
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
		if err != nil {
			return nil, err
		}
		if pod != nil {
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

// unreferencedPods returns the pods of which no container lists the request.
func unreferencedPods(pods []*corev1.Pod, claim, request string) (unreferenced []attach.Pod) {
	for _, pod := range pods {
		if !listsRequest(pod, claim, request) {
			unreferenced = append(unreferenced, attach.Pod{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name})
		}
	}
	return unreferenced
}

// listsRequest reports whether a container of the pod lists a request of the
// claim, or the whole claim, in resources.claims. It returns true if the pod
// itself does not name the claim, as with extended resources and PodGroups:
// then there is nothing to compare with.
func listsRequest(pod *corev1.Pod, claim, request string) bool {
	entries := claimref.Entries(pod, claim)
	if len(entries) == 0 {
		return true
	}
	request, _, _ = strings.Cut(request, "/") // containers list a request without its subrequest
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for _, c := range containers {
			for _, r := range c.Resources.Claims {
				if slices.Contains(entries, r.Name) && (r.Request == "" || r.Request == request) {
					return true
				}
			}
		}
	}
	return false
}
