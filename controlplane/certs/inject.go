// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package certs

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
)

// injectBundle writes the CA bundle to all webhook configurations. A
// configuration that is missing does not keep the others from being updated.
func (r *Rotator) injectBundle(ctx context.Context, bundle []byte) (err error) {
	for _, name := range r.options.Configurations {
		err = errors.Join(err, r.injectMutating(ctx, name, bundle), r.injectValidating(ctx, name, bundle))
	}
	return err
}

func (r *Rotator) injectMutating(ctx context.Context, name string, bundle []byte) error {
	api := r.client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	return retry.RetryOnConflict(retry.DefaultRetry, func() error {
		configuration, err := api.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return recreateHint(err)
		}
		var current [][]byte
		for _, w := range configuration.Webhooks {
			current = append(current, w.ClientConfig.CABundle)
		}
		patch, err := bundlePatch(configuration.ResourceVersion, current, bundle)
		if err != nil || patch == nil {
			return err
		}
		_, err = api.Patch(ctx, name, types.JSONPatchType, patch, metav1.PatchOptions{})
		return err
	})
}

func (r *Rotator) injectValidating(ctx context.Context, name string, bundle []byte) error {
	api := r.client.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	return retry.RetryOnConflict(retry.DefaultRetry, func() error {
		configuration, err := api.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return recreateHint(err)
		}
		var current [][]byte
		for _, w := range configuration.Webhooks {
			current = append(current, w.ClientConfig.CABundle)
		}
		patch, err := bundlePatch(configuration.ResourceVersion, current, bundle)
		if err != nil || patch == nil {
			return err
		}
		_, err = api.Patch(ctx, name, types.JSONPatchType, patch, metav1.PatchOptions{})
		return err
	})
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
