// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
)

// Version is the API version in this package.
const Version = "v1alpha1"

// APIVersion is the value of apiVersion for all kinds in this package.
const APIVersion = Group + "/" + Version

// Kinds of the opaque parameters, and of the file that describes a fabric.
const (
	NetworkAttachmentKind = "NetworkAttachment"
	AcceleratorShareKind  = "AcceleratorShare"
	FabricMembershipKind  = "FabricMembership"
)

// GroupVersion identifies the API in this package.
var GroupVersion = schema.GroupVersion{Group: Group, Version: Version}

// TypeMeta returns the TypeMeta of a kind in this package.
func TypeMeta(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: APIVersion, Kind: kind}
}

// AddToScheme registers this package's kinds and their defaults with a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion,
		&NetworkAttachment{}, &AcceleratorShare{}, &FabricMembership{},
		&NetworkStatus{}, &NetworkStatusSummary{}, &FabricStatusSummary{},
	)
	s.AddTypeDefaultingFunc(&NetworkAttachment{}, func(o any) {
		if a, ok := o.(*NetworkAttachment); ok {
			SetDefaultsNetworkAttachment(a)
		}
	})
	return nil
}

// scheme holds this package's kinds, for Decode.
var scheme = runtime.NewScheme()

func init() { utilruntime.Must(AddToScheme(scheme)) }
