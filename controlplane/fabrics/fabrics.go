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
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
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
	// Owner is the name of the ClusterRole that owns the ResourceSlices, which are garbage-collected with it. The
	// controller's own ClusterRole exists as long as the controller is installed; its Deployment cannot be the owner,
	// because the owner of an object without a namespace must not have a namespace either. If Owner is empty, the
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
	for err == nil && ctx.Err() == nil {
		owner, err = p.publish(ctx, owner)
	}
	return err
}

// publish publishes the fabrics until ctx ends or another object has replaced the owner. It returns the owner to
// publish them with next.
func (p *Publisher) publish(ctx context.Context, owner *resourceslice.Owner) (*resourceslice.Owner, error) {
	resources := Resources(p.Config.Fabrics)
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: p.DriverName, KubeClient: p.Client, Owner: owner, Resources: &resources, SyncDelay: p.syncDelay,
	})
	if err != nil {
		return nil, fmt.Errorf("publish fabrics: %w", err)
	}
	defer controller.Stop()
	klog.FromContext(ctx).Info("Started publishing fabrics", "poolCount", len(resources.Pools))
	if owner == nil {
		<-ctx.Done()
		return nil, nil
	}
	return p.awaitOtherOwner(ctx, owner), nil
}

// awaitOtherOwner returns the owner when its UID differs from the argument's, or the argument when ctx ends. If a tool
// deletes the ClusterRole and creates it again, garbage collection would otherwise delete the ResourceSlices again and
// again, because their owner has the former UID.
func (p *Publisher) awaitOtherOwner(ctx context.Context, owner *resourceslice.Owner) *resourceslice.Owner {
	roles := p.Client.RbacV1().ClusterRoles()
	onlyOwner := fields.OneTermEqualSelector(metav1.ObjectNameField, owner.Name).String()
	listWatch := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			options.FieldSelector = onlyOwner
			return roles.List(ctx, options)
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.FieldSelector = onlyOwner
			return roles.Watch(ctx, options)
		},
	}
	source := cache.ToListWatcherWithWatchListSemantics(listWatch, p.Client) // the client of tests supports only lists
	isOther := func(e watch.Event) (bool, error) {
		role, ok := e.Object.(*rbacv1.ClusterRole)
		return ok && e.Type != watch.Deleted && role.Name == owner.Name && role.UID != owner.UID, nil
	}
	event, err := watchtools.UntilWithSync(ctx, source, &rbacv1.ClusterRole{}, nil, isOther)
	if err != nil {
		return owner // ctx has ended
	}
	klog.FromContext(ctx).Info("The owner of ResourceSlices was created again", "clusterRole", owner.Name)
	role, ok := event.Object.(*rbacv1.ClusterRole)
	if !ok {
		return owner
	}
	return ownerOf(role)
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
	return ownerOf(role), nil
}

func ownerOf(role *rbacv1.ClusterRole) *resourceslice.Owner {
	return &resourceslice.Owner{
		APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRole", Name: role.Name, UID: role.UID,
	}
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
