// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// The kernel delivers broadcast and multicast to the macvlans of a NIC through one queue. Its length is the largest
// that any of them requests. A frame skips the queue if the number of its receivers does not exceed the cutoff: the
// kernel delivers it before it handles the next frame. A pod with CAP_NET_ADMIN in its own user namespace can request
// any length, and then a flood takes the node's memory. It can also set the NIC's cutoff, and then each frame takes the
// time of thousands of links.

// The kernel's defaults.
const (
	defaultQueue  = 1000 // frames; MACVLAN_DEFAULT_BC_QUEUE_LEN
	defaultCutoff = 1    // links
)

// iflaMacvlanBCCutoff is IFLA_MACVLAN_BC_CUTOFF, which Linux has since 6.4.
const iflaMacvlanBCCutoff = nl.IFLA_MACVLAN_BC_QUEUE_LEN_USED + 1

// longQueue describes the request of a pod for a longer queue, given all macvlans in its namespace; "" if there
// is none. The node cannot change the request, because the kernel lets other namespaces only create and delete
// links.
func longQueue(a Attachment, macvlans []macvlanState) string {
	for _, m := range macvlans {
		if m.parent == a.Parent && m.queue > defaultQueue {
			return fmt.Sprintf("the pod extended the broadcast queue of %s to %d frames, which delays the broadcasts of all "+
				"links of the NIC and takes the memory of the node", m.name, m.queue)
		}
	}
	return ""
}

// keepCutoff resets the cutoff of a NIC if a macvlan shows that a pod has changed it. Any pod with a link on the
// NIC may have done so.
func (n *Node) keepCutoff(parent int, macvlans []macvlanState) error {
	for _, m := range macvlans {
		if m.parent == parent && m.cutoff != defaultCutoff {
			return n.resetCutoff(parent)
		}
	}
	return nil
}

// resetCutoff resets the cutoff of a NIC by a link that stays down, because the node cannot change a pod's link.
func (n *Node) resetCutoff(parent int) error {
	name := cutoffLinkName(parent)
	remove := nl.NewNetlinkRequest(unix.RTM_DELLINK, 0)
	remove.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	remove.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	reset := func() error { return n.deletions.Do(cutoffRequest(parent, name), remove) }
	err := reset()
	if errors.Is(err, unix.EEXIST) { // an earlier process created the link, and the request has removed it
		err = reset()
	}
	if err != nil {
		return fmt.Errorf("reset the broadcast cutoff of link %d by creating %s: %w", parent, name, err)
	}
	return nil
}

// cutoffLinkPrefix begins the names of links that reset cutoffs.
const cutoffLinkPrefix = "drabc"

// cutoffLinkName returns the name of the link that resets the cutoff of a NIC.
func cutoffLinkName(parent int) string { return fmt.Sprintf("%s%d", cutoffLinkPrefix, parent) }

// isOfCutoffLink reports whether an event is about a link that resets a cutoff. A pod can cause such events in a
// loop.
func isOfCutoffLink(link []byte) bool {
	if len(link) < unix.SizeofIfInfomsg {
		return false
	}
	return strings.HasPrefix(rtnl.AttributeText(link[unix.SizeofIfInfomsg:], unix.IFLA_IFNAME), cutoffLinkPrefix)
}

// cutoffRequest creates a macvlan in the node's namespace, and sets the cutoff of its NIC to the default.
func cutoffRequest(parent int, name string) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	r.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	r.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	r.AddData(nl.NewRtAttr(unix.IFLA_LINK, nl.Uint32Attr(uint32(parent))))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.ZeroTerminated("macvlan"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	data.AddRtAttr(nl.IFLA_MACVLAN_MODE, nl.Uint32Attr(uint32(Private)))
	data.AddRtAttr(iflaMacvlanBCCutoff, nl.Uint32Attr(defaultCutoff))
	r.AddData(info)
	return r
}
