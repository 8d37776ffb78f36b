// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package classify assigns frames to the HTB classes of shares, in the kernel.
//
// Two eBPF programs are attached to each NIC, one for each direction; see AttachPoint. They look up a frame in BPF maps
// and write its class to skb->priority. The queues of package shape read it there. They also drop, or count, frames
// that do not carry the identity of their sender; see Policy. Incoming frames are also redirected to the IFB device of
// the NIC, by the program or by its filter. All NICs and shares use the same two programs. To add a share,
// Classifier.AddMember only updates maps, which takes microseconds; callers call it before they bring up the share's
// link. Otherwise, frames could pass without a class.
//
// The programs identify a sender by two values: the cookie of the network namespace of the sending
// socket, and the source MAC address. A pod can change the MAC address, stack links on its link,
// and send raw frames, but it cannot change the cookie. How the programs get the cookie depends on
// the kernel; see Key. Frames without a socket, such as frames that a pod forwards or bridges and
// frames of virtual machines, go to the class for unidentified frames, unless the administrator
// trusts MAC addresses. Frames that the node itself forwards can have a separate class; see
// Forwarded. The programs identify a receiver by its MAC address.
package classify

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
)

//go:generate go tool bpf2go -target bpfel -tags linux bpf bpf/classify.c -- -O2 -Wall -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu

// Key names the values that identify the sender of a frame to the programs, and how the programs get them.
type Key string

// Values of Key, strongest first.
const (
	// KeyCookie is the cookie of the sending socket's network namespace,
	// together with the source MAC address. A helper of the kernel returns the
	// cookie; tc programs have it since about Linux 6.15.
	KeyCookie Key = "NetnsCookie"
	// KeySocketCookie has the values of KeyCookie. The program reads the cookie
	// from the kernel's memory, which needs CAP_PERFMON, the types of the kernel
	// (BTF), and a kernel that is not in lockdown. Namespaces have had cookies
	// since Linux 5.12.
	KeySocketCookie Key = "NetnsCookieOfSocket"
	// KeyMAC is the source MAC address alone. A pod with CAP_NET_RAW can send
	// frames that are charged to another share.
	KeyMAC Key = "MAC"
)

// Keys returns all keys, strongest first.
func Keys() []Key { return []Key{KeyCookie, KeySocketCookie, KeyMAC} }

// HasCookie reports whether the key contains the cookie. If it does, a pod cannot send frames that are charged to
// another share.
func (k Key) HasCookie() bool { return k == KeyCookie || k == KeySocketCookie }

// programPair is a program for the frames that leave through a NIC, and one for those
// that arrive.
type programPair struct {
	// The names in classify.c. ingress is that for AttachClsact; see ingressFor.
	egress, ingress string
	// readsRoutes reports whether the egress program supports ForwardedByRoute.
	readsRoutes bool
	// checksIdentity reports whether the programs check frames; see Policy.
	checksIdentity bool
}

// ingressFor returns the name of the program for frames that arrive.
func (p programPair) ingressFor(point AttachPoint) string {
	if point == AttachTCX {
		return p.ingress + "_tcx"
	}
	return p.ingress
}

// programPairs are the programs by key, in the order that Open tries them. Those with checks are first: Linux 6.1 loads
// them only with CAP_PERFMON.
var programPairs = map[Key][]programPair{
	KeyCookie: {
		{"dra_shared_egress_helper_routes", "dra_shared_ingress_helper_lists", true, true},
		{"dra_shared_egress_helper", "dra_shared_ingress_helper", false, true},
		{"dra_shared_egress_helper_routes_unchecked", "dra_shared_ingress_unchecked", true, false},
		{"dra_shared_egress_helper_unchecked", "dra_shared_ingress_unchecked", false, false},
	},
	KeySocketCookie: {
		{"dra_shared_egress_socket", "dra_shared_ingress_socket", true, true},
		{"dra_shared_egress_socket_unchecked", "dra_shared_ingress_unchecked", true, false},
	},
	KeyMAC: {
		{"dra_shared_egress_mac", "dra_shared_ingress_mac", false, true},
		{"dra_shared_egress_mac_unchecked", "dra_shared_ingress_unchecked", false, false},
	},
}

// pinVersion is the version of the maps' layout and part of their path. Two
// releases of the plugin that run at the same time share maps only if they use
// the same layout.
const pinVersion = "v1"

