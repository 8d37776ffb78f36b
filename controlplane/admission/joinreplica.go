// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/podgroups"
)

// replicaOf returns the replica of the pod: from its own StatefulSet, or, for a worker of a LeaderWorkerSet, from its
// leader's StatefulSet. That StatefulSet's template lists the same claims.
func (p *Pods) replicaOf(ctx context.Context, pod *corev1.Pod, value string) (*claimList, error) {
	controller := metav1.GetControllerOfNoCopy(pod)
	if !isStatefulSet(controller) {
		return nil, deniedReplica(reasonOwner, "only pods of StatefulSets and LeaderWorkerSets share claims of a replica: "+
			"remove the annotation; other pods share claims in a PodGroup")
	}
	var set appsv1.StatefulSet
	if err := p.getController(ctx, pod.Namespace, controller, &set, scheduling.ReplicaClaimsAnnotation); err != nil {
		return nil, err
	}
	member := pod.Name
	if leader := metav1.GetControllerOfNoCopy(&set); leader != nil && leader.Kind == "Pod" {
		if !strings.HasPrefix(pod.Name, leader.Name+"-") {
			return nil, deniedReplica(reasonOwner,
				"the name of the pod must begin with the name of its leader, Pod %q", leader.Name)
		}
		leaders, err := p.leadersOf(ctx, pod.Namespace, leader)
		if err != nil {
			return nil, err
		}
		set, member = *leaders, leader.Name
	}
	replica, ok := podgroups.ReplicaOfPod(set.Name, member)
	if !ok {
		return nil, deniedReplica(reasonOwner,
			"the name of Pod %q does not consist of the name of StatefulSet %q and an ordinal",
			member, set.Name)
	}
	listed := set.Spec.Template.Annotations[scheduling.ReplicaClaimsAnnotation]
	if !sameClaims(scheduling.ReplicaClaimsAnnotation, listed, value) {
		return nil, deniedReplica(reasonAnnotationDiffers,
			"differs from the one of StatefulSet %q: the templates of the leader and of the workers of a "+
				"LeaderWorkerSet must have the same annotation", set.Name)
	}
	entries, err := podgroups.ReplicaClaims(&set.Spec.Template)
	if err != nil {
		return nil, denied(reasonInvalid, "StatefulSet %q: %w", set.Name, err)
	}
	return &claimList{
		annotation: scheduling.ReplicaClaimsAnnotation, kind: "StatefulSet", name: set.Name,
		owner: podgroups.ReplicaOwner(pod.Namespace, set.Name, set.UID, replica), entries: entries,
	}, nil
}

// leadersOf returns the StatefulSet of the leader of a LeaderWorkerSet's replica. It reads the
// leader from the API server: the cache does not keep the owners of pods.
func (p *Pods) leadersOf(
	ctx context.Context, namespace string, controller *metav1.OwnerReference,
) (*appsv1.StatefulSet, error) {
	var leader corev1.Pod
	err := p.APIReader.Get(ctx, types.NamespacedName{Namespace: namespace, Name: controller.Name}, &leader)
	if apierrors.IsNotFound(err) || err == nil && leader.UID != controller.UID {
		return nil, deniedReplica(reasonOwner, "the leader, Pod %q, no longer exists", controller.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("look up the leader, Pod %q: %w", controller.Name, err)
	}
	owner := metav1.GetControllerOfNoCopy(&leader)
	if !isStatefulSet(owner) {
		return nil, deniedReplica(reasonOwner, "the leader, Pod %q, is not a pod of a StatefulSet", controller.Name)
	}
	var set appsv1.StatefulSet
	err = p.getController(ctx, namespace, owner, &set, scheduling.ReplicaClaimsAnnotation)
	return &set, err
}

func isStatefulSet(controller *metav1.OwnerReference) bool {
	return controller != nil && controller.Kind == "StatefulSet" &&
		controller.APIVersion == appsv1.SchemeGroupVersion.String()
}

func deniedReplica(reason denialReason, format string, args ...any) error {
	return denied(reason, "metadata.annotations[%q]: %w", scheduling.ReplicaClaimsAnnotation, fmt.Errorf(format, args...))
}
