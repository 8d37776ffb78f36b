// Package fabrics publishes the fabrics of the DriverConfig: a pool of one
// device each, for all nodes that have the labels. There is one publisher in a
// cluster.
package fabrics

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/fabricpool"
)

// Publisher keeps the fabrics' ResourceSlices what the configuration says.
type Publisher struct {
	Client     kubernetes.Interface
	DriverName string
	Config     *config.DriverConfig
	// Owner is the ClusterRole with which the slices go: the controller's own,
	// which is there as long as that is installed. (Its Deployment cannot own what
	// has no namespace.) Without one the slices stay when the controller is gone.
	Owner string
}

// Start publishes until ctx ends. It implements manager.Runnable.
func (p *Publisher) Start(ctx context.Context) error {
	owner, err := p.owner(ctx)
	if err != nil {
		return err
	}
	resources := Resources(p.Config.Fabrics)
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: p.DriverName, KubeClient: p.Client, Owner: owner, Resources: &resources,
	})
	if err != nil {
		return fmt.Errorf("publish fabrics: %w", err)
	}
	klog.FromContext(ctx).Info("Fabrics are published", "fabrics", len(resources.Pools))
	<-ctx.Done()
	controller.Stop()
	return nil
}

func (p *Publisher) owner(ctx context.Context) (*resourceslice.Owner, error) {
	if p.Owner == "" {
		return nil, nil
	}
	role, err := p.Client.RbacV1().ClusterRoles().Get(ctx, p.Owner, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("find the ClusterRole that owns the fabrics' ResourceSlices: %w: does --slices-owner name one?", err)
	}
	return &resourceslice.Owner{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRole", Name: role.Name, UID: role.UID}, nil
}

// Resources are the pools of the fabrics.
func Resources(fabrics []config.Fabric) resourceslice.DriverResources {
	pools := map[string]resourceslice.Pool{}
	for i := range fabrics {
		f := &fabrics[i]
		pools[fabricpool.Name(f.Name)] = resourceslice.Pool{
			NodeSelector: selector(f.NodeSelector),
			Slices:       []resourceslice.Slice{{Devices: []resourceapi.Device{fabricpool.Device(f)}}},
		}
	}
	return resourceslice.DriverResources{Pools: pools}
}

// selector is of the nodes that have all the labels.
func selector(labels map[string]string) *corev1.NodeSelector {
	var term corev1.NodeSelectorTerm
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		term.MatchExpressions = append(term.MatchExpressions, corev1.NodeSelectorRequirement{Key: name, Operator: corev1.NodeSelectorOpIn, Values: []string{labels[name]}})
	}
	return &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}}
}