// Classifier holds the loaded programs and their maps. The maps are pinned, so
// the attached programs, this process, a later process, and a second plugin
// during a handover use the same maps.
type Classifier struct {
	maps        bpfMaps
	egress      *ebpf.Program
	ingress     *ebpf.Program
	hairpin     *ebpf.Program // nil without pins
	attachPoint AttachPoint
	key         Key
	bpffs       string      // where maps and links are pinned; "" if they are not
	links       []link.Link // attached programs that end with this process, unless they are pinned
	arpTrace    link.Link   // one of links; nil if the sender of ARP is not known
	readsRoutes bool
	checks      bool  // whether the programs check frames
	listsErr    error // why the programs do not read lists of senders; nil if they do
	failpoints  failpoint.Injector
	constants   map[string]any // of the programs, which tests set before load

	identities sync.Mutex // held while the entry of a link is read and replaced
}

// NIC describes a NIC to the programs.
type NIC struct {
	Index    int // interface index
	IFBIndex int // interface index of the IFB device that shapes incoming frames
	MAC      net.HardwareAddr
	// HostCookie is the cookie of the network namespace that the NIC is in.
	HostCookie uint64
	// Major is the major number of the NIC's classes.
	Major uint16
	// TrustMAC assigns a frame without a socket to the share with the frame's source MAC address on a link.
	TrustMAC bool
	// Forwarded is how the programs recognize frames that the node forwards.
	Forwarded Forwarded
	// Policy is the treatment of frames that do not carry the identity of
	// their sender.
	Policy Policy
	// Steer sends the frames of the NIC and of the IFB device through the transmit queue with their class in its HTB
	// qdisc; see shape.Trees.
	Steer bool
}

// Forwarded is how the programs recognize frames that the node forwards, such as pods' frames in the cluster network.
// They have the NIC's source MAC address, and either do not have a socket or have one of another namespace.
type Forwarded uint8

// Values of Forwarded, the numbers of nic.h.
const (
	// ForwardedUnidentified means that forwarded frames do not have a separate class.
	ForwardedUnidentified Forwarded = iota
	// ForwardedByRoute recognizes them by the route that the node has chosen for
	// them. The frames of a share do not have it.
	ForwardedByRoute
	// ForwardedByAddress recognizes them by their source MAC address. A share
	// can send frames without a socket that have the address of the NIC.
	ForwardedByAddress
)

// Open loads the programs, and opens or creates the maps on the BPF file system
// that is mounted at bpffs.
func Open(bpffs string, failpoints failpoint.Injector, point AttachPoint, key Key) (*Classifier, error) {
	pins := pinDir(bpffs)
	if err := os.MkdirAll(pins, 0o700); err != nil {
		return nil, fmt.Errorf("pin BPF maps: %w", err)
	}
	var errs error
	for _, pair := range programPairs[key] {
		c := newClassifier(point, key, pair)
		c.bpffs, c.failpoints = bpffs, failpoints
		err := c.load(pins, pair)
		if err == nil {
			return c, nil
		}
		errs = errors.Join(errs, fmt.Errorf("load classifier with key %s: %w", key, err))
	}
	return nil, errs
}

// OpenUnpinned loads the programs for a key, without checks of frames. Their maps are not shared
// with other programs, and end with the Classifier and the programs that it attaches. With
// readsRoutes, it loads programs that support ForwardedByRoute, or fails.
func OpenUnpinned(point AttachPoint, key Key, readsRoutes bool) (*Classifier, error) {
	for _, pair := range slices.Backward(programPairs[key]) {
		if readsRoutes && !pair.readsRoutes {
			continue
		}
		c := newClassifier(point, key, pair)
		if err := c.load("", pair); err != nil {
			return nil, fmt.Errorf("load classifier: %w", err)
		}
		return c, nil
	}
	return nil, fmt.Errorf("the programs for key %s do not read routes", key)
}

func newClassifier(point AttachPoint, key Key, pair programPair) *Classifier {
	return &Classifier{attachPoint: point, key: key, readsRoutes: pair.readsRoutes, checks: pair.checksIdentity}
}

// isPinned reports whether maps and attached programs outlive the Classifier.
func (c *Classifier) isPinned() bool { return c.bpffs != "" }

// pinsDir returns the directory of the pinned maps and links of all releases.
func pinsDir(bpffs string) string { return filepath.Join(bpffs, "dra-shared") }

