// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
)

// Identity is the action of the programs on frames that do not carry the identity of
// their sender: the MAC address of its link, and the addresses that the link has.
type Identity uint8

// Values of Identity, the numbers of policy.h.
const (
	// IdentityOff means that the programs do not check frames.
	IdentityOff Identity = iota
	// IdentityAudit means that the programs count such frames.
	IdentityAudit
	// IdentityEnforce means that the programs drop such frames.
	IdentityEnforce
)

// Reason is a reason to refuse a frame.
type Reason string

// reasons are the reasons by their number in policy.h.
var reasons = [...]Reason{
	1: "SourceMAC", 2: "SourceAddress", 3: "ARP", 4: "NeighborDiscovery", 5: "RouterAdvertisement", 6: "DHCPServer",
	7: "VLAN", 8: "Forwarded", 9: "NeighborRate", 10: "Blocked", 11: "Protocol", 12: "Receiver", 13: "Isolation",
	14: "MulticastRouter",
}

// Reasons returns all reasons.
func Reasons() []Reason { return slices.Clone(reasons[1:]) }

// Policy is the treatment of frames on a NIC that do not carry the identity of their sender.
type Policy struct {
	Identity Identity
	// Forwarding permits pods to forward frames, which do not have a socket. A frame must still have the MAC address of a
	// link.
	Forwarding bool
	// Autoconf lets links receive router advertisements, and send from addresses with a second half that is derived from
	// their MAC address (EUI-64).
	Autoconf bool
	// VLANs are the VLAN IDs that frames may be tagged with.
	VLANs []uint16
	// MACs are additional addresses that every link may use. With MACs or Addresses, links may send VRRP.
	MACs []net.HardwareAddr
	// Addresses are additional networks. Every link may use their addresses.
	Addresses []netip.Prefix
	// Subnets are the networks with the addresses that a link may use if it does not have recorded addresses. Without
	// Subnets, it may use any address that another link does not have, except other links' IPv6 link-local addresses.
	Subnets []netip.Prefix
	// NodeAddresses are addresses of the node, which no link may use.
	NodeAddresses []netip.Addr
	// ReachesNode lets the node and links that may reach each other also reach one another.
	// Such a link and the node exchange frames as two links do. All links of the NIC receive
	// the broadcasts of the node.
	ReachesNode bool
	// Guarded hides the senders of received frames from links in mode source, which
	// receive the frames of senders that their pods list. While it is set, all pods
	// see a random source MAC address in each frame.
	Guarded bool
	// GuardTime is how long Guarded stays set after the last link that made it necessary, rounded to seconds. A plugin
	// that starts later uses it to continue. The programs ignore it.
	GuardTime time.Duration
}

// Refusals are the numbers of frames of a class that the programs refused.
type Refusals struct {
	// Parent is the interface index of the NIC.
	Parent int
	// Class is major<<16 | minor of the sender's class, or of the receiver's if the
	// sender is not on the node. It is the class for unidentified frames if no share
	// is known.
	Class uint32
	// Dropped and Passed are the numbers by reason.
	Dropped, Passed map[Reason]uint64
}

// numberOf returns an address as the programs use it, the first byte lowest.
func numberOf(mac net.HardwareAddr) (number uint64) {
	for i, b := range mac {
		number |= uint64(b) << (8 * i)
	}
	return number
}

// addressKey returns the key of an address in the map of addresses.
func addressKey(parent int, a netip.Addr) bpfAddress {
	return bpfAddress{Parent: uint64(parent), Bytes: a.As16()}
}

// subnetKey returns the key of a network in the map of networks.
func subnetKey(parent int, p netip.Prefix) bpfSubnet {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return bpfSubnet{Prefixlen: uint32(32 + bits), Parent: uint32(parent), Bytes: p.Masked().Addr().As16()}
}

// SetPolicy puts the rules of a NIC into the maps, and removes its previous rules.
// Attach includes SetPolicy.
func (c *Classifier) SetPolicy(nic NIC) error {
	return c.failpoints.Do("put policy in maps", func() error {
		return errors.Join(c.putSubnets(nic), c.putAllowed(nic), c.putHeld(nic), c.putPolicy(nic))
	})
}

