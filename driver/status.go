// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// deviceStatuses returns the entries of status.devices for a claim's shares.
func deviceStatuses(driver string, states []shareState) ([]resourceapi.AllocatedDeviceStatus, error) {
	entries := make([]resourceapi.AllocatedDeviceStatus, 0, len(states))
	for _, s := range states {
		entry, err := deviceStatus(driver, s)
		if err != nil {
			return nil, err
		}
		entries = append(entries, entry)
	}
	return entries, nil
}

// deviceStatus builds the entry of status.devices for one share.
func deviceStatus(driver string, s shareState) (resourceapi.AllocatedDeviceStatus, error) {
	entry := resourceapi.AllocatedDeviceStatus{Driver: driver, Pool: s.Pool, Device: s.Device}
	if s.ShareID != "" {
		entry.ShareID = ptr.To(string(s.ShareID))
	}
	if s.conditions != nil {
		entry.Conditions = s.conditions
		return entry, nil
	}
	entry.Conditions = append([]metav1.Condition{readyCondition(s)}, worstConditions(s.attachments)...)
	if len(s.attachments) == 0 {
		return entry, nil
	}
	if len(s.attachments) == 1 {
		entry.NetworkData = s.attachments[0].NetworkData
	}
	raw, err := json.Marshal(s.attacher.StatusData(s.attachments, len(s.failed)))
	entry.Data = &runtime.RawExtension{Raw: raw}
	return entry, err
}

// readyCondition builds the condition Ready. The first problem that a user can
// act on wins.
func readyCondition(s shareState) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse}
	notReady := slices.IndexFunc(s.attachments, func(a PodState) bool { return !a.Ready })
	switch {
	case len(s.failed) > 0:
		c.Reason, c.Message = v1alpha1.ReasonAttachFailed, strings.Join(slices.Sorted(slices.Values(s.failed)), "; ")
	case notReady >= 0:
		a := s.attachments[notReady]
		c.Reason, c.Message = a.Reason, fmt.Sprintf("pod %s/%s: %s", a.Pod.Namespace, a.Pod.Name, a.Message)
	case len(s.hookNotRun) > 0:
		c.Reason, c.Message = v1alpha1.ReasonHookNotRun, hookNotRunMessage(s.hookNotRun[0])
	case len(s.unreferenced) > 0:
		pod := s.unreferenced[0]
		c.Reason = v1alpha1.ReasonNotReferenced
		c.Message = fmt.Sprintf(
			"pod %s/%s uses the claim, but no container references it in resources.claims, so the plugin does not attach the "+
				"share: reference the claim in a container and recreate the pod",
			pod.Namespace,
			pod.Name,
		)
	case len(s.attachments) == 0:
		c.Reason = v1alpha1.ReasonPrepared
		c.Message = "no container that references the claim has started on the node yet"
	default:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonAttached
		c.Message = fmt.Sprintf("attached to %d pod(s)", len(s.attachments))
	}
	c.Message = claimstatus.Truncate(c.Message, claimstatus.MaxMessageLength)
	return c
}

func hookNotRunMessage(p podWithoutHook) string {
	runtime := "the default runtime"
	if p.runtimeClass != "" {
		runtime = fmt.Sprintf("the runtime of RuntimeClass %q", p.runtimeClass)
	}
	return fmt.Sprintf("container %s of pod %s/%s runs without its share: %s did not run the hook of its CDI spec: "+
		"use a runtimeClassName whose handler is runc or crun, and enable CDI in the runtime (containerd 1.7: enable_cdi), "+
		"then recreate the pod", p.container, p.Namespace, p.Name, runtime)
}

// worstConditions combines the kind's conditions for all attachments: for each type, it returns the first that is not
// True, or else the first.
func worstConditions(attachments []PodState) (worst []metav1.Condition) {
	for _, a := range attachments {
		for _, c := range a.Conditions {
			c.Message = claimstatus.Truncate(c.Message, claimstatus.MaxMessageLength)
			known := meta.FindStatusCondition(worst, c.Type)
			switch {
			case known == nil:
				worst = append(worst, c)
			case known.Status == metav1.ConditionTrue && c.Status != metav1.ConditionTrue:
				*known = c
			}
		}
	}
	return worst
}
