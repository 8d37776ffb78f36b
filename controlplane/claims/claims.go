// Package claims makes ResourceClaims for whoever owns them, and keeps them
// reserved as long as the owner is there. It knows nothing of what the owner is:
// a PodGroup, a Job, anything with a kind, a name and a UID.
//
// Three things are decided here, by pure functions: what a generated claim is
// called and looks like (Generate), who must be in a claim's status.reservedFor
// (ReservationChange), and with which patch that comes to be (Patch). A ClaimWriter applies
// them; each of its functions is one write, and repeating it is harmless.
package claims

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
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
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// Owner is the object that claims are generated for, in its namespace.
type Owner struct {
	schema.GroupVersionKind
	// Resource is the lower-case plural, as reservations name it.
	Resource        string
	Namespace, Name string
	UID             types.UID
}

// Reference is the owner as a claim's status.reservedFor has it. Every version
// of Kubernetes keeps consumers of kinds that it does not know.
func (o Owner) Reference() resourceapi.ResourceClaimConsumerReference {
	return resourceapi.ResourceClaimConsumerReference{APIGroup: o.Group, Resource: o.Resource, Name: o.Name, UID: o.UID}
}

// Name of the claim that is generated for an owner's entry. It follows from the
// owner's UID: two writers, or one that was cut off, never make two claims, and
// an owner that comes again under its name never gets the claim of the one
// before. Shard 0 is the first, and most often the only one.
func Name(owner Owner, entry string, shard int) string {
	sum := sha256.Sum256([]byte(string(owner.UID) + "/" + entry))
	suffix := "-" + strings.ToLower(base32.HexEncoding.EncodeToString(sum[:5]))
	name := owner.Name + "-" + entry
	name = strings.TrimRight(name[:min(len(name), validation.DNS1123SubdomainMaxLength-len(suffix)-shardSuffix)], "-.") + suffix
	if shard > 0 {
		name += "-" + strconv.Itoa(shard)
	}
	return name
}

// shardSuffix is the room that a name leaves for the number of a shard.
const shardSuffix = len("-255")

// Generate makes the claim for an owner's entry from a template.
func Generate(owner Owner, entry string, shard int, template *resourceapi.ResourceClaimTemplate) *resourceapi.ResourceClaim {
	meta := *template.Spec.ObjectMeta.DeepCopy()
	annotations := map[string]string{}
	maps.Copy(annotations, meta.Annotations)
	annotations[scheduling.ClaimAnnotation] = entry
	if shard > 0 {
		annotations[scheduling.ShardAnnotation] = strconv.Itoa(shard)
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: owner.Namespace, Name: Name(owner, entry, shard), Labels: meta.Labels, Annotations: annotations,
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: owner.GroupVersion().String(), Kind: owner.Kind, Name: owner.Name, UID: owner.UID,
				Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true),
			}},
		},
		Spec: *template.Spec.Spec.DeepCopy(),
	}
}

// IsGeneratedFor tells whether a claim was generated for the owner of that UID.
func IsGeneratedFor(claim *resourceapi.ResourceClaim, owner types.UID) bool {
	controller := metav1.GetControllerOf(claim)
	return controller != nil && controller.UID == owner
}

// ClaimWriter writes claims.
type ClaimWriter struct {
	Client client.Client
}

// NameTakenError is of a claim that somebody else made under the name of one that
// was to be generated.
type NameTakenError struct{ Name string }

func (e *NameTakenError) Error() string {
	return fmt.Sprintf("there is a ResourceClaim %s that was not generated for this: delete it", e.Name)
}

// Create creates a generated claim. That it is there already is no error, unless
// somebody else's is.
func (k ClaimWriter) Create(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	err := k.Client.Create(ctx, claim)
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	var there resourceapi.ResourceClaim
	if err := k.Client.Get(ctx, client.ObjectKeyFromObject(claim), &there); err != nil {
		return fmt.Errorf("look at claim %s, which exists: %w", claim.Name, err) // not in the cache yet: again
	}
	if !IsGeneratedFor(&there, metav1.GetControllerOf(claim).UID) {
		return &NameTakenError{Name: claim.Name}
	}
	return nil
}

// Delete deletes a generated claim. It stays until it is reserved for nobody.
func (k ClaimWriter) Delete(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	if claim.DeletionTimestamp != nil {
		return nil
	}
	return client.IgnoreNotFound(k.Client.Delete(ctx, claim, client.Preconditions{UID: &claim.UID}))
}

// Apply changes who a claim is reserved for. It does nothing for a claim that
// has become another, is gone or is not allocated any more: whoever asked sees
// it soon.
func (k ClaimWriter) Apply(ctx context.Context, claim *resourceapi.ResourceClaim, c Change) error {
	if c.Empty() {
		return nil
	}
	raw, err := c.Patch(claim)
	if err != nil {
		return err
	}
	err = k.Client.Status().Patch(ctx, claim.DeepCopy(), client.RawPatch(types.StrategicMergePatchType, raw))
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil // the cache is behind: the event will come
	case apierrors.IsInvalid(err) && !c.Deallocate && len(c.Add) > 0:
		// A claim without an allocation takes no reservations, and one has room for
		// so many: others were faster. What goes makes room.
		c.Add = nil
		return k.Apply(ctx, claim, c)
	}
	return err
}
