package netdev

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// LinkKey is what a link is known by on the node, whatever its namespace.
type LinkKey struct {
	Parent int
	MAC    [6]byte
}

// KeyOf returns the key of a link.
func NewLinkKey(parent int, mac net.HardwareAddr) LinkKey {
	k := LinkKey{Parent: parent}
	copy(k.MAC[:], mac)
	return k
}

// Classes returns the minor numbers of the classes that shares have on a NIC.
func (n *Node) Classes(parent int) (map[uint16]bool, error) {
	m, err := n.parent(parent)
	if err != nil || !m.Enforce {
		return nil, err
	}
	minors := map[uint16]bool{}
	for _, dev := range []int{m.Index, m.ifb} {
		states, err := n.shaper.ShareClasses(dev)
		if err != nil {
			return nil, err
		}
		for minor := range states {
			minors[minor] = true
		}
	}
	return minors, nil
}

// Members returns the links that the classifier knows, of all NICs.
func (n *Node) Members() ([]classify.Member, error) {
	n.mu.Lock()
	c := n.classifier
	n.mu.Unlock()
	if c == nil {
		return nil, nil
	}
	return c.Members()
}

// Declassify makes the classifier forget a link.
func (n *Node) RemoveMember(m classify.Member) error {
	n.mu.Lock()
	c := n.classifier
	n.mu.Unlock()
	if c == nil {
		return nil
	}
	return c.RemoveMember(m)
}

// Links returns the macvlans of this namespace's links in all namespaces that
// have an ID here: every namespace that a share was ever attached to has one.
func (n *Node) Links() (map[LinkKey]bool, error) {
	ids, err := n.conn.NamespaceIDs()
	if err != nil {
		return nil, err
	}
	links := map[LinkKey]bool{}
	for _, id := range ids {
		if err := n.linksIn(id, links); err != nil {
			return nil, err
		}
	}
	return links, nil
}

func (n *Node) linksIn(nsid int, links map[LinkKey]bool) error {
	dump := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	dump.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	messages, err := n.conn.Dump(inNamespace(dump, nsid))
	if isGone(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list the links of namespace %d: %w", nsid, err)
	}
	for _, m := range messages {
		link, err := parseLink(m.Data)
		if err != nil {
			return err
		}
		if link.Type() == "macvlan" {
			links[NewLinkKey(link.Attrs().ParentIndex, link.Attrs().HardwareAddr)] = true
		}
	}
	return nil
}

// StrayIFBs returns the names of IFB devices of ours whose NIC is gone, or has
// no queues of ours.
func (n *Node) OrphanIFBs() (names []string, err error) {
	links, err := listLinks()
	if err != nil {
		return nil, err
	}
	var ifbs []string
	used := map[string]bool{}
	for _, l := range links {
		owned, ownedErr := shape.Owned(l.Attrs().Index)
		err = errors.Join(err, ownedErr)
		switch {
		case !owned:
		case l.Type() == "ifb":
			ifbs = append(ifbs, l.Attrs().Name)
		default:
			used[shape.IFBName(l.Attrs().Name)] = true
		}
	}
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(ifbs, func(name string) bool { return used[name] }), nil
}

// RemoveIFB removes an IFB device that StrayIFBs named.
func (n *Node) RemoveIFB(name string) error {
	link, err := netlink.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err != nil {
		return err
	}
	return n.failpoints.Do("remove IFB", func() error { return netlink.LinkDel(link) })
}
