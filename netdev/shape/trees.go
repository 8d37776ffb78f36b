// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package shape

import (
	"errors"
	"math/bits"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Trees is how many HTB qdiscs a NIC and its IFB device have. It is OneTree, or the number of transmit queues with an
// HTB qdisc each below a qdisc mq. Frames of different queues then do not wait for one lock.
//
// Below mq, each share has its class in the HTB of one queue, its home. No class borrows from
// another queue: the rate of a share is also its limit, and traffic without a share has the
// rest of the line, in the first queue. So the sum over all queues is at most the line.
type Trees int

const (
	// OneTree is one HTB qdisc at the root of the device.
	OneTree Trees = 0
	// MaxTrees is the largest number of HTB qdiscs below mq. The BPF programs encode the queue in 4 bits.
	MaxTrees Trees = 16
)

// Major numbers of the qdiscs of a device with an HTB qdisc per queue. They differ from the major numbers of leaf
// qdiscs; bpf/nic.h in package classify has the same numbers.
const (
	mqMajor    = Major + 1
	queueMajor = 0x5d50 // of the first queue; the next queue has the next number
)

// Minor numbers of additional base classes below mq. Classes with a leaf qdisc have different ones, because the leaf
// qdisc has the number as its major number.
const (
	// classStray is the class of the second queue, for frames with a class that is not in the queue's HTB qdisc. The next
	// queue has the next number.
	classStray = 0xf01
	classNode  = 0xf00 // of the first queue, the parent of the other base classes
)

// home returns the queue of a share. It follows from the share's number, so it does not need a record. If the device
// loses queues, only the shares of these queues get another home.
func (t Trees) home(minor uint16) int {
	if t == OneTree || minor < FirstMinor {
		return 0
	}
	queue := uint(minor-FirstMinor) % uint(MaxTrees)
	for queue >= uint(t) {
		queue -= 1 << (bits.Len(queue) - 1) // the highest bit
	}
	return int(queue)
}

// major returns the major number of the HTB qdisc of a queue.
func (t Trees) major(queue int) uint16 {
	if t == OneTree {
		return Major
	}
	return queueMajor + uint16(queue)
}

// queues returns how many HTB qdiscs a device has.
func (t Trees) queues() int { return max(int(t), 1) }

// isShare reports whether a class belongs to a share.
func isShare(class uint32) bool {
	major, minor := netlink.MajorMinor(class)
	return (major == Major || major&^(uint16(MaxTrees)-1) == queueMajor) && minor >= FirstMinor && minor < Major
}

// isSender reports whether a class is one for senders of multicast.
func isSender(class uint32) bool {
	major, minor := netlink.MajorMinor(class)
	return (major == Major || major == queueMajor) && minor >= classSender && minor < classSender+classSenders
}

// Major returns the major number of the base classes that classify frames.
func (t Trees) Major() uint16 { return t.major(0) }

// Class returns the class of a share, or the base class with that minor number, as
// major<<16 | minor.
func (t Trees) Class(minor uint16) uint32 { return netlink.MakeHandle(t.major(t.home(minor)), minor) }

// defaultMinor returns the minor number of the class for frames that do not select a class of a queue's HTB qdisc.
func defaultMinor(queue int) uint16 {
	if queue == 0 {
		return classUnidentified
	}
	return classStray + uint16(queue) - 1
}

// parent returns the parent of the HTB qdisc of a queue.
func (t Trees) parent(queue int) uint32 {
	if t == OneTree {
		return netlink.HANDLE_ROOT
	}
	return netlink.MakeHandle(mqMajor, uint16(queue)+1)
}

// presentTrees returns which queues of a device have an HTB qdisc of this driver below mq, as bits, or
// whether it has one at the root.
func (h *HTB) presentTrees(dev int) (queues uint, atRoot bool, err error) {
	root, err := h.root(dev)
	if err != nil || root == nil || !root.isOwn() || root.kind == kindHTB {
		return 0, err == nil && root != nil && root.isOwn(), err
	}
	for queue := range int(MaxTrees) {
		id := nl.TcMsg{Ifindex: int32(dev), Handle: netlink.MakeHandle(MaxTrees.major(queue), 0)}
		message, err := h.get(unix.RTM_GETQDISC, id)
		if err != nil {
			return 0, false, err
		}
		if message != nil {
			queues |= 1 << queue
		}
	}
	return queues, false, nil
}

// hasTrees reports whether a device has the qdiscs of t, and no others of this driver.
func (h *HTB) hasTrees(dev int, t Trees) (bool, error) {
	queues, atRoot, err := h.presentTrees(dev)
	return err == nil && atRoot == (t == OneTree) && queues == 1<<t-1, err
}

// TreesInUse returns the Trees of a NIC or of its IFB device, whichever has classes of shares, even if an
// earlier process created them. inUse is false if none has.
func (h *HTB) TreesInUse(name string, index int) (t Trees, inUse bool, err error) {
	devices := []int{index}
	ifb, err := netlink.LinkByName(IFBName(name))
	switch {
	case err == nil:
		devices = append(devices, ifb.Attrs().Index)
	case !errors.As(err, &netlink.LinkNotFoundError{}):
		return OneTree, false, err
	}
	for _, dev := range devices {
		queues, _, err := h.presentTrees(dev)
		if err != nil {
			return OneTree, false, err
		}
		shares, err := h.ShareClasses(dev)
		if err != nil || len(shares) > 0 {
			return Trees(bits.Len(queues)), err == nil, err
		}
	}
	return OneTree, false, nil
}

// setupTrees creates the qdiscs of a device, unless they exist, and removes the qdiscs of queues that t does not
// contain. It keeps the other qdiscs, because the kernel cannot change an HTB qdisc.
func (h *HTB) setupTrees(dev int, t Trees) error {
	queues, atRoot, err := h.presentTrees(dev)
	if err != nil || atRoot && t == OneTree {
		return err
	}
	requests := treesRequests(dev, t, queues)
	if len(requests) == 0 {
		return nil
	}
	return h.conn.Do(requests...)
}

// treesRequests returns the requests that give a device the qdiscs of t. queues are the queues that have
// an HTB qdisc, as bits.
func treesRequests(dev int, t Trees, queues uint) []*nl.NetlinkRequest {
	if t == OneTree {
		return []*nl.NetlinkRequest{t.htbRequest(dev, 0)}
	}
	var requests []*nl.NetlinkRequest
	if queues == 0 {
		requests = append(requests, mqRequest(dev))
	}
	for queue := range int(MaxTrees) {
		switch present := queues&(1<<queue) != 0; {
		case present && queue >= int(t):
			requests = append(requests, deleteRequest(dev, t.parent(queue), netlink.MakeHandle(t.major(queue), 0)))
		case !present && queue < int(t):
			requests = append(requests, t.htbRequest(dev, queue))
		}
	}
	return requests
}

// mqRequest replaces the root qdisc of a device by mq.
func mqRequest(dev int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	r.AddData(&nl.TcMsg{
		Family: nl.FAMILY_ALL, Ifindex: int32(dev),
		Handle: netlink.MakeHandle(mqMajor, 0), Parent: netlink.HANDLE_ROOT,
	})
	r.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated(kindMQ)))
	return r
}

// htbRequest creates the HTB qdisc of a queue. Frames that select none of its classes go to its
// default class.
func (t Trees) htbRequest(dev, queue int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	r.AddData(&nl.TcMsg{
		Family: nl.FAMILY_ALL, Ifindex: int32(dev),
		Handle: netlink.MakeHandle(t.major(queue), 0), Parent: t.parent(queue),
	})
	r.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated(kindHTB)))
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	glob := nl.TcHtbGlob{Version: 3, Rate2Quantum: 10, Defcls: uint32(defaultMinor(queue))}
	options.AddRtAttr(nl.TCA_HTB_INIT, glob.Serialize())
	r.AddData(options)
	return r
}

func deleteRequest(dev int, parent, handle uint32) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_DELQDISC, 0)
	r.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(dev), Handle: handle, Parent: parent})
	return r
}
