// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
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

// Jobs is the webhook for Jobs, CronJobs, and JobSets whose templates of pods have the annotation
// job-claims, and for StatefulSets and LeaderWorkerSets with the annotation replica-claims. It
// denies claims that the controller could not generate, so that the author sees the error, and
// claims that the author is not permitted to create, because the controller creates them with its
// own permissions.
type Jobs struct {
	// Client creates SubjectAccessReviews, and claims in dry runs.
	Client client.Client
	// APIReader reads the owners of Jobs and StatefulSets from the API server.
	APIReader client.Reader
	Driver    string
}

const (
	kindCronJob         = "CronJob"
	kindLeaderWorkerSet = "LeaderWorkerSet"
)

// ownerKinds are the kinds of the objects that create Jobs or StatefulSets, and whose templates
// the webhook also checks, by API group. The resource is the lower-case plural of the kind.
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
			LeaderTemplate *corev1.PodTemplateSpec `json:"leaderTemplate"` // nil: the same as that of the workers
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
func parseClaims(annotation, value string, path *field.Path) ([]scheduling.JobClaim, field.ErrorList) {
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

// templateAt is a template of pods with its path.
type templateAt struct {
	*corev1.PodTemplateSpec
	path *field.Path
}

// templates returns the templates of pods that have the annotation.
func (j *workloadObject) templates() (templates []templateAt) {
	add := func(template *corev1.PodTemplateSpec, path *field.Path) {
		if _, ok := template.Annotations[j.annotation]; ok {
			templates = append(templates, templateAt{template, path})
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
	if t := j.Spec.LeaderWorkerTemplate; t != nil {
		add(&t.WorkerTemplate, spec.Child("leaderWorkerTemplate", "workerTemplate"))
		if t.LeaderTemplate != nil {
			add(t.LeaderTemplate, spec.Child("leaderWorkerTemplate", "leaderTemplate"))
		}
	}
	return templates
}

// checkLeader denies a LeaderWorkerSet whose leader and workers have different annotations: the
// claims are those of the StatefulSet of leaders.
func (j *workloadObject) checkLeader() error {
	t := j.Spec.LeaderWorkerTemplate
	if t == nil || t.LeaderTemplate == nil || sameClaims(j.annotation,
		t.LeaderTemplate.Annotations[j.annotation], t.WorkerTemplate.Annotations[j.annotation]) {
		return nil
	}
	return denied(reasonAnnotationDiffers,
		"%s: differs from that of leaderTemplate: the leader and the workers of a replica share its claims; "+
			"use the same annotation in both templates, and list the containers that get a reference in containers",
		j.annotationPath(field.NewPath("spec", "leaderWorkerTemplate", "workerTemplate")))
}

// checkRelease denies an object that lists claims and on which, or on whose templates, the annotation release is new:
// it has no effect. An object with a controller has the annotations of its owner, which was checked.
func (j *workloadObject) checkRelease(old *workloadObject) error {
	if len(j.templates()) == 0 || metav1.GetControllerOfNoCopy(&j.Metadata) != nil {
		return nil
	}
	advice := "those of a Job are released when it is suspended, and deleted when it ends: remove the annotation; " +
		"deletionPolicy: OnDeletion of an element keeps its claim until the Job is deleted"
	if j.annotation == scheduling.ReplicaClaimsAnnotation {
		advice = "those of a replica stay until it is scaled away: remove the annotation"
	}
	before, after := old.releases(), j.releases()
	for _, path := range slices.Sorted(maps.Keys(after)) {
		if before[path] != after[path] {
			return denied(reasonInvalid, "%s: Forbidden: %q has no effect on the claims that the annotation %s lists: %s; "+
				"claims of a PodGroup can be released after a time without pods", path, after[path], j.annotation, advice)
		}
	}
	return nil
}

// releases returns the annotations release of the object and of its templates, by their paths.
func (j *workloadObject) releases() map[string]string {
	values := map[string]string{}
	add := func(meta *metav1.ObjectMeta, path *field.Path) {
		if value, ok := meta.Annotations[scheduling.ReleaseAnnotation]; ok {
			values[path.Child("metadata", "annotations").Key(scheduling.ReleaseAnnotation).String()] = value
		}
	}
	add(&j.Metadata, nil)
	for _, t := range j.templates() {
		add(&t.ObjectMeta, t.path)
	}
	spec := field.NewPath("spec")
	if j.Spec.JobTemplate != nil {
		add(&j.Spec.JobTemplate.ObjectMeta, spec.Child("jobTemplate"))
	}
	for i := range j.Spec.ReplicatedJobs {
		add(&j.Spec.ReplicatedJobs[i].Template.ObjectMeta, spec.Child("replicatedJobs").Index(i).Child("template"))
	}
	return values
}

// containers returns the containers of the pods that share the claims which the template
// lists: in a LeaderWorkerSet, those of the leader and of the workers.
func (j *workloadObject) containers(template *corev1.PodSpec) map[string]*corev1.Container {
	known := containersByName(template)
	if t := j.Spec.LeaderWorkerTemplate; t != nil {
		maps.Copy(known, containersByName(&t.WorkerTemplate.Spec))
		if t.LeaderTemplate != nil {
			maps.Copy(known, containersByName(&t.LeaderTemplate.Spec))
		}
	}
	return known
}

// values returns the annotations of the templates that have one, by their paths.
func (j *workloadObject) values() map[string]string {
	values := map[string]string{}
	for _, t := range j.templates() {
		values[t.path.String()] = t.Annotations[j.annotation]
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

// Handle implements admission.Handler.
func (j *Jobs) Handle(ctx context.Context, req admission.Request) admission.Response {
	object, err := decodeWorkload(req.Kind.Kind, req.Object.Raw)
	if err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	old, err := decodeWorkload(req.Kind.Kind, req.OldObject.Raw)
	if err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	warnings, err := j.checkObject(ctx, req, old, object)
	if err != nil {
		return errorResponse(err, warnings)
	}
	return admission.Allowed("").WithWarnings(warnings...)
}

// checkObject denies an object with a changed annotation that is invalid, and returns warnings.
func (j *Jobs) checkObject(
	ctx context.Context, req admission.Request, old, object *workloadObject,
) (warnings []string, err error) {
	if err := j.checkUpdate(req, old, object); err != nil {
		return nil, err
	}
	if err := errors.Join(object.checkLeader(), object.checkRelease(old)); err != nil {
		return nil, err
	}
	before, known := old.values(), &confirmed{}
	for _, t := range object.templates() {
		previous, existed := before[t.path.String()]
		if existed && sameClaims(object.annotation, previous, t.Annotations[object.annotation]) {
			continue
		}
		more, err := j.check(ctx, req, object, t, known)
		warnings = append(warnings, more...)
		if err != nil {
			return warnings, err
		}
	}
	return warnings, nil
}

// checkUpdate denies changes of the listed claims, except on a CronJob: the claims may exist, and
// pods may use them. The Jobs that a CronJob creates from now on have the new ones.
func (j *Jobs) checkUpdate(req admission.Request, old, updated *workloadObject) error {
	if req.Operation != admissionv1.Update || req.Kind.Kind == kindCronJob {
		return nil
	}
	before, after := old.values(), updated.values()
	for _, values := range []map[string]string{before, after} {
		for path := range values {
			if !sameClaims(updated.annotation, before[path], after[path]) {
				return denied(reasonInUse,
					"%s: cannot be changed, because pods may use the claims: delete the %s, and create another",
					updated.annotationPath(field.NewPath(path)), req.Kind.Kind)
			}
		}
	}
	return nil
}

func (j *workloadObject) annotationPath(template *field.Path) *field.Path {
	return template.Child("metadata", "annotations").Key(j.annotation)
}

// confirmed has what the API server has confirmed about an object. The replicated jobs of a JobSet often list the
// same claims, and a request for each of them would take longer than the timeout of the webhook.
type confirmed struct {
	// valid has the specs that the API server accepts.
	valid []*resourceapi.ResourceClaimSpec
	// authorized means that the author may create claims.
	authorized bool
}

// check denies a template of pods whose claims cannot be generated, and returns warnings.
func (j *Jobs) check(
	ctx context.Context, req admission.Request, object *workloadObject, t templateAt, known *confirmed,
) ([]string, error) {
	path := object.annotationPath(t.path)
	inherited, err := j.isInherited(ctx, req, object, t.Annotations[object.annotation])
	if err != nil || inherited && req.Kind.Kind == "StatefulSet" {
		return nil, err // the LeaderWorkerSet was checked, with the containers of all of its templates
	}
	claims, errs := parseClaims(object.annotation, t.Annotations[object.annotation], path)
	if _, ok := t.Annotations[scheduling.GroupAnnotation]; ok {
		errs = append(errs, field.Forbidden(path, "the pods are in a PodGroup, by the annotation "+
			scheduling.GroupAnnotation+": remove one of the annotations"))
	}
	errs = append(errs, unknownContainers(claims, object.containers(&t.Spec), path)...)
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
			invalid, err := j.dryRun(ctx, req.Namespace, claims[i].Spec, specPath, known)
			if err != nil {
				return nil, err
			}
			errs = append(errs, invalid...)
		}
	}
	if err := errs.ToAggregate(); err != nil {
		return nil, denied(reasonInvalid, "%w", err)
	}
	if inline && !inherited && !known.authorized {
		if err := j.authorize(ctx, req, object, t); err != nil {
			return nil, err
		}
		known.authorized = true
	}
	return object.overridden(claims, t), nil
}

// unknownContainers returns an error for each container of the entries that the template lacks.
func unknownContainers(
	claims []scheduling.JobClaim, known map[string]*corev1.Container, path *field.Path,
) (errs field.ErrorList) {
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
func (j *workloadObject) overridden(claims []scheduling.JobClaim, t templateAt) (warnings []string) {
	for i, c := range t.Spec.ResourceClaims {
		if slices.ContainsFunc(claims, func(entry scheduling.JobClaim) bool { return entry.Name == c.Name }) {
			warnings = append(warnings, fmt.Sprintf("%s %q overrides the claim of that name in the annotation %s: "+
				"the pods use %s; rename one of them to use both", t.path.Child("spec", "resourceClaims").Index(i), c.Name,
				j.annotation, describeSource(c.ResourceClaimName, c.ResourceClaimTemplateName)))
		}
	}
	return warnings
}

// dryRun returns the errors that the API server reports for the spec of a claim.
func (j *Jobs) dryRun(
	ctx context.Context, namespace string, spec *resourceapi.ResourceClaimSpec, path *field.Path, known *confirmed,
) (field.ErrorList, error) {
	isSame := func(valid *resourceapi.ResourceClaimSpec) bool { return equality.Semantic.DeepEqual(valid, spec) }
	if slices.ContainsFunc(known.valid, isSame) {
		return nil, nil
	}
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
	known.valid = append(known.valid, spec)
	return nil, nil
}

// mayDo reports whether the user of the request has a right.
func (j *Jobs) mayDo(
	ctx context.Context, req admission.Request, right authorizationv1.ResourceAttributes,
) (bool, error) {
	right.Namespace = req.Namespace
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: req.UserInfo.Username, Groups: req.UserInfo.Groups, UID: req.UserInfo.UID, Extra: extra(req.UserInfo),
		ResourceAttributes: &right,
	}}
	if err := j.Client.Create(ctx, review); err != nil {
		return false, fmt.Errorf("check the right of user %q to %s %s: %w",
			req.UserInfo.Username, right.Verb, right.Resource, err)
	}
	return review.Status.Allowed, nil
}

// authorize denies the request unless its user may create ResourceClaims.
func (j *Jobs) authorize(ctx context.Context, req admission.Request, object *workloadObject, t templateAt) error {
	allowed, err := j.mayDo(ctx, req, authorizationv1.ResourceAttributes{
		Verb: "create", Group: resourceapi.GroupName, Version: "v1", Resource: "resourceclaims",
	})
	if err != nil || allowed {
		return err
	}
	return denied(reasonNotPermitted,
		"%s: user %q may not create ResourceClaims in namespace %q, which an entry with spec requires: "+
			"ask for the right to create resourceclaims.%s, or use resourceClaimTemplateName instead of spec",
		object.annotationPath(t.path), req.UserInfo.Username, req.Namespace, resourceapi.GroupName)
}

func extra(user authenticationv1.UserInfo) map[string]authorizationv1.ExtraValue {
	values := map[string]authorizationv1.ExtraValue{}
	for key, value := range user.Extra {
		values[key] = authorizationv1.ExtraValue(value)
	}
	return values
}

// isInherited reports whether the controller of the object exists, and lists the same claims, and
// the user may create objects that it controls.
// Then a controller has created the object, such as a Job of a JobSet, and the owner's author
// had the right to create claims. For the StatefulSet of a LeaderWorkerSet's workers, whose
// controller is the leader's pod, it checks the controller of that pod.
func (j *Jobs) isInherited(
	ctx context.Context, req admission.Request, object *workloadObject, value string,
) (bool, error) {
	namespace, controller := req.Namespace, metav1.GetControllerOfNoCopy(&object.Metadata)
	ofLeader := controller != nil && controller.Kind == "Pod" && controller.APIVersion == "v1"
	if ofLeader {
		leader, err := j.owner(ctx, namespace, controller, object.annotation)
		if err != nil || leader == nil {
			return false, err
		}
		controller = metav1.GetControllerOf(leader)
	}
	if !createsWorkloads(controller) && (!ofLeader || !isStatefulSet(controller)) {
		return false, nil
	}
	owner, err := j.owner(ctx, namespace, controller, object.annotation)
	if err != nil || owner == nil {
		return false, err
	}
	typed := workloadObject{annotation: object.annotation}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(owner.Object, &typed.workloadFields); err != nil {
		return false, fmt.Errorf("read %s %q: %w", controller.Kind, controller.Name, err)
	}
	same := func(t templateAt) bool { return sameClaims(typed.annotation, t.Annotations[typed.annotation], value) }
	if !slices.ContainsFunc(typed.templates(), same) {
		return false, nil
	}
	return j.controls(ctx, req, controller)
}

// controls reports whether the user may create objects that the owner controls: any user can name an owner.
// The right is that of Kubernetes' admission plugin OwnerReferencesPermissionEnforcement.
func (j *Jobs) controls(ctx context.Context, req admission.Request, owner *metav1.OwnerReference) (bool, error) {
	group, _, _ := strings.Cut(owner.APIVersion, "/")
	resource := ownerKinds[group].resource
	if isStatefulSet(owner) {
		resource = "statefulsets"
	}
	return j.mayDo(ctx, req, authorizationv1.ResourceAttributes{
		Verb: "update", Group: group, Resource: resource, Subresource: "finalizers", Name: owner.Name,
	})
}

// createsWorkloads reports whether a controller has one of the ownerKinds.
func createsWorkloads(controller *metav1.OwnerReference) bool {
	if controller == nil {
		return false
	}
	group, _, _ := strings.Cut(controller.APIVersion, "/")
	owner, known := ownerKinds[group]
	return known && owner.kind == controller.Kind
}

// owner returns the object that a reference to a controller names, or nil if it does not exist.
func (j *Jobs) owner(
	ctx context.Context, namespace string, controller *metav1.OwnerReference, annotation string,
) (*unstructured.Unstructured, error) {
	owner := &unstructured.Unstructured{}
	owner.SetGroupVersionKind(schema.FromAPIVersionAndKind(controller.APIVersion, controller.Kind))
	err := j.APIReader.Get(ctx, types.NamespacedName{Namespace: namespace, Name: controller.Name}, owner)
	switch {
	case apierrors.IsNotFound(err), meta.IsNoMatchError(err), err == nil && owner.GetUID() != controller.UID:
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look up %s %q, which created an object with the annotation %s: %w",
			controller.Kind, controller.Name, annotation, err)
	}
	return owner, nil
}
