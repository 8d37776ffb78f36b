// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/classify/trial"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// Node manages the NICs of the network namespace that it was created in, and the links of shares on them. It is safe
// for concurrent use.
type Node struct {
	conn       *rtnl.Conn
	deletions  *rtnl.Pool // for deleting links: the kernel then waits for its readers
	shaper     *shape.HTB
	cookie     uint64 // of the node's network namespace
	nsid       int    // of the node's network namespace, in itself
	portID     uint32 // of conn; the kernel's events for requests of this Node have it
	bpffs      string
	keys       []classify.Key
	failpoints failpoint.Injector
	loaded     func()
	now        func() time.Time
	history    *linkHistory

	// blocking is held while the links of a pod are read and one of them is blocked or unblocked. Otherwise, an older
	// reading could replace the result of a newer one. It is locked before mu.
	blocking sync.Mutex

	mu         sync.Mutex
	classifier *classify.Classifier // nil until Manage gets the first NIC to enforce
	trials     []trial.Result       // of the keys that the Node may use
	trialErr   error                // why none has passed since RetryTrials; nil before the next trial
	steering   *steering            // nil before the first NIC with QueuePerShare
	seesRoutes bool                 // whether the classifier recognizes frames by their route
	managed    map[int]managedNIC   // by interface index
	arrivals   map[int]*arrival     // of NICs with enforcement, by interface index
	guards     map[int]*nicGuard    // by interface index
	gateways   map[int][]netip.Addr // set by SetGateways, by interface index
	// keepingRoutes are the NICs that keepRoutes has succeeded for, by interface index.
	keepingRoutes map[int]bool
	cookies       map[int]uint64 // of namespaces, by ID; see rememberNamespace
}

// managedNIC is a NIC that Manage was called for.
type managedNIC struct {
	NICConfig
	ifb           int           // index of the IFB device; 0 without Enforce
	trees         shape.Trees   // of the NIC and the IFB device
	multiQueueErr error         // reason why QueuePerShare is not applied; nil if it is applied or not requested
	hairpin       shape.Hairpin // zero before the first link that needs it
}

// NICConfig is the desired state of a NIC.
type NICConfig struct {
	Name  string
	Index int
	MAC   []byte
	// Enforce limits shares to their bandwidth.
	Enforce bool
	// Rates are the NIC's rates. Manage ignores them without Enforce, and computes
	// Rates.Forwarded.
	Rates shape.NICRates
	// TakeOver permits Manage to replace a root qdisc that another program or
	// an administrator configured.
	TakeOver bool
	// TrustMAC assigns a frame without a socket to the share with the frame's source address on a link.
	TrustMAC bool
	// QueuePerShare gives each transmit queue a separate HTB qdisc, and each share a home queue, if
	// the NIC has several queues and the kernel steers frames to them. Shares then do not borrow. A
	// change takes effect on a NIC with shares only after its last share is released.
	QueuePerShare bool
	// Policy is the NIC's treatment of frames that do not carry the identity of their
	// sender. Manage adds to Policy.NodeAddresses, and sets Policy.Guarded and
	// Policy.GuardTime.
	Policy classify.Policy
	// Forwarded is the rate that is guaranteed to frames that the node forwards, in bits per second; 0 if they do not have
	// a separate class. They can use the whole line without TrustMAC if the kernel lets the classifier recognize them by
	// their route. Otherwise, the classifier recognizes them by their source address, which a share can forge, and they
	// get no more than Forwarded.
	Forwarded uint64
}

// forwardedBy returns how the classifier recognizes frames that a NIC forwards.
// The caller holds n.mu and has opened the classifier.
func (n *Node) forwardedBy(c NICConfig) classify.Forwarded {
	switch {
	case c.Forwarded == 0:
		return classify.ForwardedUnidentified
	case c.TrustMAC || !n.seesRoutes:
		return classify.ForwardedByAddress
	default:
		return classify.ForwardedByRoute
	}
}

// rates returns the rates of a NIC's queues. The caller holds n.mu and has opened
// the classifier.
func (n *Node) rates(c NICConfig) shape.NICRates {
	rates := c.Rates
	switch n.forwardedBy(c) {
	case classify.ForwardedByRoute:
		rates.Forwarded = shape.Rates{Floor: c.Forwarded, Ceil: rates.Line}
	case classify.ForwardedByAddress:
		rates.Forwarded = shape.Rates{Floor: c.Forwarded, Ceil: c.Forwarded}
	}
	return rates
}

// ForwardedBy returns how the classifier recognizes frames that the node forwards
// through a NIC.
func (n *Node) ForwardedBy(index int) classify.Forwarded {
	n.mu.Lock()
	defer n.mu.Unlock()
	m, ok := n.managed[index]
	if !ok || !m.Enforce {
		return classify.ForwardedUnidentified
	}
	return n.forwardedBy(m.NICConfig)
}

