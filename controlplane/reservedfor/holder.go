// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reservedfor

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

// Holder names an object in the claim's namespace that holds the claim.
type Holder struct {
	schema.GroupResource
	Name string
}

// Parse parses the value of the annotation, <API group>/<resource>/<name>. The API
// group of core resources is empty. Errors say what the value should be. If the value
// has the right format, but objects of that resource cannot hold claims, Parse returns
// the holder and an error.
func Parse(text string) (Holder, error) {
	parts := strings.Split(text, "/")
	if len(parts) != 3 || parts[1] == "" || parts[2] == "" {
		return Holder{}, errors.New("must be <API group>/<resource>/<name>, such as batch/jobs/train; " +
			"for the core group, /replicationcontrollers/web")
	}
	if parts[0] == "" && parts[1] == "pods" {
		return Holder{}, errors.New("a pod holds the claims that it names in spec.resourceClaims, until it ends: " +
			"name an object that outlives its pods")
	}
	h := Holder{GroupResource: schema.GroupResource{Group: parts[0], Resource: parts[1]}, Name: parts[2]}
	if h.Group != "" && len(validation.IsDNS1123Subdomain(h.Group)) > 0 {
		return Holder{}, fmt.Errorf("%q is not an API group: use one such as batch or apps, or nothing for the core group",
			h.Group)
	}
	if len(validation.IsDNS1123Label(h.Resource)) > 0 {
		return Holder{}, fmt.Errorf("%q is not a resource: use the lower-case plural, such as jobs", h.Resource)
	}
	if len(validation.IsDNS1123Subdomain(h.Name)) > 0 {
		return Holder{}, fmt.Errorf("%q is not a valid object name", h.Name)
	}
	if h.Group == resourceapi.GroupName {
		return h, fmt.Errorf("%s cannot hold claims: two claims that hold each other could never be deleted: "+
			"name an object such as a Job", h.GroupResource)
	}
	return h, nil
}

// IsHeldBy reports whether a claim with these entries is reserved for the holder that
// the annotation names. The annotation must not change then, because the controller
// would not find the holder's entry any more to remove it.
func IsHeldBy(annotation string, entries []resourceapi.ResourceClaimConsumerReference) bool {
	h, err := Parse(annotation)
	return err == nil && h.hasEntry(entries)
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

// String returns the holder in the format that Parse reads.
func (h Holder) String() string { return h.Group + "/" + h.Resource + "/" + h.Name }
