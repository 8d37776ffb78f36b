// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"slices"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// Snapshot is the kernel's state at one time, as far as it concerns the links of shares. Taking one costs a dump of
// namespace IDs and a dump of the classes of each NIC and IFB device, however many links are then compared with it.
type Snapshot struct {
	node       *Node
	namespaces map[int]bool // by ID
	nics       map[int]nicSnapshot
}

// nicSnapshot is the state of a NIC with enforcement.
type nicSnapshot struct {
	managedNIC
	// classified reports whether the classifier's programs are attached.
	classified bool
	// send, receive, and switched are the classes of shares on the NIC, the IFB device, and
	// the hairpin, by major<<16 | minor.
	send, receive, switched map[uint32]shape.ClassState
}

// Snapshot reads the state of all managed NICs.
func (n *Node) Snapshot() (*Snapshot, error) {
	ids, err := n.conn.ListNamespaceIDs()
	if err != nil {
		return nil, err
	}
	s := &Snapshot{node: n, namespaces: make(map[int]bool, len(ids)), nics: map[int]nicSnapshot{}}
	for _, id := range ids {
		s.namespaces[id] = true
	}
	for _, m := range n.enforcedNICs() {
		nic := nicSnapshot{managedNIC: m}
		if nic.classified, err = classify.AnyVersionAttached(n.bpffs, m.Index); err != nil {
			return nil, err
		}
		if nic.send, err = n.shaper.ShareClasses(m.Index); err != nil {
			return nil, err
		}
		if nic.receive, err = n.shaper.ShareClasses(m.ifb); err != nil {
			return nil, err
		}
		if m.hairpin.Outer != 0 {
			if nic.switched, err = n.shaper.ShareClasses(m.hairpin.Outer); err != nil {
				return nil, err
			}
		}
		s.nics[m.Index] = nic
	}
	return s, nil
}

// HasPrograms reports whether programs of this driver are attached to a NIC, even if another plugin attached them.
func (n *Node) HasPrograms(index int) (bool, error) {
	return classify.AnyVersionAttached(n.bpffs, index)
}

// enforcedNICs returns the NICs that are managed with enforcement.
func (n *Node) enforcedNICs() (nics []managedNIC) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, m := range n.managed {
		if m.Enforce {
			nics = append(nics, m)
		}
	}
	slices.SortFunc(nics, func(a, b managedNIC) int { return a.Index - b.Index })
	return nics
}

// NamespaceExists reports whether a namespace has the ID of the attachment's
// namespace. The kernel reuses the IDs of namespaces that have ended. A dump may not list
// all namespaces, so NamespaceExists asks the kernel about a missing one.
func (s *Snapshot) NamespaceExists(a Attachment) (bool, error) {
	if s.namespaces[a.NSID] {
		return !s.node.isIDReused(a), nil
	}
	return s.node.conn.NamespaceExists(a.NSID)
}

// Enforced reports whether the NIC of an attachment is managed with enforcement.
func (s *Snapshot) Enforced(a Attachment) bool {
	_, enforced := s.nics[a.Parent]
	return enforced
}

// Rates returns the rates that the kernel enforces on the frames of an attachment's
// link, unless the pod has changed the address of the link; nil if the frames do not
// select a class or the class does not exist. The classifier's entries are read when
// Rates is called.
func (s *Snapshot) Rates(a Attachment) (send, receive *shape.Rates, err error) {
	nic, enforced := s.nics[a.Parent]
	if !enforced || !nic.classified {
		return nil, nil, nil
	}
	sendClass, receiveClass, err := s.node.classifier.Lookup(nic.member(a))
	send, receive = ratesIn(nic.send, sendClass), ratesIn(nic.receive, receiveClass)
	if a.switches() {
		send = combine(send, ratesIn(nic.switched, onHairpin(sendClass)))
	}
	return send, receive, err
}

// Identified reports whether the programs know the link of an attachment, also one without a class.
func (s *Snapshot) Identified(a Attachment) (bool, error) {
	return s.node.classifier.Knows(a.Parent, a.MAC)
}

// Blocked reports whether the link of an attachment is blocked; see LinkState. ReadAndBlock then
// examines the link.
func (s *Snapshot) Blocked(a Attachment) (bool, error) {
	nic, enforced := s.nics[a.Parent]
	if !enforced {
		return false, nil
	}
	return s.node.classifier.Blocked(nic.member(a))
}

// ratesIn returns the rates of a class; nil if it does not exist.
func ratesIn(classes map[uint32]shape.ClassState, class uint32) *shape.Rates {
	state, ok := classes[class]
	if !ok {
		return nil
	}
	return &state.Rates
}
