// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// claimReader reads the claims of records from the API server.
type claimReader struct{ client kubernetes.Interface }

// current gets the claim of a record from the API server. It returns nil if the claim was deleted, deallocated,
// or replaced by another with the same name.
func (c claimReader) current(ctx context.Context, recorded *record.Claim) (*resourceapi.ResourceClaim, error) {
	return c.get(ctx, recorded, metav1.GetOptions{})
}

// cached is like current, but lets the API server answer from its cache instead of etcd, because all nodes'
// plugins repeatedly read their claims' status.
func (c claimReader) cached(ctx context.Context, recorded *record.Claim) (*resourceapi.ResourceClaim, error) {
	return c.get(ctx, recorded, metav1.GetOptions{ResourceVersion: "0"})
}

func (c claimReader) get(
	ctx context.Context, recorded *record.Claim, source metav1.GetOptions,
) (*resourceapi.ResourceClaim, error) {
	claim, err := c.client.ResourceV1().ResourceClaims(recorded.Namespace).Get(ctx, recorded.Name, source)
	if apierrors.IsNotFound(err) || err == nil && (claim.UID != recorded.UID || claim.Status.Allocation == nil) {
		return nil, nil
	}
	return claim, err
}
