// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package certs

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	admissionregistration "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
)

// injectBundle writes the CA bundle to all webhook configurations. A
// configuration that is missing does not keep the others from being updated.
func (r *Rotator) injectBundle(ctx context.Context, bundle []byte) (err error) {
	api := r.client.AdmissionregistrationV1()
	for _, name := range r.options.Configurations {
		err = errors.Join(err,
			inject(ctx, api.MutatingWebhookConfigurations(), name, mutatingBundles, bundle),
			inject(ctx, api.ValidatingWebhookConfigurations(), name, validatingBundles, bundle))
	}
	return err
}

// configurationClient is a client of one type of webhook configurations.
type configurationClient[T metav1.Object] interface {
	Get(ctx context.Context, name string, options metav1.GetOptions) (T, error)
	Patch(ctx context.Context, name string, patchType types.PatchType, patch []byte, options metav1.PatchOptions,
		subresources ...string) (T, error)
}

// inject writes the CA bundle to one webhook configuration. bundlesOf returns the current
// bundles of its webhooks, in order.
func inject[T metav1.Object](
	ctx context.Context, api configurationClient[T], name string, bundlesOf func(T) [][]byte, bundle []byte,
) error {
	return retry.RetryOnConflict(retry.DefaultRetry, func() error {
		configuration, err := api.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return recreateHint(err)
		}
		patch, err := bundlePatch(configuration.GetResourceVersion(), bundlesOf(configuration), bundle)
		if err != nil || patch == nil {
			return err
		}
		_, err = api.Patch(ctx, name, types.JSONPatchType, patch, metav1.PatchOptions{})
		return err
	})
}

func mutatingBundles(c *admissionregistration.MutatingWebhookConfiguration) (bundles [][]byte) {
	for _, w := range c.Webhooks {
		bundles = append(bundles, w.ClientConfig.CABundle)
	}
	return bundles
}

func validatingBundles(c *admissionregistration.ValidatingWebhookConfiguration) (bundles [][]byte) {
	for _, w := range c.Webhooks {
		bundles = append(bundles, w.ClientConfig.CABundle)
	}
	return bundles
}

// bundlePatch returns a JSON patch that sets the CA bundle of each webhook that
// has another one, or nil if all webhooks have it. The patch names webhooks by
// their index in the configuration that was read; it therefore conflicts with a
// configuration of another resourceVersion.
func bundlePatch(resourceVersion string, current [][]byte, bundle []byte) ([]byte, error) {
	type operation struct {
		Op    string `json:"op"`
		Path  string `json:"path"`
		Value any    `json:"value"`
	}
	var operations []operation
	for i, b := range current {
		if !bytes.Equal(b, bundle) {
			operations = append(operations, operation{"add", fmt.Sprintf("/webhooks/%d/clientConfig/caBundle", i), bundle})
		}
	}
	if operations == nil {
		return nil, nil
	}
	version := operation{"replace", "/metadata/resourceVersion", resourceVersion}
	return json.Marshal(append(operations, version))
}
