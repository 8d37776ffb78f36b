// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package classify assigns frames to the HTB classes of shares, in the kernel.
//
// Two eBPF programs are attached to the clsact hooks of each NIC, one for each
// direction. They look up a frame in BPF maps and write its class to
// skb->priority, where the queues of package shape read it. All NICs and shares
// use the same two programs. To add a share, Classifier.AddMember only updates
// maps, which takes microseconds; callers do so before they bring up the
// share's link, so that no frame passes without a class.
//
// The programs identify a sender by two values: the cookie of the network
// namespace of the sending socket, and the source MAC address. A pod can change
// its address, stack links on its link, and send raw frames, but it cannot
// change the cookie. Frames without a socket, such as forwarded and bridged
// frames and frames of virtual machines, go to the class for unidentified
// frames, unless the administrator trusts MAC addresses. The programs identify
// a receiver by its MAC address.
package classify

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
)

//go:generate go tool bpf2go -target bpfel -tags linux bpf bpf/classify.c -- -O2 -Wall -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu

// Key names the values by which the programs identify the sender of a frame.
type Key string

// Values of Key, strongest first.
const (
	// KeyCookie is the cookie of the sending socket's network namespace,
	// together with the source MAC address.
	KeyCookie Key = "NetnsCookie"
	// KeyMAC is the source MAC address alone. A pod with CAP_NET_RAW can send
	// frames that are charged to another share.
	KeyMAC Key = "MAC"
)

// pinVersion is the version of the maps' layout and part of their path. Two
// releases of the plugin that run at the same time share maps only if they use
// the same layout.
const pinVersion = "v1"

// filterPriority is the priority of this driver's filters at the clsact hooks.
// It also identifies them, so it is a number that other programs are unlikely
// to use.
const filterPriority = 0xd5a

// Classifier holds the loaded programs and their maps. The maps are pinned, so
// the attached programs, this process, a later process, and a second plugin
// during a handover use the same maps.
type Classifier struct {
	objects    bpfObjects
	key        Key
	failpoints failpoint.Injector
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
	// TrustMAC assigns a frame that has no socket to the share whose link has
	// the frame's source MAC address.
	TrustMAC bool
}

// Open loads the programs, and opens or creates the maps on the BPF file system
// that is mounted at bpffs. It uses the first of keys that the kernel supports;
// without keys, it tries all of them, strongest first.
func Open(bpffs string, failpoints failpoint.Injector, keys ...Key) (*Classifier, error) {
	if len(keys) == 0 {
		keys = []Key{KeyCookie, KeyMAC}
	}
	pins := pinDir(bpffs)
	if err := os.MkdirAll(pins, 0o700); err != nil {
		return nil, fmt.Errorf("pin BPF maps: %w: is a BPF file system mounted on %s?", err, bpffs)
	}
	var errs error
	for _, key := range keys {
		c := &Classifier{key: key, failpoints: failpoints}
		err := c.load(pins)
		if err == nil {
			return c, nil
		}
		errs = errors.Join(errs, fmt.Errorf("load classifier with key %s: %w", key, err))
	}
	return nil, errs
}

// pinDir returns the directory of the pinned maps.
func pinDir(bpffs string) string { return filepath.Join(bpffs, "dra-shared", pinVersion) }

// RemovePins removes the pinned maps of all releases from the BPF file system.
// The kernel frees a map when the last program or process that uses it releases
// it.
func RemovePins(bpffs string, failpoints failpoint.Injector) error {
	return failpoints.Do("remove pinned maps", func() error { return os.RemoveAll(filepath.Dir(pinDir(bpffs))) })
}

// load loads the programs for c.key and opens or creates the maps in pins.
func (c *Classifier) load(pins string) error {
	spec, err := loadBpf()
	if err != nil {
		return err
	}
	var hasCookie uint8
	if c.key == KeyCookie {
		hasCookie = 1
	}
	if err := spec.Variables["has_cookie"].Set(hasCookie); err != nil {
		return err
	}
	return spec.LoadAndAssign(&c.objects, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: pins}})
}

// Close closes the programs and maps in this process. Attached programs and
// pinned maps stay in the kernel.
func (c *Classifier) Close() error { return c.objects.Close() }

// Key returns the key that the programs use.
func (c *Classifier) Key() Key { return c.key }

// senderCookies returns the cookies under which the sender map has entries for
// a link. Cookie 0 matches frames whose cookie the programs ignore.
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

