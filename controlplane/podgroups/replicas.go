// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package podgroups

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
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
	"github.com/dra-shared/dra-driver-shared/internal/requeue"
)

const (
	// indexStatefulSet indexes claims by the name of the StatefulSet that they were generated for.
	indexStatefulSet = "dra-shared.statefulset"
	// indexReplicaTemplate indexes StatefulSets by the names of the templates that their claims
	// refer to.
	indexReplicaTemplate = "dra-shared.replica-template"
	// indexUID indexes StatefulSets by their UIDs.
	indexUID = "dra-shared.uid"
)

// ReplicaReconciler reconciles the claims of StatefulSets' replicas if the pod template has the annotation
// replica-claims.
//
// A LeaderWorkerSet creates one StatefulSet for the leaders, with the replicas as ordinals, and for each replica a
// StatefulSet for the workers, with the leader as controller. A replica's claims belong to the ordinal of the leaders'
// StatefulSet, so only the validation of LeaderWorkerSets depends on their API.
//
// To the rest of the package, a replica is a PodGroup with claims that the StatefulSet owns; see JobReconciler.
type ReplicaReconciler struct {
	// Reconciler has the mode Bridge.
	Reconciler
}

// ReplicaOwner returns a replica of a StatefulSet as the owner of its claims.
func ReplicaOwner(namespace, name string, uid types.UID, replica int) claims.Owner {
	owner := statefulSetKind(namespace)
	owner.Name, owner.UID, owner.Replica = name, uid, strconv.Itoa(replica)
	return owner
}

func statefulSetKind(namespace string) claims.Owner {
	return claims.Owner{
		GroupVersionKind: appsv1.SchemeGroupVersion.WithKind("StatefulSet"), Resource: "statefulsets", Namespace: namespace,
	}
}

// ReplicaClaims returns the claims of each replica with this pod template, except
// claims that a claim of the pods overrides.
func ReplicaClaims(template *corev1.PodTemplateSpec) ([]scheduling.ListedClaim, error) {
	return listedClaims(template, scheduling.ReplicaClaimsAnnotation, scheduling.ParseReplicaClaims)
}

// ReplicaOfPod returns the ordinal of a pod of the StatefulSet, or of a worker with such a pod as leader: the first
// number after the name of the StatefulSet.
func ReplicaOfPod(statefulSet, pod string) (int, bool) {
	rest, ok := strings.CutPrefix(pod, statefulSet+"-")
	if !ok {
		return 0, false
	}
	ordinal, _, _ := strings.Cut(rest, "-")
	replica, err := strconv.Atoi(ordinal)
	return replica, err == nil && replica >= 0
}

// Reconcile reconciles the claims of the replicas of the StatefulSet of that name. It also
// releases the claims of earlier StatefulSets of the same name.
func (r *ReplicaReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var set appsv1.StatefulSet
	err := r.Client.Get(ctx, req.NamespacedName, &set)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	err = r.releaseFormerOwners(ctx, req.NamespacedName, set.UID, indexStatefulSet, replicaOwnerOf, &appsv1.StatefulSet{})
	if err != nil || set.UID == "" {
		return ctrl.Result{}, err
	}
	listed, err := ReplicaClaims(&set.Spec.Template)
	if err != nil {
		// Admission denies an invalid annotation. This StatefulSet is older than the webhook.
		return ctrl.Result{}, reconcile.TerminalError(err)
	}
	if len(listed) == 0 || isForWorkers(&set) {
		return ctrl.Result{}, nil
	}
	groups, err := r.readReplicas(ctx, &set, listed)
	if err != nil {
		return ctrl.Result{}, err
	}
	var result ctrl.Result
	var errs error
	for replica, g := range groups {
		errs = errors.Join(errs, r.reconcileReplica(ctx, &set, replica, g))
		r.reportProblems(&set, g)
		result.RequeueAfter = requeue.Soonest(result.RequeueAfter, g.retryInterval())
	}
	if errs != nil {
		return ctrl.Result{}, errs
	}
	return result, nil
}

// isForWorkers reports whether the StatefulSet is for the workers of one replica of a
// LeaderWorkerSet, which use the claims of their leader.
func isForWorkers(set *appsv1.StatefulSet) bool {
	controller := metav1.GetControllerOfNoCopy(set)
	return controller != nil && controller.Kind == "Pod"
}

// reconcileReplica performs the steps that a replica needs in the current state of its
// StatefulSet. It leaves in g the shared claims that the replica still needs.
func (r *ReplicaReconciler) reconcileReplica(
	ctx context.Context, set *appsv1.StatefulSet, replica int, g *group,
) error {
	if set.DeletionTimestamp != nil || !isDesired(set, replica) {
		released := g.sharedClaims
		g.sharedClaims = nil
		return r.releaseClaims(ctx, g, released)
	}
	return r.serve(ctx, g)
}

