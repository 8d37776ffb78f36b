// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package shape

import (
	"slices"

	"github.com/vishvananda/netlink"
)

// Minor numbers of the base classes. bpf/nic.h in package classify has the same numbers.
const (
	classRoot         = 1
	classHost         = 2
	classControl      = 3
	classUnidentified = 4
	classMulticast    = 6 // on the IFB device, the parent of the classes for senders
	classDrop         = 7
	// The IFB device has classSenders classes for the senders of multicast, which start at
	// classSender.
	classSender  = 8
	classSenders = 8
)

// UnidentifiedMinor is the minor number of the class for frames that cannot be
// assigned to a share.
const UnidentifiedMinor = classUnidentified

// MulticastMinor is the minor number of the class for multicast and broadcast frames that
// arrive, except ARP and neighbor discovery.
const MulticastMinor = classMulticast

// ForwardedMinor is the minor number of the class for frames that the node
// forwards. The class exists if NICRates.Forwarded has a ceil.
const ForwardedMinor = 5

// FirstMinor is the lowest minor number for the class of a share. Minor numbers
// must be less than Major, because the minor number of a class is the major
// number of its leaf qdisc.
const FirstMinor = 0x10

// Rates are the rates of a share, in bits per second.
type Rates struct {
	Floor uint64 // guaranteed rate
	Ceil  uint64 // maximum rate; equal to Floor if the share must not borrow
	// Overhead is the NICRates.Overhead that the kernel measures the rates with. It is the same for all classes of a NIC.
	Overhead uint16
}

// NICRates are the rates of a NIC, in bits per second.
type NICRates struct {
	// Line is the rate of the link at the physical layer.
	Line uint64
	// Reserve is the part of Line that shares do not get. It serves the node's
	// own traffic, ARP, neighbor discovery, and unidentified frames.
	Reserve uint64
	// Forwarded are the rates of frames that the node forwards. Its Floor is the part of Line that Reserve and shares do
	// not have. If its Ceil is 0, these frames do not have a class and are unidentified.
	Forwarded Rates
	// Multicast is the rate of multicast and broadcast frames that arrive, except ARP
	// and neighbor discovery. If it is 0, the rate is an eighth of Reserve. Senders
	// share it: they are divided into eight classes.
	Multicast uint64
	// Overhead is how many bytes the network carries with each frame in addition to its
	// Ethernet header and payload. If it is not 0, the queues add it to each frame,
	// and count a frame that is shorter than the minimum of Ethernet as the minimum. The kernel counts it once for
	// a packet that the NIC segments.
	Overhead uint16
	// MinShare is the rate of the smallest share that the NIC permits. It sets the scale of the quanta that borrowing
	// shares divide idle bandwidth by.
	MinShare uint64
}

const (
	bitsPerByte = 8
	// minFrame is the length of the shortest Ethernet frame without its checksum, in bytes.
	minFrame = 60
	// maxGSO is the size of the largest packet that a queue gets, in bytes: a
	// segment before segmentation (GSO), or received frames after merging (GRO).
	maxGSO = 64 << 10
	// maxQuantum is a quantum that is always permitted, in bytes. Faster NICs permit more, because a turn then does not
	// take longer; see NICRates.quantum.
	maxQuantum = 16 << 20
	// turnsPerSecond is the number of turns of the longest duration that fit into a second.
	turnsPerSecond = 15
)

// class is one HTB class with its leaf queue.
type class struct {
	major         uint16
	minor, parent uint16
	floor, ceil   uint64 // bits per second
	prio          uint32
	quantum       uint32 // bytes
	queue         uint32 // bytes; 0 for an inner class
	sendQueue     uint32 // bytes, for a FIFO of a share on the NIC itself; see sendQueueBytes
	fair          bool   // whether its queue divides the rate between flows, if the kernel can
	exists        bool   // whether its fair queue exists: the kernel refuses to change some parameters
	overhead      uint16 // bytes; see NICRates.Overhead
}

// handle returns the number that identifies the class to the kernel.
func (c class) handle() uint32 { return netlink.MakeHandle(c.major, c.minor) }

// base returns the classes that a NIC has without shares. The host may use the whole line. The classes for control
// frames and for unidentified frames are small, because any pod can fill them. Forwarded frames compete with the shares
// for idle bandwidth like another share. The class for frames to drop has a queue that is smaller than every frame.
//
// With a tree per queue, these classes are in the first queue's tree, and cannot use more than the part of the line
// that shares do not get. The other trees have a class that drops frames.
func (l NICRates) base(t Trees) []class {
	parent := uint16(classRoot)
	if t != OneTree {
		parent = classNode
	}
	part := max(l.Reserve/4, bitsPerByte)
	multicast := l.Multicast
	if multicast == 0 {
		multicast = max(part/2, bitsPerByte)
	}
	classes := []class{
		{minor: classRoot, floor: l.Line, ceil: l.Line},
		{
			minor: classHost, parent: parent,
			floor: 2*part - bitsPerByte, ceil: l.Line,
			quantum: maxGSO, queue: queueBytes(l.Line),
		},
		{
			minor: classControl, parent: parent,
			floor: max(part/2, bitsPerByte), ceil: part,
			quantum: maxGSO, queue: queueBytes(part),
		},
		{
			minor: classMulticast, parent: parent,
			floor: min(max(part/2, bitsPerByte), multicast), ceil: multicast, prio: 1,
			quantum: maxGSO, queue: queueBytes(multicast),
		},
		{minor: classDrop, parent: parent, floor: bitsPerByte, ceil: bitsPerByte, prio: 7, quantum: maxGSO, queue: 1},
		{
			minor: classUnidentified, parent: parent,
			floor: part, ceil: part, prio: 1,
			quantum: maxGSO, queue: queueBytes(part),
		},
	}
	if t != OneTree {
		node := l.Reserve + l.Forwarded.Floor
		classes = slices.Insert(classes, 1, class{minor: classNode, parent: classRoot, floor: node, ceil: node})
	}
	if l.Forwarded.Ceil > 0 {
		forwarded := l.share(OneTree, ForwardedMinor, l.Forwarded)
		forwarded.parent = parent
		forwarded.fair = false // the queue of a base class keeps its kind
		classes = append(classes, forwarded)
	}
	for i := range classes {
		classes[i].major, classes[i].overhead = t.Major(), l.Overhead
	}
	return append(classes, l.stray(t)...)
}

