// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package trial finds out which keys and attach points of the classifier work on this node. It tries them
// instead of comparing the version of the kernel, because distributions change kernels, and because
// capabilities, lockdown, and security modules can forbid features that the kernel has.
//
// Run creates a pair of links with the queues of a NIC, sends frames through it with each key, and checks which class
// they arrive in. Strongest chooses the key from the results.
package trial

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/internal/files"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// linkPrefix starts the names of the links of a trial.
const linkPrefix = "dra-trial"

const (
	nicName  = linkPrefix + "0" // has the queues and the programs
	peerName = linkPrefix + "1" // the other end of the pair
)

// The links have addresses from their creation on, so udev does not assign others to them.
var (
	nicMAC  = net.HardwareAddr{0x02, 0xd5, 0xa0, 0, 0, 0}
	peerMAC = net.HardwareAddr{0x02, 0xd5, 0xa0, 0, 0, 1}
	// otherMAC is the address that the programs take for the NIC's, so none of the trial's frames look like the host's.
	otherMAC = net.HardwareAddr{0x02, 0xd5, 0xa0, 0, 0, 2}
)

// IsLink reports whether a link of that name belongs to a trial.
func IsLink(name string) bool { return strings.HasPrefix(name, linkPrefix) }

// Result is the result of the trial of one key.
type Result struct {
	Key classify.Key
	// AttachPoint is the best attach point that got the frames into the expected classes.
	AttachPoint classify.AttachPoint
	// TCX is the reason why AttachPoint is not classify.AttachTCX, or nil.
	TCX error
	// Err is nil if the frames arrived in the expected classes.
	Err error
	// Routes is nil if the programs for the key also recognized a frame by its
	// route (classify.ForwardedByRoute).
	Routes error
	// ARP is nil if the programs for the key also know the sender of ARP.
	ARP error
	// Lists is nil if the programs for the key also read the lists of senders of links in mode source. Run does not
	// set it: it follows from the types of the kernel, when the programs are loaded.
	Lists error
}

// Strongest returns the result for the strongest key that passed. results are in the
// order of strength. If none passed, the error names the cause of each.
func Strongest(results []Result) (Result, error) {
	errs := make([]error, 0, len(results))
	for _, r := range results {
		if r.Err == nil {
			return r, nil
		}
		errs = append(errs, fmt.Errorf("key %s: %w", r.Key, r.Err))
	}
	return Result{}, fmt.Errorf("no way to identify the sender of a frame works on this node: %w", errors.Join(errs...))
}

// Run tries keys in the caller's network namespace, and returns their results in
// the same order. It creates and removes links, and first removes links that an
// interrupted trial left. The directory lock serializes trials of the node.
//
// The error is about the trial itself, such as a kernel without veth.
func Run(lock string, failpoints failpoint.Injector, keys ...classify.Key) (results []Result, err error) {
	return results, onLinks(lock, failpoints, shape.OneTree, func(t *trial) error {
		for _, key := range keys {
			results = append(results, t.tryAttachPoints(key))
		}
		return nil
	})
}

// onLinks calls f with a trial. The trial's links exist during the call.
func onLinks(lock string, failpoints failpoint.Injector, trees shape.Trees, f func(*trial) error) (err error) {
	unlock, err := acquire(lock)
	if err != nil {
		return err
	}
	defer unlock()
	conn, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer conn.Close()
	t := &trial{shaper: shape.New(conn, nil), trees: trees}
	if t.cookie, err = conn.Cookie(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, failpoints.Do("remove trial links", removeLinks)) }()
	if err := failpoints.Do("add trial links", t.addLinks); err != nil {
		return err
	}
	return f(t)
}

// tryAttachPoints tries a key at each attach point until it passes.
func (t *trial) tryAttachPoints(key classify.Key) Result {
	r := Result{Key: key}
	for _, r.AttachPoint = range classify.AttachPoints() {
		if r.Err = t.try(r.AttachPoint, key); r.Err == nil {
			break
		}
		if r.AttachPoint == classify.AttachTCX {
			r.TCX = r.Err
		}
	}
	r.Routes, r.ARP = t.tryMemory(r.AttachPoint, key)
	return r
}

