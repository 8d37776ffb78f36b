package podgroups

import (
	"context"
	"fmt"

	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

// translate keeps Kubernetes' own PodGroup of the name, with the same claims, by
// name.
func (r *Reconciler) translate(ctx context.Context, g *group) error {
	if r.Mode != mode.Native {
		return nil
	}
	var there schedulingapi.PodGroup
	err := r.Client.Get(ctx, client.ObjectKeyFromObject(g.PodGroup), &there)
	if err == nil && !metav1.IsControlledBy(&there, g.PodGroup) {
		problem := fmt.Errorf("there is a PodGroup %s of scheduling.k8s.io that was not made for this one: delete one of them", g.Name)
		if there.DeletionTimestamp != nil {
			problem = fmt.Errorf("the PodGroup of scheduling.k8s.io of an earlier PodGroup %s goes when the pods of that name have ended", g.Name)
		}
		for _, e := range g.entries {
			e.problem = problem
		}
		return nil
	}
	if !apierrors.IsNotFound(err) {
		return err
	}
	native := &schedulingapi.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: g.Namespace, Name: g.Name},
		Spec: schedulingapi.PodGroupSpec{
			SchedulingPolicy: schedulingapi.PodGroupSchedulingPolicy{Basic: &schedulingapi.BasicSchedulingPolicy{}},
		},
	}
	for _, e := range g.entries {
		name := e.ResourceClaimName
		if name == nil {
			name = ptr.To(claims.Name(g.owner, e.Name, 0))
		}
		native.Spec.ResourceClaims = append(native.Spec.ResourceClaims, schedulingapi.PodGroupResourceClaim{Name: e.Name, ResourceClaimName: name})
	}
	if err := controllerutil.SetControllerReference(g.PodGroup, native, r.Client.Scheme()); err != nil {
		return err
	}
	err = r.Client.Create(ctx, native)
	if apierrors.IsAlreadyExists(err) {
		return nil // the cache is behind
	}
	return err
}
