package netdev

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// LinkState is a link as the kernel has it now.
type LinkState struct {
	Exists    bool
	Name      string
	MAC       net.HardwareAddr
	MTU       int  // bytes
	Up        bool // set up by its owner
	Carrier   bool // and the NIC has a link
	Addresses []netip.Prefix
	// Send and Receive are the share's classes; nil where there is none or
	// the link's frames do not select it.
	Send, Receive *shape.Rates
}

// Read asks the kernel about a link. A link that is gone is no error.
func (n *Node) Read(a Attachment) (LinkState, error) {
	var s LinkState
	link, err := n.linkOf(a)
	if err != nil || link == nil {
		return s, err
	}
	s = LinkState{Exists: true, Name: link.Name, MAC: link.HardwareAddr, MTU: link.MTU,
		Up: link.Flags&net.FlagUp != 0, Carrier: link.OperState == netlink.OperUp || link.RawFlags&unix.IFF_LOWER_UP != 0}
	if s.Addresses, err = n.addresses(a); err != nil {
		return s, err
	}
	return s, n.readClasses(a, &s)
}

func (n *Node) readClasses(a Attachment, s *LinkState) error {
	parent, err := n.parent(a.Parent)
	if errors.Is(err, ErrNotManaged) || !parent.Enforce {
		return nil
	}
	if attached, err := classify.AnyVersionAttached(parent.Index); err != nil || !attached {
		return err
	}
	member := n.member(a, parent)
	member.MAC = s.MAC // what the link has now, not what it was given
	send, receive, err := n.classifier.Lookup(member)
	if err != nil {
		return fmt.Errorf("look up the classes of %s: %w", s.Name, err)
	}
	if s.Send, err = n.rates(parent.Index, send); err != nil {
		return err
	}
	s.Receive, err = n.rates(parent.ifb, receive)
	return err
}

func (n *Node) rates(dev int, class uint32) (*shape.Rates, error) {
	if class == 0 {
		return nil, nil
	}
	_, minor := netlink.MajorMinor(class)
	state, err := n.shaper.ReadClass(dev, minor)
	if state == nil {
		return nil, err
	}
	return &state.Rates, err
}

// addresses returns the global addresses of a link in a pod.
func (n *Node) addresses(a Attachment) ([]netip.Prefix, error) {
	r := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
	msg := nl.NewIfAddrmsg(unix.AF_UNSPEC)
	msg.Index = uint32(a.Index)
	r.AddData(msg)
	r.AddData(nl.NewRtAttr(unix.IFA_TARGET_NETNSID, nl.Uint32Attr(uint32(a.NSID))))
	messages, err := n.conn.Dump(r)
	if err != nil {
		if isGone(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("addresses of %s: %w", a.Name, err)
	}
	var addresses []netip.Prefix
	for _, m := range messages {
		if p, ok := parseAddress(m.Data, a.Index); ok {
			addresses = append(addresses, p)
		}
	}
	return addresses, nil
}

// parseAddress reads an RTM_NEWADDR message; link-local addresses, which the
// kernel makes by itself, are left out.
func parseAddress(payload []byte, index int) (p netip.Prefix, ok bool) {
	if len(payload) < unix.SizeofIfAddrmsg {
		return p, false
	}
	msg := nl.DeserializeIfAddrmsg(payload)
	attrs, err := nl.ParseRouteAttr(payload[unix.SizeofIfAddrmsg:])
	if err != nil || int(msg.Index) != index {
		return p, false
	}
	var address netip.Addr
	for _, a := range attrs {
		switch a.Attr.Type {
		case unix.IFA_LOCAL: // has precedence: IFA_ADDRESS is the peer's then
			address, _ = netip.AddrFromSlice(a.Value)
		case unix.IFA_ADDRESS:
			if !address.IsValid() {
				address, _ = netip.AddrFromSlice(a.Value)
			}
		}
	}
	if !address.IsValid() || address.IsLinkLocalUnicast() || int(msg.Prefixlen) > address.BitLen() {
		return p, false
	}
	return netip.PrefixFrom(address, int(msg.Prefixlen)), true
}
