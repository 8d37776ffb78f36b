// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"fmt"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/podgroups"
)

// claimList holds the claims that the annotation of a pod lists, and their owner: a Job, or a
// replica of a StatefulSet. The pod shares the claims with the other pods of the owner.
type claimList struct {
	// annotation is the name of the annotation.
	annotation string
	// kind and name identify the Job or StatefulSet.
	kind, name string
	owner      claims.Owner
	entries    []scheduling.ListedClaim
}

// listedClaim is a claim of a claimList.
type listedClaim struct {
	scheduling.ListedClaim
	spec *resourceapi.ResourceClaimSpec
}

// joinListed adds the listed claims of its Job or replica to a pod that inherited the annotation
// job-claims or replica-claims, and returns the claims that the pod shares, by their names.
func (p *Pods) joinListed(
	ctx context.Context, pod *corev1.Pod, request string,
) (map[string]listedClaim, []string, error) {
	list, err := p.claimListOf(ctx, pod)
	if err != nil || list == nil {
		return nil, nil, err
	}
	if uid := pod.Labels[scheduling.GroupUIDLabel]; uid != "" && uid != string(list.owner.UID) {
		return nil, nil, denied(reasonConflict,
			"metadata.annotations[%q]: the pod is in a PodGroup as well, by the annotation %s or by "+
				"spec.schedulingGroup: remove one of them from the template of %s %q",
			list.annotation, scheduling.GroupAnnotation, list.kind, list.name)
	}
	shared, sharded := map[string]listedClaim{}, false
	var warnings []string
	for _, entry := range list.entries {
		claim, err := p.listedClaim(ctx, list, entry)
		if err != nil {
			return nil, warnings, err
		}
		name, exists := podClaimName(pod, entry.Name)
		// By an earlier call, or in the pod that this one copies.
		_, joined := claims.ShardNumber(list.owner, entry.Name, name)
		if exists && !joined {
			warnings = append(warnings, fmt.Sprintf("spec.resourceClaims %q overrides the claim of that name of %s %q",
				entry.Name, list.kind, list.name))
			continue
		}
		if !exists {
			shard, isSharded, err := p.listedShard(ctx, list.owner, claim, request)
			if err != nil {
				return nil, warnings, err
			}
			sharded = sharded || isSharded
			pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{
				Name: entry.Name, ResourceClaimName: ptr.To(claims.Name(list.owner, entry.Name, shard)),
			})
		}
		addToContainers(&pod.Spec, entry)
		shared[entry.Name] = claim
	}
	markSharing(pod, list.owner.UID, request, sharded)
	return shared, warnings, nil
}

// listedShard returns the number of the claim that a new pod shares. sharded reports whether it may be one of several,
// because the claim requests a fabric.
func (p *Pods) listedShard(
	ctx context.Context, owner claims.Owner, claim listedClaim, request string,
) (shard int, sharded bool, err error) {
	isFabric, err := claims.RequestsFabric(claim.spec, p.Driver, p.deviceClass(ctx))
	if err != nil || !isFabric {
		return 0, false, err
	}
	first := claims.Name(owner, claim.Name, 0)
	shard, err = p.Shards.assign(ctx, shardQuestion{Namespace: owner.Namespace, Claim: first, Request: request})
	return shard, true, err
}

// claimListOf returns the claims that the annotation of a pod lists, or nil.
func (p *Pods) claimListOf(ctx context.Context, pod *corev1.Pod) (*claimList, error) {
	jobClaims, hasJobClaims := pod.Annotations[scheduling.JobClaimsAnnotation]
	replicaClaims, hasReplicaClaims := pod.Annotations[scheduling.ReplicaClaimsAnnotation]
	hasJobClaims, hasReplicaClaims = hasJobClaims && p.JobClaims, hasReplicaClaims && p.ReplicaClaims
	switch {
	case hasJobClaims && hasReplicaClaims:
		return nil, denied(reasonConflict,
			"metadata.annotations[%q]: must not be set together with %s: remove one of them from the template",
			scheduling.ReplicaClaimsAnnotation, scheduling.JobClaimsAnnotation)
	case hasJobClaims:
		return p.jobOf(ctx, pod, jobClaims)
	case hasReplicaClaims:
		return p.replicaOf(ctx, pod, replicaClaims)
	}
	return nil, nil
}

