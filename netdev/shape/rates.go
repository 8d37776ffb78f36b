package shape

// Classes that every NIC has, by the minor numbers that the classifier knows.
const (
	classRoot         = 1
	classHost         = 2
	classControl      = 3
	classUnidentified = 4
)

// Minor numbers for shares. The upper bound keeps a leaf's handle, which is
// made of its class's minor number, apart from Major.
const (
	FirstMinor = 0x10
	LastMinor  = 0x0cff
)

// Rates of one share, in bits per second.
type Rates struct {
	Floor uint64 // guaranteed
	Ceil  uint64 // never exceeded; equal to Floor for a hard cap
}

// Link is a NIC's rates, in bits per second.
type NICRates struct {
	Line uint64
	// Reserve is kept from shares: for the host, for ARP and neighbour
	// discovery, for what cannot be identified.
	Reserve uint64
	// Smallest is the smallest share there may be; it sets the scale in
	// which shares that may borrow divide what is idle.
	MinShare uint64
}

const (
	bitsPerByte = 8
	// maxGSO is the largest frame that is handed to a queue: a segment yet
	// to be cut, or received frames already merged.
	maxGSO = 64 << 10
	// maxQuantum bounds how long one class may send before its siblings have a turn.
	maxQuantum = 16 << 20
)

// class is one HTB class with its leaf queue.
type class struct {
	minor, parent uint16
	floor, ceil   uint64 // bits per second
	prio          uint32
	quantum       uint32 // bytes
	queue         uint32 // bytes; 0 for an inner class
}

// base returns the classes that every NIC has. The host may use the whole
// line; the other two are small on purpose, since everybody can fill them.
func (l NICRates) base() []class {
	part := max(l.Reserve/4, bitsPerByte)
	return []class{
		{minor: classRoot, floor: l.Line, ceil: l.Line},
		{minor: classHost, parent: classRoot, floor: 2 * part, ceil: l.Line, quantum: maxGSO, queue: queueBytes(l.Line)},
		{minor: classControl, parent: classRoot, floor: part, ceil: part, quantum: maxGSO, queue: queueBytes(part)},
		{minor: classUnidentified, parent: classRoot, floor: part, ceil: part, prio: 1, quantum: maxGSO, queue: queueBytes(part)},
	}
}

// share returns the class of a share.
func (l NICRates) share(minor uint16, r Rates) class {
	ceil := min(max(r.Ceil, r.Floor), max(l.Line, r.Floor))
	return class{minor: minor, parent: classRoot, floor: r.Floor, ceil: ceil, quantum: l.quantum(r.Floor), queue: queueBytes(ceil)}
}

// quantum is what a class may send beyond its floor before the next one's
// turn. Idle bandwidth is divided in proportion to floors only if quanta are
// in proportion too and none is below a whole segment.
func (l NICRates) quantum(floor uint64) uint32 {
	scale := float64(floor) / float64(max(l.MinShare, 1))
	return uint32(min(max(scale, 1)*maxGSO, maxQuantum))
}

// queueBytes bounds a leaf's queue to 20 ms of its rate, and lets a few of
// the largest frames in.
func queueBytes(rate uint64) uint32 {
	return uint32(min(max(rate/bitsPerByte/50, 3*maxGSO), 1<<31))
}

// burstBytes is what a class may send at once: a millisecond of its rate,
// which hides the scheduler's timer, and at least a jumbo frame.
func burstBytes(rate uint64) uint64 { return max(rate/bitsPerByte/1000, 9216) }

// SegmentBytes is the largest segment that a share's links should hand down:
// with a larger one, a slow share sends in bursts that are long for its rate.
// mtu is in bytes.
func SegmentBytes(rate uint64, mtu int) int {
	return min(max(int(rate/bitsPerByte/500), 4*mtu), maxGSO)
}

// ticks converts a burst to the unit of linux/pkt_sched.h: the time it takes
// at the rate, in steps of 64 ns.
func ticks(bytes, rate uint64) uint32 {
	const tickNanoseconds = 64
	ns := float64(bytes) * bitsPerByte * 1e9 / float64(max(rate, 1))
	return uint32(min(ns/tickNanoseconds, 1<<32-1))
}
