// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package claims generates ResourceClaims for an owner and keeps them reserved for
// it as long as the owner exists. An owner is any object with a kind, a name, and a
// UID, such as a PodGroup or a Job; the package does not depend on its kind.
//
// Pure functions decide the name and the contents of a generated claim (Name,
// Generate, GenerateShard) and how the entries of a claim's status.reservedFor must
// change (ReservationChange, StaleEntriesChange, DeletedClaimChange, ReleaseChange).
// A ClaimWriter applies the results. Each of its methods performs one write, which
// callers may repeat safely.
package claims

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// Owner identifies the object that claims are generated and reserved for. The claims are in its namespace.
type Owner struct {
	schema.GroupVersionKind
	// Resource is the lower-case plural of the kind, such as "jobs".
	Resource  string
	Namespace string
	Name      string
	UID       types.UID
	// Replica is the ordinal of the replica that the claims belong to; "" if they belong to the owner as a whole.
	Replica string
}

// Reference returns the owner's entry in a claim's status.reservedFor. All versions
// of Kubernetes keep entries of resources that they do not know.
func (o Owner) Reference() resourceapi.ResourceClaimConsumerReference {
	return resourceapi.ResourceClaimConsumerReference{
		APIGroup: o.Group, Resource: o.Resource, Name: o.Name, UID: o.UID,
	}
}

// Name returns the name of the claim that is generated for a shard of an owner's spec.resourceClaims entry. The name
// depends only on the arguments, so concurrent or repeated reconciles never create two claims for one shard. It
// includes a hash of the owner's UID (and the replica), so an owner that was deleted and created again under the same
// name does not take over its predecessor's claims. Most entries have only shard 0.
func Name(owner Owner, entry string, shard int) string {
	key, name := string(owner.UID)+"/"+entry, owner.Name+"-"+entry
	if owner.Replica != "" {
		key, name = string(owner.UID)+"/"+owner.Replica+"/"+entry, owner.Name+"-"+owner.Replica+"-"+entry
	}
	sum := sha256.Sum256([]byte(key))
	suffix := "-" + strings.ToLower(base32.HexEncoding.EncodeToString(sum[:5]))
	maxLength := validation.DNS1123SubdomainMaxLength - len(suffix) - maxShardSuffix
	return NameOfShard(strings.TrimRight(name[:min(len(name), maxLength)], "-.")+suffix, shard)
}

// NameOfShard returns the name of a shard, given the name of shard 0.
func NameOfShard(first string, shard int) string {
	if shard == 0 {
		return first
	}
	return first + "-" + strconv.Itoa(shard)
}

// maxShardSuffix is the length of the longest suffix that Name appends for a shard.
const maxShardSuffix = len("-255")

// generatedAnnotations returns the annotations that identify a generated claim. Only the
// controller sets them.
func generatedAnnotations() []string {
	return []string{
		scheduling.ClaimAnnotation, scheduling.ReplicaAnnotation, scheduling.ShardAnnotation, scheduling.PrimaryAnnotation,
	}
}

// Generate returns the claim for the primary shard of an owner's entry, with the spec, labels,
// and annotations of the template. The owner is the claim's controller.
func Generate(
	owner Owner, entry string, shard int, template *resourceapi.ResourceClaimTemplate,
) *resourceapi.ResourceClaim {
	claim := generate(owner, entry, shard, template)
	if shard > 0 {
		claim.Annotations[scheduling.PrimaryAnnotation] = "true"
	}
	return claim
}

// HasPrimaryAnnotation reports whether the claim was generated as the primary shard in place of shard 0.
func HasPrimaryAnnotation(claim *resourceapi.ResourceClaim) bool {
	return claim.Annotations[scheduling.PrimaryAnnotation] == "true"
}

// generate returns the claim for a shard of an owner's entry.
func generate(
	owner Owner, entry string, shard int, template *resourceapi.ResourceClaimTemplate,
) *resourceapi.ResourceClaim {
	meta := *template.Spec.ObjectMeta.DeepCopy()
	annotations := map[string]string{}
	maps.Copy(annotations, meta.Annotations)
	for _, name := range generatedAnnotations() {
		delete(annotations, name) // the claim would not be recognized as the owner's
	}
	annotations[scheduling.ClaimAnnotation] = entry
	if owner.Replica != "" {
		annotations[scheduling.ReplicaAnnotation] = owner.Replica
	}
	if shard > 0 {
		annotations[scheduling.ShardAnnotation] = strconv.Itoa(shard)
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: owner.Namespace, Name: Name(owner, entry, shard),
			Labels: meta.Labels, Annotations: annotations,
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: owner.GroupVersion().String(), Kind: owner.Kind, Name: owner.Name, UID: owner.UID,
				Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true),
			}},
		},
		Spec: *template.Spec.Spec.DeepCopy(),
	}
}