// pinDir returns the directory of the pinned maps.
func pinDir(bpffs string) string { return filepath.Join(pinsDir(bpffs), pinVersion) }

// RemovePins removes the pinned maps and links of all releases from the BPF file system.
// The kernel frees a map when the last program or process that uses it releases
// it.
func RemovePins(bpffs string, failpoints failpoint.Injector) error {
	return failpoints.Do("remove pinned maps", func() error { return os.RemoveAll(pinsDir(bpffs)) })
}

// parseObject parses the embedded object once: the trials at the start of the plugin load
// programs several times, and parsing takes milliseconds. Callers copy the result.
var parseObject = sync.OnceValues(loadBpf)

// unpinnedEntries is the maximum number of entries of a map that is not pinned. The kernel
// allocates the buckets of a map when it creates it: for all maps, several milliseconds.
const unpinnedEntries = 256

// load loads two programs, and opens or creates the maps in pins. If pins is "", it creates
// maps that are not pinned.
func (c *Classifier) load(pins string, pair programPair) error {
	parsed, err := parseObject()
	if err != nil {
		return err
	}
	spec, ingress := parsed.Copy(), pair.ingressFor(c.attachPoint)
	for name := range spec.Programs {
		if name != pair.egress && name != ingress && name != hairpinProgram {
			delete(spec.Programs, name) // the kernel may refuse it
		}
	}
	if pins == "" {
		delete(spec.Programs, hairpinProgram) // the trials do not use it
		for _, m := range spec.Maps {
			m.Pinning = ebpf.PinNone
			m.MaxEntries = min(m.MaxEntries, unpinnedEntries)
		}
	}
	for name, value := range c.constants {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	c.listsErr = errNoMemory
	if pair.checksIdentity && pair.readsRoutes {
		c.listsErr = c.failpoints.Do(FailpointLists, func() error { return setListOffsets(spec) })
	}
	loaded, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: pins}})
	if err != nil {
		return describeLoadError(err, c.key)
	}
	defer loaded.Close() // closes the programs that are not detached
	if err := loaded.Assign(&c.maps); err != nil {
		return err
	}
	c.egress, c.ingress = loaded.DetachProgram(pair.egress), loaded.DetachProgram(ingress)
	c.hairpin = loaded.DetachProgram(hairpinProgram)
	return nil
}

// Close closes the programs and maps in this process. Attached programs and pinned maps stay in the kernel, unless
// OpenUnpinned loaded them and the attach point is AttachTCX.
func (c *Classifier) Close() error {
	err := errors.Join(c.maps.Close(), c.egress.Close(), c.ingress.Close(), c.hairpin.Close())
	for _, l := range c.links {
		err = errors.Join(err, l.Close())
	}
	return err
}

// Key returns the key that the programs use.
func (c *Classifier) Key() Key { return c.key }

// ReadsRoutes reports whether the kernel lets the programs read the route of a
// frame, which ForwardedByRoute requires. It has the requirements of
// KeySocketCookie.
func (c *Classifier) ReadsRoutes() bool { return c.readsRoutes }

// ChecksIdentity reports whether the programs check frames; see Policy.
func (c *Classifier) ChecksIdentity() bool { return c.checks }

// ListsErr returns the reason why the programs do not read the lists of senders of links in mode source; nil if they
// do. A link that a pod hides can then keep frames from others while it is down.
func (c *Classifier) ListsErr() error { return c.listsErr }

// senderCookies returns the cookies in a link's keys in the sender map. Cookie 0 matches frames if the programs ignore
// their cookie.
func (c *Classifier) senderCookies(cookie uint64, trustMAC bool) []uint64 {
	switch {
	case c.key == KeyMAC:
		return []uint64{0}
	case trustMAC:
		return []uint64{cookie, 0}
	default:
		return []uint64{cookie}
	}
}

