// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reservedfor

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

// holdChange returns the change for a claim with an existing holder: the owner's entry is added when the claim is in
// use on a node, and the entries of earlier objects of the same name are removed.
func holdChange(claim *resourceapi.ResourceClaim, holder holderRef, owner claims.Owner, inUse bool) claims.Change {
	var change claims.Change
	isPredecessor := func(entry resourceapi.ResourceClaimConsumerReference) bool {
		return holder.isEntry(entry) && entry.UID != owner.UID
	}
	if slices.ContainsFunc(claim.Status.ReservedFor, isPredecessor) {
		change.Remove = claims.EntriesToRemove(claim, isPredecessor)
		change.Precondition = true // see claims.ReleaseChange
	}
	if inUse && claim.DeletionTimestamp == nil && !claims.IsReservedFor(claim, owner.UID) {
		change.Add = append(change.Add, owner.Reference())
	}
	return change
}

// releaseChange returns the change for a claim if its holder does not exist: all entries of objects of that name are
// removed, regardless of their UIDs. If no other entries remain, the claim is deallocated, unless it is being deleted:
// then Kubernetes deallocates it.
func releaseChange(claim *resourceapi.ResourceClaim, holder holderRef) claims.Change {
	remove := claims.EntriesToRemove(claim, holder.isEntry)
	switch {
	case len(remove) == 0:
		return claims.Change{}
	case len(remove) == len(claim.Status.ReservedFor) && claim.DeletionTimestamp == nil:
		return claims.Change{Deallocate: true}
	}
	return claims.Change{Remove: remove, Precondition: true} // see claims.ReleaseChange
}
