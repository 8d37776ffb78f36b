// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"context"
	"errors"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

// listedClaims returns the claims that an annotation of a pod template lists, except
// claims that a claim of the pods overrides.
func listedClaims(
	template *corev1.PodTemplateSpec, annotation string,
	parse func(string, *field.Path) ([]scheduling.ListedClaim, field.ErrorList),
) ([]scheduling.ListedClaim, error) {
	value, ok := template.Annotations[annotation]
	if !ok {
		return nil, nil
	}
	jobClaims, errs := parse(value, field.NewPath("spec", "template", "metadata", "annotations").Key(annotation))
	return slices.DeleteFunc(jobClaims, func(j scheduling.ListedClaim) bool {
		return slices.ContainsFunc(template.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool {
			return c.Name == j.Name
		})
	}), errs.ToAggregate()
}

// reportProblems emits an event on the owner of the group's claims for each problem, for each claim that a user has
// deleted, for each claim without a leader that the scheduler accepts, and for each write that the API server refuses.
func (r *Reconciler) reportProblems(owner client.Object, g *group) {
	warn := func(reason, message string) {
		r.Events.Eventf(owner, nil, corev1.EventTypeWarning, reason, scheduling.EventActionClaims, "%s", message)
	}
	for _, s := range g.sharedClaims {
		if s.problem != nil {
			warn(scheduling.ReasonClaimMissing, s.problem.Error())
		}
		if len(s.deletedClaims()) > 0 {
			warn(scheduling.ReasonClaimDeleted, g.deletionMessage(s))
		}
		if l := g.stalled(s); l != nil {
			warn(scheduling.ReasonUnschedulable, stalledMessage(s, l))
		}
		if s.reserveProblem != nil {
			warn(scheduling.ReasonWriteRefused, s.reserveProblem.Error())
		}
	}
	if g.gateProblem != nil {
		warn(scheduling.ReasonWriteRefused, g.gateProblem.Error())
	}
}

// releaseClaims deletes the shards of the released claims. Pods that run keep them until they end,
// because the pods have separate entries.
func (r *Reconciler) releaseClaims(ctx context.Context, g *group, released []*sharedClaim) error {
	var errs error
	for _, s := range released {
		for n, claim := range s.shards {
			errs = errors.Join(errs, r.releaseOwnedClaim(ctx, claim, g.UID, g.waitingUsers(s, n)...))
		}
	}
	return errs
}

// releaseOwnedClaim deletes a claim that was generated for the owner with that UID. waiting
// are pods without a node that have entries.
func (r *Reconciler) releaseOwnedClaim(
	ctx context.Context, claim *resourceapi.ResourceClaim, uid types.UID, waiting ...types.UID,
) error {
	return errors.Join(r.writer().Delete(ctx, claim),
		r.writer().Apply(ctx, claim, claims.ReleaseChange(claim, uid, false, waiting...)))
}

// readListedClaims reads the claims that an annotation lists. Their shards are among the
// owned claims.
func (r *Reconciler) readListedClaims(
	ctx context.Context, g *group, listed []scheduling.ListedClaim, owned []*resourceapi.ResourceClaim,
) error {
	for i := range listed {
		c := scheduling.PodGroupResourceClaim{
			Name: listed[i].Name, ResourceClaimTemplateName: listed[i].ResourceClaimTemplateName,
		}
		s, err := r.readGeneratedClaim(ctx, g, c, owned)
		if err != nil {
			return err
		}
		if template := listed[i].Template(); template != nil {
			s.template = template
		}
		g.sharedClaims = append(g.sharedClaims, s)
	}
	return nil
}

// releaseFormerOwners deletes the claims of owners of one kind that had this name and no longer exist. Their deletion
// does not wait for the controller, which does not add a finalizer to them. uid is the UID of the object that has the
// name in the cache, if there is one. index finds the claims by the names of their owners, ownerOf returns the owner,
// and current is an empty object of the kind.
func (r *Reconciler) releaseFormerOwners(
	ctx context.Context, name types.NamespacedName, uid types.UID, index string,
	ownerOf func(*resourceapi.ResourceClaim) *claims.Owner, current client.Object,
) error {
	var generated resourceapi.ResourceClaimList
	if err := r.Client.List(ctx, &generated, client.InNamespace(name.Namespace),
		client.MatchingFields{index: name.Name}); err != nil {
		return err
	}
	for i := range generated.Items {
		claim := &generated.Items[i]
		owner := ownerOf(claim)
		if owner == nil || owner.UID == uid {
			continue
		}
		// The cache of owners may be older than the cache of claims.
		if err := r.APIReader.Get(ctx, name, current); client.IgnoreNotFound(err) != nil {
			return err
		}
		if current.GetUID() == owner.UID {
			continue
		}
		if err := r.releaseOwnedClaim(ctx, claim, owner.UID); err != nil {
			return err
		}
	}
	return nil
}

