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

// LinkSpec is a link as it should be.
type LinkSpec struct {
	Parent    int    // index of the NIC
	Name      string // in the pod; empty: the lowest free net<N>, N >= 1
	MAC       net.HardwareAddr
	MTU       int // bytes; 0: the NIC's
	Mode      Mode
	Addresses []netip.Prefix
	Routes    []Route
	Alias     string // for a person who looks; at most 255 bytes
	// Minor is the class of the link's share; 0: none, the link's frames are
	// of those that cannot be identified.
	Minor uint16
	// Rates of the share.
	Rates shape.Rates
	// SegmentBytes is the largest segment the pod's stack hands down; 0: unchanged.
	SegmentBytes int
}

// PodNamespace is how a pod's network namespace is reached.
type PodNamespace struct {
	File   *os.File   // the namespace
	Socket *rtnl.Conn // opened in it
}

// Attachment is a link that exists, and all that is needed to find it again.
type Attachment struct {
	Parent int              // index of the NIC
	NSID   int              // the pod's namespace, as the node's knows it; valid until it is gone
	Cookie uint64           // of the pod's namespace
	Index  int              // of the link in the pod
	Name   string           // of the link in the pod
	MAC    net.HardwareAddr // as created
	MTU    int              // bytes
	Minor  uint16           // class of the share
}

// Attach creates a link in a pod. When it returns, the link is up and what the
// pod sends and receives through it is held to the share's rates; there is no
// moment in which it is up and not. After an error nothing is left behind.
//
// A link of the same address that is there already, from an attempt that was
// cut off, is replaced.
func (n *Node) Attach(pod PodNamespace, s LinkSpec) (a Attachment, err error) {
	parent, err := n.parent(s.Parent)
	if err != nil {
		return a, err
	}
	a = Attachment{Parent: s.Parent, MAC: s.MAC, Minor: s.Minor}
	if a.Cookie, err = pod.Socket.Cookie(); err != nil {
		return a, err
	}
	if a.NSID, err = n.conn.NamespaceID(pod.File); err != nil {
		return a, err
	}
	if a.Name, err = n.create(pod, s); err != nil {
		return a, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Detach(a))
		}
	}()
	link, err := findLink(pod.Socket, func(l *netlink.LinkAttrs) bool { return l.Name == a.Name })
	if err != nil {
		return a, err
	}
	if link == nil {
		return a, fmt.Errorf("link %s vanished from the pod as it was created", a.Name)
	}
	a.Index, a.MTU = link.Index, link.MTU
	if err := n.failpoints.Do("configure link", func() error { return pod.Socket.Do(configureRequests(a.Index, s)...) }); err != nil {
		return a, fmt.Errorf("configure %s: %w", a.Name, describe(err, s))
	}
	if parent.Enforce && s.Minor != 0 {
		if err := n.shaper.SetClass(parent.Index, parent.ifb, parent.Rates, s.Minor, s.Rates); err != nil {
			return a, err
		}
		if err := n.classifier.AddMember(n.member(a, parent), netlink.MakeHandle(shape.Major, s.Minor)); err != nil {
			return a, err
		}
	}
	if err := n.failpoints.Do("bring up link", func() error { return pod.Socket.Do(upRequests(a.Index, s)...) }); err != nil {
		return a, fmt.Errorf("bring up %s: %w", a.Name, describeUp(err, s))
	}
	return a, nil
}

// create finds a name and creates the link under it.
func (n *Node) create(pod PodNamespace, s LinkSpec) (string, error) {
	taken := map[string]bool{}
	leftover, err := findLink(pod.Socket, func(l *netlink.LinkAttrs) bool {
		taken[l.Name] = true
		return l.HardwareAddr.String() == s.MAC.String()
	})
	if err != nil {
		return "", err
	}
	if leftover != nil {
		if err := n.failpoints.Do("delete link", func() error { return pod.Socket.Do(deleteRequest(leftover.Index)) }); err != nil {
			return "", fmt.Errorf("remove %s, left by an earlier attempt: %w", leftover.Name, err)
		}
		delete(taken, leftover.Name)
	}
	name := s.Name
	if name == "" {
		name = freeName(taken)
	}
	if taken[name] {
		return "", fmt.Errorf("the pod has an interface %s already: choose another interfaceName", name)
	}
	if err := n.failpoints.Do("create link", func() error { return n.conn.Do(createRequest(s, name, int(pod.File.Fd()))) }); err != nil {
		return "", fmt.Errorf("create macvlan %s: %w", name, describeCreate(err, s))
	}
	return name, nil
}

func freeName(taken map[string]bool) string {
	for i := 1; ; i++ {
		if name := "net" + strconv.Itoa(i); !taken[name] {
			return name
		}
	}
}

// findLink returns the last link for which match is true; nil if there is
// none. match sees every link.
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

func (n *Node) member(a Attachment, parent managedNIC) classify.Member {
	return classify.Member{Parent: a.Parent, Cookie: a.Cookie, MAC: a.MAC, TrustMAC: parent.TrustMAC}
}

