// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"encoding/json"
	"net/http"

	"k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
)

// AddressPools is the webhook for AddressPools. It denies a spec that the plugin and the controller could not use: one
// invalid entry would keep all links from getting addresses of the pool.
type AddressPools struct{}

// Handle implements admission.Handler. A pool that is being deleted, and an update that does not change the spec, is
// allowed even if the spec is invalid.
func (*AddressPools) Handle(_ context.Context, req admission.Request) admission.Response {
	var pool network.AddressPool
	if err := json.Unmarshal(req.Object.Raw, &pool); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	if len(req.OldObject.Raw) > 0 {
		var old network.AddressPool
		if err := json.Unmarshal(req.OldObject.Raw, &old); err != nil {
			return admission.Errored(http.StatusBadRequest, err)
		}
		if pool.DeletionTimestamp != nil || equality.Semantic.DeepEqual(old.Spec, pool.Spec) {
			return admission.Allowed("")
		}
	}
	if _, err := addresspool.Parse(&pool); err != nil {
		return errorResponse(denied(reasonInvalid, "%w", err), nil)
	}
	return admission.Allowed("")
}
