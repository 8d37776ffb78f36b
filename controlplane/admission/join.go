// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/podgroups"
)

// joiner adds a pod to a PodGroup.
type joiner struct {
	group *scheduling.PodGroup
	// request is the UID of the admission request that creates the pod.
	request string
	native  bool
	// keepField keeps the pod in the PodGroup of Kubernetes that it names by the field.
	keepField bool
	// assignShard chooses one of the claims of an entry, or returns notSharded.
	assignShard func(entry string) (int, error)
}

// join replaces the pod's references to templates by the PodGroup's claims, and
// returns warnings for the user.
func (j *joiner) join(pod *corev1.Pod) (warnings []string, err error) {
	shared, sharded := 0, false
	for i := range pod.Spec.ResourceClaims {
		c := &pod.Spec.ResourceClaims[i]
		entry, mismatch := j.matchEntry(c)
		if mismatch != "" {
			warnings = append(warnings, fmt.Sprintf("spec.resourceClaims[%d] %q is not shared with PodGroup %q: %s",
				i, c.Name, j.group.Name, mismatch))
		}
		if entry == nil {
			continue
		}
		shared++
		if entry.ResourceClaimName != nil || j.hasJoined(pod, c) {
			continue
		}
		shard, err := j.assignShard(entry.Name)
		if err != nil {
			return warnings, err
		}
		if shard == notSharded {
			shard = 0
		} else {
			sharded = true
		}
		c.ResourceClaimTemplateName = nil
		c.ResourceClaimName = ptr.To(claims.Name(podgroups.Owner(j.group), entry.Name, shard))
	}
	if shared == 0 && len(warnings) == 0 {
		warnings = append(warnings, fmt.Sprintf("the pod shares no claim with PodGroup %q, which has %s: "+
			"repeat an entry of the PodGroup in spec.resourceClaims",
			j.group.Name, describeEntries(j.group.Spec.ResourceClaims)))
	}
	j.markMember(pod, sharded)
	return warnings, nil
}

// hasJoined reports whether an earlier call replaced the claim. The API server
// calls the webhook again if another webhook changes the pod afterwards.
func (j *joiner) hasJoined(pod *corev1.Pod, c *corev1.PodResourceClaim) bool {
	return c.ResourceClaimName != nil && pod.Labels[scheduling.GroupUIDLabel] == string(j.group.UID)
}

// markMember records the PodGroup in the pod, in fields that every cluster stores. A pod with a claim that is one of
// several shards gets the gate, unless it is also in a PodGroup of Kubernetes: such pods are scheduled together.
func (j *joiner) markMember(pod *corev1.Pod, sharded bool) {
	pod.Labels, pod.Annotations = notNil(pod.Labels), notNil(pod.Annotations)
	pod.Labels[scheduling.GroupUIDLabel] = string(j.group.UID)
	pod.Annotations[scheduling.GroupAnnotation] = j.group.Name
	// In bridge mode, Kubernetes usually does not have a PodGroup of that name. A cluster that stores the field without
	// supporting claims would not schedule the pod.
	if !j.keepField {
		pod.Spec.SchedulingGroup = nil
	}
	if j.native {
		pod.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: ptr.To(j.group.Name)}
	}
	if !sharded {
		return
	}
	pod.Annotations[scheduling.AdmittedAnnotation] = j.request
	if !j.keepField {
		addGate(pod, j.group.Annotations)
	}
}

// addGate adds the gate to a pod, unless annotations disable gates or the pod is for a scheduler other than Kubernetes'
// own. With a gang scheduler, the pods would deadlock: the scheduler waits for all pods, and the gate waits for the
// first pod to be bound.
func addGate(pod *corev1.Pod, annotations map[string]string) {
	gate := corev1.PodSchedulingGate{Name: scheduling.ReservedGate}
	isDefault := pod.Spec.SchedulerName == "" || pod.Spec.SchedulerName == corev1.DefaultSchedulerName
	disabled := annotations[scheduling.GatesAnnotation] == scheduling.GatesDisabled
	if isDefault && !disabled && !slices.Contains(pod.Spec.SchedulingGates, gate) {
		pod.Spec.SchedulingGates = append(pod.Spec.SchedulingGates, gate)
	}
}

// notNil returns m, or an empty map if m is nil.
func notNil(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}

// matchEntry returns the PodGroup's entry that a pod's claim refers to. If an
// entry is similar but does not match, matchEntry returns the difference instead:
// Kubernetes would then generate a claim for this pod alone, without a message.
func (j *joiner) matchEntry(c *corev1.PodResourceClaim) (entry *scheduling.PodGroupResourceClaim, mismatch string) {
	entries := j.group.Spec.ResourceClaims
	for i := range entries {
		e := &entries[i]
		if e.Name != c.Name {
			continue
		}
		if j.sameClaim(e, c) {
			return e, ""
		}
		return nil, fmt.Sprintf("it refers to %s, and the PodGroup's entry to %s",
			describeSource(c.ResourceClaimName, c.ResourceClaimTemplateName),
			describeSource(e.ResourceClaimName, e.ResourceClaimTemplateName))
	}
	for i := range entries {
		if j.sameClaim(&entries[i], c) {
			return nil, fmt.Sprintf("the PodGroup calls that claim %q", entries[i].Name)
		}
	}
	return nil, ""
}

// sameClaim reports whether a PodGroup's entry and a pod's refer to the same
// claim. A pod that was copied from a running one has the name of the generated
// claim.
func (j *joiner) sameClaim(e *scheduling.PodGroupResourceClaim, c *corev1.PodResourceClaim) bool {
	if c.ResourceClaimName != nil && e.ResourceClaimTemplateName != nil {
		_, generated := claims.ShardNumber(podgroups.Owner(j.group), e.Name, *c.ResourceClaimName)
		return generated
	}
	return ptr.Equal(e.ResourceClaimName, c.ResourceClaimName) &&
		ptr.Equal(e.ResourceClaimTemplateName, c.ResourceClaimTemplateName)
}

// describeSource names the object that a claim comes from.
func describeSource(claim, template *string) string {
	switch {
	case claim != nil:
		return fmt.Sprintf("ResourceClaim %q", *claim)
	case template != nil:
		return fmt.Sprintf("ResourceClaimTemplate %q", *template)
	}
	return "nothing"
}

func describeEntries(entries []scheduling.PodGroupResourceClaim) string {
	if len(entries) == 0 {
		return "none"
	}
	var described []string
	for _, e := range entries {
		source := describeSource(e.ResourceClaimName, e.ResourceClaimTemplateName)
		described = append(described, fmt.Sprintf("%q (%s)", e.Name, source))
	}
	return strings.Join(described, ", ")
}