// acquire locks a directory. It waits until another process has unlocked it.
func acquire(directory string) (unlock func(), err error) {
	f, err := os.Open(directory)
	if err != nil {
		return nil, fmt.Errorf("lock %s for trial: %w", directory, err)
	}
	if err := files.Flock(f, unix.LOCK_EX); err != nil {
		return nil, errors.Join(&os.PathError{Op: "lock for trial", Path: directory, Err: err}, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// trial is a pair of links, and an IFB device that shapes what arrives at the first.
type trial struct {
	shaper *shape.HTB
	cookie uint64 // of this network namespace
	nic    int    // interface indexes
	peer   int
	ifb    int
	trees  shape.Trees // of the first link and the IFB device
	// filtered reports whether the trial has waited for a frame in vain because the node drops datagrams.
	filtered bool
}

// rates are more than the frames of a trial need.
var rates = shape.NICRates{Line: 1e9, Reserve: 1e8, MinShare: 1e7, Forwarded: shape.Rates{Floor: 1e7, Ceil: 1e9}}

// class is the class of the share that a trial's frames belong to.
const class = shape.FirstMinor

func (t *trial) addLinks() error {
	if err := removeLinks(); err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = nicName, nicMAC
	attrs.NumTxQueues = max(int(t.trees), 1)
	pair := &netlink.Veth{LinkAttrs: attrs, PeerName: peerName, PeerHardwareAddr: peerMAC}
	if err := netlink.LinkAdd(pair); err != nil {
		return fmt.Errorf("create trial links %s and %s: %w: does the kernel have veth?", nicName, peerName, err)
	}
	for name, index := range map[string]*int{nicName: &t.nic, peerName: &t.peer} {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return fmt.Errorf("look up trial link %s: %w", name, err)
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return fmt.Errorf("bring up trial link %s: %w", name, err)
		}
		*index = link.Attrs().Index
	}
	var err error
	if t.ifb, err = t.shaper.Setup(nicName, t.nic, t.trees, rates, false); err != nil {
		return err
	}
	return t.shaper.SetClass(t.nic, t.ifb, t.trees, rates, class, shape.Rates{Floor: rates.MinShare, Ceil: rates.Line})
}

// removeLinks removes the links of a trial, if they exist. The queues and
// programs end with them.
func removeLinks() (failed error) {
	for _, name := range []string{nicName, shape.IFBName(nicName)} {
		link, err := netlink.LinkByName(name)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			continue
		}
		if err == nil {
			err = netlink.LinkDel(link)
		}
		if err != nil && !errors.Is(err, unix.ENODEV) {
			failed = errors.Join(failed, fmt.Errorf("remove trial link %s: %w", name, err))
		}
	}
	return failed
}

// try returns nil if the programs for a key load, assign a frame that a socket of
// this namespace sends to the class of a share, and pass on a frame that arrives.
func (t *trial) try(point classify.AttachPoint, key classify.Key) (err error) {
	c, err := classify.OpenUnpinned(point, key, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	err = c.Attach(classify.NIC{Index: t.nic, IFBIndex: t.ifb, MAC: otherMAC, Major: shape.Major})
	if err != nil {
		return err
	}
	share := classify.Member{Parent: t.nic, Cookie: t.cookie, MAC: nicMAC}
	if err := c.AddMember(share, netlink.MakeHandle(shape.Major, class)); err != nil {
		return err
	}
	if err := t.arrives(t.nic, t.sentBy(class)); err != nil {
		return fmt.Errorf("a frame sent by a socket was not assigned to its share's class: %w", err)
	}
	if err := t.arrives(t.peer, t.received); err != nil {
		return fmt.Errorf("a received frame did not pass through the IFB device: %w", err)
	}
	return nil
}

// tryMemory tries each kind of kernel memory that the programs for a key read: the routes of
// frames, and the senders of ARP.
func (t *trial) tryMemory(point classify.AttachPoint, key classify.Key) (routes, arp error) {
	if !key.HasCookie() {
		return errors.New("without the namespace cookie, any frame with the NIC's address counts as the node's"),
			errors.New("without the namespace cookie, the sender of ARP cannot be compared with the link's owner")
	}
	c, err := classify.OpenUnpinned(point, key, true)
	if err != nil {
		return err, err
	}
	routes, arp = t.tryRoutes(c), t.tryARP(c)
	return errors.Join(routes, c.Close()), arp
}

// tryRoutes returns nil if the programs assign a frame to the class of forwarded frames because it
// has a route out of the NIC. No share sent the frame, and it has the address of the NIC.
func (t *trial) tryRoutes(c *classify.Classifier) error {
	err := c.Attach(classify.NIC{
		Index: t.nic, IFBIndex: t.ifb, MAC: nicMAC, Major: shape.Major, Forwarded: classify.ForwardedByRoute,
	})
	if err != nil {
		return err
	}
	route := func() error { return sendDatagrams(t.nic) } // the frames of packet sockets do not have a route
	if err := t.increases(route, t.sentBy(shape.ForwardedMinor)); err != nil {
		return fmt.Errorf("a routed frame was not assigned to the class for forwarded frames: %w", err)
	}
	return nil
}

// tryARP returns nil if the program that traces ARP records this namespace when the kernel sends ARP.
func (t *trial) tryARP(c *classify.Classifier) error {
	if err := c.TraceARP(); err != nil {
		return err
	}
	// The kernel asks a neighbor in this state whether it still has the address. Neither needs to exist.
	ask := func() error {
		return netlink.NeighSet(&netlink.Neigh{
			LinkIndex: t.nic, State: netlink.NUD_PROBE, IP: net.IPv4(192, 0, 2, 1), HardwareAddr: peerMAC,
		})
	}
	recorded := func() (own uint64, err error) {
		cookies, err := c.SendersOfARP()
		for _, cookie := range cookies {
			if cookie == t.cookie {
				own++
			}
		}
		return own, err
	}
	if err := t.increases(ask, recorded); err != nil {
		return fmt.Errorf("the sender of ARP was not recorded: %w", err)
	}
	return nil
}

// sentBy returns a function that returns how many bytes a class has sent.
func (t *trial) sentBy(minor uint16) func() (uint64, error) {
	return func() (uint64, error) {
		class := t.trees.Class(minor)
		state, err := t.shaper.ReadClass(t.nic, class)
		if err != nil || state == nil {
			return 0, errors.Join(err, fmt.Errorf("class %s is missing", netlink.HandleStr(class)))
		}
		return state.SentBytes, nil
	}
}

// received returns how many bytes the IFB device has passed back to the NIC.
func (t *trial) received() (uint64, error) {
	link, err := netlink.LinkByIndex(t.ifb)
	if err != nil {
		return 0, err
	}
	return link.Attrs().Statistics.TxBytes, nil
}

// A frame of a trial takes microseconds. patience is for a node without idle CPU time, and for a node with only IPv6,
// where addresses are unusable for the first 2 s.
const (
	patience = 3 * time.Second
	interval = 20 * time.Millisecond
)

// arrives sends frames through a link until count increases.
func (t *trial) arrives(link int, count func() (uint64, error)) error {
	return t.increases(func() error { return send(link) }, count)
}

// increases repeats an action until count increases. If the node drops datagrams, only the first call
// of a trial waits: the addresses of IPv6 are usable afterwards.
func (t *trial) increases(action func() error, count func() (uint64, error)) error {
	before, err := count()
	if err != nil {
		return err
	}
	start, again := time.Now(), time.NewTicker(interval)
	defer again.Stop()
	for {
		actionErr := action()
		after, err := count()
		switch {
		case err != nil:
			return err
		case after > before:
			return nil
		}
		filtered, waited := errors.Is(actionErr, errFiltered), time.Since(start)
		if waited >= patience || filtered && t.filtered {
			t.filtered = filtered
			return errors.Join(fmt.Errorf("no frame in %s", waited.Round(time.Millisecond)), actionErr)
		}
		<-again.C
	}
}
