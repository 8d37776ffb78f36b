// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"

	admissionv1 "k8s.io/api/admission/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// Jobs is the webhook for Jobs, CronJobs, and JobSets whose templates of pods have the
// annotation job-claims. It denies what the controller could not, or must not, generate:
// the author sees the error, and the controller acts with rights of its own.
type Jobs struct {
	// Client creates SubjectAccessReviews, and claims in dry runs.
	Client client.Client
	// APIReader reads the owners of Jobs from the API server.
	APIReader client.Reader
	Driver    string
}

// jobOwners are the kinds with templates of Jobs that the webhook also checks, by API group.
var jobOwners = map[string]string{batchv1.GroupName: "CronJob", "jobset.x-k8s.io": "JobSet"}

// jobs is a Job, a CronJob, or a JobSet.
type jobs struct {
	Metadata metav1.ObjectMeta `json:"metadata"`
	Spec     struct {
		Template       *corev1.PodTemplateSpec  `json:"template"`    // of a Job
		JobTemplate    *batchv1.JobTemplateSpec `json:"jobTemplate"` // of a CronJob
		ReplicatedJobs []struct {
			Name     string                  `json:"name"`
			Template batchv1.JobTemplateSpec `json:"template"`
		} `json:"replicatedJobs"` // of a JobSet
	} `json:"spec"`
}

// jobTemplate is a template of a Job's pods with its path.
type jobTemplate struct {
	*corev1.PodTemplateSpec
	path *field.Path
}

// templates returns the templates of pods that have the annotation.
func (j *jobs) templates() (templates []jobTemplate) {
	add := func(template *corev1.PodTemplateSpec, path *field.Path) {
		if _, ok := template.Annotations[scheduling.JobClaimsAnnotation]; ok {
			templates = append(templates, jobTemplate{template, path})
		}
	}
	spec := field.NewPath("spec")
	if j.Spec.Template != nil {
		add(j.Spec.Template, spec.Child("template"))
	}
	if j.Spec.JobTemplate != nil {
		add(&j.Spec.JobTemplate.Spec.Template, spec.Child("jobTemplate", "spec", "template"))
	}
	for i := range j.Spec.ReplicatedJobs {
		add(&j.Spec.ReplicatedJobs[i].Template.Spec.Template,
			spec.Child("replicatedJobs").Index(i).Child("template", "spec", "template"))
	}
	return templates
}

// values returns the annotations by the paths of their templates. It contains no templates
// without the annotation.
func (j *jobs) values() map[string]string {
	values := map[string]string{}
	for _, t := range j.templates() {
		if value, ok := t.Annotations[scheduling.JobClaimsAnnotation]; ok {
			values[t.path.String()] = value
		}
	}
	return values
}

// Handle implements admission.Handler.
func (j *Jobs) Handle(ctx context.Context, req admission.Request) admission.Response {
	var object, old jobs
	if err := json.Unmarshal(req.Object.Raw, &object); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	if len(req.OldObject.Raw) > 0 {
		if err := json.Unmarshal(req.OldObject.Raw, &old); err != nil {
			return admission.Errored(http.StatusBadRequest, err)
		}
	}
	var warnings []string
	err := j.checkUpdate(req, &old, &object)
	before, after := old.values(), object.values()
	for _, t := range object.templates() {
		if err != nil {
			break
		}
		value, ok := after[t.path.String()]
		if previous, existed := before[t.path.String()]; !ok || existed && previous == value {
			continue
		}
		var more []string
		more, err = j.check(ctx, req, &object, t)
		warnings = append(warnings, more...)
	}
	if err != nil {
		return errorResponse(err, warnings)
	}
	return admission.Allowed("").WithWarnings(warnings...)
}

// checkUpdate denies to change the annotation of a Job or a JobSet: its claims may exist,
// and its pods may use them. The Jobs that a CronJob creates from now on have the new one.
func (j *Jobs) checkUpdate(req admission.Request, old, updated *jobs) error {
	if req.Operation != admissionv1.Update || req.Kind.Kind == jobOwners[batchv1.GroupName] {
		return nil
	}
	before, after := old.values(), updated.values()
	for _, values := range []map[string]string{before, after} {
		for path := range values {
			if before[path] != after[path] {
				return denied("%s: cannot be changed, because pods may use the claims: delete the %s, and create another",
					annotationPath(field.NewPath(path)), req.Kind.Kind)
			}
		}
	}
	return nil
}

func annotationPath(template *field.Path) *field.Path {
	return template.Child("metadata", "annotations").Key(scheduling.JobClaimsAnnotation)
}

// check denies a template of pods whose claims cannot be generated, and returns warnings.
func (j *Jobs) check(ctx context.Context, req admission.Request, object *jobs, t jobTemplate) ([]string, error) {
	path := annotationPath(t.path)
	claims, errs := scheduling.ParseJobClaims(t.Annotations[scheduling.JobClaimsAnnotation], path)
	if _, ok := t.Annotations[scheduling.GroupAnnotation]; ok {
		errs = append(errs, field.Forbidden(path, "the pods are in a PodGroup, by the annotation "+
			scheduling.GroupAnnotation+": remove one of the annotations"))
	}
	errs = append(errs, unknownContainers(claims, &t.Spec, path)...)
	inline := false
	for i := range claims {
		if claims[i].Spec == nil {
			continue
		}
		inline = true
		specPath := path.Index(i).Child("spec")
		errs = append(errs, (&Parameters{Driver: j.Driver}).validateClaim(claims[i].Spec.Devices.Config,
			specPath.Child("devices", "config"))...)
		if len(errs) == 0 {
			invalid, err := j.dryRun(ctx, req.Namespace, claims[i].Spec, specPath)
			if err != nil {
				return nil, err
			}
			errs = append(errs, invalid...)
		}
	}
	if err := errs.ToAggregate(); err != nil {
		return nil, denied("%w", err)
	}
	if inline {
		if err := j.authorize(ctx, req, object, t); err != nil {
			return nil, err
		}
	}
	return overridden(claims, &t.Spec, t.path), nil
}

