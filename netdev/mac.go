// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"crypto/sha256"
	"encoding/binary"
	"net"
)

// MAC derives the MAC address of a link from the share, the pod, and the cookie
// of the pod's network namespace. The address is unicast and locally
// administered; the last 40 bits are a hash of the arguments.
//
// The hash includes the cookie because a pod can get a new sandbox while its
// previous one still has a link, and two links of a NIC cannot have the same
// address.
func MAC(claimUID, device, shareID, podUID string, cookie uint64) net.HardwareAddr {
	h := sha256.New()
	for _, part := range []string{claimUID, device, shareID, podUID} {
		// The length distinguishes ("ab", "c") from ("a", "bc").
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(part))))
		h.Write([]byte(part))
	}
	h.Write(binary.BigEndian.AppendUint64(nil, cookie))
	return append(net.HardwareAddr{0x02}, h.Sum(nil)[:5]...)
}
