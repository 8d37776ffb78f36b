// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// Queues is the webhook for workloads that Kueue admits (label kueue.x-k8s.io/queue-name) if their pods share claims.
// It denies workloads that Kueue would charge wrongly: Kueue charges each reference to a ResourceClaimTemplate once for
// each pod, and does not charge claims that annotations list. It also denies workloads if Kueue would never admit their
// pods: for Deployments, StatefulSets, and LeaderWorkerSets, Kueue admits each pod, and refuses pods that reference
// claims by name, as pods with shared claims do.
type Queues struct {
	// APIReader reads PodGroups and templates from the API server.
	APIReader client.Reader
	// DeviceClasses are the classes that Kueue charges, by its deviceClassMappings.
	DeviceClasses []string
}

// queuedWorkload has the fields of a workload that the webhook reads.
type queuedWorkload struct {
	fields workloadFields
	counts podCounts
}

// podCounts has the numbers of pods of workloads.
type podCounts struct {
	Spec struct {
		Replicas       *int64 `json:"replicas"`    // of a Deployment, a StatefulSet, or a LeaderWorkerSet
		Parallelism    *int32 `json:"parallelism"` // of a Job
		Completions    *int32 `json:"completions"` // of a Job
		ReplicatedJobs []struct {
			Replicas *int64 `json:"replicas"`
		} `json:"replicatedJobs"` // of a JobSet
		LeaderWorkerTemplate struct {
			Size *int64 `json:"size"`
		} `json:"leaderWorkerTemplate"` // of a LeaderWorkerSet
	} `json:"spec"`
}

// podSet is a pod template with the number of pods that Kueue charges it for.
type podSet struct {
	templateAt
	pods int64
	// inQueuedJob reports whether the template belongs to a replicated Job with the label.
	inQueuedJob bool
}

// Handle implements admission.Handler.
func (q *Queues) Handle(ctx context.Context, req admission.Request) admission.Response {
	var w queuedWorkload
	if err := json.Unmarshal(req.Object.Raw, &w.fields); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	if err := json.Unmarshal(req.Object.Raw, &w.counts); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	var warnings []string
	_, hasLabel := w.fields.Metadata.Labels[queueLabel]
	sets := w.podSets()
	for _, set := range sets {
		if !hasLabel {
			if err := checkQueuedTemplate(req.Kind.Kind, &w.fields.Metadata, set); err != nil {
				return errorResponse(err, warnings)
			}
			continue
		}
		err := checkPods(req.Kind.Kind, set)
		if err == nil {
			var more []string
			more, err = q.check(ctx, req.Namespace, set, sets)
			warnings = append(warnings, more...)
		}
		if err != nil {
			return errorResponse(err, warnings)
		}
	}
	return admission.Allowed("").WithWarnings(warnings...)
}

// checkPods denies a pod template if Kueue admits its pods one by one.
func checkPods(kind string, set podSet) error {
	if kind != "Deployment" && kind != "StatefulSet" && kind != kindLeaderWorkerSet {
		return nil
	}
	for _, key := range sharingAnnotations {
		if _, ok := set.Annotations[key]; ok {
			return denied(reasonQueue,
				"%s: Kueue admits each pod of a %s separately, and never admits a pod that references a claim by name; "+
					"pods that share claims reference them by name: remove the annotation so that each pod has claims of its "+
					"own, use a Job, or remove the label %s", set.path.Child("metadata", "annotations").Key(key), kind, queueLabel)
		}
	}
	return nil
}

// queueLabel is the label of workloads and pods that Kueue admits.
const queueLabel = "kueue.x-k8s.io/queue-name"

// sharingAnnotations are the annotations of pods that share claims.
var sharingAnnotations = []string{
	scheduling.GroupAnnotation, scheduling.JobClaimsAnnotation, scheduling.ReplicaClaimsAnnotation,
}

// checkQueuedTemplate denies a template of pods with shared claims if the pods have the label, but the workload's
// metadata does not: Kueue admits such pods one by one.
func checkQueuedTemplate(kind string, workload *metav1.ObjectMeta, set podSet) error {
	if _, hasLabel := set.Labels[queueLabel]; !hasLabel || set.inQueuedJob {
		return nil
	}
	// Kueue ignores the label of pods if it manages any of their owners, such as the JobSet of a Job. It does not
	// know CronJobs. For others, checkQueuedPod decides.
	if owner := metav1.GetControllerOf(workload); owner != nil && owner.Kind != "CronJob" {
		return nil
	}
	shares := func(key string) bool { return metav1.HasAnnotation(set.ObjectMeta, key) }
	if !slices.ContainsFunc(sharingAnnotations, shares) {
		return nil
	}
	advice := "move the label to the metadata of the " + kind
	if kind != "Job" && kind != "JobSet" {
		advice = "give each pod claims of its own, use a Job with the label, or remove the label"
	}
	return denied(reasonQueue,
		"%s: without the label on the %s, Kueue admits each of its pods separately, and never admits a pod that "+
			"references a claim by name; pods that share claims reference them by name: %s",
		set.path.Child("metadata", "labels").Key(queueLabel), kind, advice)
}

