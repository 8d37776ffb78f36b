// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// LinkSpec describes the link that Attach creates.
type LinkSpec struct {
	// Parent is the interface index of the NIC.
	Parent int
	// Name is the name of the link in the pod. If it is empty, Attach uses
	// net<N> with the lowest N >= 1 that is free.
	Name string
	MAC  net.HardwareAddr
	// MTU is in bytes; 0 means the MTU of the NIC.
	MTU       int
	Mode      Mode
	Addresses []netip.Prefix
	Routes    []Route
	// Alias is a description for people, at most 255 bytes; "ip link" shows it.
	Alias string
	// Minor is the minor number of the share's class. If it is 0, the share
	// has no class, and its frames queue in the class for unidentified frames.
	Minor uint16
	// Rates are the rates of the share's class.
	Rates shape.Rates
	// SegmentBytes is the size of the largest segment that the pod's network
	// stack passes to the link, in bytes; 0 keeps the kernel's default.
	SegmentBytes int
}

// PodNamespace gives access to the network namespace of a pod.
type PodNamespace struct {
	File   *os.File   // descriptor of the namespace
	Socket *rtnl.Conn // opened in the namespace
}

// Attachment identifies a link that Attach created.
type Attachment struct {
	Parent int              // interface index of the NIC
	NSID   int              // ID of the pod's namespace in the node's namespace; valid while the pod's exists
	Cookie uint64           // cookie of the pod's namespace
	Index  int              // interface index of the link in the pod
	Name   string           // name of the link in the pod
	MAC    net.HardwareAddr // address of the link at its creation
	MTU    int              // bytes
	Minor  uint16           // minor number of the share's class
}

// Attach creates a link in a pod. When it returns, the link is up, and the
// kernel limits what the pod sends and receives through it to the share's
// rates. The limits are in place before the link is up, so no frame passes
// without them. If Attach fails, it removes what it created.
//
// If the pod already has a link with the same MAC address, it is left over from
// an interrupted attempt, and Attach replaces it.
func (n *Node) Attach(pod PodNamespace, s LinkSpec) (Attachment, error) {
	nic, err := n.managedNIC(s.Parent)
	if err != nil {
		return Attachment{}, err
	}
	a := Attachment{Parent: s.Parent, MAC: s.MAC, Minor: s.Minor}
	if a.Cookie, err = pod.Socket.Cookie(); err != nil {
		return a, err
	}
	if a.NSID, err = n.conn.NamespaceID(pod.File); err != nil {
		return a, err
	}
	if a.Name, err = n.createLink(pod, s); err != nil {
		return a, err
	}
	if err := n.setUpLink(pod, nic, &a, s); err != nil {
		return a, errors.Join(err, n.Detach(a))
	}
	return a, nil
}

// createLink chooses a name, creates the link with it, and returns the name.
func (n *Node) createLink(pod PodNamespace, s LinkSpec) (string, error) {
	taken := map[string]bool{}
	leftover, err := findLink(pod.Socket, func(l *netlink.LinkAttrs) bool {
		taken[l.Name] = true
		return l.HardwareAddr.String() == s.MAC.String()
	})
	if err != nil {
		return "", err
	}
	if leftover != nil {
		err := n.failpoints.Do("delete link", func() error { return pod.Socket.Do(deleteRequest(leftover.Index)) })
		if err != nil {
			return "", fmt.Errorf("remove link %s of an earlier attempt: %w", leftover.Name, err)
		}
		delete(taken, leftover.Name)
	}
	name := s.Name
	if name == "" {
		name = freeName(taken)
	}
	if taken[name] {
		return "", fmt.Errorf("the pod already has an interface %s: choose another interfaceName", name)
	}
	request := createRequest(s, name, int(pod.File.Fd()))
	if err := n.failpoints.Do("create link", func() error { return n.conn.Do(request) }); err != nil {
		return "", fmt.Errorf("create macvlan %s: %w", name, describeCreateError(err, s))
	}
	return name, nil
}

