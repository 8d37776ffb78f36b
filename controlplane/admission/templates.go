package admission

import (
	"context"
	"encoding/json"
	"net/http"

	"gomodules.xyz/jsonpatch/v2"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

// Templates is the webhook for what has a template of pods. A cluster whose gates
// are off drops spec.schedulingGroup from templates before anybody makes a pod
// of them: the name is kept in the annotation, which pods inherit.
type Templates struct {
	APIReader client.Reader
	Mode      mode.Mode
}

// template is as much of an object as matters, at whichever depth.
type template struct {
	Metadata *struct {
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Spec struct {
		SchedulingGroup *struct {
			PodGroupName string `json:"podGroupName"`
		} `json:"schedulingGroup"`
	} `json:"spec"`
}

type templated struct {
	Template *template `json:"template"` // a PodTemplate
	Spec     struct {
		Template    *template `json:"template"`
		JobTemplate *struct {
			Spec struct {
				Template *template `json:"template"`
			} `json:"spec"`
		} `json:"jobTemplate"`
	} `json:"spec"`
}

// find returns the template of pods and where it is, as a JSON pointer.
func (t *templated) find() (*template, string) {
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
	pods, at := object.find()
	if pods == nil || pods.Spec.SchedulingGroup == nil || pods.Spec.SchedulingGroup.PodGroupName == "" {
		return admission.Allowed("")
	}
	name := pods.Spec.SchedulingGroup.PodGroupName
	if had, ok := pods.annotations()[scheduling.GroupAnnotation]; ok {
		if had != name {
			return refuse(denied("%s: metadata.annotations[%q] names PodGroup %q, and spec.schedulingGroup.podGroupName %q: a pod is in one", at[1:], scheduling.GroupAnnotation, had, name), nil)
		}
		return admission.Allowed("")
	}
	var pg scheduling.PodGroup
	err := t.APIReader.Get(ctx, types.NamespacedName{Namespace: req.Namespace, Name: name}, &pg)
	switch {
	case apierrors.IsNotFound(err) && t.Mode == mode.Native:
		return admission.Allowed("") // one of Kubernetes' own PodGroups
	case client.IgnoreNotFound(err) != nil:
		return admission.Errored(http.StatusInternalServerError, err)
	}
	response := admission.Patched("", annotate(pods, at, name)...)
	if apierrors.IsNotFound(err) {
		response = response.WithWarnings("PodGroup " + name + " does not exist yet: the pods come when it does")
	}
	return response
}

func (t *template) annotations() map[string]string {
	if t.Metadata == nil {
		return nil
	}
	return t.Metadata.Annotations
}

func annotate(pods *template, at, name string) []jsonpatch.Operation {
	annotations := map[string]string{scheduling.GroupAnnotation: name}
	switch {
	case pods.Metadata == nil:
		return []jsonpatch.Operation{jsonpatch.NewOperation("add", at+"/metadata", map[string]any{"annotations": annotations})}
	case len(pods.Metadata.Annotations) == 0:
		return []jsonpatch.Operation{jsonpatch.NewOperation("add", at+"/metadata/annotations", annotations)}
	}
	// In a JSON pointer (RFC 6901) a slash is ~1.
	return []jsonpatch.Operation{jsonpatch.NewOperation("add", at+"/metadata/annotations/"+scheduling.GroupName+"~1pod-group", name)}
}
