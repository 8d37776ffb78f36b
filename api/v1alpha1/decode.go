// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"fmt"
	"reflect"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/validation/field"
	kjson "sigs.k8s.io/json"

	"github.com/dra-shared/dra-driver-shared/api/internal/strict"
)

// maxParametersLength is the API server's limit for opaque parameters, in bytes (resource.k8s.io/v1,
// OpaqueParametersMaxLength).
const maxParametersLength = 10 << 10

// Parameters is the content of an opaque configuration for this driver: a
// *NetworkAttachment or an *AcceleratorShare.
//
// +kubebuilder:object:generate=false
type Parameters interface {
	runtime.Object
	// Validate checks everything that does not depend on the device.
	Validate() field.ErrorList
	kind() string
}

func (*NetworkAttachment) kind() string { return NetworkAttachmentKind }
func (*AcceleratorShare) kind() string  { return AcceleratorShareKind }

// decoder refuses unknown and duplicate fields.
var decoder = json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme,
	json.SerializerOptions{Strict: true})

// Decode reads the parameters from one opaque configuration. It does not merge, default, or validate them. The error
// names the field and what is expected.
func Decode(raw []byte) (Parameters, error) {
	if len(raw) > maxParametersLength {
		return nil, fmt.Errorf("parameters have %d bytes: want at most %d", len(raw), maxParametersLength)
	}
	var id metav1.TypeMeta
	if err := kjson.UnmarshalCaseSensitivePreserveInts(raw, &id); err != nil {
		return nil, fmt.Errorf("parameters are not an object of %s: %w", APIVersion, err)
	}
	if id.APIVersion != APIVersion {
		return nil, fmt.Errorf("apiVersion: %q: want %q", id.APIVersion, APIVersion)
	}
	var parameters Parameters
	switch id.Kind {
	case NetworkAttachmentKind:
		parameters = &NetworkAttachment{}
	case AcceleratorShareKind:
		parameters = &AcceleratorShare{}
	default:
		return nil, fmt.Errorf("kind: %q: want %q or %q", id.Kind, NetworkAttachmentKind, AcceleratorShareKind)
	}
	if _, _, err := decoder.Decode(raw, nil, parameters); err != nil {
		return nil, fmt.Errorf("%s: %w", id.Kind, strict.Explain(err, fields(parameters)...))
	}
	return parameters, nil
}

// DecodeAs decodes parameters, and returns an error if the device does not accept their kind.
func DecodeAs[T Parameters](raw []byte) (T, error) {
	var want T
	parameters, err := Decode(raw)
	if err != nil {
		return want, err
	}
	got, ok := parameters.(T)
	if !ok {
		return want, fmt.Errorf("kind: %q: the device takes %q: "+
			"list the matching requests in the field `requests` of each configuration", parameters.kind(), want.kind())
	}
	return got, nil
}

// Check decodes, defaults, and validates the parameters of one opaque configuration. It checks everything that does
// not depend on the device or on the combination of DeviceClass and claim: the addresses with the gateways' subnets
// may be in other parameters.
func Check(raw []byte) error {
	parameters, err := Decode(raw)
	if err != nil {
		return err
	}
	scheme.Default(parameters)
	if a, ok := parameters.(*NetworkAttachment); ok && len(a.Addresses) == 0 {
		return a.validate(true).ToAggregate()
	}
	return parameters.Validate().ToAggregate()
}

// fields returns the names of the fields of an object, except apiVersion and kind.
func fields(object Parameters) (names []string) {
	t := reflect.TypeOf(object).Elem()
	for i := range t.NumField() {
		if name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ","); name != "" {
			names = append(names, name)
		}
	}
	return names
}
