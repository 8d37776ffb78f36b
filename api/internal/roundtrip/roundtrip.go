// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package roundtrip tests that the types of an API group keep their values when they are encoded and decoded. Only
// tests import it.
package roundtrip

import (
	"math/rand"
	"testing"

	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	"k8s.io/apimachinery/pkg/api/apitesting/roundtrip"
	metafuzzer "k8s.io/apimachinery/pkg/apis/meta/fuzzer"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
)

// Test encodes and decodes random values of the types that addToScheme registers.
func Test(t *testing.T, addToScheme func(*runtime.Scheme) error) {
	t.Helper()
	s := runtime.NewScheme()
	if err := addToScheme(s); err != nil {
		t.Fatal(err)
	}
	codecs := serializer.NewCodecFactory(s)
	random := rand.NewSource(rand.Int63()) //nolint:gosec // the values need not be unpredictable
	filler := fuzzer.FuzzerFor(metafuzzer.Funcs, random, codecs)
	roundtrip.RoundTripExternalTypesWithoutProtobuf(t, s, codecs, filler, nil)
}
