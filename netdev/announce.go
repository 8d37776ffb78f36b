// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// announceIPv4 adds arp_notify to a request that sets a link's attributes. The kernel then sends gratuitous ARP for the
// link's addresses when the link comes up, and hosts on the network replace the MAC address that an address had in
// another pod. Netlink does not have an attribute for the IPv6 counterpart, ndisc_notify: the hook sets it (package
// attach).
func announceIPv4(set *nl.NetlinkRequest) {
	const (
		inetConf  = 1  // IFLA_INET_CONF
		arpNotify = 22 // IPV4_DEVCONF_ARP_NOTIFY of linux/ip.h
	)
	families := nl.NewRtAttr(unix.IFLA_AF_SPEC, nil)
	conf := families.AddRtAttr(unix.AF_INET, nil).AddRtAttr(inetConf, nil)
	conf.AddRtAttr(arpNotify, nl.Uint32Attr(1))
	set.AddData(families)
}
