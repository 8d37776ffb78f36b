// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"encoding/json"
	"maps"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

const (
	kindCronJob         = "CronJob"
	kindLeaderWorkerSet = "LeaderWorkerSet"
)

// ownerKinds are the kinds of objects that create Jobs or StatefulSets, by API group. The webhook also checks their
// templates. The resource is the lower-case plural of the kind.
var ownerKinds = map[string]struct{ kind, resource string }{
	batchv1.GroupName: {kindCronJob, "cronjobs"}, "jobset.x-k8s.io": {"JobSet", "jobsets"},
	"leaderworkerset.x-k8s.io": {kindLeaderWorkerSet, "leaderworkersets"},
}

// workloadObject is a Job, a CronJob, a JobSet, a StatefulSet, or a LeaderWorkerSet.
type workloadObject struct {
	// annotation lists the claims of the kind.
	annotation string
	workloadFields
}

// workloadFields has the fields of these kinds that the webhook reads.
type workloadFields struct {
	Metadata metav1.ObjectMeta `json:"metadata"`
	Spec     struct {
		Template       *corev1.PodTemplateSpec  `json:"template"`    // of a Job or a StatefulSet
		JobTemplate    *batchv1.JobTemplateSpec `json:"jobTemplate"` // of a CronJob
		ReplicatedJobs []struct {
			Name     string                  `json:"name"`
			Template batchv1.JobTemplateSpec `json:"template"`
		} `json:"replicatedJobs"` // of a JobSet
		LeaderWorkerTemplate *struct {
			LeaderTemplate *corev1.PodTemplateSpec `json:"leaderTemplate"` // nil: the same as WorkerTemplate
			WorkerTemplate corev1.PodTemplateSpec  `json:"workerTemplate"`
		} `json:"leaderWorkerTemplate"` // of a LeaderWorkerSet
	} `json:"spec"`
}

// annotationOf returns the annotation that lists the claims of objects of a kind.
func annotationOf(kind string) string {
	if kind == "StatefulSet" || kind == kindLeaderWorkerSet {
		return scheduling.ReplicaClaimsAnnotation
	}
	return scheduling.JobClaimsAnnotation
}

// parseClaims parses the value of the annotation.
func parseClaims(annotation, value string, path *field.Path) ([]scheduling.ListedClaim, field.ErrorList) {
	if annotation == scheduling.ReplicaClaimsAnnotation {
		return scheduling.ParseReplicaClaims(value, path)
	}
	return scheduling.ParseJobClaims(value, path)
}

// sameClaims reports whether two values of the annotation list the same claims, regardless of their
// format.
func sameClaims(annotation, a, b string) bool {
	if a == b {
		return true
	}
	first, errs := parseClaims(annotation, a, nil)
	second, more := parseClaims(annotation, b, nil)
	return len(errs) == 0 && len(more) == 0 && equality.Semantic.DeepEqual(first, second)
}

// templateAt is a pod template with its path.
type templateAt struct {
	*corev1.PodTemplateSpec
	path *field.Path
}

// templates returns the pod templates that have the annotation.
func (w *workloadObject) templates() (templates []templateAt) {
	add := func(template *corev1.PodTemplateSpec, path *field.Path) {
		if _, ok := template.Annotations[w.annotation]; ok {
			templates = append(templates, templateAt{template, path})
		}
	}
	spec := field.NewPath("spec")
	if w.Spec.Template != nil {
		add(w.Spec.Template, spec.Child("template"))
	}
	if w.Spec.JobTemplate != nil {
		add(&w.Spec.JobTemplate.Spec.Template, spec.Child("jobTemplate", "spec", "template"))
	}
	for i := range w.Spec.ReplicatedJobs {
		add(&w.Spec.ReplicatedJobs[i].Template.Spec.Template,
			spec.Child("replicatedJobs").Index(i).Child("template", "spec", "template"))
	}
	if t := w.Spec.LeaderWorkerTemplate; t != nil {
		add(&t.WorkerTemplate, spec.Child("leaderWorkerTemplate", "workerTemplate"))
		if t.LeaderTemplate != nil {
			add(t.LeaderTemplate, spec.Child("leaderWorkerTemplate", "leaderTemplate"))
		}
	}
	return templates
}

// releases returns the annotations release of the object and of its templates, by their paths.
func (w *workloadObject) releases() map[string]string {
	values := map[string]string{}
	add := func(meta *metav1.ObjectMeta, path *field.Path) {
		if value, ok := meta.Annotations[scheduling.ReleaseAnnotation]; ok {
			values[path.Child("metadata", "annotations").Key(scheduling.ReleaseAnnotation).String()] = value
		}
	}
	add(&w.Metadata, nil)
	for _, t := range w.templates() {
		add(&t.ObjectMeta, t.path)
	}
	spec := field.NewPath("spec")
	if w.Spec.JobTemplate != nil {
		add(&w.Spec.JobTemplate.ObjectMeta, spec.Child("jobTemplate"))
	}
	for i := range w.Spec.ReplicatedJobs {
		add(&w.Spec.ReplicatedJobs[i].Template.ObjectMeta, spec.Child("replicatedJobs").Index(i).Child("template"))
	}
	return values
}

// containers returns the containers of the pods that share the claims listed in the template: in a LeaderWorkerSet, the
// containers of the leader and of the workers.
func (w *workloadObject) containers(template *corev1.PodSpec) map[string]*corev1.Container {
	known := containersByName(template)
	if t := w.Spec.LeaderWorkerTemplate; t != nil {
		maps.Copy(known, containersByName(&t.WorkerTemplate.Spec))
		if t.LeaderTemplate != nil {
			maps.Copy(known, containersByName(&t.LeaderTemplate.Spec))
		}
	}
	return known
}

// values returns the annotations of the templates that have one, by their paths.
func (w *workloadObject) values() map[string]string {
	values := map[string]string{}
	for _, t := range w.templates() {
		values[t.path.String()] = t.Annotations[w.annotation]
	}
	return values
}

// decodeWorkload decodes an object of a kind. It returns an empty object if raw is empty.
func decodeWorkload(kind string, raw []byte) (*workloadObject, error) {
	object := &workloadObject{annotation: annotationOf(kind)}
	if len(raw) == 0 {
		return object, nil
	}
	return object, json.Unmarshal(raw, &object.workloadFields)
}

func (w *workloadObject) annotationPath(template *field.Path) *field.Path {
	return template.Child("metadata", "annotations").Key(w.annotation)
}