// setUpLink configures the link that createLink created, limits the share's
// bandwidth, and brings the link up. It completes a.
func (n *Node) setUpLink(pod PodNamespace, nic managedNIC, a *Attachment, s LinkSpec) error {
	link, err := findLink(pod.Socket, func(l *netlink.LinkAttrs) bool { return l.Name == a.Name })
	if err != nil {
		return err
	}
	if link == nil {
		return fmt.Errorf("link %s disappeared from the pod after its creation: does another program delete links?", a.Name)
	}
	a.Index, a.MTU = link.Index, link.MTU
	configure := configureRequests(a.Index, s)
	if err := n.failpoints.Do("configure link", func() error { return pod.Socket.Do(configure...) }); err != nil {
		return fmt.Errorf("configure %s: %w", a.Name, describeAddressError(err, s))
	}
	if s.Minor != 0 {
		if err := n.enforce(nic, *a, s.Rates); err != nil {
			return err
		}
	}
	up := upRequests(a.Index, s)
	if err := n.failpoints.Do("bring up link", func() error { return pod.Socket.Do(up...) }); err != nil {
		return fmt.Errorf("bring up %s: %w", a.Name, describeUpError(err, s))
	}
	return nil
}

// enforce creates the share's class and classifies the link's frames. It does
// nothing if the NIC is managed without enforcement.
func (n *Node) enforce(nic managedNIC, a Attachment, r shape.Rates) error {
	if !nic.Enforce {
		return nil
	}
	if err := n.shaper.SetClass(nic.Index, nic.ifb, nic.Rates, a.Minor, r); err != nil {
		return err
	}
	return n.classifier.AddMember(nic.member(a), netlink.MakeHandle(shape.Major, a.Minor))
}

// freeName returns the first of net1, net2, ... that is not taken.
func freeName(taken map[string]bool) string {
	for i := 1; ; i++ {
		if name := "net" + strconv.Itoa(i); !taken[name] {
			return name
		}
	}
}

// findLink returns the last link in the namespace of conn for which match
// returns true, or nil. It calls match for every link.
func findLink(conn *rtnl.Conn, match func(*netlink.LinkAttrs) bool) (found *netlink.LinkAttrs, err error) {
	dump := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	dump.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	messages, err := conn.Dump(dump)
	if err != nil {
		return nil, fmt.Errorf("list the pod's links: %w", err)
	}
	for _, m := range messages {
		link, err := parseLink(m.Data)
		if err != nil {
			return nil, fmt.Errorf("list the pod's links: %w", err)
		}
		if match(link.Attrs()) {
			found = link.Attrs()
		}
	}
	return found, nil
}

// member returns the classifier's key for the link of an attachment.
func (m managedNIC) member(a Attachment) classify.Member {
	return classify.Member{Parent: a.Parent, Cookie: a.Cookie, MAC: a.MAC, TrustMAC: m.TrustMAC}
}

// Detach deletes a link and the classifier entries for its frames. It keeps the
// share's class, which other links of the share may use; see RemoveClass. It
// returns nil if the link, its namespace, or its NIC no longer exists.
//
// The kernel reuses namespace IDs, so Detach deletes a link only if it also has
// the MAC address of the attachment. A link whose address the pod has changed
// therefore stays until the pod's namespace ends.
func (n *Node) Detach(a Attachment) error {
	err := n.deleteLink(a)
	nic, enforced := n.enforcedNIC(a.Parent)
	if !enforced {
		return err
	}
	return errors.Join(err, n.classifier.RemoveMember(nic.member(a)))
}

func (n *Node) deleteLink(a Attachment) error {
	link, err := n.linkOf(a)
	if err != nil || link == nil || link.HardwareAddr.String() != a.MAC.String() {
		return err
	}
	request := inNamespace(deleteRequest(link.Index), a.NSID)
	err = n.failpoints.Do("delete link", func() error { return n.conn.Do(request) })
	if err != nil && !isNotFound(err) {
		return fmt.Errorf("delete %s from the pod: %w", a.Name, err)
	}
	return nil
}

// Presence is the part of an attachment that still exists.
type Presence int

