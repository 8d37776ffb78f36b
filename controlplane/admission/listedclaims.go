// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
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

// ListedClaims is the webhook for Jobs, CronJobs, and JobSets with the annotation job-claims on their pod templates,
// and for StatefulSets and LeaderWorkerSets with the annotation replica-claims. It denies claims that the controller
// could not generate: the author then sees the error. It also denies claims that the author is not permitted to create,
// because the controller creates them with its own permissions.
type ListedClaims struct {
	// Client creates SubjectAccessReviews, and claims in dry runs.
	Client client.Client
	// APIReader reads the owners of Jobs and StatefulSets from the API server.
	APIReader client.Reader
	Driver    string
}

// checkLeader denies a LeaderWorkerSet if its leader and workers have different annotations: the claims belong to the
// StatefulSet of leaders.
func (w *workloadObject) checkLeader() error {
	t := w.Spec.LeaderWorkerTemplate
	if t == nil || t.LeaderTemplate == nil || sameClaims(w.annotation,
		t.LeaderTemplate.Annotations[w.annotation], t.WorkerTemplate.Annotations[w.annotation]) {
		return nil
	}
	return denied(reasonAnnotationDiffers,
		"%s: differs from the one of leaderTemplate: the leader and the workers of a replica share its claims; "+
			"use the same annotation in both templates, and list the containers that get a reference in containers",
		w.annotationPath(field.NewPath("spec", "leaderWorkerTemplate", "workerTemplate")))
}

// checkRelease denies an object that lists claims if it or its templates have a new annotation release, because the
// annotation does not have an effect. An object with a controller has its owner's annotations, which were checked.
func (w *workloadObject) checkRelease(old *workloadObject) error {
	if len(w.templates()) == 0 || metav1.GetControllerOfNoCopy(&w.Metadata) != nil {
		return nil
	}
	advice := "the claims of a Job are released when it is suspended, and deleted when it ends: remove the annotation; " +
		"deletionPolicy: OnDeletion of an element keeps its claim until the Job is deleted"
	if w.annotation == scheduling.ReplicaClaimsAnnotation {
		advice = "the claims of a replica stay until it is scaled away: remove the annotation"
	}
	before, after := old.releases(), w.releases()
	for _, path := range slices.Sorted(maps.Keys(after)) {
		if before[path] != after[path] {
			return denied(reasonInvalid, "%s: Forbidden: %q has no effect on the claims that the annotation %s lists: %s; "+
				"claims of a PodGroup can be released after a time without pods", path, after[path], w.annotation, advice)
		}
	}
	return nil
}

// Handle implements admission.Handler.
func (l *ListedClaims) Handle(ctx context.Context, req admission.Request) admission.Response {
	object, err := decodeWorkload(req.Kind.Kind, req.Object.Raw)
	if err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	old, err := decodeWorkload(req.Kind.Kind, req.OldObject.Raw)
	if err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	warnings, err := l.checkObject(ctx, req, old, object)
	if err != nil {
		return errorResponse(err, warnings)
	}
	return admission.Allowed("").WithWarnings(warnings...)
}

// checkObject denies an object with a changed annotation that is invalid, and returns warnings.
func (l *ListedClaims) checkObject(
	ctx context.Context, req admission.Request, old, object *workloadObject,
) (warnings []string, err error) {
	if err := l.checkUpdate(req, old, object); err != nil {
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
		more, err := l.check(ctx, req, object, t, known)
		warnings = append(warnings, more...)
		if err != nil {
			return warnings, err
		}
	}
	return warnings, nil
}

