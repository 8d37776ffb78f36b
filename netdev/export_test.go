// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// AddressByNamespaceID asks the kernel to add an address to a link in the
// namespace with the given ID, through a socket of the node's namespace.
func AddressByNamespaceID(conn *rtnl.Conn, nsid, index int, address netip.Prefix) error {
	r := addressRequest(index, address)
	r.AddData(nl.NewRtAttr(unix.IFA_TARGET_NETNSID, nl.Uint32Attr(uint32(nsid))))
	return conn.Do(r)
}

// ResetCutoff resets the broadcast cutoff of a NIC, as it does after a pod has changed it.
func ResetCutoff(n *Node, parent int) error { return n.resetCutoff(parent) }

// Functions for tests.
var (
	Port             = port
	ActiveFeatures   = activeFeatures
	CreateRequest    = createRequest
	ConfigureRequest = configureRequest
	ProvisionalName  = provisionalName
	TransmitQueues   = transmitQueues
	NodeAddresses    = nodeAddresses
)

// Hardware returns what sysfs has about a NIC.
func Hardware(sysfs, name string) NIC {
	nic := NIC{Name: name}
	NewInventory(sysfs).addHardware(&nic)
	return nic
}