// Attach attaches the programs to a NIC. It replaces programs that an earlier
// process attached, without an interval in which none is attached.
func (c *Classifier) Attach(nic NIC) error {
	value := bpfNic{HostCookie: nic.HostCookie, Ifb: uint32(nic.IFBIndex), Major: uint32(nic.Major) << 16}
	copy(value.Mac[:], nic.MAC)
	if nic.TrustMAC {
		value.TrustMac = 1
	}
	err := c.failpoints.Do("put NIC in map", func() error {
		return c.objects.DraSharedNics.Put(uint32(nic.Index), value)
	})
	if err != nil {
		return fmt.Errorf("add link %d to the classifier's map of NICs: %w", nic.Index, err)
	}
	clsact := &netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: nic.Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
	err = c.failpoints.Do("add clsact", func() error { return netlink.QdiscAdd(clsact) })
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact to link %d: %w: does the kernel have sch_ingress?", nic.Index, err)
	}
	return errors.Join(
		c.attach(nic.Index, netlink.HANDLE_MIN_EGRESS, c.objects.DraSharedEgress),
		c.attach(nic.Index, netlink.HANDLE_MIN_INGRESS, c.objects.DraSharedIngress),
	)
}

// attach attaches one program to a hook of a NIC.
func (c *Classifier) attach(index int, hook uint32, program *ebpf.Program) error {
	filter := filterAt(index, hook)
	filter.Fd, filter.Name, filter.DirectAction = program.FD(), "dra_shared", true
	if err := c.failpoints.Do("attach program", func() error { return netlink.FilterReplace(filter) }); err != nil {
		return fmt.Errorf("attach classifier to link %d: %w: does the kernel have cls_bpf?", index, err)
	}
	return nil
}

// filterAt identifies this driver's filter at a hook of a NIC.
func filterAt(index int, hook uint32) *netlink.BpfFilter {
	return &netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{
		LinkIndex: index, Parent: hook, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: filterPriority}}
}

// Attached reports whether the programs of this Classifier are attached to both
// hooks of a NIC. Another program may have removed them or the clsact qdisc.
func (c *Classifier) Attached(index int) (bool, error) {
	for hook, program := range map[uint32]*ebpf.Program{
		netlink.HANDLE_MIN_EGRESS: c.objects.DraSharedEgress, netlink.HANDLE_MIN_INGRESS: c.objects.DraSharedIngress,
	} {
		attached, err := attachedAt(index, hook, program)
		if err != nil || !attached {
			return false, err
		}
	}
	return true, nil
}

// AnyVersionAttached reports whether programs of this driver are attached to
// both hooks of a NIC, even if another process attached them: they use the same
// maps.
func AnyVersionAttached(index int) (bool, error) {
	for _, hook := range []uint32{netlink.HANDLE_MIN_EGRESS, netlink.HANDLE_MIN_INGRESS} {
		attached, err := attachedAt(index, hook, nil)
		if err != nil || !attached {
			return false, err
		}
	}
	return true, nil
}

// attachedAt reports whether this driver's filter at a hook of a NIC runs
// program, or any program if program is nil.
func attachedAt(index int, hook uint32, program *ebpf.Program) (bool, error) {
	filters, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}, hook)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) {
		return false, nil // the link or its clsact qdisc does not exist
	}
	if err != nil {
		return false, fmt.Errorf("list filters of link %d: %w", index, err)
	}
	var id ebpf.ProgramID
	if program != nil {
		info, err := program.Info()
		if err != nil {
			return false, err
		}
		id, _ = info.ID()
	}
	for _, f := range filters {
		b, ok := f.(*netlink.BpfFilter)
		if !ok || b.Priority != filterPriority {
			continue
		}
		if program == nil || b.Id == int(id) {
			return true, nil
		}
	}
	return false, nil
}

// Detach detaches this driver's programs from a NIC, even if an earlier process
// attached them, and reports whether it found any. It keeps the clsact qdisc,
// which other programs may use.
func Detach(index int, failpoints failpoint.Injector) (found bool, err error) {
	for _, hook := range []uint32{netlink.HANDLE_MIN_EGRESS, netlink.HANDLE_MIN_INGRESS} {
		attached, listErr := attachedAt(index, hook, nil)
		if listErr != nil || !attached {
			err = errors.Join(err, listErr)
			continue
		}
		found = true
		deleteErr := failpoints.Do("detach program", func() error { return netlink.FilterDel(filterAt(index, hook)) })
		if deleteErr != nil {
			err = errors.Join(err, fmt.Errorf("detach classifier from link %d: %w", index, deleteErr))
		}
	}
	return found, err
}

