package netdev

import (
	"crypto/sha256"
	"encoding/binary"
	"net"
)

// MAC derives the hardware address of a link from what it belongs to: locally
// administered, unicast, 40 bits of a hash. The cookie of the namespace is part
// of it because a pod's next sandbox may come while the last one still holds
// its address, and a NIC has no address twice.
func MAC(claimUID, device, shareID, podUID string, cookie uint64) net.HardwareAddr {
	h := sha256.New()
	for _, part := range []string{claimUID, device, shareID, podUID} {
		// The length keeps ("ab", "c") apart from ("a", "bc").
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(part))))
		h.Write([]byte(part))
	}
	h.Write(binary.BigEndian.AppendUint64(nil, cookie))
	return append(net.HardwareAddr{0x02}, h.Sum(nil)[:5]...)
}