// unknownContainers returns an error for each container of the entries that the template lacks.
func unknownContainers(claims []scheduling.JobClaim, spec *corev1.PodSpec, path *field.Path) (errs field.ErrorList) {
	known := containersByName(spec)
	for i, c := range claims {
		for k, name := range c.Containers {
			if known[name] == nil {
				errs = append(errs, field.NotFound(path.Index(i).Child("containers").Index(k), name))
			}
		}
	}
	return errs
}

// overridden returns a warning for each entry that a claim of the pods overrides.
func overridden(claims []scheduling.JobClaim, spec *corev1.PodSpec, path *field.Path) (warnings []string) {
	for i, c := range spec.ResourceClaims {
		if slices.ContainsFunc(claims, func(j scheduling.JobClaim) bool { return j.Name == c.Name }) {
			warnings = append(warnings, fmt.Sprintf("%s %q overrides the claim of that name in the annotation %s: "+
				"the pods use %s; rename one of them to use both", path.Child("spec", "resourceClaims").Index(i), c.Name,
				scheduling.JobClaimsAnnotation, describeSource(c.ResourceClaimName, c.ResourceClaimTemplateName)))
		}
	}
	return warnings
}

// dryRun returns what the API server finds invalid in the spec of a claim.
func (j *Jobs) dryRun(
	ctx context.Context, namespace string, spec *resourceapi.ResourceClaimSpec, path *field.Path,
) (field.ErrorList, error) {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "dra-shared-dry-run-"}, Spec: *spec.DeepCopy(),
	}
	err := j.Client.Create(ctx, claim, client.DryRunAll)
	switch {
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		return field.ErrorList{{Type: field.ErrorTypeForbidden, Field: path.String(), Detail: err.Error()}}, nil
	case apierrors.IsForbidden(err), apierrors.IsNotFound(err):
		return nil, nil // for example an exceeded quota: the controller tries again when the Job starts
	case err != nil:
		return nil, fmt.Errorf("validate %s: %w", path, err)
	}
	return nil, nil
}

// authorize denies the request unless its user may create ResourceClaims. A Job of a CronJob or JobSet is created by a
// controller, which has the annotation from its owner: the owner's author had the right.
func (j *Jobs) authorize(ctx context.Context, req admission.Request, object *jobs, t jobTemplate) error {
	inherited, err := j.isInherited(ctx, req.Namespace, object, t.Annotations[scheduling.JobClaimsAnnotation])
	if err != nil || inherited {
		return err
	}
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: req.UserInfo.Username, Groups: req.UserInfo.Groups, UID: req.UserInfo.UID, Extra: extra(req.UserInfo),
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Namespace: req.Namespace, Verb: "create", Group: resourceapi.GroupName, Version: "v1", Resource: "resourceclaims",
		},
	}}
	if err := j.Client.Create(ctx, review); err != nil {
		return fmt.Errorf("check the right of user %q to create ResourceClaims: %w", req.UserInfo.Username, err)
	}
	if review.Status.Allowed {
		return nil
	}
	return denied("%s: user %q may not create ResourceClaims in namespace %q, which an entry with spec requires: "+
		"ask for the right to create resourceclaims.%s, or use resourceClaimTemplateName instead of spec",
		annotationPath(t.path), req.UserInfo.Username, req.Namespace, resourceapi.GroupName)
}

func extra(user authenticationv1.UserInfo) map[string]authorizationv1.ExtraValue {
	values := map[string]authorizationv1.ExtraValue{}
	for key, value := range user.Extra {
		values[key] = authorizationv1.ExtraValue(value)
	}
	return values
}

// isInherited reports whether the controller of the object exists, and has the same annotation.
func (j *Jobs) isInherited(ctx context.Context, namespace string, object *jobs, value string) (bool, error) {
	controller := metav1.GetControllerOfNoCopy(&object.Metadata)
	if controller == nil {
		return false, nil
	}
	version, err := schema.ParseGroupVersion(controller.APIVersion)
	if err != nil {
		return false, denied("metadata.ownerReferences: %w", err)
	}
	if jobOwners[version.Group] != controller.Kind {
		return false, nil
	}
	owner := &unstructured.Unstructured{}
	owner.SetGroupVersionKind(version.WithKind(controller.Kind))
	err = j.APIReader.Get(ctx, types.NamespacedName{Namespace: namespace, Name: controller.Name}, owner)
	switch {
	case apierrors.IsNotFound(err), meta.IsNoMatchError(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look up %s %q, whose Job has the annotation %s: %w",
			controller.Kind, controller.Name, scheduling.JobClaimsAnnotation, err)
	case owner.GetUID() != controller.UID:
		return false, nil
	}
	var typed jobs
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(owner.Object, &typed); err != nil {
		return false, fmt.Errorf("read %s %q: %w", controller.Kind, controller.Name, err)
	}
	for _, inherited := range typed.values() {
		if inherited == value {
			return true, nil
		}
	}
	return false, nil
}
