// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
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
	MTU int
	// Mode is Private or Bridge.
	Mode      Mode
	Addresses []netip.Prefix
	// Leases means that the link gets more addresses with SetLease. Until then, it may use only Addresses.
	Leases    bool
	Routes    []Route
	Rules     []Rule
	Neighbors []Neighbor
	// Alias is a description for administrators, at most 255 bytes; "ip link" shows it.
	Alias string
	// Minor is the minor number of the share's class. If it is 0, the share does not have a class, and its frames queue in
	// the class for unidentified frames.
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
	// Addresses are the addresses that the link got at its creation, and the leased one.
	Addresses []netip.Addr
	// Leases has the meaning of LinkSpec.Leases.
	Leases bool
	// Mode is the mode of the link in the kernel; 0 if it is not known.
	Mode Mode
	// Audited means that frames without the identity of the link are not dropped,
	// because an earlier release attached it.
	Audited bool
	// Blocking selects when ReadAndBlock and UpdateBlocking block the link.
	Blocking Blocking
}

// Blocking selects when a link is blocked.
type Blocking int

// Values of Blocking.
const (
	// BlockIfChanged blocks the link while its pod has changed it in a way that lets it receive other pods' frames.
	BlockIfChanged Blocking = iota
	// BlockAsBefore blocks the link while its pod has changed it in a way that lets it receive other pods' frames, and
	// keeps a blocked link blocked.
	BlockAsBefore
	// BlockAlways blocks the link.
	BlockAlways
)

// Attach creates a link in a pod. When it returns, the link is up, and the
// kernel limits what the pod sends and receives through it to the share's
// rates. The limits are in place before the link is up, so no frame passes
// without them. If Attach fails, it removes what it created; if that fails, too, the error wraps
// ErrLinkRemains.
//
// A link with the same MAC address is left over from an interrupted attempt. Attach replaces it.
func (n *Node) Attach(pod PodNamespace, s LinkSpec) (Attachment, error) {
	nic, err := n.managedNIC(s.Parent)
	if err != nil {
		return Attachment{}, err
	}
	a := Attachment{Parent: s.Parent, MAC: s.MAC, Minor: s.Minor, Mode: nic.kernelMode(s.Mode), Leases: s.Leases}
	for _, p := range s.Addresses {
		a.Addresses = append(a.Addresses, p.Addr())
	}
	if a.Cookie, err = pod.Socket.Cookie(); err != nil {
		return a, err
	}
	if a.NSID, err = n.conn.NamespaceID(pod.File); err != nil {
		return a, err
	}
	n.rememberNamespace(a.NSID, a.Cookie)
	if err := errors.Join(n.checkAddresses(nic, s), n.addGateways(nic, s)); err != nil {
		return a, err
	}
	created, err := n.createLink(pod, s, a.Mode)
	if err != nil {
		return a, err
	}
	if err := n.setUpLink(pod, nic, created, &a, s); err != nil {
		return a, n.Undo(err, a)
	}
	return a, nil
}

// ErrLinkRemains means that Attach or Undo could not remove a link.
var ErrLinkRemains = errors.New("the link may remain in the pod")

// Undo removes a link because of an error, which it returns. If that fails, the error wraps
// ErrLinkRemains.
func (n *Node) Undo(reason error, a Attachment) error {
	if err := n.Detach(a); err != nil {
		return fmt.Errorf("%w; %w: %w", reason, ErrLinkRemains, err)
	}
	return reason
}

// checkAddresses refuses addresses that another link of the NIC, or the node, has. The
// frames of both would be dropped or delivered to one of them.
func (n *Node) checkAddresses(nic managedNIC, s LinkSpec) error {
	if !nic.Enforce {
		return nil
	}
	for _, p := range s.Addresses {
		owner, err := n.classifier.OwnerOf(nic.Index, p.Addr())
		if err != nil {
			return fmt.Errorf("look up the owner of address %s: %w", p.Addr(), err)
		}
		switch {
		case owner == nil || bytes.Equal(owner, s.MAC):
		case bytes.Equal(owner, nic.MAC):
			return fmt.Errorf("address %s belongs to the node, or is a gateway of %s: choose another address",
				p.Addr(), nic.Name)
		default:
			return fmt.Errorf("address %s belongs to another link of %s, with MAC address %s: choose another address",
				p.Addr(), nic.Name, owner)
		}
	}
	return nil
}

// NamespaceID returns the ID of a pod's namespace in the node's namespace, and assigns one if it does not have one.
func (n *Node) NamespaceID(namespace *os.File) (int, error) { return n.conn.NamespaceID(namespace) }

