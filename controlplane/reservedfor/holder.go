// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reservedfor

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/workload"
)

// Holder names an object in the claim's namespace that holds the claim.
type Holder struct{ workload.Reference }

// IsHeldBy reports whether a claim with these entries is reserved for the holder that
// the annotation names. The annotation must not change then, because the controller
// would not find the holder's entry any more to remove it.
func IsHeldBy(annotation string, entries []resourceapi.ResourceClaimConsumerReference) bool {
	ref, err := workload.Parse(annotation)
	return err == nil && Holder{ref}.hasEntry(entries)
}

// hasEntry reports whether one of the entries is for an object with the holder's
// resource and name, regardless of its UID.
func (h Holder) hasEntry(entries []resourceapi.ResourceClaimConsumerReference) bool {
	return slices.ContainsFunc(entries, h.isEntry)
}

func (h Holder) isEntry(entry resourceapi.ResourceClaimConsumerReference) bool {
	return entry.APIGroup == h.Group && entry.Resource == h.Resource && entry.Name == h.Name
}

// isOther reports whether the entry is for a user of the claim other than the holder and
// terminal pods.
func (h Holder) isOther(entry resourceapi.ResourceClaimConsumerReference) bool {
	return !h.isEntry(entry) && !claims.IsTerminalPodEntry(entry)
}
