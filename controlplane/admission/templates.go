// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"gomodules.xyz/jsonpatch/v2"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// Templates is the webhook for objects with a pod template. A cluster with the feature gates off drops
// spec.schedulingGroup from a template when it stores the object. The webhook copies the name of the PodGroup to the
// annotation, which the pods inherit. It copies the name only if the PodGroup exists, and Kubernetes does not have a
// PodGroup of that name: otherwise, the field names Kubernetes' own PodGroup.
type Templates struct {
	APIReader client.Reader
	// Mapper knows which types the API server serves.
	Mapper meta.RESTMapper
}

// podTemplate has the fields of a pod template that the webhook reads.
type podTemplate struct {
	Metadata *struct {
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Spec struct {
		SchedulingGroup *struct {
			PodGroupName string `json:"podGroupName"`
		} `json:"schedulingGroup"`
	} `json:"spec"`
}

// templated is an object with a pod template.
type templated struct {
	Template *podTemplate `json:"template"` // of a PodTemplate
	Spec     struct {
		Template    *podTemplate `json:"template"` // of a workload
		JobTemplate *struct {
			Spec struct {
				Template *podTemplate `json:"template"`
			} `json:"spec"`
		} `json:"jobTemplate"` // of a CronJob
	} `json:"spec"`
}

// podTemplate returns the pod template and its path as a JSON pointer.
func (t *templated) podTemplate() (template *podTemplate, path string) {
	switch {
	case t.Spec.JobTemplate != nil:
		return t.Spec.JobTemplate.Spec.Template, "/spec/jobTemplate/spec/template"
	case t.Spec.Template != nil:
		return t.Spec.Template, "/spec/template"
	}
	return t.Template, "/template"
}

// Handle implements admission.Handler.
func (t *Templates) Handle(ctx context.Context, req admission.Request) admission.Response {
	var object templated
	if err := json.Unmarshal(req.Object.Raw, &object); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	template, path := object.podTemplate()
	if template == nil || template.Spec.SchedulingGroup == nil || template.Spec.SchedulingGroup.PodGroupName == "" {
		return admission.Allowed("")
	}
	name := template.Spec.SchedulingGroup.PodGroupName
	if annotated, ok := template.annotations()[scheduling.GroupAnnotation]; ok {
		if annotated != name {
			return errorResponse(twoPodGroups(strings.TrimPrefix(path, "/")+": ", annotated, name), nil)
		}
		return admission.Allowed("")
	}
	var group scheduling.PodGroup
	key := types.NamespacedName{Namespace: req.Namespace, Name: name}
	err := t.APIReader.Get(ctx, key, &group)
	switch {
	case apierrors.IsNotFound(err):
		if others, err := hasSameName(ctx, t.APIReader, t.Mapper, key); others || err != nil {
			return admission.Allowed("") // do not warn the users of Kubernetes' own PodGroups
		}
		return admission.Allowed("").WithWarnings(fmt.Sprintf("%s/spec/schedulingGroup/podGroupName: no PodGroup %q of %s "+
			"exists yet; if pods are to share its claims, name it in the annotation %s of the template instead",
			path, name, scheduling.GroupVersion, scheduling.GroupAnnotation))
	case err != nil:
		return admission.Errored(http.StatusInternalServerError, err)
	}
	sameName, err := hasSameName(ctx, t.APIReader, t.Mapper, key)
	switch {
	case err != nil:
		return admission.Errored(http.StatusInternalServerError, err)
	case sameName:
		return admission.Allowed("").WithWarnings(sameNameWarning(path+"/spec/schedulingGroup/podGroupName", name))
	}
	return admission.Patched("", annotationPatch(template, path, name)...)
}

func (t *podTemplate) annotations() map[string]string {
	if t.Metadata == nil {
		return nil
	}
	return t.Metadata.Annotations
}

// annotationPatch returns a JSON patch that adds the annotation to the template at
// the path.
func annotationPatch(template *podTemplate, path, name string) []jsonpatch.Operation {
	add := func(path string, value any) []jsonpatch.Operation {
		return []jsonpatch.Operation{jsonpatch.NewOperation("add", path, value)}
	}
	annotations := map[string]string{scheduling.GroupAnnotation: name}
	switch {
	case template.Metadata == nil:
		return add(path+"/metadata", map[string]any{"annotations": annotations})
	case len(template.Metadata.Annotations) == 0:
		return add(path+"/metadata/annotations", annotations)
	}
	// A JSON pointer (RFC 6901) writes a slash as ~1.
	key := strings.ReplaceAll(scheduling.GroupAnnotation, "/", "~1")
	return add(path+"/metadata/annotations/"+key, name)
}
