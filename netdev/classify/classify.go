// Package classify tells which share a frame belongs to, in the kernel.
//
// Two eBPF programs sit at a NIC's clsact hooks. They look a frame up in maps
// and write the class it queues in to skb->priority; package shape makes the
// queues. One pair of programs serves every NIC and every share: adding a
// share is a map update, which costs microseconds and is done before the
// share's link is up, so there is no moment without a class.
//
// A sender is known by the cookie of its socket's network namespace together
// with its address. A pod may change its address, stack links or write raw
// frames; the cookie stays. Frames without a socket (forwarded, bridged, a
// virtual machine's) belong to nobody in particular, unless the administrator
// trusts addresses. A receiver is known by its address.
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

// Key is what a sending share is told apart by.
type Key string

// Keys, strongest first.
const (
	// KeyCookie is the network namespace of the sending socket, and the source address.
	KeyCookie Key = "NetnsCookie"
	// KeyMAC is the source address alone: a pod with CAP_NET_RAW can send as another.
	KeyMAC Key = "MAC"
)

// pinVersion is part of the maps' path and changes with their layout, so that
// two versions of the plugin that run at once never share what they read differently.
const pinVersion = "v1"

// Priority of the filters at the clsact hooks: any number that others are unlikely to use.
const filterPriority = 0xd5a

// Classifier is the loaded programs and their maps. The maps are pinned:
// the NICs' programs and a restarted or second plugin work on the same ones.
type Classifier struct {
	objects    bpfObjects
	key        Key
	failpoints failpoint.Injector
}

// NIC is what the programs know of a parent.
type NIC struct {
	Index    int
	IFBIndex int
	MAC      net.HardwareAddr
	// HostCookie is the cookie of the network namespace the NIC is in.
	HostCookie uint64
	// Major is the major number of the NIC's classes.
	Major uint16
	// TrustMAC lets frames without a socket select a share by address.
	TrustMAC bool
}

// Open loads the programs, with the strongest of the keys that the kernel
// knows, and opens or creates the maps below the BPF file system at bpffs.
// keys is a preference; empty means all.
func Open(bpffs string, failpoints failpoint.Injector, keys ...Key) (*Classifier, error) {
	if len(keys) == 0 {
		keys = []Key{KeyCookie, KeyMAC}
	}
	pins := pinDir(bpffs)
	if err := os.MkdirAll(pins, 0o700); err != nil {
		return nil, fmt.Errorf("pin BPF maps: %w: is a BPF file system mounted on %s?", err, bpffs)
	}
	var failed error
	for _, key := range keys {
		c := &Classifier{key: key, failpoints: failpoints}
		err := c.load(pins)
		if err == nil {
			return c, nil
		}
		failed = errors.Join(failed, fmt.Errorf("load classifier with key %s: %w", key, err))
	}
	return nil, failed
}

func pinDir(bpffs string) string { return filepath.Join(bpffs, "dra-shared", pinVersion) }

// Unpin removes the maps of all releases from the BPF file system. They end
// with the last program that uses them.
func RemovePins(bpffs string, failpoints failpoint.Injector) error {
	return failpoints.Do("unpin maps", func() error { return os.RemoveAll(filepath.Dir(pinDir(bpffs))) })
}

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

// Close releases the programs and maps; what is attached stays.
func (c *Classifier) Close() error { return c.objects.Close() }

// Key returns the key in force.
func (c *Classifier) Key() Key { return c.key }

// cookieOf is the cookie as the maps hold it.
func (c *Classifier) cookieOf(cookie uint64, trustMAC bool) []uint64 {
	switch {
	case c.key == KeyMAC:
		return []uint64{0}
	case trustMAC:
		return []uint64{cookie, 0}
	default:
		return []uint64{cookie}
	}
}

// Attach puts the programs on a NIC, or replaces those of an earlier plugin
// without a gap.
func (c *Classifier) Attach(nic NIC) error {
	value := bpfNic{HostCookie: nic.HostCookie, Ifb: uint32(nic.IFBIndex), Major: uint32(nic.Major) << 16}
	copy(value.Mac[:], nic.MAC)
	if nic.TrustMAC {
		value.TrustMac = 1
	}
	if err := c.failpoints.Do("put NIC in map", func() error { return c.objects.DraSharedNics.Put(uint32(nic.Index), value) }); err != nil {
		return fmt.Errorf("tell the classifier of link %d: %w", nic.Index, err)
	}
	clsact := &netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: nic.Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
	if err := c.failpoints.Do("add clsact", func() error { return netlink.QdiscAdd(clsact) }); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact to link %d: %w: does the kernel have sch_ingress?", nic.Index, err)
	}
	return errors.Join(
		c.attach(nic.Index, netlink.HANDLE_MIN_EGRESS, c.objects.DraSharedEgress),
		c.attach(nic.Index, netlink.HANDLE_MIN_INGRESS, c.objects.DraSharedIngress),
	)
}

func (c *Classifier) attach(index int, hook uint32, program *ebpf.Program) error {
	filter := filterAt(index, hook)
	filter.Fd, filter.Name, filter.DirectAction = program.FD(), "dra_shared", true
	if err := c.failpoints.Do("attach program", func() error { return netlink.FilterReplace(filter) }); err != nil {
		return fmt.Errorf("attach classifier to link %d: %w: does the kernel have cls_bpf?", index, err)
	}
	return nil
}