// createLink creates the link and returns its name: the first that Attach tries, or a provisional one if that is taken.
// Renaming a link takes the kernel a millisecond or more (synchronize_net), and it holds the RTNL lock meanwhile.
func (n *Node) createLink(pod PodNamespace, s LinkSpec, mode Mode) (name string, err error) {
	create := func() error { return n.conn.Do(createRequest(s, mode, name, int(pod.File.Fd()))) }
	for _, name = range []string{firstName(s), provisionalName(s.MAC)} {
		if err = n.failpoints.Do("create link", create); !errors.Is(err, syscall.EEXIST) {
			break
		}
	}
	if errors.Is(err, syscall.EEXIST) { // an earlier attempt was interrupted before it renamed the link
		if _, err := n.removeLeftover(pod, s.MAC, 0); err != nil {
			return name, err
		}
		err = n.failpoints.Do("create link", create)
	}
	if err != nil {
		return name, fmt.Errorf("create macvlan %s: %w", firstName(s), describeCreateError(err, s))
	}
	return name, nil
}

// setUpLink configures the link that createLink created under the name created, limits
// the share's bandwidth, and brings the link up. It completes a.
func (n *Node) setUpLink(pod PodNamespace, nic managedNIC, created string, a *Attachment, s LinkSpec) error {
	link, err := createdLink(pod.Socket, created)
	if err != nil {
		return err
	}
	a.Index, a.MTU = link.Index, link.MTU
	s.SegmentBytes = segmentBytes(s.SegmentBytes, link)
	if a.Name, err = n.nameLink(pod, a.Index, s); err != nil {
		return err
	}
	if addresses := addressRequests(a.Index, s); len(addresses) > 0 {
		if err := n.failpoints.Do("add addresses", func() error { return pod.Socket.Do(addresses...) }); err != nil {
			return fmt.Errorf("configure %s: %w", a.Name, describeAddressError(err, s))
		}
	}
	if err := n.enforce(nic, *a, s.Rates); err != nil {
		return err
	}
	if err := n.bringUp(pod, *a, s); err != nil {
		return fmt.Errorf("bring up %s: %w", a.Name, describeUpError(err, s))
	}
	if err := n.addOptionalRoutes(pod, a.Index, s.optionalRoutes()); err != nil {
		return fmt.Errorf("bring up %s: %w", a.Name, err)
	}
	return n.addRules(pod, rulesFor(s))
}

// addOptionalRoutes adds the routes of a link that the pod does not have yet.
func (n *Node) addOptionalRoutes(pod PodNamespace, index int, routes []Route) error {
	for _, route := range routes {
		add := func() error { return pod.Socket.Do(routeRequest(index, route)) }
		if err := n.failpoints.Do("add route", add); err != nil && !errors.Is(err, syscall.EEXIST) {
			return describeRouteError(err, route)
		}
	}
	return nil
}

// addRules adds rules, if any, to the pod's routing policy. Unlike routes, they do not end with the link, and may be
// left over from an interrupted attempt.
func (n *Node) addRules(pod PodNamespace, rules []Rule) error {
	for i, rule := range rules {
		add := func() error { return pod.Socket.Do(ruleRequest(unix.RTM_NEWRULE, rule)) }
		err := n.failpoints.Do("add rule", add)
		if err == nil || errors.Is(err, syscall.EEXIST) {
			continue
		}
		err = fmt.Errorf("add policy rule %s: %w: does the kernel have CONFIG_IP_MULTIPLE_TABLES?", rule, err)
		for _, added := range rules[:i] {
			remove := func() error { return pod.Socket.Do(ruleRequest(unix.RTM_DELRULE, added)) }
			err = errors.Join(err, n.failpoints.Do("remove rule", remove))
		}
		return err
	}
	return nil
}

// nameLink gives a link its name and its other properties, and returns the name. It
// lists the pod's links only if the first name that it tries is taken.
func (n *Node) nameLink(pod PodNamespace, index int, s LinkSpec) (string, error) {
	name := firstName(s)
	configure := func() error { return pod.Socket.Do(configureRequest(index, name, s)) }
	err := n.failpoints.Do("configure link", configure)
	if errors.Is(err, syscall.EEXIST) {
		taken, listErr := n.removeLeftover(pod, s.MAC, index)
		switch {
		case listErr != nil:
			return name, listErr
		case s.Name == "":
			name = freeName(taken)
		case taken[name]:
			return name, fmt.Errorf("the pod already has an interface %s: choose another interfaceName", name)
		}
		err = n.failpoints.Do("configure link", configure)
	}
	if err != nil {
		return name, fmt.Errorf("configure %s: %w", name, err)
	}
	return name, nil
}

// bringUp brings a link up and adds its routes and neighbors.
func (n *Node) bringUp(pod PodNamespace, a Attachment, s LinkSpec) error {
	up := func() error { return pod.Socket.Do(upRequests(a.Index, s)...) }
	err := n.failpoints.Do("bring up link", up)
	if !errors.Is(err, syscall.EADDRINUSE) {
		return err
	}
	// The link of an interrupted attempt may have been renamed.
	if _, err := n.removeLeftover(pod, s.MAC, a.Index); err != nil {
		return err
	}
	return n.failpoints.Do("bring up link", up)
}

