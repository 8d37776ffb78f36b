// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package dhcp

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// ID returns the client identifier of a share in a pod (RFC 4361): the DUID is the UID of the pod
// (RFC 6355), and the IAID a hash of the claim and the share. It is the same for all sandboxes of the
// pod, so that a pod whose sandbox is created again keeps its address.
func ID(podUID, claimUID, share string) []byte {
	const (
		typeDUID = 0xff
		duidUUID = 4
	)
	iaid := sha256.Sum256([]byte(claimUID + "/" + share))
	id := append([]byte{typeDUID}, iaid[:4]...)
	return append(append(id, 0, duidUUID), uuidOf(podUID)...)
}

// uuidOf returns the 16 bytes of the UID of a pod. The UIDs of static pods have no hyphens.
func uuidOf(uid string) []byte {
	if raw, err := hex.DecodeString(strings.ReplaceAll(uid, "-", "")); err == nil && len(raw) == 16 {
		return raw
	}
	sum := sha256.Sum256([]byte(uid))
	return sum[:16]
}