// Values of Presence.
const (
	// LinkPresent means that the link exists with the MAC address of the attachment.
	LinkPresent Presence = iota
	// LinkMissing means that the link does not exist. Its namespace may exist.
	LinkMissing
	// NamespaceMissing means that neither the link nor its namespace exists.
	NamespaceMissing
)

// Presence reports which part of an attachment exists. The kernel reuses
// namespace IDs: if another namespace now has the ID of the attachment's,
// Presence returns LinkMissing.
func (n *Node) Presence(a Attachment) (Presence, error) {
	link, err := n.linkOf(a)
	if err != nil {
		return LinkMissing, err
	}
	if link != nil && link.HardwareAddr.String() == a.MAC.String() {
		return LinkPresent, nil
	}
	ids, err := n.conn.NamespaceIDs()
	if err == nil && !slices.Contains(ids, a.NSID) {
		return NamespaceMissing, nil
	}
	return LinkMissing, err
}

// Restore puts back the class and the classifier entries of an existing link.
// Call it after a restart, and after Manage has changed the NIC.
func (n *Node) Restore(a Attachment, r shape.Rates) error {
	nic, err := n.managedNIC(a.Parent)
	if err != nil {
		return err
	}
	return n.enforce(nic, a, r)
}

// linkOf returns the attributes of the link that has the attachment's index in
// its namespace, or nil if that is not a macvlan of the attachment's NIC.
func (n *Node) linkOf(a Attachment) (*netlink.LinkAttrs, error) {
	if a.Index == 0 {
		return nil, nil
	}
	messages, err := n.conn.Get(inNamespace(getLinkRequest(a.Index), a.NSID))
	if err != nil {
		if isNotFound(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("look up %s in the pod: %w", a.Name, err)
	}
	for _, m := range messages {
		link, err := parseLink(m.Data)
		if err != nil {
			return nil, err
		}
		// A pod can change the name and the address, but not the type and the parent.
		if link.Type() == "macvlan" && link.Attrs().ParentIndex == a.Parent {
			return link.Attrs(), nil
		}
	}
	return nil, nil
}

// isNotFound reports whether the kernel refused a request because the link or
// its namespace does not exist.
func isNotFound(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT)
}

// describeCreateError adds the likely cause to an error of createRequest.
func describeCreateError(err error, s LinkSpec) error {
	switch {
	case errors.Is(err, syscall.EINVAL) && s.MTU != 0:
		return fmt.Errorf("%w: is mtu %d larger than the NIC's?", err, s.MTU)
	case errors.Is(err, syscall.ENODEV):
		return fmt.Errorf("%w: was the NIC removed?", err)
	case errors.Is(err, syscall.EBUSY):
		return fmt.Errorf("%w: does another driver use the NIC (a bridge, ipvlan)?", err)
	default:
		return err
	}
}

// describeAddressError adds the address that the kernel refused to an error of
// configureRequests.
func describeAddressError(err error, s LinkSpec) error {
	var refused *rtnl.Error
	if errors.As(err, &refused) && refused.Index >= 1 && refused.Index <= len(s.Addresses) {
		return fmt.Errorf("address %s: %w", s.Addresses[refused.Index-1], err)
	}
	return err
}

// describeUpError adds the route that the kernel refused, or the likely cause,
// to an error of upRequests.
func describeUpError(err error, s LinkSpec) error {
	var refused *rtnl.Error
	if !errors.As(err, &refused) {
		return err
	}
	if refused.Index >= 1 && refused.Index <= len(s.Routes) {
		return describeRouteError(err, s.Routes[refused.Index-1])
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%w: another link of the NIC has the address %s", err, s.MAC)
	}
	return err
}

func describeRouteError(err error, r Route) error {
	if errors.Is(err, syscall.EEXIST) {
		return fmt.Errorf("route to %s: %w: the pod already has this route, from its cluster network: "+
			"choose narrower destinations", r.Destination, err)
	}
	return fmt.Errorf("route to %s via %s: %w: is the gateway in the network of one of the addresses?",
		r.Destination, r.Gateway, err)
}
