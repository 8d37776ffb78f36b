// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/controlplane/workload"
)

// PodGroups is the webhook for PodGroups with the annotations release and workload. It
// denies what the controller could not do in the mode of the cluster.
type PodGroups struct {
	Mode mode.Mode
}

// Handle implements admission.Handler.
func (p *PodGroups) Handle(_ context.Context, req admission.Request) admission.Response {
	var object struct {
		Metadata metav1.ObjectMeta `json:"metadata"`
	}
	if err := json.Unmarshal(req.Object.Raw, &object); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	if err := p.validate(object.Metadata.Annotations).ToAggregate(); err != nil {
		return errorResponse(denied(reasonInvalid, "%w", err), nil)
	}
	return admission.Allowed("")
}

func (p *PodGroups) validate(annotations map[string]string) field.ErrorList {
	releasePath, workloadPath := annotation(scheduling.ReleaseAnnotation), annotation(scheduling.WorkloadAnnotation)
	release, hasRelease := annotations[scheduling.ReleaseAnnotation]
	name, hasWorkload := annotations[scheduling.WorkloadAnnotation]
	var policy scheduling.Release
	if hasRelease {
		var err error
		if policy, err = scheduling.ParseRelease(release); err != nil {
			return field.ErrorList{field.Invalid(releasePath, release, err.Error())}
		}
	}
	if hasWorkload {
		if _, err := workload.Parse(name); err != nil {
			return field.ErrorList{field.Invalid(workloadPath, name, err.Error())}
		}
	}
	switch {
	case p.Mode == mode.Native && !policy.IsOnDeletion():
		return field.ErrorList{field.Forbidden(releasePath, fmt.Sprintf("in native mode, Kubernetes reserves the claims for "+
			"its own PodGroup, and releases them only when the PodGroup is deleted: remove the annotation, and delete "+
			"the PodGroup instead; or share a claim by name, without a PodGroup, that has the annotation %s",
			scheduling.ReservedForAnnotation))}
	case policy.DependsOnWorkload() && !hasWorkload:
		return field.ErrorList{field.Required(workloadPath, fmt.Sprintf("%s needs the object that creates the pods of the "+
			"PodGroup, as <API group>/<resource>/<name>, such as batch/jobs/train; %s=<duration> does not",
			release, scheduling.ReleaseUnused))}
	case hasWorkload && !policy.DependsOnWorkload():
		return field.ErrorList{field.Forbidden(workloadPath, fmt.Sprintf("has an effect only with %s or %s in the "+
			"annotation %s: add it, or remove this annotation", scheduling.ReleaseOnCompletion, scheduling.ReleaseOnSuspension,
			scheduling.ReleaseAnnotation))}
	}
	return nil
}
