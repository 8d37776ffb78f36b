// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"maps"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
)

// topology maps the interface indexes of a network namespace to links, with the links that these
// are stacked on.
type topology map[int]stackedLink

// stackedLink is a link in a topology.
type stackedLink struct {
	name string
	kind string // the kernel's name of the kind, such as vlan; "device" for hardware
	// master is the index of the bridge, bond, or team that the link is a port
	// of; 0 if none.
	master int
	// lower is the index of the link that this link was created on, such as the
	// NIC of a VLAN; 0 if none.
	lower int
}

// newTopology returns the topology of the links of one namespace.
func newTopology(links []netlink.Link) topology {
	t := topology{}
	for _, l := range links {
		a := l.Attrs()
		s := stackedLink{name: a.Name, kind: l.Type(), master: a.MasterIndex}
		if a.NetNsID == -1 && s.kind != "veth" && s.kind != "netkit" {
			// The index belongs to this namespace, not to a peer's.
			s.lower = a.ParentIndex
		}
		t[a.Index] = s
	}
	return t
}

// master returns the name of the link that receives the frames of a link as its port; "" if there is none. A VRF
// receives packets only after the macvlans on the link have got theirs.
func (t topology) master(index int) string {
	if master := t[t[index].master]; master.kind != "vrf" {
		return master.name
	}
	return ""
}

// below returns the indexes of the links directly below a link, in order: the
// link that it was created on, and its ports.
func (t topology) below(index int) (indexes []int) {
	if lower := t[index].lower; lower != 0 {
		indexes = append(indexes, lower)
	}
	for i, l := range t {
		if l.master == index {
			indexes = append(indexes, i)
		}
	}
	slices.Sort(indexes)
	return indexes
}

// closure returns the indexes of links and of all links below them.
func (t topology) closure(indexes ...int) map[int]bool {
	found := map[int]bool{}
	for len(indexes) > 0 {
		index := indexes[0]
		indexes = indexes[1:]
		if _, exists := t[index]; exists && !found[index] {
			found[index] = true
			indexes = append(indexes, t.below(index)...)
		}
	}
	return found
}

// allBelow returns the indexes of all links below a link, in order.
func (t topology) allBelow(index int) []int {
	all := t.closure(index)
	delete(all, index)
	return slices.Sorted(maps.Keys(all))
}

// allAbove returns the indexes of all links that are stacked on a link.
func (t topology) allAbove(index int) map[int]bool {
	above := map[int]bool{}
	for i := range t {
		if i != index && t.closure(i)[index] {
			above[i] = true
		}
	}
	return above
}

// uplinkMemory contains the names of links that a default route depends on or once depended on, with the last time when
// the link existed. A route is absent for a while when a DHCP lease is renewed, and a link when its driver is reloaded,
// so neither ends the protection of a link. The keys are names because a reloaded link returns with another index.
type uplinkMemory map[string]time.Time

// uplinkMemoryTime is how long a link that no longer exists stays in the memory.
const uplinkMemoryTime = time.Hour

// update adds the links that default routes through the links with the indexes
// routed depend on, and removes links that have not existed for long.
func (m uplinkMemory) update(t topology, routed []int, now time.Time) {
	for index := range t.closure(routed...) {
		m[t[index].name] = now
	}
	for _, l := range t {
		if _, known := m[l.name]; known {
			m[l.name] = now
		}
	}
	maps.DeleteFunc(m, func(_ string, seen time.Time) bool { return now.Sub(seen) > uplinkMemoryTime })
}
