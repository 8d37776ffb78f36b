// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestSuite_portable(t *testing.T) {
	s := &suite{session: &session{dir: "/tmp/dr1234", env: Env{KubeletDir: "/tmp/dr1234/k"}}, claims: []*claim{
		{ResourceClaim: &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "conformance-a", UID: "1-2"}}},
		{ResourceClaim: &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "conformance-b", UID: "3-4"}}},
	}}
	got := s.portable("claims conformance-a and conformance-b: x.example.com/x=3-4-nic0 in /tmp/dr1234/k/cdi/1-2.json")
	const want = "claims $CLAIM_1 and $CLAIM_2: x.example.com/x=$CLAIM_UID_2-nic0 in $KUBELET_DIR/cdi/$CLAIM_UID_1.json"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
