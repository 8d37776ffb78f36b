package netdev

import (
	"errors"
	"fmt"
	"reflect"
	"sync"

	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// Node is the node's side of the network: the NICs that are handed to us and
// what is needed to work on them. It is safe for concurrent use.
type Node struct {
	conn       *rtnl.Conn
	shaper     *shape.HTB
	cookie     uint64 // of the node's network namespace
	port       uint32 // of conn: events of our own doing bear it
	bpffs      string
	keys       []classify.Key
	failpoints failpoint.Injector

	mu         sync.Mutex
	classifier *classify.Classifier // opened with the first NIC that is enforced
	managed    map[int]managedNIC   // by the NIC's index
}

type managedNIC struct {
	NICConfig
	ifb int
}

// NICConfig is a NIC that is handed to us.
type NICConfig struct {
	Name  string
	Index int
	MAC   []byte
	// Enforce holds shares to their bandwidth.
	Enforce bool
	// Rates of the NIC. Unused without Enforce.
	Rates shape.NICRates
	// TakeOver replaces a root qdisc that somebody configured.
	TakeOver bool
	// TrustMAC lets frames without a socket count as the share's whose
	// source address they bear.
	TrustMAC bool
}

// Options of a Node.
type Options struct {
	// BPFFS is where the BPF file system is mounted; default /sys/fs/bpf.
	BPFFS string
	// Keys restricts what senders are told apart by; default all, strongest first.
	Keys []classify.Key
	// Failpoints that changes go through; default none.
	Failpoints failpoint.Injector
}

// NewNode returns the network of the caller's network namespace.
func NewNode(o Options) (*Node, error) {
	conn, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	cookie, err := conn.Cookie()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	port, err := conn.PortID()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if o.BPFFS == "" {
		o.BPFFS = "/sys/fs/bpf"
	}
	return &Node{conn: conn, shaper: shape.New(conn, o.Failpoints), cookie: cookie, port: port, bpffs: o.BPFFS, keys: o.Keys, failpoints: o.Failpoints, managed: map[int]managedNIC{}}, nil
}

// Close releases what the Node holds open. Links, queues and classes stay.
func (n *Node) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	err := n.conn.Close()
	if n.classifier != nil {
		err = errors.Join(err, n.classifier.Close())
	}
	return err
}

// Cookie is the cookie of the node's own network namespace.
func (n *Node) Cookie() uint64 { return n.cookie }

// ClassifierKey tells what senders are told apart by; "" as long as nothing is enforced.
func (n *Node) ClassifierKey() classify.Key {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.classifier == nil {
		return ""
	}
	return n.classifier.Key()
}

// Manage makes a NIC what p says, whatever it is now: handed to us, or handed
// to us without enforcement. It is called again and again; it changes what is
// not as it should be, and reports whether there was such a thing. Then what
// shares had on the NIC may be gone: see Restore.
func (n *Node) Manage(p NICConfig) (changed bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	old, known := n.managed[p.Index]
	if !p.Enforce {
		changed, err = n.unmanage(p.Name, p.Index)
		n.managed[p.Index] = managedNIC{NICConfig: p}
		return changed, err
	}
	if n.classifier == nil {
		if n.classifier, err = classify.Open(n.bpffs, n.failpoints, n.keys...); err != nil {
			return false, err
		}
	}
	if known && reflect.DeepEqual(old.NICConfig, p) {
		intact, err := n.intact(old)
		if err != nil || intact {
			return false, err
		}
	}
	if known && old.Name != p.Name { // the link was renamed
		if err := n.shaper.RemoveIFB(old.Name); err != nil {
			return false, err
		}
	}
	ifb, err := n.shaper.Setup(p.Name, p.Index, p.Rates, p.TakeOver)
	if err != nil {
		return false, err
	}
	n.managed[p.Index] = managedNIC{NICConfig: p, ifb: ifb}
	return true, n.classifier.Attach(classify.NIC{Index: p.Index, IFBIndex: ifb, MAC: p.MAC, HostCookie: n.cookie, Major: shape.Major, TrustMAC: p.TrustMAC})
}

func (n *Node) intact(m managedNIC) (bool, error) {
	intact, err := n.shaper.Intact(m.Name, m.Index, m.ifb, m.Rates)
	if err != nil || !intact {
		return false, err
	}
	return n.classifier.Attached(m.Index)
}

// Unmanage gives a NIC back as it was, also one that an earlier process managed.
// The caller has detached its shares. It reports whether there was anything of
// ours.
func (n *Node) Unmanage(name string, index int) (found bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.managed, index)
	return n.unmanage(name, index)
}

// unmanage undoes Manage. It is called with the lock held. A NIC that is gone took
// its queues along; its IFB device may serve a namesake by now.
func (n *Node) unmanage(name string, index int) (found bool, err error) {
	if n.classifier != nil {
		err = n.classifier.RemoveNIC(index)
	}
	link, lookErr := netlink.LinkByIndex(index)
	if lookErr != nil {
		for _, other := range n.managed {
			if other.Name == name && other.Index != index {
				return true, err
			}
		}
		return true, errors.Join(err, n.shaper.RemoveIFB(name))
	}
	classified, detachErr := classify.Detach(index, n.failpoints)
	owned, ownedErr := shape.Owned(index)
	if err = errors.Join(err, detachErr, ownedErr); !owned {
		return classified, err
	}
	if now := link.Attrs().Name; now != name {
		err = errors.Join(err, n.shaper.RemoveIFB(now))
	}
	return true, errors.Join(err, n.shaper.Teardown(name, index))
}

// RemovePins takes the classifier's maps off the BPF file system. No NIC may be
// managed any more.
func (n *Node) RemovePins() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return classify.RemovePins(n.bpffs, n.failpoints)
}

// ErrNotManaged means that the NIC was not handed to us, or is gone.
var ErrNotManaged = errors.New("NIC is not managed")

func (n *Node) parent(index int) (managedNIC, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	m, ok := n.managed[index]
	if !ok {
		return m, fmt.Errorf("%w: link %d", ErrNotManaged, index)
	}
	return m, nil
}

// RemoveClass removes a share's class. The caller has detached its links. It
// is no error if the NIC or the class is gone.
func (n *Node) RemoveClass(parent int, minor uint16) error {
	m, err := n.parent(parent)
	if errors.Is(err, ErrNotManaged) || !m.Enforce {
		return nil
	}
	return n.shaper.RemoveClass(m.Index, m.ifb, minor)
}

// Traffic returns the bytes, with Ethernet headers, that a NIC's queues have
// sent and received. It does not count frames that arrive for the node itself,
// because they are not queued.
func (n *Node) Traffic(parent int) (sent, received uint64, err error) {
	m, err := n.parent(parent)
	if err != nil || !m.Enforce {
		return 0, 0, errors.Join(err, ErrNotManaged)
	}
	out, err := n.shaper.RootClass(m.Index)
	if err != nil {
		return 0, 0, err
	}
	in, err := n.shaper.RootClass(m.ifb)
	return out.SentBytes, in.SentBytes, err
}
