// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
)

// Identification of the kind in this package.
const (
	Group      = "config.dra-shared.dev"
	Version    = "v1alpha1"
	APIVersion = Group + "/" + Version
	Kind       = "DriverConfig"
)

// GroupVersion identifies the API in this package.
var GroupVersion = schema.GroupVersion{Group: Group, Version: Version}

// AddToScheme registers DriverConfig and its defaults with a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &DriverConfig{})
	s.AddTypeDefaultingFunc(&DriverConfig{}, func(o any) {
		if c, ok := o.(*DriverConfig); ok {
			SetDefaultsDriverConfig(c)
		}
	})
	return nil
}

// scheme holds the kind of this package, for Decode.
var scheme = runtime.NewScheme()

func init() { utilruntime.Must(AddToScheme(scheme)) }