// removeLeftover deletes the link of an interrupted attempt from a pod: one with the
// MAC address mac, other than the link with the index keep. It returns the names of
// the pod's other links.
func (n *Node) removeLeftover(pod PodNamespace, mac net.HardwareAddr, keep int) (taken map[string]bool, err error) {
	taken = map[string]bool{}
	leftover, err := findLink(pod.Socket, func(l *netlink.LinkAttrs) bool {
		taken[l.Name] = true
		return l.Index != keep && l.HardwareAddr.String() == mac.String()
	})
	if err != nil || leftover == nil {
		return taken, err
	}
	delete(taken, leftover.Name)
	err = n.failpoints.Do("delete link", func() error { return pod.Socket.Do(deleteRequest(leftover.Index)) })
	if err != nil {
		return taken, fmt.Errorf("remove link %s of an earlier attempt: %w", leftover.Name, err)
	}
	return taken, nil
}

// createdLink returns the attributes of the link that createLink created.
func createdLink(conn *rtnl.Conn, name string) (*netlink.LinkAttrs, error) {
	messages, err := conn.Get(getLinkByNameRequest(name))
	if err == nil && len(messages) == 0 {
		err = unix.ENODEV
	}
	if err != nil {
		return nil, fmt.Errorf("look up the link in the pod after its creation: %w: does another program delete links?", err)
	}
	link, err := parseLink(messages[0].Data)
	if err != nil {
		return nil, err
	}
	return link.Attrs(), nil
}

// enforce creates the share's class and classifies the link's frames. It does
// nothing if the NIC is managed without enforcement. Without a class for it, a
// link uses the class for unidentified frames.
func (n *Node) enforce(nic managedNIC, a Attachment, r shape.Rates) error {
	if !nic.Enforce {
		return nil
	}
	if a.Minor == 0 {
		if a.switches() {
			if _, err := n.setUpHairpin(nic.Index); err != nil {
				return err
			}
		}
		return n.classifier.AddIdentity(nic.member(a), nic.trees.Class(shape.UnidentifiedMinor))
	}
	if err := n.shaper.SetClass(nic.Index, nic.ifb, nic.trees, nic.Rates, a.Minor, r); err != nil {
		return err
	}
	if a.switches() {
		if err := n.setHairpinClass(nic, a.Minor, r); err != nil {
			return err
		}
	}
	return n.classifier.AddMember(nic.member(a), nic.trees.Class(a.Minor))
}

// segmentBytes returns the largest segment, in bytes, that the network stack may
// pass to a link: wanted, but not more than the NIC accepts (tso_max_size, which a
// macvlan inherits) and not more than the link has. The kernel refuses more than the
// NIC accepts. If wanted is 0, the link keeps its current one.
func segmentBytes(wanted int, link *netlink.LinkAttrs) int {
	for _, limit := range []uint32{link.TSOMaxSize, link.GSOMaxSize} {
		if limit != 0 { // older kernels do not report both
			wanted = min(wanted, int(limit))
		}
	}
	return wanted
}

// firstName returns the name that Attach tries first.
func firstName(s LinkSpec) string { return cmp.Or(s.Name, freeName(nil)) }

// provisionalName returns the name of a link that is renamed after its creation. It has
// 15 characters, the most that the kernel allows. Linux 6.12 refuses to create a link in
// a pod with a name that a link of the node has, such as net1; Linux 6.18 does not.
func provisionalName(mac net.HardwareAddr) string { return fmt.Sprintf("dra%x", []byte(mac)) }

// freeName returns the first of net1, net2, ... that is not taken.
func freeName(taken map[string]bool) string {
	for i := 1; ; i++ {
		if name := "net" + strconv.Itoa(i); !taken[name] {
			return name
		}
	}
}

// findLink calls match for every link in conn's namespace, and returns the last match, or nil.
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
	return classify.Member{
		Parent: a.Parent, Cookie: a.Cookie, MAC: a.MAC, TrustMAC: m.TrustMAC,
		Addresses: a.Addresses, Assigned: a.Leases, Bridge: a.switches(), VEPA: a.Mode == VEPA, Audit: a.Audited,
	}
}

// Detach deletes a link and the classifier entries for its frames. It keeps the
// share's class, which other links of the share may use; see RemoveClass. It
// returns nil if the link, its namespace, or its NIC no longer exists.
//
// The kernel reuses namespace IDs, so Detach deletes a link only if it also has the MAC address of the attachment. If
// the pod has changed the address, the link therefore stays until the pod's namespace ends.
func (n *Node) Detach(a Attachment) error {
	err := n.deleteLink(a)
	if nic, enforced := n.enforcedNIC(a.Parent); enforced {
		n.history.addDetached(NewLinkKey(a.Parent, a.MAC), n.now())
		err = errors.Join(err, n.classifier.RemoveMember(nic.member(a)), n.holdGatewaysOf(a))
	}
	return errors.Join(err, n.setGuarded(a, false, false))
}