// jobOf returns the Job that created the pod. The Job's template lists the same claims.
func (p *Pods) jobOf(ctx context.Context, pod *corev1.Pod, value string) (*claimList, error) {
	controller := metav1.GetControllerOfNoCopy(pod)
	if controller == nil || controller.Kind != "Job" || controller.APIVersion != batchv1.SchemeGroupVersion.String() {
		return nil, denied(reasonOwner,
			"metadata.annotations[%q]: only pods of Jobs share claims of a Job: remove the annotation; "+
				"other pods share claims in a PodGroup", scheduling.JobClaimsAnnotation)
	}
	var job batchv1.Job
	if err := p.getController(ctx, pod.Namespace, controller, &job, scheduling.JobClaimsAnnotation); err != nil {
		return nil, err
	}
	listed := job.Spec.Template.Annotations[scheduling.JobClaimsAnnotation]
	if !sameClaims(scheduling.JobClaimsAnnotation, listed, value) {
		return nil, denied(reasonAnnotationDiffers,
			"metadata.annotations[%q]: differs from the one of Job %q, which owns the pod: "+
				"only the Job controller creates pods of a Job", scheduling.JobClaimsAnnotation, controller.Name)
	}
	entries, err := podgroups.JobClaims(&job.Spec.Template)
	if err != nil {
		return nil, denied(reasonInvalid, "Job %q: %w", job.Name, err)
	}
	return &claimList{
		annotation: scheduling.JobClaimsAnnotation, kind: "Job", name: job.Name,
		owner: podgroups.JobOwner(pod.Namespace, job.Name, job.UID), entries: entries,
	}, nil
}

// getController reads the object that a reference to a controller names. It denies the
// pod if the object no longer exists.
func (p *Pods) getController(
	ctx context.Context, namespace string, controller *metav1.OwnerReference, into client.Object, annotation string,
) error {
	name := types.NamespacedName{Namespace: namespace, Name: controller.Name}
	err := p.Client.Get(ctx, name, into)
	if apierrors.IsNotFound(err) || err == nil && into.GetUID() != controller.UID {
		err = p.APIReader.Get(ctx, name, into) // the cache may not have the object yet
	}
	switch {
	case apierrors.IsNotFound(err), err == nil && into.GetUID() != controller.UID:
		return denied(reasonOwner, "metadata.annotations[%q]: %s %q, which owns the pod, no longer exists",
			annotation, controller.Kind, controller.Name)
	case err != nil:
		return fmt.Errorf("look up %s %q: %w", controller.Kind, controller.Name, err)
	}
	return nil
}

// listedClaim returns the entry with the spec of its claims. It is the claim's spec, or the template's before the claim
// exists. The template may have been deleted since.
func (p *Pods) listedClaim(ctx context.Context, list *claimList, entry scheduling.ListedClaim) (listedClaim, error) {
	if entry.Spec != nil {
		return listedClaim{entry, entry.Spec}, nil
	}
	namespace, annotation := list.owner.Namespace, list.annotation
	var claim resourceapi.ResourceClaim
	name := types.NamespacedName{Namespace: namespace, Name: claims.Name(list.owner, entry.Name, 0)}
	if err := p.Client.Get(ctx, name, &claim); err == nil || !apierrors.IsNotFound(err) {
		return listedClaim{entry, &claim.Spec}, err
	}
	spec, err := p.templateSpec(ctx, namespace, *entry.ResourceClaimTemplateName)
	if err == nil && spec == nil {
		err = denied(reasonClaimMissing,
			"metadata.annotations[%q]: entry %q: ResourceClaimTemplate %q does not exist in namespace %q: "+
				"create it; the workload retries its pods", annotation, entry.Name, *entry.ResourceClaimTemplateName, namespace)
	}
	return listedClaim{entry, spec}, err
}

// podClaimName returns the name of the ResourceClaim of the pod's entry, and whether the
// entry exists.
func podClaimName(pod *corev1.Pod, entry string) (name string, exists bool) {
	i := slices.IndexFunc(pod.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool { return c.Name == entry })
	if i < 0 {
		return "", false
	}
	return ptr.Deref(pod.Spec.ResourceClaims[i].ResourceClaimName, ""), true
}

// addToContainers adds references to the claim to the containers that the entry lists.
func addToContainers(spec *corev1.PodSpec, entry scheduling.ListedClaim) {
	containers := containersByName(spec)
	for _, name := range entry.Containers {
		if c := containers[name]; c != nil && !references(c, entry.Name, "") {
			c.Resources.Claims = append(c.Resources.Claims, corev1.ResourceClaim{Name: entry.Name})
		}
	}
}

// markSharing records the owner of its claims in the pod, and adds the gate if the pod has a claim that is one of
// several shards. Kubernetes may have created a PodGroup for the workload; its pods do not get the gate.
func markSharing(pod *corev1.Pod, owner types.UID, request string, sharded bool) {
	pod.Labels, pod.Annotations = notNil(pod.Labels), notNil(pod.Annotations)
	pod.Labels[scheduling.GroupUIDLabel] = string(owner)
	if !sharded {
		return
	}
	pod.Annotations[scheduling.AdmittedAnnotation] = request
	if pod.Spec.SchedulingGroup == nil {
		addGate(pod, pod.Annotations)
	}
}