// kueueGate is the scheduling gate of the pods that Kueue admits one by one.
const kueueGate = "kueue.x-k8s.io/admission"

// checkQueuedPod denies a pod that shares claims if Kueue would never admit it. Only the gate shows whether Kueue
// admits the pod itself: Kueue ignores the label of pods if it manages any of their owners, and it may admit pods
// without the label. If Kueue's webhook adds the gate after this one has seen the pod, the API server calls this one
// again.
func checkQueuedPod(pod *corev1.Pod) error {
	gated := slices.ContainsFunc(pod.Spec.SchedulingGates, func(g corev1.PodSchedulingGate) bool {
		return g.Name == kueueGate
	})
	if _, shares := pod.Labels[scheduling.GroupUIDLabel]; !gated || !shares {
		return nil
	}
	return denied(reasonQueue,
		"spec.schedulingGates: the pod waits until Kueue admits it, by the gate %s, but Kueue never admits a pod that "+
			"references a claim by name, as pods that share claims do: let Kueue admit a Job, by the label %s of the Job and "+
			"not of its pods, or give each pod claims of its own", kueueGate, queueLabel)
}

// podSets returns the templates with their numbers of pods.
func (w *queuedWorkload) podSets() (sets []podSet) {
	spec, counts := field.NewPath("spec"), &w.counts.Spec
	add := func(template *corev1.PodTemplateSpec, path *field.Path, pods int64) {
		sets = append(sets, podSet{templateAt: templateAt{template, path}, pods: pods})
	}
	replicas := ptr.Deref(counts.Replicas, 1)
	if t := w.fields.Spec.Template; t != nil {
		add(t, spec.Child("template"), max(replicas, podsOfJob(counts.Parallelism, counts.Completions)))
	}
	for i, job := range w.fields.Spec.ReplicatedJobs {
		pods := ptr.Deref(counts.ReplicatedJobs[i].Replicas, 1) *
			podsOfJob(job.Template.Spec.Parallelism, job.Template.Spec.Completions)
		add(&w.fields.Spec.ReplicatedJobs[i].Template.Spec.Template,
			spec.Child("replicatedJobs").Index(i).Child("template", "spec", "template"), pods)
		_, sets[len(sets)-1].inQueuedJob = job.Template.Labels[queueLabel]
	}
	if t := w.fields.Spec.LeaderWorkerTemplate; t != nil {
		size := ptr.Deref(counts.LeaderWorkerTemplate.Size, 1)
		workers := replicas * size
		if t.LeaderTemplate != nil {
			add(t.LeaderTemplate, spec.Child("leaderWorkerTemplate", "leaderTemplate"), replicas)
			workers -= replicas
		}
		add(&t.WorkerTemplate, spec.Child("leaderWorkerTemplate", "workerTemplate"), workers)
	}
	return sets
}

// podsOfJob returns the number of pods that Kueue charges a Job for: the pods that run at the same time.
func podsOfJob(parallelism, completions *int32) int64 {
	atATime := ptr.Deref(parallelism, 1)
	return int64(min(atATime, ptr.Deref(completions, atATime)))
}

// check denies a template if Kueue would charge its shared claims wrongly, and returns warnings. all are the templates
// of the workload.
func (q *Queues) check(
	ctx context.Context, namespace string, set podSet, all []podSet,
) (warnings []string, err error) {
	if name, ok := set.Annotations[scheduling.GroupAnnotation]; ok {
		if warnings, err = q.checkPodGroup(ctx, namespace, name, set, all); err != nil {
			return warnings, err
		}
	}
	for _, key := range []string{scheduling.JobClaimsAnnotation, scheduling.ReplicaClaimsAnnotation} {
		value, ok := set.Annotations[key]
		if !ok {
			continue
		}
		path := set.path.Child("metadata", "annotations").Key(key)
		entries, _ := scheduling.ParseJobClaims(value, path) // ListedClaims reports errors
		for _, entry := range entries {
			class, err := q.chargedClass(ctx, namespace, entry)
			if err != nil {
				return warnings, err
			}
			if class != "" {
				return warnings, denied(reasonQueue,
					"%s: entry %q requests DeviceClass %q, which Kueue charges by its deviceClassMappings, but Kueue "+
						"does not charge claims in this annotation: reference a ResourceClaimTemplate in spec.resourceClaims, "+
						"so that each pod has a claim and Kueue charges all of them, or remove the label kueue.x-k8s.io/queue-name",
					path, entry.Name, class)
			}
		}
	}
	return warnings, nil
}

