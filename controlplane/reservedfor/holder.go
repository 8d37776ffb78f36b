package reservedfor

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Holder names an object in the claim's namespace.
type Holder struct {
	schema.GroupResource
	Name string
}

// Parse reads <API group>/<resource>/<name>; the group of the core API is empty.
func Parse(text string) (Holder, error) {
	parts := strings.Split(text, "/")
	if len(parts) != 3 || parts[1] == "" || parts[2] == "" {
		return Holder{}, errors.New("must be <API group>/<resource>/<name>, such as batch/jobs/train; for the core group, /replicationcontrollers/web")
	}
	if parts[0] == "" && parts[1] == "pods" {
		return Holder{}, errors.New("a pod holds the claims that it names in spec.resourceClaims, until it ends: name what lives longer")
	}
	h := Holder{GroupResource: schema.GroupResource{Group: parts[0], Resource: parts[1]}, Name: parts[2]}
	if h.Group != "" && len(validation.IsDNS1123Subdomain(h.Group)) > 0 {
		return Holder{}, fmt.Errorf("%q is no API group: such as batch, apps, or nothing for the core group", h.Group)
	}
	if len(validation.IsDNS1123Label(h.Resource)) > 0 {
		return Holder{}, fmt.Errorf("%q is no resource: its lower-case plural, such as jobs", h.Resource)
	}
	if len(validation.IsDNS1123Subdomain(h.Name)) > 0 {
		return Holder{}, fmt.Errorf("%q is no name of an object", h.Name)
	}
	return h, nil
}

// IsHeldBy tells whether a claim is reserved for the holder of that annotation: then
// the annotation must stay as it is, or nobody would take the entry away.
func IsHeldBy(annotation string, reserved []resourceapi.ResourceClaimConsumerReference) bool {
	h, err := Parse(annotation)
	return err == nil && h.in(reserved)
}

// in tells whether a claim is reserved for an object of that name.
func (h Holder) in(reserved []resourceapi.ResourceClaimConsumerReference) bool {
	return slices.ContainsFunc(reserved, func(r resourceapi.ResourceClaimConsumerReference) bool {
		return r.APIGroup == h.Group && r.Resource == h.Resource && r.Name == h.Name
	})
}

func (h Holder) String() string { return h.Group + "/" + h.Resource + "/" + h.Name }
