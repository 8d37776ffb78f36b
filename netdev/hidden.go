// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"bytes"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// A pod with CAP_NET_ADMIN in its own user namespace can create a network namespace with links that the node cannot
// list, and move its link there or create another one there. The kernel does not send an event when such a link comes
// up. But the NIC then accepts the address of a link that the node does not see.

const (
	// verifyInterval is the shortest time after which Inspect looks again for the link of an address that it has seen
	// before, because it lists the links of all namespaces to do so. verifyGuardedInterval is the same for a NIC that is
	// already guarded.
	verifyInterval        = 2 * time.Second
	verifyGuardedInterval = 10 * time.Second
	// compareInterval is how long Inspect waits before it compares the same addresses with the attachments again: another
	// plugin may have removed an attachment, which this Node does not notice.
	compareInterval = 30 * time.Second
	// maxSuspects is how many addresses without an attachment a NIC may accept before Inspect takes all
	// of them for addresses of hidden links. A pod can add any number: Inspect must not take longer for it, and
	// the programs remember only 4,096 addresses of Classifier.NoteImitated.
	maxSuspects = 1000
)

// inspection is the result of Inspect for a NIC.
type inspection struct {
	accepted []macAddress       // that the NIC accepts, in the kernel's order
	changes  uint64             // linkHistory.changes before they were listed
	detached uint64             // linkHistory.detached before they were listed
	compared time.Time          // when all of them were compared with the attachments
	known    addressSet         // those that an attachment had, since compared
	excused  bool               // whether a recently detached link has one of them
	suspects addressSet         // addresses that no attachment has; at most maxSuspects and one more
	unknown  []net.HardwareAddr // suspects without a link that the node sees
	verified time.Time          // when unknown was determined
}

// macAddress is a MAC address that can be compared.
type macAddress [6]byte

// addressSet is a set of MAC addresses.
type addressSet map[macAddress]struct{}

func (s addressSet) add(mac macAddress) { s[mac] = struct{}{} }

func (s addressSet) has(mac net.HardwareAddr) bool {
	if len(mac) != 6 {
		return false
	}
	_, has := s[macAddress(mac)]
	return has
}

func (s addressSet) isSubsetOf(other addressSet) bool {
	for mac := range s {
		if _, has := other[mac]; !has {
			return false
		}
	}
	return true
}

// sorted returns the addresses of the set in order.
func (s addressSet) sorted() (addresses []net.HardwareAddr) {
	for mac := range s {
		addresses = append(addresses, mac[:])
	}
	slices.SortFunc(addresses, func(a, b net.HardwareAddr) int { return bytes.Compare(a, b) })
	return addresses
}