func (c *Classifier) putPolicy(nic NIC) error {
	flag := func(b bool) uint8 {
		if b {
			return 1
		}
		return 0
	}
	value := bpfPolicy{
		Identity: uint8(nic.Policy.Identity), Forwarding: flag(nic.Policy.Forwarding), Autoconf: flag(nic.Policy.Autoconf),
		Subnets: flag(len(nic.Policy.Subnets) > 0), Guarded: flag(nic.Policy.Guarded),
		Vrrp:        flag(len(nic.Policy.MACs)+len(nic.Policy.Addresses) > 0),
		ReachesNode: flag(nic.Policy.ReachesNode), TracesArp: flag(c.arpTrace != nil),
	}
	binary.NativeEndian.PutUint16(value.Unused[:], uint16(nic.Policy.GuardTime/time.Second))
	return errors.Join(
		c.startRefusals(nic.Index, unidentified(nic.Major)),
		put(c.maps.DraSharedPolicies, uint32(nic.Index), value),
	)
}

// Guarded reports whether a NIC is guarded by the rules in the maps, and its GuardTime; 0 if an earlier release
// wrote them. See Policy.
func (c *Classifier) Guarded(parent int) (guarded bool, length time.Duration, err error) {
	var value bpfPolicy
	err = ignoreMissing(c.maps.DraSharedPolicies.Lookup(uint32(parent), &value))
	length = time.Duration(binary.NativeEndian.Uint16(value.Unused[:])) * time.Second
	return value.Guarded != 0, length, err
}

// unidentified returns the class for frames that cannot be assigned to a share.
func unidentified(major uint16) uint32 { return uint32(major)<<16 | unidentifiedMinor }

// unidentifiedMinor is CLASS_UNIDENTIFIED of nic.h.
const unidentifiedMinor = 4

// Values of the map of networks, the numbers of policy.h.
const (
	subnetAssigned uint32 = 1
	subnetAll      uint32 = 2
)

func (c *Classifier) putSubnets(nic NIC) error {
	wanted := map[bpfSubnet]uint32{}
	for _, p := range nic.Policy.Subnets {
		wanted[subnetKey(nic.Index, p)] = subnetAssigned
	}
	for _, p := range nic.Policy.Addresses {
		wanted[subnetKey(nic.Index, p)] = subnetAll
	}
	return replace(c.maps.DraSharedSubnets, wanted, func(k bpfSubnet, _ uint32) bool {
		return k.Parent == uint32(nic.Index)
	})
}

func (c *Classifier) putAllowed(nic NIC) error {
	wanted := map[bpfAllowed]uint32{}
	for _, mac := range nic.Policy.MACs {
		key := bpfAllowed{Parent: uint32(nic.Index)}
		copy(key.Mac[:], mac)
		wanted[key] = 1
	}
	for _, vlan := range nic.Policy.VLANs {
		wanted[bpfAllowed{Parent: uint32(nic.Index), Vlan: vlan}] = 1
	}
	return replace(c.maps.DraSharedAllowed, wanted, func(k bpfAllowed, _ uint32) bool {
		return k.Parent == uint32(nic.Index)
	})
}

// putHeld keeps links from using the addresses of the node. It removes those that the node no longer has, which may
// be held by the MAC address that the NIC had before.
func (c *Classifier) putHeld(nic NIC) error {
	own, wanted := numberOf(nic.MAC), map[bpfAddress]uint64{}
	for _, a := range nic.Policy.NodeAddresses {
		wanted[addressKey(nic.Index, a)] = own
	}
	var last bpfNic
	if err := c.maps.DraSharedNics.Lookup(uint32(nic.Index), &last); errors.Is(err, ebpf.ErrKeyNotExist) {
		copy(last.Mac[:], nic.MAC)
	} else if err != nil {
		return err
	}
	former := numberOf(last.Mac[:])
	return replace(c.maps.DraSharedAddresses, wanted, func(k bpfAddress, owner uint64) bool {
		return k.Parent == uint64(nic.Index) && owner != ownerOfGateways && (owner == own || owner == former)
	})
}

// ownerOfGateways is the value of gateways in the map of addresses. No link has it as its MAC
// address.
const ownerOfGateways uint64 = 0

