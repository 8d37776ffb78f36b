// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// LinkState is the state of a link in the kernel.
type LinkState struct {
	Exists    bool
	Name      string
	MAC       net.HardwareAddr
	MTU       int  // bytes
	Up        bool // administrative state
	Addresses []netip.Prefix
	// Send and Receive are the rates that the kernel enforces on the link's
	// frames; nil if the frames do not select a class or the class does not
	// exist.
	Send, Receive *shape.Rates
	// Blocked is the reason why the link is blocked; "" if it is not. The pod changed the link in a way that lets it
	// receive other pods' frames, or delay their broadcasts.
	Blocked string
	// Audited reports whether frames without the identity of the link pass,
	// because an earlier release attached it.
	Audited bool
	// Switched reports whether the kernel switches frames between the link and other such links
	// of the NIC, past the queues for what the link sends: an earlier release attached it, or
	// the NIC was managed without enforcement.
	Switched bool
	// Unchecked reports whether the kernel does not load the program that checks the identity
	// of frames.
	Unchecked bool
}

// ReadAndBlock returns the current state of a link. If the link does not exist, it returns the zero LinkState and a nil
// error. If the pod changed the link in a way that lets it receive other pods' frames or delay their broadcasts,
// ReadAndBlock blocks it until the pod reverts the change.
func (n *Node) ReadAndBlock(a Attachment) (LinkState, error) {
	link, err := n.linkOf(a)
	if err != nil {
		return LinkState{}, err
	}
	if link == nil {
		_, err := n.updateBlocking(a)
		return LinkState{}, err
	}
	s := LinkState{
		Exists:   true,
		Name:     link.Name,
		MAC:      link.HardwareAddr,
		MTU:      link.MTU,
		Up:       link.Flags&net.FlagUp != 0,
		Audited:  a.Audited,
		Switched: a.Mode == Bridge,
	}
	s.Unchecked = n.IsUnchecked()
	if s.Blocked, err = n.updateBlocking(a); err != nil {
		return s, err
	}
	if s.Addresses, err = n.addresses(a); err != nil {
		return s, err
	}
	return s, n.readClasses(a, &s)
}

// readClasses sets s.Send and s.Receive.
func (n *Node) readClasses(a Attachment, s *LinkState) error {
	nic, enforced := n.enforcedNIC(a.Parent)
	if !enforced {
		return nil
	}
	attached, err := classify.AnyVersionAttached(n.bpffs, nic.Index)
	if err != nil || !attached {
		return err
	}
	member := nic.member(a)
	member.MAC = s.MAC // the current address, because the pod may have changed it
	send, receive, err := n.classifier.Lookup(member)
	if err != nil {
		return fmt.Errorf("look up the classes of %s: %w", s.Name, err)
	}
	if s.Send, err = n.classRates(nic.Index, send); err != nil {
		return err
	}
	if a.switches() {
		switched, err := n.classRates(nic.hairpin.Outer, onHairpin(send))
		if err != nil {
			return err
		}
		s.Send = combine(s.Send, switched)
	}
	s.Receive, err = n.classRates(nic.ifb, receive)
	return err
}

// classRates returns the rates of a class of a device, or nil if the class or the device
// is 0 or does not exist.
func (n *Node) classRates(dev int, class uint32) (*shape.Rates, error) {
	if class == 0 || dev == 0 {
		return nil, nil
	}
	state, err := n.shaper.ReadClass(dev, class)
	if state == nil {
		return nil, err
	}
	return &state.Rates, err
}

// combine returns the rates of a share on the NIC and on its hairpin, which are equal unless
// another program changed one of them: then the result differs from both. It returns nil if
// one of the classes does not exist.
func combine(nic, hairpin *shape.Rates) *shape.Rates {
	if nic == nil || hairpin == nil {
		return nil
	}
	both := *nic
	both.Floor, both.Ceil = min(nic.Floor, hairpin.Floor), max(nic.Ceil, hairpin.Ceil)
	return &both
}

// addresses returns the addresses of a link in a pod, except link-local ones.
func (n *Node) addresses(a Attachment) ([]netip.Prefix, error) {
	r := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
	msg := nl.NewIfAddrmsg(unix.AF_UNSPEC)
	msg.Index = uint32(a.Index)
	r.AddData(msg)
	r.AddData(nl.NewRtAttr(unix.IFA_TARGET_NETNSID, nl.Uint32Attr(uint32(a.NSID))))
	messages, err := n.conn.Dump(r)
	if err != nil {
		if rtnl.IsNotFound(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("list the addresses of %s: %w", a.Name, err)
	}
	var addresses []netip.Prefix
	for _, m := range messages {
		if p, ok := parseAddress(m.Data, a.Index); ok && !slices.Contains(addresses, p) { // peers may share one
			addresses = append(addresses, p)
		}
	}
	return addresses, nil
}

// parseAddress parses the payload of an RTM_NEWADDR message. ok is false if the
// message is for another link or the address is link-local; the kernel itself
// adds link-local addresses.
func parseAddress(payload []byte, index int) (p netip.Prefix, ok bool) {
	if len(payload) < unix.SizeofIfAddrmsg {
		return p, false
	}
	msg := nl.DeserializeIfAddrmsg(payload)
	if int(msg.Index) != index {
		return p, false
	}
	attrs := payload[unix.SizeofIfAddrmsg:]
	address, ok := netip.AddrFromSlice(rtnl.Attribute(attrs, unix.IFA_LOCAL))
	if !ok { // IFA_LOCAL has precedence, because IFA_ADDRESS may be the address of a peer
		address, _ = netip.AddrFromSlice(rtnl.Attribute(attrs, unix.IFA_ADDRESS))
	}
	if !address.IsValid() || address.IsLinkLocalUnicast() || int(msg.Prefixlen) > address.BitLen() {
		return p, false
	}
	return netip.PrefixFrom(address, int(msg.Prefixlen)), true
}