// Options configure a Node.
type Options struct {
	// BPFFS is the mount point of the BPF file system; default /sys/fs/bpf.
	BPFFS string
	// Keys are the classifier keys that the Node may use, for tests; default all of them,
	// strongest first. The Node uses the first that works on the node.
	Keys []classify.Key
	// Trials are the results of trying the keys on this node, for tests that have them.
	// Otherwise the Node tries the keys when it manages the first NIC with Enforce.
	Trials []trial.Result
	// Failpoints intercepts operations that change the kernel's state; default none.
	Failpoints failpoint.Injector
	// Loaded is called after the classifier's programs have been loaded, if it is
	// not nil. The Node no longer needs CAP_PERFMON.
	Loaded func()
	// Now returns the time; default time.Now.
	Now func() time.Time
}

// parallelDeletions is how many links the kernel deletes at a time. Each deletion takes about 20 ms, and the kernel
// does not hold a lock for most of that time.
const parallelDeletions = 16

// withDefaults returns the options with the defaults of those that are not set.
func (o Options) withDefaults() Options {
	if len(o.Keys) == 0 {
		o.Keys = classify.Keys()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.BPFFS == "" {
		o.BPFFS = "/sys/fs/bpf"
	}
	return o
}

// identifyNamespace returns the cookie of the network namespace of a connection, the namespace's ID in itself, and the
// port ID of the connection.
func identifyNamespace(conn *rtnl.Conn) (cookie uint64, nsid int, portID uint32, err error) {
	if cookie, err = conn.Cookie(); err != nil {
		return 0, 0, 0, err
	}
	if nsid, err = conn.OwnNamespaceID(); err != nil {
		return 0, 0, 0, err
	}
	portID, err = conn.PortID()
	return cookie, nsid, portID, err
}

// NewNode returns a Node for the caller's network namespace.
func NewNode(o Options) (*Node, error) {
	o = o.withDefaults()
	conn, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	cookie, nsid, portID, err := identifyNamespace(conn)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	deletions, err := rtnl.OpenPool(parallelDeletions)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &Node{
		conn:       conn,
		deletions:  deletions,
		shaper:     shape.New(conn, o.Failpoints),
		cookie:     cookie,
		nsid:       nsid,
		portID:     portID,
		bpffs:      o.BPFFS,
		keys:       o.Keys,
		trials:     o.Trials,
		failpoints: o.Failpoints,
		loaded:     o.Loaded,
		managed:    map[int]managedNIC{},
		arrivals:   map[int]*arrival{},
		now:        o.Now,
		guards:     map[int]*nicGuard{},
		gateways:   map[int][]netip.Addr{},

		keepingRoutes: map[int]bool{},
		history:       newLinkHistory(),
		cookies:       map[int]uint64{},
	}, nil
}

// Close closes the sockets and BPF objects of the Node. Links, queues, and
// classes stay in the kernel.
func (n *Node) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	err := errors.Join(n.conn.Close(), n.deletions.Close())
	if n.classifier != nil {
		err = errors.Join(err, n.classifier.Close())
	}
	return err
}

// Messages returns how many netlink messages the Node has sent and received since it was created, through its sockets
// in the node's namespace: each request of a batch, each message of a dump, and each acknowledgement. The few requests
// that do not concern a share, such as those for the filters of a NIC, use other sockets. Only tests call it.
func (n *Node) Messages() rtnl.Counts { return n.conn.Counts().Add(n.deletions.Counts()) }

// Cookie returns the cookie of the node's network namespace.
func (n *Node) Cookie() uint64 { return n.cookie }

// ClassifierKey returns the key that the classifier identifies senders by, or "" if no NIC has been managed with
// Enforce yet.
func (n *Node) ClassifierKey() classify.Key {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.classifier == nil {
		return ""
	}
	return n.classifier.Key()
}

// Queue returns the kind of queue that shares' frames wait in.
func (n *Node) Queue() shape.Queue { return n.shaper.Queue() }

// Trials returns the results of trying the classifier's keys, strongest first. It
// is empty if no NIC has been managed with Enforce yet.
func (n *Node) Trials() []trial.Result {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.trials)
}

