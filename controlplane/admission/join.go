package admission

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/podgroups"
)

// joining makes a pod one of a group.
type joining struct {
	group *scheduling.PodGroup
	// request by which the pod is created.
	request string
	native  bool
	// shard chooses among the claims of an entry; noShard if there is one.
	shard func(entry string) (int, error)
}

// join changes the pod, and returns what its owner should know.
func (j *joining) join(pod *corev1.Pod) (warnings []string, err error) {
	shared, waits := 0, false
	for i := range pod.Spec.ResourceClaims {
		c := &pod.Spec.ResourceClaims[i]
		entry, miss := j.match(c)
		if miss != "" {
			warnings = append(warnings, fmt.Sprintf("spec.resourceClaims[%d] %q is not shared with PodGroup %q: %s", i, c.Name, j.group.Name, miss))
		}
		if entry == nil {
			continue
		}
		shared++
		if entry.ResourceClaimName != nil || c.ResourceClaimName != nil && pod.Labels[scheduling.GroupUIDLabel] == string(j.group.UID) {
			continue // by name, or the second time that this pod is seen: others change it too
		}
		n, err := j.shard(entry.Name)
		if err != nil {
			return warnings, err
		}
		if n != noShard {
			waits = true
		}
		c.ResourceClaimTemplateName, c.ResourceClaimName = nil, ptr.To(claims.Name(podgroups.Owner(j.group), entry.Name, max(n, 0)))
	}
	if shared == 0 && len(warnings) == 0 {
		warnings = append(warnings, fmt.Sprintf("the pod shares no claim with PodGroup %q, which has %s: name one in spec.resourceClaims as the PodGroup does", j.group.Name, described(j.group.Spec.ResourceClaims)))
	}
	j.mark(pod, waits)
	return warnings, nil
}

// mark tells who the pod's group is, in ways that every cluster stores.
func (j *joining) mark(pod *corev1.Pod, waits bool) {
	pod.Labels, pod.Annotations = writable(pod.Labels), writable(pod.Annotations)
	pod.Labels[scheduling.GroupUIDLabel] = string(j.group.UID)
	pod.Annotations[scheduling.GroupAnnotation] = j.group.Name
	if j.native {
		pod.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: ptr.To(j.group.Name)}
	}
	gate := corev1.PodSchedulingGate{Name: scheduling.ReservedGate}
	if waits && !slices.Contains(pod.Spec.SchedulingGates, gate) {
		pod.Annotations[scheduling.AdmittedAnnotation] = j.request
		pod.Spec.SchedulingGates = append(pod.Spec.SchedulingGates, gate)
	}
}

func writable(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}

// match finds the group's entry that a pod's stands for, or tells what it lacks
// to be one: Kubernetes makes a claim for the pod alone then, and says nothing.
func (j *joining) match(c *corev1.PodResourceClaim) (*scheduling.PodGroupResourceClaim, string) {
	for i := range j.group.Spec.ResourceClaims {
		e := &j.group.Spec.ResourceClaims[i]
		if e.Name == c.Name {
			if j.same(e, c) {
				return e, ""
			}
			return nil, fmt.Sprintf("it is of %s, and the PodGroup's of %s", source(c.ResourceClaimName, c.ResourceClaimTemplateName), source(e.ResourceClaimName, e.ResourceClaimTemplateName))
		}
	}
	for i := range j.group.Spec.ResourceClaims {
		if e := &j.group.Spec.ResourceClaims[i]; j.same(e, c) {
			return nil, fmt.Sprintf("the PodGroup names that claim %q", e.Name)
		}
	}
	return nil, ""
}

// same tells whether two entries are of one claim. A pod that was written after
// one that runs has the generated claim's name.
func (j *joining) same(e *scheduling.PodGroupResourceClaim, c *corev1.PodResourceClaim) bool {
	if c.ResourceClaimName != nil && e.ResourceClaimTemplateName != nil {
		_, ours := claims.ShardNumber(podgroups.Owner(j.group), e.Name, *c.ResourceClaimName)
		return ours
	}
	return ptr.Equal(e.ResourceClaimName, c.ResourceClaimName) && ptr.Equal(e.ResourceClaimTemplateName, c.ResourceClaimTemplateName)
}

func source(claim, template *string) string {
	switch {
	case claim != nil:
		return fmt.Sprintf("ResourceClaim %q", *claim)
	case template != nil:
		return fmt.Sprintf("ResourceClaimTemplate %q", *template)
	}
	return "nothing"
}

func described(entries []scheduling.PodGroupResourceClaim) string {
	var all []string
	for _, e := range entries {
		all = append(all, fmt.Sprintf("%q (%s)", e.Name, source(e.ResourceClaimName, e.ResourceClaimTemplateName)))
	}
	if all == nil {
		return "none"
	}
	return strings.Join(all, ", ")
}

// restore gives an update of a pod back what admission had made of it: whoever
// applies its manifest again has the references to templates in it, and a pod's
// claims do not change.
func restore(old, pod *corev1.Pod) (warnings []string) {
	if uid, ours := old.Labels[scheduling.GroupUIDLabel]; ours {
		pod.Labels, pod.Annotations = writable(pod.Labels), writable(pod.Annotations)
		pod.Labels[scheduling.GroupUIDLabel] = uid
		if name, ok := old.Annotations[scheduling.GroupAnnotation]; ok {
			// Who names the group by the field has not written the annotation.
			if now, written := pod.Annotations[scheduling.GroupAnnotation]; now != name && (written || pod.Spec.SchedulingGroup == nil) {
				warnings = append(warnings, fmt.Sprintf("the pod stays in PodGroup %s: a pod is in a group from its creation on", name))
			}
			pod.Annotations[scheduling.GroupAnnotation] = name
		}
		for i := range pod.Spec.ResourceClaims {
			for _, was := range old.Spec.ResourceClaims {
				if c := &pod.Spec.ResourceClaims[i]; c.Name == was.Name && was.ResourceClaimName != nil && c.ResourceClaimTemplateName != nil {
					*c = was
				}
			}
		}
		if pod.Spec.SchedulingGroup == nil {
			pod.Spec.SchedulingGroup = old.Spec.SchedulingGroup
		}
	}
	was := containers(&old.Spec)
	for name, c := range containers(&pod.Spec) {
		if o, ok := was[name]; ok && len(c.Resources.Claims) < len(o.Resources.Claims) {
			c.Resources.Claims = slices.Clone(o.Resources.Claims)
		}
	}
	return warnings
}

// containers of a pod that can have claims, by name.
func containers(spec *corev1.PodSpec) map[string]*corev1.Container {
	all := map[string]*corev1.Container{}
	for i := range spec.InitContainers {
		all[spec.InitContainers[i].Name] = &spec.InitContainers[i]
	}
	for i := range spec.Containers {
		all[spec.Containers[i].Name] = &spec.Containers[i]
	}
	return all
}

// names of a pod's containers, sorted.
func names(spec *corev1.PodSpec) []string { return slices.Sorted(maps.Keys(containers(spec))) }