// checkPodGroup denies a template that references a claim template of the PodGroup, if several pods of the workload
// have the reference, and any template with a DeviceClass that Kueue does not know. If the PodGroup does not exist yet,
// it may share every claim template. The charge for a single pod is correct only for the first such workload of the
// PodGroup. The webhook cannot determine which one is the first, so it returns a warning.
func (q *Queues) checkPodGroup(
	ctx context.Context, namespace, name string, set podSet, all []podSet,
) (warnings []string, err error) {
	var group scheduling.PodGroup
	err = q.APIReader.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, &group)
	missing := apierrors.IsNotFound(err)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("look up PodGroup %q: %w", name, err)
	}
	j := joiner{group: &group}
	for i := range set.Spec.ResourceClaims {
		c := &set.Spec.ResourceClaims[i]
		if c.ResourceClaimTemplateName == nil {
			continue // Kueue refuses references by name itself
		}
		if entry, _ := j.matchEntry(c); entry == nil && !missing {
			continue
		}
		template, path := *c.ResourceClaimTemplateName, set.path.Child("spec", "resourceClaims").Index(i)
		entry := scheduling.ListedClaim{Name: c.Name, ResourceClaimTemplateName: &template}
		class, err := q.chargedClass(ctx, namespace, entry)
		pods := podsSharing(all, name, c)
		switch {
		case err != nil:
			return nil, err
		case class == "":
			return nil, denied(reasonQueue,
				"%s: no DeviceClass of ResourceClaimTemplate %q is in controller.kueue.deviceClasses, and Kueue never "+
					"admits a workload that references a template with a class of none of its deviceClassMappings: "+
					"list the claim in the annotation %s instead, or remove the label %s",
				path, template, scheduling.JobClaimsAnnotation, queueLabel)
		case pods > 1:
			return nil, denied(reasonQueue,
				"%s: Kueue would charge ResourceClaimTemplate %q %d times, once for each pod, but the pods share one "+
					"claim of PodGroup %q: run one pod, remove the annotation %s so that each pod has a claim of its own, or remove "+
					"the label %s", path, template, pods, name, scheduling.GroupAnnotation, queueLabel)
		}
		warnings = append(warnings, fmt.Sprintf("%s: Kueue charges the claim of PodGroup %q for this workload, and again "+
			"for each other workload of the PodGroup in a queue", path, name))
	}
	return warnings, nil
}

// podsSharing returns the number of pods of the PodGroup that have the reference to a claim template.
func podsSharing(sets []podSet, group string, reference *corev1.PodResourceClaim) (pods int64) {
	for _, set := range sets {
		has := slices.ContainsFunc(set.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool {
			return c.Name == reference.Name && ptr.Equal(c.ResourceClaimTemplateName, reference.ResourceClaimTemplateName)
		})
		if has && set.Annotations[scheduling.GroupAnnotation] == group {
			pods += set.pods
		}
	}
	return pods
}

// chargedClass returns a DeviceClass that the claim requests and Kueue charges, or "".
func (q *Queues) chargedClass(ctx context.Context, namespace string, entry scheduling.ListedClaim) (string, error) {
	spec := entry.Spec
	if spec == nil {
		var template resourceapi.ResourceClaimTemplate
		name := types.NamespacedName{Namespace: namespace, Name: *entry.ResourceClaimTemplateName}
		if err := q.APIReader.Get(ctx, name, &template); err != nil {
			if apierrors.IsNotFound(err) {
				return "", denied(reasonClaimMissing,
					"ResourceClaimTemplate %q, to which entry %q refers, does not exist in namespace %q: create it "+
						"first, because admission must know whether Kueue charges its DeviceClass", name.Name, entry.Name, namespace)
			}
			return "", fmt.Errorf("look up ResourceClaimTemplate %q: %w", name.Name, err)
		}
		spec = &template.Spec.Spec
	}
	for _, r := range spec.Devices.Requests {
		if r.Exactly != nil && slices.Contains(q.DeviceClasses, r.Exactly.DeviceClassName) {
			return r.Exactly.DeviceClassName, nil
		}
		for _, s := range r.FirstAvailable {
			if slices.Contains(q.DeviceClasses, s.DeviceClassName) {
				return s.DeviceClassName, nil
			}
		}
	}
	return "", nil
}