// Manage brings a NIC into the state that c describes. With Enforce, it sets up
// queues and the classifier. Without Enforce, it removes them, even if an
// earlier process set them up.
//
// Manage is idempotent; call it repeatedly to repair what other programs have
// changed. It repeats trials that have failed only after RetryTrials. It reports
// whether it changed anything. If it did, classes and classifier entries of shares
// on the NIC may be missing: call Restore for each attachment.
func (n *Node) Manage(c NICConfig) (changed bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !c.Enforce {
		return n.manageWithoutEnforcement(c)
	}
	if err := n.openClassifier(); err != nil {
		return false, err
	}
	old, known := n.managed[c.Index]
	desired, err := n.desired(c, old, known)
	if err != nil {
		return false, err
	}
	if known && reflect.DeepEqual(old.NICConfig, desired.NICConfig) && old.trees == desired.trees {
		intact, err := n.isIntact(old)
		if err != nil {
			return false, err
		}
		if intact {
			old.multiQueueErr = desired.multiQueueErr
			n.managed[c.Index] = old
			return false, errors.Join(n.keepRoutes(old), n.watchArrival(c.Index))
		}
	}
	if known && old.Name != c.Name { // the interface was renamed
		if err := errors.Join(n.removeHairpin(old.Name), n.shaper.RemoveIFB(old.Name)); err != nil {
			return false, err
		}
	}
	return n.setUpEnforcement(desired)
}

// manageWithoutEnforcement removes enforcement from a NIC, and reports whether it found any. The caller holds n.mu.
func (n *Node) manageWithoutEnforcement(c NICConfig) (changed bool, err error) {
	delete(n.arrivals, c.Index)
	changed, err = n.removeEnforcement(c.Name, c.Index)
	n.managed[c.Index] = managedNIC{NICConfig: c}
	return changed, err
}

// desired returns the state that setUpEnforcement has to bring a NIC into, except its devices. old is the managed NIC,
// if it is known. If it is not, desired resumes the guard of an earlier process. The caller holds n.mu and has opened
// the classifier.
func (n *Node) desired(c NICConfig, old managedNIC, known bool) (desired managedNIC, err error) {
	c.Rates = n.rates(c)
	if c.Policy.NodeAddresses, err = nodeAddresses(c); err != nil {
		return desired, err
	}
	if !known {
		if err := n.resumeGuard(c.Index); err != nil {
			return desired, err
		}
	}
	c.Policy = n.guardOf(c.Index).policy(c.Policy, n.now())
	trees, multiQueueErr, err := n.trees(c, old.trees, known)
	return managedNIC{NICConfig: c, trees: trees, multiQueueErr: multiQueueErr}, err
}

// openClassifier loads the classifier, unless it is loaded: it tries the keys on this node, uses the
// strongest that works, and attaches the program that traces ARP. In any case, it restores the pin of that
// program. The caller holds n.mu.
func (n *Node) openClassifier() error {
	if n.classifier != nil {
		return n.classifier.KeepARPTraced()
	}
	selected, err := n.tryKeys()
	if err != nil {
		return err
	}
	if n.classifier, err = classify.Open(n.bpffs, n.failpoints, selected.AttachPoint, selected.Key); err != nil {
		return err
	}
	n.seesRoutes = n.classifier.ReadsRoutes() && selected.Routes == nil
	for i := range n.trials {
		if n.trials[i].Key == selected.Key {
			n.trials[i].Lists = n.classifier.ListsErr()
		}
	}
	n.traceARP()
	if n.loaded != nil {
		n.loaded()
	}
	return nil
}

// isIntact reports whether the NIC's queues and classifier programs are as setUpEnforcement left them. The caller holds
// n.mu.
func (n *Node) isIntact(m managedNIC) (bool, error) {
	intact, err := n.shaper.Intact(m.Name, m.Index, m.ifb, m.trees, m.Rates)
	if err != nil || !intact {
		return false, err
	}
	attached, err := n.classifier.Attached(m.Index)
	if err != nil || !attached {
		return false, err
	}
	if steered, err := isSteered(m); err != nil || !steered {
		return false, err
	}
	return n.isHairpinIntact(m)
}

// setUpEnforcement sets up the NIC's queues and attaches the classifier. It
// reports whether it may have changed the NIC. The caller holds n.mu.
func (n *Node) setUpEnforcement(m managedNIC) (changed bool, err error) {
	m.ifb, err = n.shaper.Setup(m.Name, m.Index, m.trees, m.Rates, m.TakeOver)
	if err != nil {
		return false, err
	}
	n.managed[m.Index] = m
	if err := n.keepRoutes(m); err != nil {
		return true, err
	}
	if err := n.classifier.Attach(n.classified(m)); err != nil {
		return true, err
	}
	return true, n.keepHairpin(m.Index)
}

// classified returns a NIC as the classifier needs it. The caller holds n.mu.
func (n *Node) classified(m managedNIC) classify.NIC {
	return classify.NIC{
		Index: m.Index, IFBIndex: m.ifb, MAC: m.MAC, HostCookie: n.cookie,
		Major: m.trees.Major(), Steer: m.trees != shape.OneTree,
		TrustMAC: m.TrustMAC, Forwarded: n.forwardedBy(m.NICConfig), Policy: m.Policy,
	}
}

