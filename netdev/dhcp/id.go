// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package dhcp

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// ID returns the client identifier of a share in a pod (RFC 4361): the DUID is the UID of the pod (RFC 6355), and the
// IAID a hash of the claim and the share. It is the same for all sandboxes of the pod, so the pod keeps its address
// when its sandbox is created again.
func ID(podUID, claimUID, share string) []byte {
	const (
		typeDUID = 0xff
		duidUUID = 4
	)
	iaid := sha256.Sum256([]byte(claimUID + "/" + share))
	id := append([]byte{typeDUID}, iaid[:4]...)
	return append(append(id, 0, duidUUID), uuidOf(podUID)...)
}

// uuidOf returns the 16 bytes of a pod's UID. The UIDs of static pods do not have hyphens.
func uuidOf(uid string) []byte {
	if raw, err := hex.DecodeString(strings.ReplaceAll(uid, "-", "")); err == nil && len(raw) == 16 {
		return raw
	}
	sum := sha256.Sum256([]byte(uid))
	return sum[:16]
}