// Attach attaches the programs to a NIC. It replaces programs that an earlier process attached, without a gap.
func (c *Classifier) Attach(nic NIC) error {
	value := bpfNic{
		HostCookie: nic.HostCookie,
		Ifb:        uint32(nic.IFBIndex),
		Major:      uint32(nic.Major) << 16,
		Forwarded:  uint8(nic.Forwarded),
	}
	copy(value.Mac[:], nic.MAC)
	if nic.TrustMAC {
		value.TrustMac = 1
	}
	err := c.failpoints.Do("put NIC in map", func() error {
		if err := errors.Join(c.startCounts(nic.Index), c.SetPolicy(nic)); err != nil {
			return err // the entry has the address that putHeld needs to release
		}
		return put(c.maps.DraSharedNics, uint32(nic.Index), value)
	})
	if err != nil {
		return fmt.Errorf("add link %d to the classifier's map of NICs: %w", nic.Index, err)
	}
	if err := setSteered(nic.Steer, c.failpoints, nic.Index, nic.IFBIndex); err != nil {
		return err
	}
	if err := c.attach(nic.Index, nic.IFBIndex); err != nil || !c.isPinned() {
		return err
	}
	for _, other := range AttachPoints() { // an earlier process may have used it
		if other == c.attachPoint {
			continue
		}
		if _, err := detachFrom(other, c.bpffs, nic.Index, c.failpoints); err != nil {
			return err
		}
	}
	return removeFormerPin(c.bpffs)
}