// RemoveNIC removes a NIC from the classifier's map. Attached programs then
// ignore the frames of the NIC; Detach detaches them.
func (c *Classifier) RemoveNIC(index int) error {
	return c.failpoints.Do("remove NIC from map", func() error {
		return ignoreMissing(c.objects.DraSharedNics.Delete(uint32(index)))
	})
}

// Member identifies a link whose frames the classifier assigns to the class of
// a share.
type Member struct {
	// Parent is the interface index of the NIC.
	Parent int
	// Cookie is the cookie of the pod's network namespace.
	Cookie uint64
	// MAC is the address of the link.
	MAC net.HardwareAddr
	// TrustMAC has the meaning of NIC.TrustMAC.
	TrustMAC bool
}

// AddMember assigns the frames that a link sends and receives to class, which
// is major<<16 | minor.
func (c *Classifier) AddMember(m Member, class uint32) error {
	for _, cookie := range c.senderCookies(m.Cookie, m.TrustMAC) {
		err := c.failpoints.Do("put sender in map", func() error {
			return c.objects.DraSharedTx.Put(sender(m, cookie), class)
		})
		if err != nil {
			return fmt.Errorf("add sender %s to the classifier's map: %w", m.MAC, err)
		}
	}
	err := c.failpoints.Do("put receiver in map", func() error {
		return c.objects.DraSharedRx.Put(receiver(m), class)
	})
	if err != nil {
		return fmt.Errorf("add receiver %s to the classifier's map: %w", m.MAC, err)
	}
	return nil
}

// RemoveMember removes the map entries of a link. It returns nil if the link
// has none.
func (c *Classifier) RemoveMember(m Member) error {
	var errs error
	for _, cookie := range c.senderCookies(m.Cookie, m.TrustMAC) {
		errs = errors.Join(errs, c.failpoints.Do("remove sender from map", func() error {
			return ignoreMissing(c.objects.DraSharedTx.Delete(sender(m, cookie)))
		}))
	}
	return errors.Join(errs, c.failpoints.Do("remove receiver from map", func() error {
		return ignoreMissing(c.objects.DraSharedRx.Delete(receiver(m)))
	}))
}

// Members returns all links that have an entry in the sender map or in the
// receiver map. After an interrupted AddMember or RemoveMember, a link may have
// an entry in one of them only; RemoveMember accepts it.
func (c *Classifier) Members() ([]Member, error) {
	type key struct {
		parent uint32
		mac    [6]uint8
	}
	seen := map[key]bool{}
	var members []Member
	var class uint32
	var tx bpfSender
	senders := c.objects.DraSharedTx.Iterate()
	for senders.Next(&tx, &class) {
		seen[key{tx.Parent, tx.Mac}] = true
		members = append(members, Member{Parent: int(tx.Parent), Cookie: tx.Cookie, MAC: slices.Clone(tx.Mac[:])})
	}
	var rx bpfReceiver
	receivers := c.objects.DraSharedRx.Iterate()
	for receivers.Next(&rx, &class) {
		if !seen[key{rx.Parent, rx.Mac}] {
			members = append(members, Member{Parent: int(rx.Parent), MAC: slices.Clone(rx.Mac[:])})
		}
	}
	return members, errors.Join(senders.Err(), receivers.Err())
}

// Lookup returns the classes that the kernel's maps have for the frames that a
// link sends and receives; 0 means none.
func (c *Classifier) Lookup(m Member) (send, receive uint32, err error) {
	err = errors.Join(
		ignoreMissing(c.objects.DraSharedTx.Lookup(sender(m, c.senderCookies(m.Cookie, false)[0]), &send)),
		ignoreMissing(c.objects.DraSharedRx.Lookup(receiver(m), &receive)),
	)
	return send, receive, err
}

// ignoreMissing returns nil if err means that a map has no such key.
func ignoreMissing(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}

// sender returns the key of a link in the sender map.
func sender(m Member, cookie uint64) bpfSender {
	key := bpfSender{Cookie: cookie, Parent: uint32(m.Parent)}
	copy(key.Mac[:], m.MAC)
	return key
}

// receiver returns the key of a link in the receiver map.
func receiver(m Member) bpfReceiver {
	key := bpfReceiver{Parent: uint32(m.Parent)}
	copy(key.Mac[:], m.MAC)
	return key
}