// checkUpdate denies changes of the listed claims, except on a CronJob: the claims may exist, and
// pods may use them. The Jobs that a CronJob creates from now on have the new ones.
func (l *ListedClaims) checkUpdate(req admission.Request, old, updated *workloadObject) error {
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

// confirmed has what the API server has confirmed about an object. The replicated jobs of a JobSet often list the
// same claims, and a request for each of them would take longer than the timeout of the webhook.
type confirmed struct {
	// valid has the specs that the API server accepts.
	valid []*resourceapi.ResourceClaimSpec
	// authorized means that the author may create claims.
	authorized bool
}

// check denies a pod template if its claims cannot be generated, and returns warnings.
func (l *ListedClaims) check(
	ctx context.Context, req admission.Request, object *workloadObject, t templateAt, known *confirmed,
) ([]string, error) {
	path := object.annotationPath(t.path)
	inherited, err := l.isInherited(ctx, req, object, t.Annotations[object.annotation])
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
		errs = append(errs, (&Parameters{Driver: l.Driver}).validateClaim(claims[i].Spec.Devices,
			specPath.Child("devices", "config"))...)
		if len(errs) == 0 {
			invalid, err := l.dryRun(ctx, req.Namespace, claims[i].Spec, specPath, known)
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
		if err := l.authorize(ctx, req, object, t); err != nil {
			return nil, err
		}
		known.authorized = true
	}
	return object.overridden(claims, t), nil
}

// unknownContainers returns an error for each container of the entries that the template lacks.
func unknownContainers(
	claims []scheduling.ListedClaim, known map[string]*corev1.Container, path *field.Path,
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
func (w *workloadObject) overridden(claims []scheduling.ListedClaim, t templateAt) (warnings []string) {
	for i, c := range t.Spec.ResourceClaims {
		if slices.ContainsFunc(claims, func(entry scheduling.ListedClaim) bool { return entry.Name == c.Name }) {
			warnings = append(warnings, fmt.Sprintf("%s %q overrides the claim of that name in the annotation %s: "+
				"the pods use %s; rename one of them to use both", t.path.Child("spec", "resourceClaims").Index(i), c.Name,
				w.annotation, describeSource(c.ResourceClaimName, c.ResourceClaimTemplateName)))
		}
	}
	return warnings
}

// dryRun returns the errors that the API server reports for the spec of a claim.
func (l *ListedClaims) dryRun(
	ctx context.Context, namespace string, spec *resourceapi.ResourceClaimSpec, path *field.Path, known *confirmed,
) (field.ErrorList, error) {
	isSame := func(valid *resourceapi.ResourceClaimSpec) bool { return equality.Semantic.DeepEqual(valid, spec) }
	if slices.ContainsFunc(known.valid, isSame) {
		return nil, nil
	}
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "dra-shared-dry-run-"}, Spec: *spec.DeepCopy(),
	}
	err := l.Client.Create(ctx, claim, client.DryRunAll)
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
func (l *ListedClaims) mayDo(
	ctx context.Context, req admission.Request, right authorizationv1.ResourceAttributes,
) (bool, error) {
	right.Namespace = req.Namespace
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: req.UserInfo.Username, Groups: req.UserInfo.Groups, UID: req.UserInfo.UID, Extra: extra(req.UserInfo),
		ResourceAttributes: &right,
	}}
	if err := l.Client.Create(ctx, review); err != nil {
		return false, fmt.Errorf("check the right of user %q to %s %s: %w",
			req.UserInfo.Username, right.Verb, right.Resource, err)
	}
	return review.Status.Allowed, nil
}

// authorize denies the request unless its user may create ResourceClaims.
func (l *ListedClaims) authorize(
	ctx context.Context, req admission.Request, object *workloadObject, t templateAt,
) error {
	allowed, err := l.mayDo(ctx, req, authorizationv1.ResourceAttributes{
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

// isInherited reports whether the controller of the object exists, and lists the same claims, and the user may create
// objects that it controls. Then a controller has created the object, such as a Job of a JobSet, and the owner's author
// had the right to create claims. The StatefulSet of a LeaderWorkerSet's workers has the leader's pod as its
// controller, so isInherited checks that pod's controller.
func (l *ListedClaims) isInherited(
	ctx context.Context, req admission.Request, object *workloadObject, value string,
) (bool, error) {
	namespace, controller := req.Namespace, metav1.GetControllerOfNoCopy(&object.Metadata)
	ownedByLeader := controller != nil && controller.Kind == "Pod" && controller.APIVersion == "v1"
	if ownedByLeader {
		leader, err := l.owner(ctx, namespace, controller, object.annotation)
		if err != nil || leader == nil {
			return false, err
		}
		controller = metav1.GetControllerOf(leader)
	}
	if !createsWorkloads(controller) && (!ownedByLeader || !isStatefulSet(controller)) {
		return false, nil
	}
	owner, err := l.owner(ctx, namespace, controller, object.annotation)
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
	return l.controls(ctx, req, controller)
}

// controls reports whether the user may create objects that the owner controls: any user can name an owner.
// Kubernetes' admission plugin OwnerReferencesPermissionEnforcement requires the same right.
func (l *ListedClaims) controls(
	ctx context.Context, req admission.Request, owner *metav1.OwnerReference,
) (bool, error) {
	group, _, _ := strings.Cut(owner.APIVersion, "/")
	resource := ownerKinds[group].resource
	if isStatefulSet(owner) {
		resource = "statefulsets"
	}
	return l.mayDo(ctx, req, authorizationv1.ResourceAttributes{
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
func (l *ListedClaims) owner(
	ctx context.Context, namespace string, controller *metav1.OwnerReference, annotation string,
) (*unstructured.Unstructured, error) {
	owner := &unstructured.Unstructured{}
	owner.SetGroupVersionKind(schema.FromAPIVersionAndKind(controller.APIVersion, controller.Kind))
	err := l.APIReader.Get(ctx, types.NamespacedName{Namespace: namespace, Name: controller.Name}, owner)
	switch {
	case apierrors.IsNotFound(err), meta.IsNoMatchError(err), err == nil && owner.GetUID() != controller.UID:
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look up %s %q, which created an object with the annotation %s: %w",
			controller.Kind, controller.Name, annotation, err)
	}
	return owner, nil
}