// AddGateways keeps links from using gateways' addresses, except a link with such a recorded address.
func (c *Classifier) AddGateways(parent int, gateways []netip.Addr) (failed error) {
	for _, g := range gateways {
		err := update(c.maps.DraSharedAddresses, addressKey(parent, g), ownerOfGateways, ebpf.UpdateNoExist)
		if !errors.Is(err, ebpf.ErrKeyExist) {
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// RemoveGatewaysExcept removes the addresses that AddGateways has added, except gateways. Links may then use them
// again.
func (c *Classifier) RemoveGatewaysExcept(parent int, gateways []netip.Addr) error {
	kept := map[bpfAddress]uint64{}
	for _, g := range gateways {
		kept[addressKey(parent, g)] = ownerOfGateways
	}
	present, err := entries[bpfAddress, uint64](c.maps.DraSharedAddresses)
	for key, owner := range present {
		if _, keep := kept[key]; !keep && owner == ownerOfGateways && key.Parent == uint64(parent) {
			err = errors.Join(err, ignoreMissing(c.maps.DraSharedAddresses.Delete(key)))
		}
	}
	return err
}

// replace puts entries into a map, and removes the other entries if own returns true for them.
func replace[K, V comparable](m *ebpf.Map, wanted map[K]V, own func(K, V) bool) error {
	present, err := entries[K, V](m)
	if err != nil {
		return err
	}
	for k, v := range present {
		if _, keep := wanted[k]; keep || !own(k, v) {
			continue
		}
		if err := ignoreMissing(m.Delete(k)); err != nil {
			return err
		}
	}
	for k, v := range wanted {
		if old, ok := present[k]; ok && old == v {
			continue
		}
		if err := put(m, k, v); err != nil {
			return err
		}
	}
	return nil
}

// entries returns the entries of a map.
func entries[K comparable, V any](m *ebpf.Map) (map[K]V, error) {
	found := map[K]V{}
	var k K
	var v V
	iterator := m.Iterate()
	for iterator.Next(&k, &v) {
		found[k] = v
	}
	return found, iterator.Err()
}

// errAddressTaken means that another link of the NIC, or the NIC itself, has an address.
var errAddressTaken = errors.New("another link of the NIC, or the NIC itself, has it: choose another address")

// Flags of a link, the numbers of policy.h.
const (
	linkAudit      = 1
	linkAnyAddress = 2
	linkBridge     = 4
	linkBlocked    = 8
	linkVEPA       = 16
)

// AddIdentity puts the identity of a link into the maps. The link uses class, which is
// major<<16 | minor. A blocked link stays blocked. If another link of the NIC, or the NIC
// itself, has an address of the link, AddIdentity returns an error that says so, and puts the
// rest into the maps. AddMember includes AddIdentity.
func (c *Classifier) AddIdentity(m Member, class uint32) error {
	c.identities.Lock()
	defer c.identities.Unlock()
	return c.addIdentity(m, class)
}

// addIdentity is AddIdentity for callers that hold c.identities.
func (c *Classifier) addIdentity(m Member, class uint32) error {
	value := bpfLink{Cookie: m.Cookie, Class: class, Flags: m.flags()}
	for _, a := range m.Addresses {
		if bytes := a.As16(); a.Is4() {
			value.Address = binary.NativeEndian.Uint32(bytes[12:])
		} else {
			value.Address6 = [2]uint64{binary.NativeEndian.Uint64(bytes[:8]), binary.NativeEndian.Uint64(bytes[8:])}
		}
	}
	blocked, err := c.Blocked(m)
	if err != nil {
		return err
	}
	if blocked {
		value.Flags |= linkBlocked
	}
	return c.failpoints.Do("put identity in maps", func() error {
		var errs, taken error
		for _, a := range m.Addresses {
			if err := c.takeAddress(m, a); errors.Is(err, errAddressTaken) {
				taken = errors.Join(taken, err)
			} else {
				errs = errors.Join(errs, err)
			}
		}
		errs = errors.Join(
			errs,
			c.startRefusals(m.Parent, class),
			put(c.maps.DraSharedTenants, tenant(m), class),
			put(c.maps.DraSharedLinks, receiver(m), value),
		)
		if errs != nil {
			return errs
		}
		return taken
	})
}

// SetAddresses replaces the addresses of a link that has an identity by m.Addresses. For
// addresses that another link has, see AddIdentity.
func (c *Classifier) SetAddresses(m Member) error {
	c.identities.Lock()
	defer c.identities.Unlock()
	var value bpfLink
	if err := c.maps.DraSharedLinks.Lookup(receiver(m), &value); err != nil {
		return ignoreMissing(err) // AddMember will put the addresses into the maps
	}
	if err := c.addIdentity(m, value.Class); err != nil {
		return err
	}
	return c.failpoints.Do("remove addresses from map", func() error {
		own, kept := numberOf(m.MAC), map[bpfAddress]uint64{}
		for _, a := range m.Addresses {
			kept[addressKey(m.Parent, a)] = own
		}
		return replace(c.maps.DraSharedAddresses, kept, func(k bpfAddress, holder uint64) bool {
			return k.Parent == uint64(m.Parent) && holder == own
		})
	})
}

// takeAddress assigns an address of a NIC to a link, unless another link or the NIC has it.
func (c *Classifier) takeAddress(m Member, a netip.Addr) error {
	key, own := addressKey(m.Parent, a), numberOf(m.MAC)
	err := update(c.maps.DraSharedAddresses, key, own, ebpf.UpdateNoExist)
	if !errors.Is(err, ebpf.ErrKeyExist) {
		return err
	}
	var owner uint64
	if err := c.maps.DraSharedAddresses.Lookup(key, &owner); err != nil {
		return fmt.Errorf("look up the owner of address %s: %w", a, err)
	}
	switch owner {
	case own:
		return nil
	case ownerOfGateways: // the link is the gateway of others
		return put(c.maps.DraSharedAddresses, key, own)
	default:
		return fmt.Errorf("address %s: %w", a, errAddressTaken)
	}
}

func (m Member) flags() (flags uint32) {
	for flag, set := range map[uint32]bool{
		linkAudit: m.Audit, linkAnyAddress: len(m.Addresses) == 0 && !m.Assigned, linkBridge: m.Bridge,
		linkVEPA: m.VEPA,
	} {
		if set {
			flags |= flag
		}
	}
	return flags
}

func tenant(m Member) bpfTenant { return bpfTenant{Cookie: m.Cookie, Parent: uint64(m.Parent)} }

// removeIdentity removes the identity of a link from the maps. If the caller does not
// know the link's addresses, it finds them.
func (c *Classifier) removeIdentity(m Member) error {
	return c.failpoints.Do("remove identity from maps", func() error {
		var value bpfLink
		err := c.maps.DraSharedLinks.Lookup(receiver(m), &value)
		isKnown := !errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && isKnown || !isKnown && len(m.Addresses) == 0 {
			return ignoreMissing(err)
		}
		var errs error
		addresses, err := c.addressesOf(m, value)
		for _, a := range addresses {
			errs = errors.Join(errs, ignoreMissing(c.maps.DraSharedAddresses.Delete(a)))
		}
		if !isKnown { // AddIdentity has failed after it had taken addresses
			return errors.Join(err, errs)
		}
		return errors.Join(
			err,
			errs,
			c.removeTenant(bpfTenant{Cookie: value.Cookie, Parent: uint64(m.Parent)}, value.Class),
			ignoreMissing(c.maps.DraSharedLinks.Delete(receiver(m))),
		)
	})
}

// removeTenant removes the class of a namespace, unless it belongs to another link.
func (c *Classifier) removeTenant(key bpfTenant, class uint32) error {
	var present uint32
	if err := c.maps.DraSharedTenants.Lookup(key, &present); err != nil || present != class {
		return ignoreMissing(err)
	}
	return ignoreMissing(c.maps.DraSharedTenants.Delete(key))
}

// addressesOf returns the entries of a link in the map of addresses.
func (c *Classifier) addressesOf(m Member, value bpfLink) (keys []bpfAddress, err error) {
	own := numberOf(m.MAC)
	if len(m.Addresses) > 0 {
		for _, a := range m.Addresses {
			var owner uint64
			key := addressKey(m.Parent, a)
			if c.maps.DraSharedAddresses.Lookup(key, &owner) == nil && owner == own {
				keys = append(keys, key)
			}
		}
		return keys, nil
	}
	if value.Flags&linkAnyAddress != 0 {
		return nil, nil
	}
	all, err := entries[bpfAddress, uint64](c.maps.DraSharedAddresses)
	for key, owner := range all {
		if key.Parent == uint64(m.Parent) && owner == own {
			keys = append(keys, key)
		}
	}
	return keys, err
}

// SetBlocked blocks or unblocks a link: a blocked link does not send or receive unicast frames if its NIC enforces
// identity. It reports whether that changed.
func (c *Classifier) SetBlocked(m Member, blocked bool) (changed bool, err error) {
	c.identities.Lock()
	defer c.identities.Unlock()
	var value bpfLink
	if err := c.maps.DraSharedLinks.Lookup(receiver(m), &value); err != nil {
		return false, ignoreMissing(err)
	}
	if blocked == (value.Flags&linkBlocked != 0) {
		return false, nil
	}
	value.Flags ^= linkBlocked
	return true, c.failpoints.Do("block link in map", func() error {
		return update(c.maps.DraSharedLinks, receiver(m), value, ebpf.UpdateExist)
	})
}

// Blocked reports whether the link of a member is blocked.
func (c *Classifier) Blocked(m Member) (bool, error) {
	var value bpfLink
	err := ignoreMissing(c.maps.DraSharedLinks.Lookup(receiver(m), &value))
	return value.Flags&linkBlocked != 0, err
}

// Knows reports whether a link with a MAC address on a NIC has an identity.
func (c *Classifier) Knows(parent int, mac net.HardwareAddr) (bool, error) {
	var value bpfLink
	err := c.maps.DraSharedLinks.Lookup(receiver(Member{Parent: parent, MAC: mac}), &value)
	return err == nil, ignoreMissing(err)
}

// NoteImitated makes the programs hide the source address of multicast and broadcast frames that hosts
// with the addresses send to a NIC: pods have links with these addresses, which would take the frames
// from other links. The programs forget addresses when there are thousands.
func (c *Classifier) NoteImitated(parent int, addresses []net.HardwareAddr) (failed error) {
	for _, mac := range addresses {
		failed = errors.Join(failed, put(c.maps.DraSharedImitated, receiver(Member{Parent: parent, MAC: mac}), uint32(1)))
	}
	return failed
}

// startRefusals adds a class to the map of refusals, unless it is there.
func (c *Classifier) startRefusals(parent int, class uint32) error {
	key := bpfCharged{Parent: uint32(parent), Class: class}
	err := update(c.maps.DraSharedRefused, key, bpfRefusals{}, ebpf.UpdateNoExist)
	if errors.Is(err, ebpf.ErrKeyExist) {
		return nil
	}
	return err
}

// Refusals returns the refused frames of a class of a NIC.
func (c *Classifier) Refusals(parent int, class uint32) (r Refusals, err error) {
	r = Refusals{Parent: parent, Class: class, Dropped: map[Reason]uint64{}, Passed: map[Reason]uint64{}}
	var values bpfRefusals
	key := bpfCharged{Parent: uint32(parent), Class: class}
	if err := ignoreMissing(c.maps.DraSharedRefused.Lookup(key, &values)); err != nil {
		return r, fmt.Errorf("read the refused frames of link %d: %w", parent, err)
	}
	for number, reason := range reasons {
		if n := values.Frames[number]; n > 0 {
			r.Passed[reason] = n
		}
		if n := values.Frames[number+len(values.Frames)/2]; n > 0 {
			r.Dropped[reason] = n
		}
	}
	return r, nil
}

// RemoveRefusals removes the counts of a class of a NIC.
func (c *Classifier) RemoveRefusals(parent int, class uint32) error {
	return ignoreMissing(c.maps.DraSharedRefused.Delete(bpfCharged{Parent: uint32(parent), Class: class}))
}

// IsGateway reports whether an address on a NIC belongs to a gateway that AddGateways has added, and no link
// has it.
func (c *Classifier) IsGateway(parent int, a netip.Addr) (bool, error) {
	var owner uint64
	err := c.maps.DraSharedAddresses.Lookup(addressKey(parent, a), &owner)
	return err == nil && owner == ownerOfGateways, ignoreMissing(err)
}

// OwnerOf returns the MAC address of the link, or of the NIC, that has an address on a NIC; nil if no link has it and
// the NIC does not have it either.
func (c *Classifier) OwnerOf(parent int, a netip.Addr) (net.HardwareAddr, error) {
	var number uint64
	err := c.maps.DraSharedAddresses.Lookup(addressKey(parent, a), &number)
	if errors.Is(err, ebpf.ErrKeyNotExist) || err == nil && number == ownerOfGateways {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return addressOf(number), nil
}

// addressOf is the inverse of numberOf.
func addressOf(number uint64) net.HardwareAddr {
	return slices.Clone(binary.LittleEndian.AppendUint64(nil, number)[:6])
}

// removePolicy removes the rules of a NIC.
func (c *Classifier) removePolicy(index int) error {
	var errs error
	refusals, err := entries[bpfCharged, bpfRefusals](c.maps.DraSharedRefused)
	for key := range refusals {
		if key.Parent == uint32(index) {
			errs = errors.Join(errs, ignoreMissing(c.maps.DraSharedRefused.Delete(key)))
		}
	}
	none := NIC{Index: index}
	return errors.Join(
		err, errs,
		ignoreMissing(c.maps.DraSharedPolicies.Delete(uint32(index))),
		c.putSubnets(none), c.putAllowed(none),
		replace(c.maps.DraSharedAddresses, map[bpfAddress]uint64{}, func(k bpfAddress, _ uint64) bool {
			return k.Parent == uint64(index)
		}),
	)
}