// isDesired reports whether the StatefulSet should have a pod with that ordinal.
func isDesired(set *appsv1.StatefulSet, ordinal int) bool {
	start := 0
	if set.Spec.Ordinals != nil {
		start = int(set.Spec.Ordinals.Start)
	}
	return ordinal >= start && ordinal < start+int(ptr.Deref(set.Spec.Replicas, 1))
}

// readReplicas reads the replicas that have pods or claims from the cache, by their
// ordinals. The claims of a replica are generated for its first pod.
func (r *ReplicaReconciler) readReplicas(
	ctx context.Context, set *appsv1.StatefulSet, listed []scheduling.ListedClaim,
) (map[int]*group, error) {
	meta := metav1.ObjectMeta{Namespace: set.Namespace, Name: set.Name, UID: set.UID}
	pods, err := listPods(ctx, r.Client, &scheduling.PodGroup{ObjectMeta: meta}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, err
	}
	generated, err := r.ownedClaims(ctx, set.Namespace, set.UID)
	if err != nil {
		return nil, err
	}
	groups, owned := map[int]*group{}, map[int][]*resourceapi.ResourceClaim{}
	add := func(replica int) *group {
		if groups[replica] == nil {
			groups[replica] = &group{
				PodGroup: &scheduling.PodGroup{ObjectMeta: meta},
				owner:    ReplicaOwner(set.Namespace, set.Name, set.UID, replica),
			}
		}
		return groups[replica]
	}
	for _, pod := range pods {
		if replica, ok := ReplicaOfPod(set.Name, pod.Name); ok {
			g := add(replica)
			g.pods = append(g.pods, pod)
		}
	}
	for _, claim := range generated {
		if replica, err := strconv.Atoi(claim.Annotations[scheduling.ReplicaAnnotation]); err == nil {
			add(replica)
			owned[replica] = append(owned[replica], claim)
		}
	}
	for replica, g := range groups {
		if err := r.readListedClaims(ctx, g, slices.Clone(listed), owned[replica]); err != nil {
			return nil, err
		}
	}
	return groups, nil
}

// replicaOwnerOf returns the replica that the claim was generated for, or nil.
func replicaOwnerOf(claim *resourceapi.ResourceClaim) *claims.Owner {
	return ownerOfKind(claim, statefulSetKind(claim.Namespace))
}

// SetupWithManager registers the controller with the manager, which starts it. It needs
// the indexes of the Reconciler of PodGroups.
func (r *ReplicaReconciler) SetupWithManager(ctx context.Context, m ctrl.Manager) error {
	return listedClaimsController{
		name: "replicaclaims", owner: &appsv1.StatefulSet{}, annotation: scheduling.ReplicaClaimsAnnotation,
		indexes:       replicaIndexes(),
		ownersOfClaim: statefulSetOfClaim, ownersOfTemplate: r.statefulSetsOfTemplate, ownersOfPod: r.statefulSetOfPod,
	}.setUp(ctx, m, r)
}

// replicaIndexes returns the field indexes that the ReplicaReconciler needs in addition to the Reconciler's.
func replicaIndexes() []index {
	return []index{
		{&resourceapi.ResourceClaim{}, indexStatefulSet, ownerNames(replicaOwnerOf)},
		{&appsv1.StatefulSet{}, indexReplicaTemplate, templateNames(ReplicaClaims)},
		{&appsv1.StatefulSet{}, indexUID, func(o client.Object) []string { return []string{string(o.GetUID())} }},
	}
}

// statefulSetOfClaim returns a request for the StatefulSet that the claim was generated for.
func statefulSetOfClaim(_ context.Context, o client.Object) []reconcile.Request {
	return requests(o.GetNamespace(), ownerNames(replicaOwnerOf)(o))
}

// statefulSetOfPod returns a request for the StatefulSet with the UID in the pod's label.
func (r *ReplicaReconciler) statefulSetOfPod(ctx context.Context, o client.Object) []reconcile.Request {
	return r.statefulSetsWith(ctx, o.GetNamespace(), indexUID, o.GetLabels()[scheduling.GroupUIDLabel])
}

// statefulSetsOfTemplate returns requests for the StatefulSets with claims that refer to the template.
func (r *ReplicaReconciler) statefulSetsOfTemplate(ctx context.Context, o client.Object) []reconcile.Request {
	return r.statefulSetsWith(ctx, o.GetNamespace(), indexReplicaTemplate, o.GetName())
}

// statefulSetsWith returns requests for the StatefulSets that the index finds for a value.
func (r *ReplicaReconciler) statefulSetsWith(ctx context.Context, namespace, field, value string) []reconcile.Request {
	return requests(namespace, r.namesWith(ctx, &appsv1.StatefulSetList{}, namespace, field, value))
}