// Detach removes a link and what classifies its frames. The share's class
// stays: see RemoveShare. It is no error if the link, its namespace or its NIC
// is gone. The ID of a namespace that is gone is used again, so that a link
// counts as this one only if it has the same address too; one that a pod gave
// another address goes with the pod.
func (n *Node) Detach(a Attachment) error {
	failed := n.deleteLink(a)
	parent, err := n.parent(a.Parent)
	if errors.Is(err, ErrNotManaged) || !parent.Enforce {
		return failed
	}
	return errors.Join(failed, n.classifier.RemoveMember(n.member(a, parent)))
}

func (n *Node) deleteLink(a Attachment) error {
	link, err := n.linkOf(a)
	if err != nil || link == nil || link.HardwareAddr.String() != a.MAC.String() {
		return err
	}
	err = n.failpoints.Do("delete link", func() error { return n.conn.Do(inNamespace(deleteRequest(link.Index), a.NSID)) })
	if err != nil && !isGone(err) {
		return fmt.Errorf("delete %s from the pod: %w", a.Name, err)
	}
	return nil
}

// Presence is what there is of an attachment.
type Presence int

// Presences.
const (
	// LinkThere: as it was attached.
	LinkPresent Presence = iota
	// LinkGone: the namespace may be there, and has no such link.
	LinkMissing
	// NamespaceGone: nothing is there.
	NamespaceMissing
)

// Presence asks the kernel. The ID of a namespace that is gone is used again:
// then it says LinkGone.
func (n *Node) Presence(a Attachment) (Presence, error) {
	link, err := n.linkOf(a)
	switch {
	case err != nil:
		return LinkMissing, err
	case link != nil && link.HardwareAddr.String() == a.MAC.String():
		return LinkPresent, nil
	}
	ids, err := n.conn.NamespaceIDs()
	if err == nil && !slices.Contains(ids, a.NSID) {
		return NamespaceMissing, nil
	}
	return LinkMissing, err
}

// Restore puts a live link's class and classification back in place, for a
// plugin that starts.
func (n *Node) Restore(a Attachment, r shape.Rates) error {
	parent, err := n.parent(a.Parent)
	if err != nil || !parent.Enforce {
		return err
	}
	if err := n.shaper.SetClass(parent.Index, parent.ifb, parent.Rates, a.Minor, r); err != nil {
		return err
	}
	return n.classifier.AddMember(n.member(a, parent), netlink.MakeHandle(shape.Major, a.Minor))
}

// linkOf returns the link's attributes, nil if it is gone.
func (n *Node) linkOf(a Attachment) (*netlink.LinkAttrs, error) {
	if a.Index == 0 {
		return nil, nil
	}
	messages, err := n.conn.Get(inNamespace(getLinkRequest(a.Index), a.NSID))
	if err != nil {
		if isGone(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("look up %s in the pod: %w", a.Name, err)
	}
	for _, m := range messages {
		link, err := parseLink(m.Data)
		if err != nil {
			return nil, err
		}
		// The pod may have changed name and address, not what it is made of.
		if link.Type() == "macvlan" && link.Attrs().ParentIndex == a.Parent {
			return link.Attrs(), nil
		}
	}
	return nil, nil
}

func isGone(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT)
}

func describeCreate(err error, s LinkSpec) error {
	switch {
	case errors.Is(err, syscall.EINVAL) && s.MTU != 0:
		return fmt.Errorf("%w: is mtu %d larger than the NIC's?", err, s.MTU)
	case errors.Is(err, syscall.ENODEV):
		return fmt.Errorf("%w: is the NIC gone?", err)
	case errors.Is(err, syscall.EBUSY):
		return fmt.Errorf("%w: does another driver use the NIC (a bridge, ipvlan)?", err)
	default:
		return err
	}
}

// describe names the address that the kernel refused.
func describe(err error, s LinkSpec) error {
	var refused *rtnl.Error
	if errors.As(err, &refused) && refused.Index >= 1 && refused.Index <= len(s.Addresses) {
		return fmt.Errorf("address %s: %w", s.Addresses[refused.Index-1], err)
	}
	return err
}

// describeUp names the route that the kernel refused.
func describeUp(err error, s LinkSpec) error {
	var refused *rtnl.Error
	if !errors.As(err, &refused) {
		return err
	}
	if refused.Index >= 1 && refused.Index <= len(s.Routes) {
		route := s.Routes[refused.Index-1]
		if errors.Is(err, syscall.EEXIST) {
			return fmt.Errorf("route to %s: %w: the pod has one already, by its cluster network; choose narrower destinations", route.Destination, err)
		}
		return fmt.Errorf("route to %s by %s: %w: is the gateway on one of the addresses' networks?", route.Destination, route.Gateway, err)
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%w: another link of the NIC has the address %s", err, s.MAC)
	}
	return err
}
