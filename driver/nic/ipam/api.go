// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
)

// API reads AddressPools, and reads and writes AddressBlocks.
type API interface {
	ListPools(ctx context.Context, o metav1.ListOptions) (*network.AddressPoolList, error)
	WatchPools(ctx context.Context, o metav1.ListOptions) (watch.Interface, error)
	// ListBlocks returns the blocks that the options select, as of now unless the options
	// have a resource version.
	ListBlocks(ctx context.Context, o metav1.ListOptions) (*network.AddressBlockList, error)
	WatchBlocks(ctx context.Context, o metav1.ListOptions) (watch.Interface, error)
	CreateBlock(ctx context.Context, b *network.AddressBlock) (*network.AddressBlock, error)
	UpdateBlock(ctx context.Context, b *network.AddressBlock) (*network.AddressBlock, error)
	// DeleteBlock deletes this block, not another of the same name. It returns nil if the block does not exist.
	DeleteBlock(ctx context.Context, b *network.AddressBlock) error
}

// Fields that ListBlocks and WatchBlocks can select by.
const (
	fieldNode    = "spec.node"
	fieldNetwork = "spec.network"
)

type client struct {
	rest       rest.Interface
	parameters runtime.ParameterCodec
}

// NewAPI returns the API of a cluster.
func NewAPI(restConfig *rest.Config) (API, error) {
	scheme := runtime.NewScheme()
	if err := network.AddToScheme(scheme); err != nil {
		return nil, err
	}
	c := rest.CopyConfig(restConfig)
	c.GroupVersion, c.APIPath = &network.GroupVersion, "/apis"
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	r, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("client for %s: %w", network.GroupName, err)
	}
	return &client{r, runtime.NewParameterCodec(scheme)}, nil
}

// ListPools implements API.
func (c *client) ListPools(ctx context.Context, o metav1.ListOptions) (*network.AddressPoolList, error) {
	var list network.AddressPoolList
	err := c.rest.Get().Resource(network.PoolResource).VersionedParams(&o, c.parameters).Do(ctx).Into(&list)
	return &list, err
}

// WatchPools implements API.
func (c *client) WatchPools(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch = true
	return c.rest.Get().Resource(network.PoolResource).VersionedParams(&o, c.parameters).Watch(ctx)
}

// ListBlocks implements API.
func (c *client) ListBlocks(ctx context.Context, o metav1.ListOptions) (*network.AddressBlockList, error) {
	var list network.AddressBlockList
	err := c.rest.Get().Resource(network.BlockResource).VersionedParams(&o, c.parameters).Do(ctx).Into(&list)
	return &list, err
}

// WatchBlocks implements API.
func (c *client) WatchBlocks(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch = true
	return c.rest.Get().Resource(network.BlockResource).VersionedParams(&o, c.parameters).Watch(ctx)
}

// CreateBlock implements API.
func (c *client) CreateBlock(ctx context.Context, b *network.AddressBlock) (*network.AddressBlock, error) {
	var created network.AddressBlock
	return &created, c.rest.Post().Resource(network.BlockResource).Body(b).Do(ctx).Into(&created)
}

// UpdateBlock implements API.
func (c *client) UpdateBlock(ctx context.Context, b *network.AddressBlock) (*network.AddressBlock, error) {
	var updated network.AddressBlock
	return &updated, c.rest.Put().Resource(network.BlockResource).Name(b.Name).Body(b).Do(ctx).Into(&updated)
}

// DeleteBlock implements API.
func (c *client) DeleteBlock(ctx context.Context, b *network.AddressBlock) error {
	o := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &b.UID}}
	err := c.rest.Delete().Resource(network.BlockResource).Name(b.Name).Body(&o).Do(ctx).Error()
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // another block has the name
		return nil
	}
	return err
}