// Unmanage removes the queues and the classifier from a NIC, even if an earlier
// process set them up, and stops managing the NIC. The kernel then uses its
// default qdisc again. The caller must have detached the links of the NIC.
// Unmanage reports whether it found anything to remove.
func (n *Node) Unmanage(name string, index int) (found bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.managed, index)
	delete(n.arrivals, index)
	delete(n.guards, index)
	delete(n.gateways, index)
	delete(n.keepingRoutes, index)
	return n.removeEnforcement(name, index)
}

// removeEnforcement undoes setUpEnforcement and reports whether it found
// anything to remove. The caller holds n.mu.
func (n *Node) removeEnforcement(name string, index int) (found bool, err error) {
	if n.classifier != nil {
		err = n.classifier.RemoveNIC(index)
	}
	link, lookupErr := netlink.LinkByIndex(index)
	switch {
	case errors.As(lookupErr, &netlink.LinkNotFoundError{}):
		_, detachErr := classify.Detach(n.bpffs, index, n.failpoints) // removes the pins
		return true, errors.Join(err, detachErr, n.removeIFBOfMissingNIC(name, index))
	case lookupErr != nil:
		return true, errors.Join(err, fmt.Errorf("look up link %d (%s): %w", index, name, lookupErr))
	}
	found, removeErr := n.removeFromLink(link.Attrs().Name, name, index)
	return found, errors.Join(err, removeErr)
}

// removeIFBOfMissingNIC removes the IFB device of a NIC that no longer exists; the kernel has removed the queues with
// the NIC. The device stays if another managed NIC has the same name now, because it uses the device.
func (n *Node) removeIFBOfMissingNIC(name string, index int) error {
	for _, other := range n.managed {
		if other.Name == name && other.Index != index {
			return nil
		}
	}
	return errors.Join(n.removeHairpin(name), n.shaper.RemoveIFB(name))
}

// removeFromLink removes the classifier programs and the queues from an existing NIC. name is the name that the NIC had
// when it was managed; currentName differs from it if the interface was renamed.
func (n *Node) removeFromLink(currentName, name string, index int) (found bool, err error) {
	classified, detachErr := classify.Detach(n.bpffs, index, n.failpoints)
	owned, ownedErr := n.shaper.Owned(index)
	err = errors.Join(detachErr, ownedErr)
	if !owned {
		return classified, err
	}
	if currentName != name {
		err = errors.Join(err, n.removeHairpin(currentName), n.shaper.RemoveIFB(currentName))
	}
	return true, errors.Join(err, n.removeHairpin(name), n.shaper.Teardown(name, index))
}

// RemovePins removes the classifier's maps and links from the BPF file system. Call it
// after Unmanage was called for every NIC.
func (n *Node) RemovePins() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return classify.RemovePins(n.bpffs, n.failpoints)
}

// errNotManaged means that Manage was not called for the NIC, or that Unmanage
// was called since.
var errNotManaged = errors.New("NIC is not managed")

// managedNIC returns the NIC with that index, or errNotManaged.
func (n *Node) managedNIC(index int) (managedNIC, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	m, ok := n.managed[index]
	if !ok {
		return m, fmt.Errorf("%w: link %d", errNotManaged, index)
	}
	return m, nil
}

// devices returns the interface indexes of the devices that have queues for the NIC.
func (m managedNIC) devices() []int {
	if m.hairpin.Outer == 0 {
		return []int{m.Index, m.ifb}
	}
	return []int{m.Index, m.ifb, m.hairpin.Outer}
}

// enforcedNIC returns the NIC with that index. ok is false if the NIC is not
// managed, or managed without enforcement.
func (n *Node) enforcedNIC(index int) (m managedNIC, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	m, ok = n.managed[index]
	return m, ok && m.Enforce
}

// RemoveClass removes the class of a share from a NIC. The caller must have
// detached the links of the share. RemoveClass returns nil if the NIC or the
// class does not exist.
func (n *Node) RemoveClass(parent int, minor uint16) error {
	nic, enforced := n.enforcedNIC(parent)
	if !enforced {
		return nil
	}
	class := nic.trees.Class(minor)
	err := errors.Join(
		n.shaper.RemoveClass(class, nic.Index, nic.ifb),
		n.classifier.RemoveRefusals(parent, class),
	)
	if nic.hairpin.Outer != 0 {
		err = errors.Join(err, n.shaper.RemoveClass(onHairpin(class), nic.hairpin.Outer))
	}
	return err
}