// removeFormerPin removes the pin of a map of an earlier release, which had the numbers of refused frames once for each
// CPU. Programs of that release that are still attached keep the map.
func removeFormerPin(bpffs string) error {
	err := os.Remove(filepath.Join(pinDir(bpffs), "dra_shared_refusals"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// filters returns the filters of a NIC. The filter of incoming frames redirects
// them to the link ifb.
func (c *Classifier) filters(index, ifb int) []filter {
	return []filter{
		{link: index, parent: netlink.HANDLE_MIN_EGRESS, program: c.egress},
		{link: index, parent: netlink.HANDLE_MIN_INGRESS, program: c.ingress, redirectTo: ifb},
	}
}

// Detach detaches this driver's programs from a NIC, even if an earlier process
// attached them, and reports whether it found any. It keeps the clsact qdisc,
// which other programs may use.
func Detach(bpffs string, index int, failpoints failpoint.Injector) (found bool, err error) {
	for _, point := range AttachPoints() {
		detached, detachErr := detachFrom(point, bpffs, index, failpoints)
		found, err = found || detached, errors.Join(err, detachErr)
	}
	return found, errors.Join(err, setSteered(false, failpoints, index))
}

// RemoveNIC removes a NIC from the classifier's map. Attached programs then
// ignore the frames of the NIC; Detach detaches them.
func (c *Classifier) RemoveNIC(index int) error {
	return c.failpoints.Do("remove NIC from map", func() error {
		return errors.Join(
			ignoreMissing(c.maps.DraSharedNics.Delete(uint32(index))),
			ignoreMissing(c.maps.DraSharedCounts.Delete(uint32(index))),
			c.RemoveHairpin(index),
			c.removePolicy(index),
		)
	})
}

// Member identifies a link. The classifier assigns its frames to the class of a share.
type Member struct {
	// Parent is the interface index of the NIC.
	Parent int
	// Cookie is the cookie of the pod's network namespace.
	Cookie uint64
	// MAC is the address of the link.
	MAC net.HardwareAddr
	// TrustMAC has the meaning of NIC.TrustMAC.
	TrustMAC bool
	// Addresses are the recorded addresses of the link.
	Addresses []netip.Addr
	// Assigned means that the link may not use other addresses, even if it currently does not have any.
	Assigned bool
	// Bridge permits frames between the link and other such links of the NIC.
	Bridge bool
	// VEPA means that the link sends frames for other links out of the NIC, too; see Hairpin.
	// Without it, the kernel switches frames between Bridge links itself.
	VEPA bool
	// Audit means that frames of the link are counted and not dropped, because an
	// earlier release attached it.
	Audit bool
}

// AddMember assigns the frames that a link sends and receives to class, which
// is major<<16 | minor. For addresses that another link has, see AddIdentity.
func (c *Classifier) AddMember(m Member, class uint32) error {
	var taken error
	if err := c.AddIdentity(m, class); errors.Is(err, errAddressTaken) {
		taken = err
	} else if err != nil {
		return fmt.Errorf("add identity of %s to the classifier's maps: %w", m.MAC, err)
	}
	for _, cookie := range c.senderCookies(m.Cookie, m.TrustMAC) {
		err := c.failpoints.Do("put sender in map", func() error {
			return put(c.maps.DraSharedTx, sender(m, cookie), class)
		})
		if err != nil {
			return fmt.Errorf("add sender %s to the classifier's map: %w", m.MAC, err)
		}
	}
	err := c.failpoints.Do("put receiver in map", func() error {
		return put(c.maps.DraSharedRx, receiver(m), class)
	})
	if err != nil {
		return fmt.Errorf("add receiver %s to the classifier's map: %w", m.MAC, err)
	}
	return taken
}

// RemoveMember removes the map entries of a link, also those that a plugin with another Key has
// added. It returns nil if the link has none.
func (c *Classifier) RemoveMember(m Member) error {
	errs := c.removeIdentity(m)
	cookies := c.senderCookies(m.Cookie, m.TrustMAC)
	if !slices.Contains(cookies, m.Cookie) {
		cookies = append(cookies, m.Cookie)
	}
	for _, cookie := range cookies {
		errs = errors.Join(errs, c.failpoints.Do("remove sender from map", func() error {
			return ignoreMissing(c.maps.DraSharedTx.Delete(sender(m, cookie)))
		}))
	}
	return errors.Join(errs, c.failpoints.Do("remove receiver from map", func() error {
		return ignoreMissing(c.maps.DraSharedRx.Delete(receiver(m)))
	}))
}

// Members returns all links that have an entry in a map. After an interrupted AddMember or
// RemoveMember, a link may have an entry in only one of the maps; RemoveMember also removes that.
func (c *Classifier) Members() ([]Member, error) {
	type key struct {
		parent uint32
		mac    [6]uint8
	}
	seen := map[key]bool{}
	var members []Member
	var class uint32
	var tx bpfSender
	senders := c.maps.DraSharedTx.Iterate()
	for senders.Next(&tx, &class) {
		seen[key{tx.Parent, tx.Mac}] = true
		members = append(members, Member{Parent: int(tx.Parent), Cookie: tx.Cookie, MAC: slices.Clone(tx.Mac[:])})
	}
	var rx bpfReceiver
	receivers := c.maps.DraSharedRx.Iterate()
	for receivers.Next(&rx, &class) {
		if !seen[key{rx.Parent, rx.Mac}] {
			seen[key{rx.Parent, rx.Mac}] = true
			members = append(members, Member{Parent: int(rx.Parent), MAC: slices.Clone(rx.Mac[:])})
		}
	}
	var identity bpfLink
	identities := c.maps.DraSharedLinks.Iterate() // an earlier release removes only the other entries
	for identities.Next(&rx, &identity) {
		if !seen[key{rx.Parent, rx.Mac}] {
			mac := slices.Clone(rx.Mac[:])
			members = append(members, Member{Parent: int(rx.Parent), Cookie: identity.Cookie, MAC: mac})
		}
	}
	return members, errors.Join(senders.Err(), receivers.Err(), identities.Err())
}

// Lookup returns the classes in the maps for the frames that a link sends and receives; 0 means
// none. send is also 0 if an entry differs from what AddMember writes, apart from addresses and
// SetBlocked.
func (c *Classifier) Lookup(m Member) (send, receive uint32, err error) {
	if err := ignoreMissing(c.maps.DraSharedRx.Lookup(receiver(m), &receive)); err != nil {
		return 0, 0, err
	}
	var link bpfLink
	if err := ignoreMissing(c.maps.DraSharedLinks.Lookup(receiver(m), &link)); err != nil {
		return 0, receive, err
	}
	if link.Cookie != m.Cookie || link.Flags&^linkBlocked != m.flags() {
		return 0, receive, nil
	}
	for _, cookie := range c.senderCookies(m.Cookie, m.TrustMAC) {
		var class uint32
		err := ignoreMissing(c.maps.DraSharedTx.Lookup(sender(m, cookie), &class))
		if err != nil || class != link.Class {
			return 0, receive, err
		}
	}
	return link.Class, receive, nil
}

// ignoreMissing returns nil if err means that a map does not have the key.
func ignoreMissing(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}

// sender returns the key of a link in the sender map. The library encodes a value by reflection; it uses the memory
// that a pointer refers to.
func sender(m Member, cookie uint64) *bpfSender {
	key := bpfSender{Cookie: cookie, Parent: uint32(m.Parent)}
	copy(key.Mac[:], m.MAC)
	return &key
}

// receiver returns the key of a link in the receiver map; see sender.
func receiver(m Member) *bpfReceiver {
	key := bpfReceiver{Parent: uint32(m.Parent)}
	copy(key.Mac[:], m.MAC)
	return &key
}
