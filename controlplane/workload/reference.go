// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"errors"
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Reference names an object in a namespace that the context gives.
type Reference struct {
	schema.GroupResource
	Name string
}

// Parse parses the value of an annotation, <API group>/<resource>/<name>. The API
// group of core resources is empty. Errors state what the value should be. If the value
// has the right format, but objects of that resource cannot hold claims, Parse returns
// the reference and an error.
func Parse(text string) (Reference, error) {
	parts := strings.Split(text, "/")
	if len(parts) != 3 || parts[1] == "" || parts[2] == "" {
		return Reference{}, errors.New("must be <API group>/<resource>/<name>, such as batch/jobs/train; " +
			"for the core group, /replicationcontrollers/web")
	}
	if parts[0] == "" && parts[1] == "pods" {
		return Reference{}, errors.New("a pod holds the claims that it names in spec.resourceClaims, until it ends: " +
			"name an object that outlives its pods")
	}
	r := Reference{GroupResource: schema.GroupResource{Group: parts[0], Resource: parts[1]}, Name: parts[2]}
	if r.Group != "" && len(validation.IsDNS1123Subdomain(r.Group)) > 0 {
		return Reference{}, fmt.Errorf("%q is not an API group: use one such as batch or apps, or nothing for the core group",
			r.Group)
	}
	if len(validation.IsDNS1123Label(r.Resource)) > 0 {
		return Reference{}, fmt.Errorf("%q is not a resource: use the lower-case plural, such as jobs", r.Resource)
	}
	if len(validation.IsDNS1123Subdomain(r.Name)) > 0 {
		return Reference{}, fmt.Errorf("%q is not a valid object name", r.Name)
	}
	if r.Group == resourceapi.GroupName {
		return r, fmt.Errorf("%s cannot hold claims: two claims that hold each other could never be deleted: "+
			"name an object such as a Job", r.GroupResource)
	}
	return r, nil
}

// String returns the reference in the format that Parse reads.
func (r Reference) String() string { return r.Group + "/" + r.Resource + "/" + r.Name }
