// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

// Holds is the webhook for the first entry of a PodGroup in a user's claim without a device of the driver. It denies
// the entry unless the PodGroup names the claim. For other claims, and for claims with an entry, the policies of the
// chart limit what the controller's token can do; policies cannot read PodGroups.
type Holds struct {
	// APIReader reads PodGroups from the API server.
	APIReader client.Reader
}

// Handle implements admission.Handler.
func (h *Holds) Handle(ctx context.Context, req admission.Request) admission.Response {
	var before, after resourceapi.ResourceClaim
	if err := errors.Join(
		json.Unmarshal(req.OldObject.Raw, &before), json.Unmarshal(req.Object.Raw, &after),
	); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	name := types.NamespacedName{Namespace: req.Namespace, Name: req.Name}
	if err := h.check(ctx, name, slices.Concat(before.Status.ReservedFor, after.Status.ReservedFor)); err != nil {
		return errorResponse(err, nil)
	}
	return admission.Allowed("")
}

// check denies the entries of a claim of that name unless one of them is for a PodGroup that names
// the claim, or for the PodGroup of Kubernetes that corresponds to it.
func (h *Holds) check(
	ctx context.Context, claim types.NamespacedName, entries []resourceapi.ResourceClaimConsumerReference,
) error {
	for _, e := range entries {
		own := claims.IsPodGroupEntry(e)
		if !own && !claims.IsNativePodGroup(e) {
			continue
		}
		var group scheduling.PodGroup
		err := h.APIReader.Get(ctx, types.NamespacedName{Namespace: claim.Namespace, Name: e.Name}, &group)
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("look up PodGroup %q: %w", e.Name, err)
		}
		if err == nil && (!own || group.UID == e.UID) && namesClaim(&group, claim.Name) {
			return nil
		}
	}
	return denied(reasonNotPermitted,
		"status.reservedFor: the controller may hold ResourceClaim %q, which has no device of the driver, only for a "+
			"PodGroup that names it in spec.resourceClaims", claim.Name)
}

// namesClaim reports whether the PodGroup refers to the claim by its name.
func namesClaim(group *scheduling.PodGroup, claim string) bool {
	return slices.ContainsFunc(group.Spec.ResourceClaims, func(c scheduling.PodGroupResourceClaim) bool {
		return ptr.Deref(c.ResourceClaimName, "") == claim
	})
}