func filterAt(index int, hook uint32) *netlink.BpfFilter {
	return &netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{
		LinkIndex: index, Parent: hook, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: filterPriority}}
}

// Attached tells whether both programs are on a NIC: somebody may have taken
// them off, or the clsact qdisc from under them.
func (c *Classifier) Attached(index int) (bool, error) {
	for hook, program := range map[uint32]*ebpf.Program{
		netlink.HANDLE_MIN_EGRESS: c.objects.DraSharedEgress, netlink.HANDLE_MIN_INGRESS: c.objects.DraSharedIngress,
	} {
		there, err := attachedAt(index, hook, program)
		if err != nil || !there {
			return false, err
		}
	}
	return true, nil
}

// AttachedAny tells whether programs of ours are on a NIC, also another
// plugin's: they work on the same maps.
func AnyVersionAttached(index int) (bool, error) {
	for _, hook := range []uint32{netlink.HANDLE_MIN_EGRESS, netlink.HANDLE_MIN_INGRESS} {
		if there, err := attachedAt(index, hook, nil); err != nil || !there {
			return false, err
		}
	}
	return true, nil
}

// attachedAt looks for our filter at a hook: this very program, or without one
// that of any of our releases.
func attachedAt(index int, hook uint32, program *ebpf.Program) (bool, error) {
	filters, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}, hook)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) {
		return false, nil // no clsact, no link
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
		if b, ok := f.(*netlink.BpfFilter); ok && b.Priority == filterPriority && (program == nil || b.Id == int(id)) {
			return true, nil
		}
	}
	return false, nil
}

// Detach takes the programs off a NIC, also those of an earlier process. The
// clsact qdisc stays: others may use it. It reports whether there were any.
func Detach(index int, failpoints failpoint.Injector) (found bool, err error) {
	for _, hook := range []uint32{netlink.HANDLE_MIN_EGRESS, netlink.HANDLE_MIN_INGRESS} {
		there, listErr := attachedAt(index, hook, nil)
		if listErr != nil || !there {
			err = errors.Join(err, listErr)
			continue
		}
		found = true
		if delErr := failpoints.Do("detach program", func() error { return netlink.FilterDel(filterAt(index, hook)) }); delErr != nil {
			err = errors.Join(err, fmt.Errorf("take the classifier off link %d: %w", index, delErr))
		}
	}
	return found, err
}

// Forget forgets a NIC that is gone, and the programs with it.
func (c *Classifier) RemoveNIC(index int) error {
	return c.failpoints.Do("remove NIC from map", func() error { return ignoreMissing(c.objects.DraSharedNics.Delete(uint32(index))) })
}

// Member is one link of a share.
type Member struct {
	// Parent is the NIC's index.
	Parent int
	// Cookie is that of the pod's network namespace.
	Cookie uint64
	MAC    net.HardwareAddr
	// TrustMAC as in NIC.
	TrustMAC bool
}

// Add makes a link's frames queue in class (major<<16 | minor), both ways.
func (c *Classifier) AddMember(m Member, class uint32) error {
	for _, cookie := range c.cookieOf(m.Cookie, m.TrustMAC) {
		if err := c.failpoints.Do("put sender in map", func() error { return c.objects.DraSharedTx.Put(sender(m, cookie), class) }); err != nil {
			return fmt.Errorf("classify what %s sends: %w", m.MAC, err)
		}
	}
	if err := c.failpoints.Do("put receiver in map", func() error { return c.objects.DraSharedRx.Put(receiver(m), class) }); err != nil {
		return fmt.Errorf("classify what %s receives: %w", m.MAC, err)
	}
	return nil
}

// Remove forgets a link. It is no error if it is not known.
func (c *Classifier) RemoveMember(m Member) error {
	var failed error
	for _, cookie := range c.cookieOf(m.Cookie, m.TrustMAC) {
		failed = errors.Join(failed, c.failpoints.Do("remove sender from map", func() error {
			return ignoreMissing(c.objects.DraSharedTx.Delete(sender(m, cookie)))
		}))
	}
	return errors.Join(failed, c.failpoints.Do("remove receiver from map", func() error {
		return ignoreMissing(c.objects.DraSharedRx.Delete(receiver(m)))
	}))
}

// Members returns all links that are known. A link of which one half is known
// is returned too; Remove forgets what there is.
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

// Lookup returns the classes that a link's frames queue in, as the kernel has
// them; 0 means none.
func (c *Classifier) Lookup(m Member) (send, receive uint32, err error) {
	err = errors.Join(
		ignoreMissing(c.objects.DraSharedTx.Lookup(sender(m, c.cookieOf(m.Cookie, false)[0]), &send)),
		ignoreMissing(c.objects.DraSharedRx.Lookup(receiver(m), &receive)),
	)
	return send, receive, err
}

func ignoreMissing(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}

func sender(m Member, cookie uint64) bpfSender {
	key := bpfSender{Cookie: cookie, Parent: uint32(m.Parent)}
	copy(key.Mac[:], m.MAC)
	return key
}

func receiver(m Member) bpfReceiver {
	key := bpfReceiver{Parent: uint32(m.Parent)}
	copy(key.Mac[:], m.MAC)
	return key
}