// ownerOfKind returns the object that the claim was generated for if it is of the kind of an owner without name and
// UID, or nil. The claim names the object in its owner reference, or, if a user has deleted the object without its
// dependents, in its entry. The hash in the claim's name is the proof.
func ownerOfKind(claim *resourceapi.ResourceClaim, kind claims.Owner) *claims.Owner {
	name, ok := claim.Annotations[scheduling.ClaimAnnotation]
	if !ok {
		return nil
	}
	named := func(name string, uid types.UID) claims.Owner {
		kind.Name, kind.UID, kind.Replica = name, uid, claim.Annotations[scheduling.ReplicaAnnotation]
		return kind
	}
	var candidates []claims.Owner
	if c := metav1.GetControllerOf(claim); c != nil && c.APIVersion == kind.GroupVersion().String() &&
		c.Kind == kind.Kind {
		candidates = append(candidates, named(c.Name, c.UID))
	}
	for _, e := range claim.Status.ReservedFor {
		if e.APIGroup == kind.Group && e.Resource == kind.Resource {
			candidates = append(candidates, named(e.Name, e.UID))
		}
	}
	for _, owner := range candidates {
		if _, ok := claims.ShardNumber(owner, name, claim.Name); ok {
			return &owner
		}
	}
	return nil
}

// templateNames returns a function that returns the names of the ResourceClaimTemplates that an object's pod template
// refers to in its list of claims. It returns none if the list is invalid.
func templateNames(claimsOf func(*corev1.PodTemplateSpec) ([]scheduling.ListedClaim, error)) client.IndexerFunc {
	return func(o client.Object) (names []string) {
		template := podTemplate(o)
		if template == nil {
			return nil
		}
		listed, err := claimsOf(template)
		if err != nil {
			return nil
		}
		for _, c := range listed {
			if c.ResourceClaimTemplateName != nil {
				names = append(names, *c.ResourceClaimTemplateName)
			}
		}
		return names
	}
}

// ownerNames returns a function that returns the name of the object that a claim was generated for.
func ownerNames(ownerOf func(*resourceapi.ResourceClaim) *claims.Owner) client.IndexerFunc {
	return func(o client.Object) []string {
		claim, ok := o.(*resourceapi.ResourceClaim)
		if !ok {
			return nil
		}
		owner := ownerOf(claim)
		if owner == nil {
			return nil
		}
		return []string{owner.Name}
	}
}

// listedClaimsController is the controller of the claims that an annotation of pod templates
// lists.
type listedClaimsController struct {
	name string
	// owner is an empty object of the kind. Its pod templates list claims.
	owner client.Object
	// annotation lists the claims; objects without it do not need a reconcile.
	annotation string
	indexes    []index
	// ownersOfClaim, ownersOfTemplate, and ownersOfPod return requests for the owners that a
	// change of another object affects.
	ownersOfClaim, ownersOfTemplate, ownersOfPod handler.MapFunc
}

// setUp registers the controller with the manager, which starts it.
func (c listedClaimsController) setUp(ctx context.Context, m ctrl.Manager, r reconcile.Reconciler) error {
	if err := addIndexes(ctx, m, c.indexes); err != nil {
		return err
	}
	hasClaims := predicate.NewPredicateFuncs(func(o client.Object) bool {
		template := podTemplate(o)
		return template != nil && template.Annotations[c.annotation] != ""
	})
	return ctrl.NewControllerManagedBy(m).Named(c.name).
		For(c.owner, builder.WithPredicates(hasClaims)).
		Watches(&resourceapi.ResourceClaim{}, handler.EnqueueRequestsFromMapFunc(c.ownersOfClaim)).
		Watches(&resourceapi.ResourceClaimTemplate{}, handler.EnqueueRequestsFromMapFunc(c.ownersOfTemplate)).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(c.ownersOfPod),
			builder.WithPredicates(relevantPodChange())).
		WithOptions(controllerOptions()).
		Complete(r)
}

// podTemplate returns the pod template of a Job or a StatefulSet, or nil for other objects.
func podTemplate(o client.Object) *corev1.PodTemplateSpec {
	switch o := o.(type) {
	case *batchv1.Job:
		return &o.Spec.Template
	case *appsv1.StatefulSet:
		return &o.Spec.Template
	}
	return nil
}
