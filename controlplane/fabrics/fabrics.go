// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fabrics publishes the fabrics of the DriverConfig. Each is a pool with
// one device, available to the nodes that have the fabric's labels. The leading
// replica of the controller publishes them for the whole cluster.
package fabrics

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

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

// Publisher is a manager.Runnable that keeps the fabrics' ResourceSlices equal to
// the configuration.
type Publisher struct {
	Client     kubernetes.Interface
	DriverName string
	Config     *config.DriverConfig
	// Owner is the name of the ClusterRole that owns the ResourceSlices, which are
	// garbage-collected with it. The controller's own ClusterRole exists as long as
	// the controller is installed; its Deployment cannot be the owner, because the
	// owner of an object without a namespace has none either. If Owner is empty, the
	// ResourceSlices remain after the controller is removed.
	Owner string

	// syncDelay is the time from a change of a ResourceSlice by another client to its
	// correction; nil means the default of the library. Tests shorten it.
	syncDelay *time.Duration
}

// Start publishes the fabrics until ctx ends. The ResourceSlices remain for the
// replica that leads next. It implements manager.Runnable.
func (p *Publisher) Start(ctx context.Context) error {
	owner, err := p.ownerReference(ctx)
	if err != nil {
		return err
	}
	resources := Resources(p.Config.Fabrics)
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: p.DriverName, KubeClient: p.Client, Owner: owner, Resources: &resources, SyncDelay: p.syncDelay,
	})
	if err != nil {
		return fmt.Errorf("publish fabrics: %w", err)
	}
	klog.FromContext(ctx).Info("Started publishing fabrics", "count", len(resources.Pools))
	<-ctx.Done()
	controller.Stop()
	return nil
}

// ownerReference returns the reference to the owner, or nil if there is none.
func (p *Publisher) ownerReference(ctx context.Context) (*resourceslice.Owner, error) {
	if p.Owner == "" {
		return nil, nil
	}
	role, err := p.Client.RbacV1().ClusterRoles().Get(ctx, p.Owner, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf(
			"get ClusterRole %s, the owner of the fabrics' ResourceSlices: %w: does --slices-owner name a ClusterRole?",
			p.Owner, err)
	}
	return &resourceslice.Owner{
		APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRole", Name: role.Name, UID: role.UID,
	}, nil
}

// Resources returns a pool for each fabric.
func Resources(fabrics []config.Fabric) resourceslice.DriverResources {
	pools := map[string]resourceslice.Pool{}
	for i := range fabrics {
		f := &fabrics[i]
		pools[fabricpool.Name(f.Name)] = resourceslice.Pool{
			NodeSelector: nodeSelector(f.NodeSelector),
			Slices:       []resourceslice.Slice{{Devices: []resourceapi.Device{fabricpool.Device(f)}}},
		}
	}
	return resourceslice.DriverResources{Pools: pools}
}

// nodeSelector selects the nodes that have all the labels.
func nodeSelector(labels map[string]string) *corev1.NodeSelector {
	var term corev1.NodeSelectorTerm
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		term.MatchExpressions = append(term.MatchExpressions, corev1.NodeSelectorRequirement{
			Key: name, Operator: corev1.NodeSelectorOpIn, Values: []string{labels[name]},
		})
	}
	return &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}}
}