// IsGeneratedFor reports whether the claim was generated for the owner with that UID.
func IsGeneratedFor(claim *resourceapi.ResourceClaim, owner types.UID) bool {
	controller := metav1.GetControllerOf(claim)
	return controller != nil && controller.UID == owner
}

// ClaimWriter creates, deletes, and reserves claims.
type ClaimWriter struct {
	// Client writes to the API server.
	Client client.Client
	// APIReader reads from the API server: the cache of Client may not have the claim, see
	// trim.IsForeign.
	APIReader client.Reader
}

// NameTakenError reports that the name of a generated claim is in use by a claim
// that was not generated for the owner.
type NameTakenError struct{ Name string }

func (e *NameTakenError) Error() string {
	return fmt.Sprintf("ResourceClaim %s exists already and was not generated for this owner: delete it", e.Name)
}

// Create creates a generated claim. It succeeds if the claim already exists, and
// returns a NameTakenError if a claim with that name exists for a different owner.
func (w ClaimWriter) Create(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	err := w.Client.Create(ctx, claim)
	if err == nil {
		klog.FromContext(ctx).V(2).Info("Created claim", "claim", klog.KObj(claim), "claimUID", claim.UID)
	}
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	var existing resourceapi.ResourceClaim
	if err := w.APIReader.Get(ctx, client.ObjectKeyFromObject(claim), &existing); err != nil {
		return fmt.Errorf("get existing claim %s: %w", claim.Name, err)
	}
	if !IsGeneratedFor(&existing, metav1.GetControllerOf(claim).UID) {
		return &NameTakenError{Name: claim.Name}
	}
	return nil
}

// Delete starts the deletion of a generated claim. The API server keeps the claim
// until its status.reservedFor is empty.
func (w ClaimWriter) Delete(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	return w.delete(ctx, claim, client.Preconditions{UID: &claim.UID})
}

// DeleteUnchanged deletes a claim as Delete does, unless the claim has changed since it was read.
func (w ClaimWriter) DeleteUnchanged(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	err := w.delete(ctx, claim, client.Preconditions{UID: &claim.UID, ResourceVersion: &claim.ResourceVersion})
	if apierrors.IsConflict(err) {
		return nil // the change triggers the next reconcile
	}
	return err
}

func (w ClaimWriter) delete(
	ctx context.Context, claim *resourceapi.ResourceClaim, preconditions client.Preconditions,
) error {
	if claim.DeletionTimestamp != nil {
		return nil
	}
	err := w.Client.Delete(ctx, claim, preconditions)
	if err == nil {
		klog.FromContext(ctx).V(2).Info("Deleted claim", "claim", klog.KObj(claim), "claimUID", claim.UID)
	}
	return client.IgnoreNotFound(err)
}

// Apply applies a change to a claim's status. It ignores conflicts and claims that
// no longer exist: the cache is stale then, and a watch event triggers the next
// reconcile.
func (w ClaimWriter) Apply(ctx context.Context, claim *resourceapi.ResourceClaim, c Change) error {
	if c.Empty() {
		return nil
	}
	raw, err := c.Patch(claim)
	if err != nil {
		return err
	}
	err = w.Client.Status().Patch(ctx, claim.DeepCopy(), client.RawPatch(types.StrategicMergePatchType, raw))
	switch {
	case err == nil:
		klog.FromContext(ctx).V(4).Info("Changed reservations of claim", "claim", klog.KObj(claim), "claimUID", claim.UID,
			"addedCount", len(c.Add), "removedCount", len(c.Remove), "deallocated", c.Deallocate)
		return nil
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		klog.FromContext(ctx).V(4).Info("Claim has changed since it was read; waiting for the next event",
			"claim", klog.KObj(claim), "claimUID", claim.UID)
		return nil
	case apierrors.IsInvalid(err) && !c.Deallocate && len(c.Add) > 0:
		// The API server refuses new entries if the claim has been deallocated in the
		// meantime, or if other writers have filled status.reservedFor. Removals are
		// valid in either case, and make room.
		if isValidation(err) {
			err = nil // an event triggers the next reconcile
		}
		c.Add = nil
		return errors.Join(err, w.Apply(ctx, claim, c))
	}
	return err
}
