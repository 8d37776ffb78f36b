// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"context"
	"errors"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

const (
	// indexJob indexes claims by the name of the Job that they were generated for.
	indexJob = "dra-shared.job"
	// indexJobTemplate indexes Jobs by the names of the templates that their claims refer to.
	indexJobTemplate = "dra-shared.job-template"
)

// JobReconciler reconciles the claims of Jobs with the annotation job-claims on their pod templates (KEP-762).
//
// To the rest of the package, such a Job is a PodGroup with claims that the Job owns. It does not need a finalizer: the
// Job's entry in a claim names the Job, so the controller finds the claims of a Job that no longer exists. Even in
// native mode, the controller reserves the claims for each pod: Kubernetes may have created one of its own PodGroups
// for the Job.
type JobReconciler struct {
	// Reconciler has the mode Bridge.
	Reconciler
}

// JobOwner returns the Job as the owner of its claims.
func JobOwner(namespace, name string, uid types.UID) claims.Owner {
	return claims.Owner{
		GroupVersionKind: batchv1.SchemeGroupVersion.WithKind("Job"), Resource: "jobs",
		Namespace: namespace, Name: name, UID: uid,
	}
}

// JobClaims returns the claims that a Job with this pod template shares among its
// pods, except claims that a claim of the pods overrides.
func JobClaims(template *corev1.PodTemplateSpec) ([]scheduling.ListedClaim, error) {
	return listedClaims(template, scheduling.JobClaimsAnnotation, scheduling.ParseJobClaims)
}

// Reconcile reconciles the claims of the Job of that name. It also releases the claims of
// earlier Jobs of the same name.
func (r *JobReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var job batchv1.Job
	err := r.Client.Get(ctx, req.NamespacedName, &job)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	if err := r.releaseFormerJobs(ctx, req.NamespacedName, job.UID); err != nil || job.UID == "" {
		return ctrl.Result{}, err
	}
	jobClaims, err := JobClaims(&job.Spec.Template)
	if err != nil {
		// Admission denies an invalid annotation. This Job is older than the webhook.
		return ctrl.Result{}, reconcile.TerminalError(err)
	}
	if len(jobClaims) == 0 {
		return ctrl.Result{}, nil
	}
	g, err := r.readJob(ctx, &job, jobClaims)
	if err != nil {
		return ctrl.Result{}, err
	}
	err = r.reconcileJob(ctx, &job, g, jobClaims)
	r.reportProblems(&job, g)
	return ctrl.Result{RequeueAfter: g.retryInterval()}, err
}

// reconcileJob performs the steps that the Job needs in its current state. It leaves in
// g the shared claims that the Job still needs.
func (r *JobReconciler) reconcileJob(
	ctx context.Context, job *batchv1.Job, g *group, jobClaims []scheduling.ListedClaim,
) error {
	switch {
	case job.DeletionTimestamp != nil:
		released := g.sharedClaims
		g.sharedClaims = nil
		return r.releaseClaims(ctx, g, released)
	case hasEnded(job):
		var released, kept []*sharedClaim
		for i, s := range g.sharedClaims {
			if jobClaims[i].DeletionPolicy == scheduling.DeleteOnDeletion {
				kept = append(kept, s)
			} else {
				released = append(released, s)
			}
		}
		g.sharedClaims = kept
		return errors.Join(r.releaseClaims(ctx, g, released), r.reserve(ctx, g))
	case ptr.Deref(job.Spec.Suspend, false):
		return r.suspend(ctx, g)
	case runsElsewhere(job, g):
		g.sharedClaims = nil
		return nil
	}
	return r.serve(ctx, g)
}

// runsElsewhere reports whether a controller other than Kubernetes' own creates the Job's pods, and has not created any
// in this cluster. MultiKueue's controller, for example, lets a copy of the Job run in another cluster. A claim in this
// cluster would not have a user.
func runsElsewhere(job *batchv1.Job, g *group) bool {
	hasShards := func(s *sharedClaim) bool { return len(s.shards) > 0 }
	return ptr.Deref(job.Spec.ManagedBy, batchv1.JobControllerName) != batchv1.JobControllerName &&
		len(g.pods) == 0 && !slices.ContainsFunc(g.sharedClaims, hasShards)
}

