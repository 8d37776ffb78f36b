// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"bytes"
	"fmt"
	"net"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// macvlanState is the state of a macvlan that its pod can change.
type macvlanState struct {
	index  int // interface index
	name   string
	parent int // interface index in the node's namespace
	mac    net.HardwareAddr
	up     bool
	mode   Mode
	flags  uint16
	macs   int // in the list of mode source
	// queue is the length of the queue of broadcasts that the link requests, in frames. cutoff is the cutoff of
	// all links of the NIC. See broadcasts.go.
	queue  uint32
	cutoff int32
}

// modeSource is MACVLAN_MODE_SOURCE: the link receives the frames of listed senders.
const modeSource Mode = 16

// flagNoDst is MACVLAN_FLAG_NODST: a link in mode source takes frames from their
// receiver.
const flagNoDst = 2

// modeNames are the names that ip link uses.
var modeNames = map[Mode]string{Private: "private", VEPA: "vepa", Bridge: "bridge", 8: "passthru", modeSource: "source"}

func (m Mode) String() string {
	if name, known := modeNames[m]; known {
		return name
	}
	return fmt.Sprintf("mode %d", uint32(m))
}

// parseMacvlan parses the payload of an RTM_NEWLINK message. ok is false if the link is not a
// macvlan on a link of the namespace with the ID parents. A pod can create a link with the
// interface index of the NIC in its own namespace, and macvlans on that link.
func parseMacvlan(payload []byte, parents int) (s macvlanState, ok bool) {
	if len(payload) < unix.SizeofIfInfomsg {
		return s, false
	}
	info, attrs := nl.DeserializeIfInfomsg(payload), payload[unix.SizeofIfInfomsg:]
	linkInfo := rtnl.Attribute(attrs, unix.IFLA_LINKINFO)
	if kind := rtnl.AttributeText(linkInfo, nl.IFLA_INFO_KIND); kind != "macvlan" && kind != "macvtap" {
		return s, false
	}
	s = macvlanState{
		index: int(info.Index), name: rtnl.AttributeText(attrs, unix.IFLA_IFNAME), up: info.Flags&unix.IFF_UP != 0,
		cutoff: defaultCutoff, // the kernel reports it only if it is another
	}
	parentNamespace := -1
	for attrType, value := range rtnl.Attributes(attrs) {
		switch native := nl.NativeEndian(); {
		case attrType == unix.IFLA_ADDRESS:
			s.mac = bytes.Clone(value)
		case attrType == unix.IFLA_LINK && len(value) >= 4:
			s.parent = int(native.Uint32(value))
		case attrType == unix.IFLA_LINK_NETNSID && len(value) >= 4:
			parentNamespace = int(int32(native.Uint32(value)))
		}
	}
	s.parseParameters(rtnl.Attribute(linkInfo, nl.IFLA_INFO_DATA))
	return s, parentNamespace == parents
}

// parseParameters parses the attributes of a macvlan that other kinds of links do not have.
func (s *macvlanState) parseParameters(attrs []byte) {
	for attrType, value := range rtnl.Attributes(attrs) {
		switch native := nl.NativeEndian(); {
		case attrType == nl.IFLA_MACVLAN_MODE && len(value) >= 4:
			s.mode = Mode(native.Uint32(value))
		case attrType == nl.IFLA_MACVLAN_FLAGS && len(value) >= 2:
			s.flags = native.Uint16(value)
		case attrType == nl.IFLA_MACVLAN_MACADDR_COUNT && len(value) >= 4:
			s.macs = int(native.Uint32(value))
		case attrType == nl.IFLA_MACVLAN_BC_QUEUE_LEN && len(value) >= 4:
			s.queue = native.Uint32(value)
		case attrType == iflaMacvlanBCCutoff && len(value) >= 4:
			s.cutoff = int32(native.Uint32(value))
		}
	}
}

// macvlans returns the macvlans of a namespace on links of the node; none if it has ended.
func (n *Node) macvlans(nsid int) (found []macvlanState, err error) {
	dump := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	dump.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	found, err = rtnl.Collect(n.conn, inNamespace(dump, nsid), func(payload []byte) (macvlanState, bool) {
		return parseMacvlan(payload, n.nsid)
	})
	if rtnl.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the links of namespace %d: %w", nsid, err)
	}
	return found, nil
}