// Inspect looks for links on a NIC in network namespaces that pods have created, and guards the NIC while there are
// any, and for some time afterwards; see guardTimer. It returns the addresses of the links, and whether the NIC is
// guarded for them or for any other link. It takes one dump with an entry for each link of the NIC, and more if one
// does not belong to an attachment. While nothing changes, it only compares the dump with the last one.
func (n *Node) Inspect(index int) (unknown []net.HardwareAddr, guarded bool, err error) {
	nic, enforced := n.enforcedNIC(index)
	if !enforced {
		return nil, false, nil
	}
	found, err := n.inspect(nic)
	if err != nil {
		return nil, false, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.guardOf(index).inspection = found
	err = n.applyGuard(index)
	return found.unknown, n.managed[index].Policy.Guarded, err
}

func (n *Node) inspect(nic managedNIC) (now inspection, err error) {
	n.mu.Lock()
	last := n.guardOf(nic.Index).inspection
	n.mu.Unlock()
	now.changes, now.detached = n.history.counts()
	if now.accepted, err = n.acceptedAddresses(nic.Index); err != nil {
		return now, err
	}
	if now.compared = n.now(); now.confirms(last) {
		return last, nil
	}
	now.keepKnown(last)
	if now.suspects, now.excused, err = n.suspects(nic, now.accepted, now.known); err != nil || len(now.suspects) == 0 {
		return now, err
	}
	if len(now.suspects) > maxSuspects {
		now.unknown = now.suspects.sorted()
		return now, nil
	}
	interval := verifyInterval
	if nic.Policy.Guarded {
		interval = verifyGuardedInterval
	}
	// All of them, because the programs forget addresses when a pod then uses thousands of others.
	if err := n.classifier.NoteImitated(nic.Index, now.suspects.sorted()); err != nil {
		return now, err
	}
	if n.now().Sub(last.verified) < interval && (nic.Policy.Guarded || now.suspects.isSubsetOf(last.suspects)) {
		now.verified = last.verified
		now.unknown = slices.DeleteFunc(slices.Clone(last.unknown), func(mac net.HardwareAddr) bool {
			return !now.suspects.has(mac)
		})
		return now, nil
	}
	now.verified = n.now()
	now.unknown, err = n.withoutVisibleLink(nic, now.suspects)
	return now, err
}

// confirms reports whether the last inspection found no suspects, and nothing that it read has changed since.
func (i inspection) confirms(last inspection) bool {
	return len(last.suspects) == 0 && !last.excused && i.changes == last.changes &&
		i.compared.Sub(last.compared) < compareInterval && slices.Equal(i.accepted, last.accepted)
}

// keepKnown keeps the addresses of attachments that an earlier inspection has looked up, unless one may have ended
// since.
func (i *inspection) keepKnown(last inspection) {
	if last.known != nil && i.detached == last.detached && i.compared.Sub(last.compared) < compareInterval {
		i.known, i.compared = last.known, last.compared
		return
	}
	i.known = addressSet{}
}

// suspects returns the accepted addresses that no attachment has, but stops once there are more than maxSuspects.
// excused reports whether recently detached links still have some. See isExpected for known.
func (n *Node) suspects(
	nic managedNIC, accepted []macAddress, known addressSet,
) (suspects addressSet, excused bool, err error) {
	suspects = addressSet{}
	for _, mac := range accepted {
		if len(suspects) > maxSuspects {
			break
		}
		if bytes.Equal(mac[:], nic.MAC) {
			continue // a bridge lists its own address
		}
		recent := n.history.wasDetachedRecently(NewLinkKey(nic.Index, mac[:]), n.now())
		excused = excused || recent
		if recent {
			continue
		}
		expected, err := n.isExpected(nic, mac, known)
		if err != nil {
			return nil, false, err
		}
		if !expected {
			suspects.add(mac)
		}
	}
	return suspects, excused, nil
}

// withoutVisibleLink returns the addresses that the NIC still accepts although the node does not see a link with them:
// links may have been removed in the meantime.
func (n *Node) withoutVisibleLink(nic managedNIC, addresses addressSet) ([]net.HardwareAddr, error) {
	visible, err := n.visibleSuspects(nic, addresses)
	if err != nil {
		return nil, err
	}
	accepted, err := n.acceptedAddresses(nic.Index)
	if err != nil {
		return nil, err
	}
	remaining := addressSet{}
	for _, mac := range accepted {
		if addresses.has(mac[:]) && !visible[NewLinkKey(nic.Index, mac[:])] {
			remaining.add(mac)
		}
	}
	return remaining.sorted(), nil
}

// visibleSuspects returns at least the suspects with a link that the node sees. An attachment must have the same
// address as its link, so only the link is read: a pod that sets its link down and up in a loop must not make the node
// list the links of all namespaces.
func (n *Node) visibleSuspects(nic managedNIC, suspects addressSet) (map[LinkKey]bool, error) {
	visible := map[LinkKey]bool{}
	for mac := range suspects {
		known, err := n.classifier.Knows(nic.Index, mac[:])
		if err != nil {
			return nil, err
		}
		if !known {
			return n.visibleAddresses(nic.Index)
		}
		if visible[NewLinkKey(nic.Index, mac[:])], err = n.isAtOwnLink(nic, mac); err != nil {
			return nil, err
		}
	}
	return visible, nil
}

// isExpected reports whether an address belongs to an attachment and its link has it. It adds the addresses of
// attachments to known, and does not look up addresses that are already there.
func (n *Node) isExpected(nic managedNIC, mac macAddress, known addressSet) (bool, error) {
	if !known.has(mac[:]) {
		exists, err := n.classifier.Knows(nic.Index, mac[:])
		if err != nil || !exists {
			return false, err
		}
		known.add(mac)
	}
	return n.isAtOwnLink(nic, mac)
}

// isAtOwnLink reports whether the link of an attachment has the attachment's address, as far as the Node knows: it
// reads the link if that was different the last time.
func (n *Node) isAtOwnLink(nic managedNIC, mac macAddress) (bool, error) {
	a, displaced := n.history.displacedWith(NewLinkKey(nic.Index, mac[:]))
	if !displaced {
		return true, nil
	}
	link, err := n.linkOf(a)
	return link != nil && link.Flags&net.FlagUp != 0 && bytes.Equal(link.HardwareAddr, mac[:]), err
}

// visibleAddresses returns the addresses of the links on a NIC that are up, in the node's namespace and in all
// namespaces that have an ID there. Links on a link of the node on the NIC, such as a VLAN, count as well. Links in
// mode source do not: a pod can create them in a namespace that has an ID but does not belong to an attachment.
func (n *Node) visibleAddresses(index int) (map[LinkKey]bool, error) {
	visible := map[LinkKey]bool{}
	own, err := listLinks()
	if err != nil {
		return nil, err
	}
	parents := newTopology(own).allAbove(index)
	parents[index] = true
	for _, l := range own {
		if a := l.Attrs(); parents[a.ParentIndex] && a.NetNsID == -1 && a.Flags&net.FlagUp != 0 {
			visible[NewLinkKey(index, a.HardwareAddr)] = true
		}
	}
	ids, err := n.conn.NamespaceIDs()
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		macvlans, err := n.macvlans(id)
		if err != nil {
			return nil, err
		}
		for _, m := range macvlans {
			if parents[m.parent] && m.up && m.mode != modeSource {
				visible[NewLinkKey(index, m.mac)] = true
			}
		}
	}
	return visible, nil
}

// acceptedAddresses returns the unicast addresses that a NIC accepts besides its own, in the kernel's order: each
// macvlan that is up adds its address. There may be tens of thousands.
func (n *Node) acceptedAddresses(index int) ([]macAddress, error) {
	dump := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, unix.NLM_F_DUMP)
	dump.AddData(&netlink.Ndmsg{Family: unix.AF_BRIDGE, Index: uint32(index)})
	accepted, err := rtnl.Collect(n.conn, dump, func(entry []byte) (macAddress, bool) {
		return acceptedAddress(entry, index)
	})
	if err != nil {
		return nil, fmt.Errorf("list the addresses that link %d accepts: %w", index, err)
	}
	return accepted, nil
}

// acceptedAddress returns the address in an entry, which is a struct ndmsg and attributes. ok is false if the entry is
// for another link, or if the address is not a unicast address.
func acceptedAddress(entry []byte, index int) (mac macAddress, ok bool) {
	const offsetOfIndex = 4
	if len(entry) < unix.SizeofNdMsg || int(nl.NativeEndian().Uint32(entry[offsetOfIndex:])) != index {
		return mac, false
	}
	address := rtnl.Attribute(entry[unix.SizeofNdMsg:], unix.NDA_LLADDR)
	if len(address) != len(mac) || address[0]&1 != 0 {
		return mac, false
	}
	return macAddress(address), true
}