func (n *Node) deleteLink(a Attachment) error {
	link, err := n.linkOf(a)
	if err != nil || link == nil || link.HardwareAddr.String() != a.MAC.String() {
		return err
	}
	request := inNamespace(deleteRequest(link.Index), a.NSID)
	err = n.failpoints.Do("delete link", func() error { return n.deletions.Do(request) })
	if err != nil && !rtnl.IsNotFound(err) {
		return fmt.Errorf("delete %s from the pod: %w", a.Name, err)
	}
	return nil
}

// Presence states which part of an attachment still exists.
type Presence int

// Values of Presence.
const (
	// LinkPresent means that the link exists with the MAC address of the attachment.
	LinkPresent Presence = iota
	// LinkMissing means that the link does not exist. Its namespace may exist.
	LinkMissing
	// NamespaceMissing means that the link and its namespace do not exist.
	NamespaceMissing
)

// Presence reports which part of an attachment exists. The kernel reuses namespace IDs: if another namespace now has
// the attachment's ID, Presence returns LinkMissing until a link is attached in that namespace, and NamespaceMissing
// afterward.
func (n *Node) Presence(a Attachment) (Presence, error) {
	link, err := n.linkOf(a)
	if err != nil {
		return LinkMissing, err
	}
	if link != nil && link.HardwareAddr.String() == a.MAC.String() {
		return LinkPresent, nil
	}
	exists, err := n.namespaceExists(a)
	if err == nil && !exists {
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

// linkOf returns the attributes of the link with the attachment's index in its namespace. It returns nil if that link
// is not a macvlan of the attachment's NIC, or if it belongs to another attachment in a namespace that now has the ID.
func (n *Node) linkOf(a Attachment) (*netlink.LinkAttrs, error) {
	if a.Index == 0 {
		return nil, nil
	}
	messages, err := n.conn.Get(inNamespace(getLinkRequest(a.Index), a.NSID))
	if err != nil {
		if rtnl.IsNotFound(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("look up %s in the pod: %w", a.Name, err)
	}
	for _, m := range messages {
		link, err := parseLink(m.Data)
		if err != nil {
			return nil, err
		}
		// A pod can change the name and the address. It can also give the NIC's index to another of its links, and replace
		// the link with one on top of that, with the same index.
		l := link.Attrs()
		if link.Type() != "macvlan" || l.ParentIndex != a.Parent || l.NetNsID != n.nsid {
			continue
		}
		if bytes.Equal(l.HardwareAddr, a.MAC) || !n.isIDReused(a) {
			return l, nil
		}
	}
	return nil, nil
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
// addressRequests.
func describeAddressError(err error, s LinkSpec) error {
	var refused *rtnl.Error
	if !errors.As(err, &refused) || refused.Index >= len(s.Addresses) {
		return err
	}
	address := s.Addresses[refused.Index]
	switch isIPv6 := address.Addr().Is6(); {
	case isIPv6 && errors.Is(err, syscall.EINVAL):
		return fmt.Errorf("address %s: %w: is the MTU of the link at least 1280, which IPv6 needs?", address, err)
	case isIPv6 && errors.Is(err, syscall.EACCES):
		return fmt.Errorf("address %s: %w: does the pod disable IPv6 (disable_ipv6)?", address, err)
	}
	return fmt.Errorf("address %s: %w", address, err)
}

// describeUpError adds the route that the kernel refused, or the likely cause,
// to an error of upRequests.
func describeUpError(err error, s LinkSpec) error {
	var refused *rtnl.Error
	if !errors.As(err, &refused) {
		return err
	}
	routes := s.requiredRoutes()
	if refused.Index >= 1 && refused.Index <= len(routes) {
		return describeRouteError(err, routes[refused.Index-1])
	}
	if i := refused.Index - 1 - len(routes); i >= 0 && i < len(s.Neighbors) {
		return fmt.Errorf("neighbor %s: %w", s.Neighbors[i].Address, err)
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%w: another link of the NIC has the address %s", err, s.MAC)
	}
	return err
}

func describeRouteError(err error, r Route) error {
	if errors.Is(err, syscall.EEXIST) {
		return fmt.Errorf("route to %s: %w: the pod already has this route, from its cluster network "+
			"or another link: use more specific destinations", r.Destination, err)
	}
	return fmt.Errorf("route to %s via %s: %w: is the gateway in the subnet of one of the addresses?",
		r.Destination, r.Gateway, err)
}