// stray returns the base classes of all trees but the first: the root, and the class that drops frames if their class
// is not in the tree.
func (l NICRates) stray(t Trees) (classes []class) {
	for queue := 1; queue < int(t); queue++ {
		classes = append(classes,
			class{major: t.major(queue), minor: classRoot, floor: l.Line, ceil: l.Line, overhead: l.Overhead},
			class{
				major: t.major(queue), minor: defaultMinor(queue), parent: classRoot,
				floor: bitsPerByte, ceil: bitsPerByte, prio: 7, quantum: maxGSO, queue: 1, overhead: l.Overhead,
			})
	}
	return classes
}

// received returns the classes that a NIC's IFB device has without shares: the NIC's classes, and classes that divide
// the rate for multicast between senders.
func (l NICRates) received(t Trees) (classes []class) {
	for _, c := range l.base(t) {
		if c.minor != classMulticast {
			classes = append(classes, c)
			continue
		}
		sender := c
		c.queue = 0
		classes = append(classes, c)
		sender.parent, sender.floor = classMulticast, max(c.floor/classSenders, bitsPerByte)
		for i := range uint16(classSenders) {
			sender.minor = classSender + i
			classes = append(classes, sender)
		}
	}
	return classes
}

// share returns the class of a share. With a tree per queue, it does not borrow; see Trees.
func (l NICRates) share(t Trees, minor uint16, r Rates) class {
	ceil := min(max(r.Ceil, r.Floor), max(l.Line, r.Floor))
	if t != OneTree {
		ceil = r.Floor
	}
	return class{
		major: t.major(t.home(minor)), minor: minor, parent: classRoot,
		floor: r.Floor, ceil: ceil,
		quantum: l.quantum(r.Floor), queue: queueBytes(ceil), sendQueue: sendQueueBytes(ceil), fair: true,
		overhead: l.Overhead,
	}
}

// quantum returns how many bytes a class may borrow in its turn before the next class gets its turn. Classes divide
// idle bandwidth in proportion to their floors only if their quanta are in the same proportion and each quantum is at
// least one whole segment. A quantum is limited to keep classes from waiting long for their turn to borrow. They do not
// wait for their floor.
func (l NICRates) quantum(floor uint64) uint32 {
	scale := float64(floor) / float64(max(l.MinShare, 1))
	longest := max(maxQuantum, l.Line/bitsPerByte/turnsPerSecond)
	return uint32(min(max(scale, 1)*maxGSO, float64(longest), 1<<31))
}

// queueBytes returns the length of a leaf queue: 20 ms at the rate, but at least
// three of the largest packets.
func queueBytes(rate uint64) uint32 {
	return uint32(min(max(rate/bitsPerByte/50, 3*maxGSO), 1<<31))
}

// sendQueueBytes returns the length of the FIFO for frames that a share sends: 8 ms at the rate, so a pod that sends as
// fast as it can waits less than 10 ms for an answer, but at least the fragments of the largest datagram and one
// segment more. It can be shorter than the queue for received frames because the pod's link limits the size of
// segments; see SegmentBytes.
func sendQueueBytes(rate uint64) uint32 {
	const eightMillisecondsPerSecond = 125
	return uint32(min(max(rate/bitsPerByte/eightMillisecondsPerSecond, maxGSO+maxGSO/4), 1<<31))
}

// burstBytes returns how many bytes a class may send in one burst: 1 ms at the rate, which is longer than the
// resolution of the packet scheduler's timer, but at least a jumbo frame.
func burstBytes(rate uint64) uint64 { return max(rate/bitsPerByte/1000, 9216) }

// SegmentBytes returns the maximum size, in bytes, of the segments that the
// network stack of a pod should pass to a link of a share. Larger segments make
// a slow share send in bursts that take long at its rate. The rate is in bits
// per second, and the MTU in bytes.
func SegmentBytes(rate uint64, mtu int) int {
	return min(max(int(rate/bitsPerByte/500), 4*mtu), maxGSO)
}

// ticks converts the size of a burst to the unit of linux/pkt_sched.h: the time
// that the burst takes at the rate, in units of 64 ns.
func ticks(bytes, rate uint64) uint32 {
	const tickNanoseconds = 64
	ns := float64(bytes) * bitsPerByte * 1e9 / float64(max(rate, 1))
	return uint32(min(ns/tickNanoseconds, 1<<32-1))
}
