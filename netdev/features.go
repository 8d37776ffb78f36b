// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// macvlanOffload is the name of the feature that lets a NIC deliver frames to macvlans in hardware
// (NETIF_F_HW_L2FW_DOFFLOAD). Such frames bypass the NIC's attach points.
const macvlanOffload = "l2-fwd-offload"

// activeFeatures returns the names of the features that are switched on for a
// link, as "ethtool -k" shows them. The kernel answers through the family ethtool
// of generic netlink (Documentation/networking/ethtool-netlink.rst).
func activeFeatures(index int) (map[string]bool, error) {
	messages, err := ethtool(index, unix.ETHTOOL_MSG_FEATURES_GET, unix.ETHTOOL_A_FEATURES_HEADER)
	if err != nil {
		return nil, fmt.Errorf("read the features of link %d: %w", index, err)
	}
	active := map[string]bool{}
	for _, m := range messages {
		bits := rtnl.Attribute(rtnl.Attribute(m, unix.ETHTOOL_A_FEATURES_ACTIVE), unix.ETHTOOL_A_BITSET_BITS)
		for _, bit := range rtnl.Attributes(bits) {
			active[rtnl.AttributeText(bit, unix.ETHTOOL_A_BITSET_BIT_NAME)] = true
		}
	}
	return active, nil
}

// ethtool sends a request about a link to the family ethtool, and returns the attributes of the
// answers. header is the type of the attribute that names the link; others follow it.
func ethtool(index int, command uint8, header int, others ...nl.NetlinkRequestData) (answers [][]byte, err error) {
	family, err := netlink.GenlFamilyGet(unix.ETHTOOL_GENL_NAME)
	if err != nil {
		return nil, fmt.Errorf("look up the netlink family %s: %w", unix.ETHTOOL_GENL_NAME, err)
	}
	request := nl.NewNetlinkRequest(int(family.ID), 0)
	request.AddData(&nl.Genlmsg{Command: command, Version: unix.ETHTOOL_GENL_VERSION})
	device := nl.NewRtAttr(header|unix.NLA_F_NESTED, nil)
	device.AddRtAttr(unix.ETHTOOL_A_HEADER_DEV_INDEX, nl.Uint32Attr(uint32(index)))
	request.AddData(device)
	for _, o := range others {
		request.AddData(o)
	}
	messages, err := request.Execute(unix.NETLINK_GENERIC, 0)
	for _, m := range messages {
		if len(m) >= nl.SizeofGenlmsg {
			answers = append(answers, m[nl.SizeofGenlmsg:])
		}
	}
	return answers, err
}
