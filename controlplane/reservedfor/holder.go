// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reservedfor

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/workload"
)

// holderRef names an object in the claim's namespace that holds the claim.
type holderRef struct{ workload.Reference }

// IsHeldBy reports whether a claim with these entries is reserved for the holder that the annotation names. The
// annotation must not change then, because the controller would no longer find the holder's entry to remove it.
func IsHeldBy(annotation string, entries []resourceapi.ResourceClaimConsumerReference) bool {
	ref, err := workload.Parse(annotation)
	return err == nil && holderRef{ref}.hasEntry(entries)
}

// hasEntry reports whether one of the entries is for an object with the holder's
// resource and name, regardless of its UID.
func (h holderRef) hasEntry(entries []resourceapi.ResourceClaimConsumerReference) bool {
	return slices.ContainsFunc(entries, h.isEntry)
}

func (h holderRef) isEntry(entry resourceapi.ResourceClaimConsumerReference) bool {
	return entry.APIGroup == h.Group && entry.Resource == h.Resource && entry.Name == h.Name
}

// isOther reports whether the entry is for a user of the claim other than the holder and
// terminal pods.
func (h holderRef) isOther(entry resourceapi.ResourceClaimConsumerReference) bool {
	return !h.isEntry(entry) && !claims.IsTerminalPodEntry(entry)
}

// isOwnerOf reports whether the claim was generated for the object. The hash in the claim's name is the proof.
func (h holderRef) isOwnerOf(claim *resourceapi.ResourceClaim) bool {
	c := metav1.GetControllerOfNoCopy(claim)
	if c == nil {
		return false
	}
	resource, _ := meta.UnsafeGuessKindToResource(schema.FromAPIVersionAndKind(c.APIVersion, c.Kind))
	if resource.Group != h.Group || resource.Resource != h.Resource || c.Name != h.Name {
		return false
	}
	owner := claims.Owner{Name: c.Name, UID: c.UID, Replica: claim.Annotations[scheduling.ReplicaAnnotation]}
	_, ok := claims.ShardNumber(owner, claim.Annotations[scheduling.ClaimAnnotation], claim.Name)
	return ok
}