// hasEnded reports whether the Job is complete or has failed. All of its pods are terminal
// then.
func hasEnded(job *batchv1.Job) bool {
	return slices.ContainsFunc(job.Status.Conditions, func(c batchv1.JobCondition) bool {
		return (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) && c.Status == corev1.ConditionTrue
	})
}

// suspend releases the devices of a suspended Job. Kubernetes deletes the Job's pods. The claims stay, so pods of the
// resumed Job can use them immediately: while the last pods end, they are still allocated. Shards other than the
// primary one are deleted with their last pods; until then, they use its devices.
func (r *JobReconciler) suspend(ctx context.Context, g *group) error {
	var errs error
	for _, s := range g.sharedClaims {
		for n, claim := range s.shards {
			switch {
			case n != s.primary && !slices.Contains(s.neededShards, n):
				errs = errors.Join(errs, r.releaseOwnedClaim(ctx, claim, g.UID))
			case n == s.primary && len(s.shards) == 1:
				change := claims.ReleaseChange(claim, g.UID, true, g.waitingUsers(s, n)...)
				errs = errors.Join(errs, r.writer().Apply(ctx, claim, change))
			}
		}
	}
	return errs
}

// readJob reads the pods and the claims of the Job from the cache.
func (r *JobReconciler) readJob(
	ctx context.Context, job *batchv1.Job, jobClaims []scheduling.ListedClaim,
) (*group, error) {
	pg := &scheduling.PodGroup{ObjectMeta: metav1.ObjectMeta{Namespace: job.Namespace, Name: job.Name, UID: job.UID}}
	pods, err := listPods(ctx, r.Client, pg, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, err
	}
	owned, err := r.ownedClaims(ctx, job.Namespace, job.UID)
	if err != nil {
		return nil, err
	}
	g := &group{PodGroup: pg, owner: JobOwner(job.Namespace, job.Name, job.UID), pods: pods}
	return g, r.readListedClaims(ctx, g, jobClaims, owned)
}

// releaseFormerJobs deletes the claims of Jobs that had this name; see releaseFormerOwners.
func (r *JobReconciler) releaseFormerJobs(ctx context.Context, name types.NamespacedName, uid types.UID) error {
	return r.releaseFormerOwners(ctx, name, uid, indexJob, jobOwnerOf, &batchv1.Job{})
}

// jobOwnerOf returns the Job that the claim was generated for, or nil.
func jobOwnerOf(claim *resourceapi.ResourceClaim) *claims.Owner {
	return ownerOfKind(claim, JobOwner(claim.Namespace, "", ""))
}

// SetupWithManager registers the controller with the manager, which starts it. It needs
// the indexes of the Reconciler of PodGroups.
func (r *JobReconciler) SetupWithManager(ctx context.Context, m ctrl.Manager) error {
	return listedClaimsController{
		name: "jobclaims", owner: &batchv1.Job{}, annotation: scheduling.JobClaimsAnnotation, indexes: jobIndexes(),
		ownersOfClaim: jobOfClaim, ownersOfTemplate: r.jobsOfTemplate, ownersOfPod: jobOfPod,
	}.setUp(ctx, m, r)
}

// jobIndexes returns the field indexes that the JobReconciler needs in addition to the Reconciler's.
func jobIndexes() []index {
	return []index{
		{&resourceapi.ResourceClaim{}, indexJob, ownerNames(jobOwnerOf)},
		{&batchv1.Job{}, indexJobTemplate, templateNames(JobClaims)},
	}
}

// jobOfClaim returns a request for the Job that the claim was generated for.
func jobOfClaim(_ context.Context, o client.Object) []reconcile.Request {
	return requests(o.GetNamespace(), ownerNames(jobOwnerOf)(o))
}

// jobOfPod returns a request for a pod's Job if the pod shares the Job's claims.
func jobOfPod(_ context.Context, o client.Object) []reconcile.Request {
	controller := metav1.GetControllerOfNoCopy(o)
	if controller == nil || string(controller.UID) != o.GetLabels()[scheduling.GroupUIDLabel] {
		return nil
	}
	return requests(o.GetNamespace(), []string{controller.Name})
}

// jobsOfTemplate returns requests for the Jobs with claims that refer to the template.
func (r *JobReconciler) jobsOfTemplate(ctx context.Context, o client.Object) []reconcile.Request {
	return requests(o.GetNamespace(),
		r.namesWith(ctx, &batchv1.JobList{}, o.GetNamespace(), indexJobTemplate, o.GetName()))
}
