// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
)

// Conflict is an address of a link that a host on the network has used in ARP or neighbor discovery.
// The host may have forged it.
type Conflict struct {
	Parent  int // interface index of the NIC
	Address netip.Addr
	Link    net.HardwareAddr // MAC address of the link
	Host    net.HardwareAddr // MAC address of the host
}

// Conflicts returns the conflicts since the last call, at most one for each address. Without any, it
// takes one system call.
func (c *Classifier) Conflicts() (found []Conflict, failed error) {
	noted, err := entries[bpfAddress, uint64](c.maps.DraSharedConflicts)
	// The programs may replace an entry while the map is read. The host uses the address again.
	if err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return nil, fmt.Errorf("read conflicts: %w", err)
	}
	for key, host := range noted {
		failed = errors.Join(failed, ignoreMissing(c.maps.DraSharedConflicts.Delete(key)))
		conflict := Conflict{Parent: int(key.Parent), Address: netip.AddrFrom16(key.Bytes).Unmap(), Host: addressOf(host)}
		conflict.Link, err = c.OwnerOf(conflict.Parent, conflict.Address)
		failed = errors.Join(failed, err)
		if conflict.Link != nil { // otherwise the link is detached
			found = append(found, conflict)
		}
	}
	return found, failed
}
