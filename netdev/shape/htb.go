// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package shape limits the bandwidth of each share in both directions with queues on the node. An HTB qdisc on the NIC
// shapes the frames that pods send. An HTB qdisc on an IFB device shapes the frames that pods receive. The classifier
// redirects incoming frames to that device.
//
// A share has one class in each qdisc, which all links of the share use. Pods
// cannot change the qdiscs, because those are in the node's network namespace.
// Package classify writes the class of a frame to the frame's priority.
//
// All rates are in bits per second.
package shape

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"strings"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// Major is the major number of this driver's HTB qdiscs at the root of a device, and identifies
// them; see Trees for the others.
const Major = 0x0d5a

// Kinds of qdiscs.
const (
	kindHTB = "htb"
	kindMQ  = "mq"
)

// ErrQueuesMissing means that the queues of a NIC do not exist, because another program removed
// them or the NIC.
var ErrQueuesMissing = errors.New("the NIC's queues are missing")

// ErrForeignQdisc means that another program or an administrator configured
// the NIC's root qdisc.
var ErrForeignQdisc = errors.New("root qdisc is not managed by this driver")

// HTB configures hierarchical token bucket qdiscs. It is safe for concurrent use.
type HTB struct {
	conn       *rtnl.Conn
	failpoints failpoint.Injector
	queue      atomic.Pointer[Queue] // nil before Setup has tried
}

// New returns an HTB that sends its requests through conn.
func New(conn *rtnl.Conn, failpoints failpoint.Injector) *HTB {
	return &HTB{conn: conn, failpoints: failpoints}
}

// Setup creates the queues of a NIC, or corrects their rates if they exist, and
// returns the interface index of the NIC's IFB device. It keeps the classes of
// shares and the frames in their queues, unless it replaces the trees of the NIC.
//
// Setup replaces a root qdisc that the kernel chose. With takeOver, it also
// replaces a qdisc that another program or an administrator configured; without
// takeOver, it returns ErrForeignQdisc for such a qdisc.
func (h *HTB) Setup(name string, index int, t Trees, l NICRates, takeOver bool) (ifb int, err error) {
	if err := h.Check(name, index, takeOver); err != nil {
		return 0, err
	}
	if ifb, err = h.setUpIFB(name, t); err != nil {
		return 0, err
	}
	if err := errors.Join(h.setupDevice(index, t, l.base(t)), h.setupDevice(ifb, t, l.received(t))); err != nil {
		return 0, fmt.Errorf("set up queues on %s: %w: does the kernel have sch_htb?", name, err)
	}
	return ifb, h.tryQueue(ifb, t)
}

// Check returns an error if Setup would refuse to replace the NIC's root qdisc.
func (h *HTB) Check(name string, index int, takeOver bool) error {
	root, err := h.root(index)
	if err != nil {
		return fmt.Errorf("read the root qdisc of %s: %w", name, err)
	}
	if root != nil && !root.isOwn() && !takeOver {
		return fmt.Errorf("%w: %s has %s %s: remove it, or set takeOver for this network",
			ErrForeignQdisc, name, root.kind, netlink.HandleStr(root.handle))
	}
	return nil
}

// setupDevice creates the qdiscs and the base classes of a NIC or an IFB device.
func (h *HTB) setupDevice(dev int, t Trees, base []class) error {
	var requests []*nl.NetlinkRequest
	for _, c := range base {
		requests = append(requests, classRequests(dev, c, h.Queue())...)
	}
	return h.failpoints.Do("set up queues", func() error {
		if err := h.setupTrees(dev, t); err != nil {
			return err
		}
		return h.conn.Do(requests...)
	})
}

// Intact reports whether a NIC's queues are as Setup left them. It checks the IFB device, the qdiscs of both devices,
// and the base classes, but not the classes of shares.
func (h *HTB) Intact(name string, index, ifb int, t Trees, l NICRates) (bool, error) {
	link, err := netlink.LinkByIndex(ifb)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if link.Attrs().Name != IFBName(name) || link.Attrs().Flags&net.FlagUp == 0 {
		return false, nil
	}
	intact, err := h.deviceIntact(index, t, l.base(t))
	if err != nil || !intact {
		return false, err
	}
	return h.deviceIntact(ifb, t, l.received(t))
}

// deviceIntact reports whether a device has the qdiscs and the base classes that
// setupDevice creates.
func (h *HTB) deviceIntact(dev int, t Trees, base []class) (bool, error) {
	present, err := h.hasTrees(dev, t)
	if err != nil || !present {
		return false, err
	}
	for _, c := range base {
		s, err := h.ReadClass(dev, c.handle())
		if err != nil || s == nil {
			return false, err
		}
		// The kernel stores rates in bytes per second.
		if s.Floor/bitsPerByte != c.floor/bitsPerByte || s.Ceil/bitsPerByte != c.ceil/bitsPerByte ||
			s.Overhead != c.overhead {
			return false, nil
		}
	}
	return true, nil
}

// Owned reports whether the root qdisc of a NIC or an IFB device is this
// driver's, even if an earlier process created it.
func (h *HTB) Owned(index int) (bool, error) {
	root, err := h.root(index)
	return err == nil && root != nil && root.isOwn(), err
}

// qdisc is the root qdisc of a device.
type qdisc struct {
	kind   string
	handle uint32
}

// isOwn reports whether a root qdisc is this driver's.
func (q *qdisc) isOwn() bool {
	return q.kind == kindHTB && q.handle == netlink.MakeHandle(Major, 0) ||
		q.kind == kindMQ && q.handle == netlink.MakeHandle(mqMajor, 0)
}

// root returns the configured root qdisc of a device. It returns nil if the device does not exist, or has the kernel's
// default qdisc, which does not have a handle.
func (h *HTB) root(index int) (*qdisc, error) {
	message, err := h.get(unix.RTM_GETQDISC, nl.TcMsg{Ifindex: int32(index), Parent: netlink.HANDLE_ROOT})
	if message == nil || err != nil {
		return nil, err
	}
	q := qdisc{handle: nl.DeserializeTcMsg(message).Handle}
	if q.handle == 0 {
		return nil, nil
	}
	q.kind = rtnl.AttributeText(message[nl.SizeofTcMsg:], nl.TCA_KIND)
	return &q, nil
}

// get returns the payload of the kernel's answer to a request for one qdisc or class, or nil if the device does not
// have it. A dump would contain the qdiscs and classes of all shares.
//
// The kernel sends the answer as a notification (NLM_F_ECHO), which other
// subscribers of events also receive. A Watcher of the Node ignores it, because it
// has the port ID of conn.
func (h *HTB) get(kind int, id nl.TcMsg) ([]byte, error) {
	// Without the acknowledgement, Get would wait forever for the root qdisc of a link that has never been up: the kernel
	// (6.18) does not send an answer or an error.
	r := nl.NewNetlinkRequest(kind, unix.NLM_F_ECHO|unix.NLM_F_ACK)
	id.Family = nl.FAMILY_ALL
	r.AddData(&id)
	messages, err := h.conn.Get(r)
	if rtnl.IsNotFound(err) { // EINVAL: the device does not have a configured qdisc
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		if len(m.Data) >= nl.SizeofTcMsg {
			return m.Data, nil
		}
	}
	return nil, nil
}

// IFBName returns the name of the IFB device for a NIC: "ifb-" and the name of
// the NIC, or a hash of the name if that would be too long.
func IFBName(nic string) string { return ifbPrefix + suffix(nic) }

const ifbPrefix = "ifb-"

// NICOfIFB returns the name of the NIC that an IFB device is for, or a hash of that name. The names of the NIC's other
// devices are the same for either.
func NICOfIFB(name string) string { return strings.TrimPrefix(name, ifbPrefix) }

// suffix returns the part of the names of a NIC's devices that follows their prefix, which
// has four characters.
func suffix(nic string) string {
	if len(ifbPrefix)+len(nic) < unix.IFNAMSIZ {
		return nic
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(nic)) // never fails
	return fmt.Sprintf("%08x", h.Sum32())
}

// setUpIFB creates the IFB device of a NIC if it does not exist or has too few queues, brings
// it up, and returns its interface index.
func (h *HTB) setUpIFB(nic string, t Trees) (int, error) {
	name := IFBName(nic)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	if t != OneTree {
		attrs.NumTxQueues = int(MaxTrees)
	}
	present, err := netlink.LinkByName(name)
	if err == nil && present.Type() == "ifb" && present.Attrs().NumTxQueues < int(t) {
		if err := h.RemoveIFB(nic); err != nil {
			return 0, err
		}
	}
	err = h.failpoints.Do("add IFB", func() error { return netlink.LinkAdd(&netlink.Ifb{LinkAttrs: attrs}) })
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return 0, fmt.Errorf("create %s: %w: does the kernel have ifb?", name, err)
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return 0, fmt.Errorf("look up %s: %w", name, err)
	}
	if link.Type() != "ifb" {
		return 0, fmt.Errorf("link %s is a %s, want an ifb: does another program use the name?", name, link.Type())
	}
	return link.Attrs().Index, h.failpoints.Do("bring up IFB", func() error { return setUpWithoutIPv6(link) })
}

// setUpWithoutIPv6 brings up a device that only the classifier sends frames to. The kernel does not give it an address.
// Otherwise, it would send router solicitations that no program classifies.
func setUpWithoutIPv6(link netlink.Link) error {
	const addrGenModeNone = 1 // IN6_ADDR_GEN_MODE_NONE of linux/if_link.h
	// Without IPv6, the kernel does not have a mode to change.
	if err := netlink.LinkSetIP6AddrGenMode(link, addrGenModeNone); err != nil && !errors.Is(err, unix.EAFNOSUPPORT) {
		return err
	}
	return netlink.LinkSetUp(link)
}

// Teardown removes the queues and the IFB device of a NIC. The kernel then uses
// its default qdisc again. Teardown keeps a root qdisc that is not this driver's.
func (h *HTB) Teardown(name string, index int) error {
	root, err := h.root(index)
	if root != nil && root.isOwn() {
		err = h.do("remove queues", []*nl.NetlinkRequest{deleteRequest(index, netlink.HANDLE_ROOT, root.handle)})
	}
	if err = errors.Join(err, h.RemoveIFB(name)); err != nil {
		return fmt.Errorf("remove queues of %s: %w", name, err)
	}
	return nil
}

// RemoveIFB deletes the IFB device of a NIC. It returns nil if a device of that
// name does not exist or is not an IFB device.
func (h *HTB) RemoveIFB(nic string) error {
	link, err := netlink.LinkByName(IFBName(nic))
	switch {
	case errors.As(err, &netlink.LinkNotFoundError{}):
		return nil
	case err != nil:
		return err
	case link.Type() != "ifb":
		return nil
	}
	return h.failpoints.Do("remove IFB", func() error { return netlink.LinkDel(link) })
}

// SetClass creates the class of a share on the NIC and its IFB device, or
// changes the rates of the existing class. It keeps the frames in the queues.
func (h *HTB) SetClass(index, ifb int, t Trees, l NICRates, minor uint16, r Rates) error {
	return h.setClass(l.share(t, minor, r), func(c class) []*nl.NetlinkRequest {
		return append(h.sendRequests(index, c), classRequests(ifb, c, h.Queue())...)
	})
}

// SetHairpinClass creates the class of a share on the outer link of a hairpin, or changes
// the rates of the existing class.
func (h *HTB) SetHairpinClass(p Hairpin, l NICRates, minor uint16, r Rates) error {
	return h.setClass(l.share(OneTree, minor, r), func(c class) []*nl.NetlinkRequest {
		return h.sendRequests(p.Outer, c)
	})
}

// setClass sends the requests for c.
func (h *HTB) setClass(c class, requests func(class) []*nl.NetlinkRequest) error {
	err := h.do("set class", requests(c))
	if errors.Is(err, unix.EEXIST) {
		c.exists = true // at least one of the queues did; the kernel has created the other
		err = h.do("change class", requests(c))
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV):
		return fmt.Errorf("set class %x:%x: %w: %w; the plugin restores them: did another program remove them?",
			c.major, c.minor, err, ErrQueuesMissing)
	default:
		return fmt.Errorf("set class %x:%x: %w", c.major, c.minor, err)
	}
}

// sendRequests create or change the class of a share on a device, for what the share sends. A
// fair queue keeps delays short at any length.
func (h *HTB) sendRequests(dev int, c class) []*nl.NetlinkRequest {
	if h.Queue() == FIFO {
		c.queue = c.sendQueue
	}
	return classRequests(dev, c, h.Queue())
}

// do sends requests, which are one change for failpoints.
func (h *HTB) do(operation string, requests []*nl.NetlinkRequest) error {
	return h.failpoints.Do(operation, func() error { return h.conn.Do(requests...) })
}

// RemoveClass removes the class of a share, as Trees.Class returns it, from devices. It returns
// nil if a class does not exist.
func (h *HTB) RemoveClass(class uint32, devices ...int) error {
	var errs error
	major, minor := netlink.MajorMinor(class)
	for _, dev := range devices {
		del := nl.NewNetlinkRequest(unix.RTM_DELTCLASS, 0)
		del.AddData(&nl.TcMsg{
			Family:  nl.FAMILY_ALL,
			Ifindex: int32(dev),
			Handle:  class,
			Parent:  netlink.MakeHandle(major, classRoot),
		})
		err := h.failpoints.Do("remove class", func() error { return h.conn.Do(del) })
		if err != nil && !rtnl.IsNotFound(err) {
			errs = errors.Join(errs, fmt.Errorf("remove class %x:%x: %w", major, minor, err))
		}
	}
	return errs
}

// ClassState is the state of a class in the kernel.
type ClassState struct {
	Rates
	// SentBytes counts the bytes that the class has sent, including Ethernet
	// headers.
	SentBytes uint64
	// Dropped counts the packets that did not fit into the class's queue.
	Dropped uint32
}

// ReadClass returns a class, major<<16 | minor, of the device with that interface index, or nil
// if the class does not exist.
func (h *HTB) ReadClass(index int, class uint32) (*ClassState, error) {
	major, minor := netlink.MajorMinor(class)
	message, err := h.get(unix.RTM_GETTCLASS, nl.TcMsg{Ifindex: int32(index), Handle: class})
	if err != nil {
		return nil, fmt.Errorf("read class %x:%x of link %d: %w", major, minor, index, err)
	}
	if message == nil {
		return nil, nil
	}
	s := parseClass(message[nl.SizeofTcMsg:])
	return &s, nil
}

// SentBytes returns how many bytes have passed the queues of a device, including Ethernet headers.
// It returns 0 if the device does not have this driver's queues.
func (h *HTB) SentBytes(index int, t Trees) (sum uint64, err error) {
	for queue := range t.queues() {
		s, err := h.ReadClass(index, netlink.MakeHandle(t.major(queue), classRoot))
		if err != nil {
			return 0, err
		}
		if s != nil {
			sum += s.SentBytes
		}
	}
	return sum, nil
}

// Strays returns how many frames were dropped because they came to a queue of a device that does not
// have their class; 0 with OneTree. A frame of a share in the first queue is not among them: it goes to the
// class for unidentified frames.
func (h *HTB) Strays(index int, t Trees) (frames uint64, err error) {
	for queue := 1; queue < int(t); queue++ {
		s, err := h.ReadClass(index, netlink.MakeHandle(t.major(queue), defaultMinor(queue)))
		if err != nil {
			return 0, err
		}
		if s != nil {
			frames += uint64(s.Dropped)
		}
	}
	return frames, nil
}

// ShareClasses returns the classes of shares on the device with that interface index, by
// major<<16 | minor, from one dump.
func (h *HTB) ShareClasses(index int) (map[uint32]ClassState, error) {
	states, _, err := h.ReceivedClasses(index)
	return states, err
}

// ReceivedClasses returns the same as ShareClasses, and how many multicast and broadcast frames an IFB device has
// dropped because they exceeded NICRates.Multicast.
func (h *HTB) ReceivedClasses(ifb int) (shares map[uint32]ClassState, multicastDropped uint64, err error) {
	dump := nl.NewNetlinkRequest(unix.RTM_GETTCLASS, unix.NLM_F_DUMP)
	dump.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(ifb)})
	messages, err := h.conn.Dump(dump)
	if errors.Is(err, unix.ENODEV) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, fmt.Errorf("list classes of link %d: %w", ifb, err)
	}
	shares = map[uint32]ClassState{}
	for _, m := range messages {
		if len(m.Data) < nl.SizeofTcMsg {
			continue
		}
		class := nl.DeserializeTcMsg(m.Data).Handle
		if !isShare(class) && !isSender(class) {
			continue
		}
		state := parseClass(m.Data[nl.SizeofTcMsg:])
		if isShare(class) {
			shares[class] = state
		} else {
			multicastDropped += uint64(state.Dropped)
		}
	}
	return shares, multicastDropped, nil
}

// parseClass parses the attributes of an HTB class.
func parseClass(payload []byte) (s ClassState) {
	s.parseOptions(rtnl.Attribute(payload, nl.TCA_OPTIONS))
	s.parseStatistics(rtnl.Attribute(payload, nl.TCA_STATS2))
	return s
}

// parseOptions parses the parameters of a class. The kernel adds the 64-bit
// attributes only for rates that do not fit in the 32 bits of struct tc_htb_opt.
func (s *ClassState) parseOptions(payload []byte) {
	for attrType, value := range rtnl.Attributes(payload) {
		switch {
		case attrType == nl.TCA_HTB_PARMS && len(value) >= nl.SizeofTcHtbCopt:
			options := nl.DeserializeTcHtbCopt(value)
			s.Floor = max(s.Floor, uint64(options.Rate.Rate)*bitsPerByte)
			s.Ceil = max(s.Ceil, uint64(options.Ceil.Rate)*bitsPerByte)
			s.Overhead = options.Ceil.Overhead
		case attrType == nl.TCA_HTB_RATE64 && len(value) >= 8:
			s.Floor = nl.NativeEndian().Uint64(value) * bitsPerByte
		case attrType == nl.TCA_HTB_CEIL64 && len(value) >= 8:
			s.Ceil = nl.NativeEndian().Uint64(value) * bitsPerByte
		}
	}
}

// parseStatistics parses struct gnet_stats_basic and struct gnet_stats_queue (linux/gen_stats.h).
func (s *ClassState) parseStatistics(payload []byte) {
	if basic := rtnl.Attribute(payload, nl.TCA_STATS_BASIC); len(basic) >= 8 {
		s.SentBytes = nl.NativeEndian().Uint64(basic)
	}
	if queue := rtnl.Attribute(payload, nl.TCA_STATS_QUEUE); len(queue) >= 12 {
		s.Dropped = nl.NativeEndian().Uint32(queue[8:])
	}
}

// classRequests create or change a class of a device, and its queue if it has one.
func classRequests(dev int, c class, q Queue) []*nl.NetlinkRequest {
	parent := netlink.MakeHandle(c.major, c.parent)
	r := nl.NewNetlinkRequest(unix.RTM_NEWTCLASS, unix.NLM_F_CREATE)
	r.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(dev), Handle: c.handle(), Parent: parent})
	r.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("htb")))
	r.AddData(c.options())
	if c.queue == 0 {
		return []*nl.NetlinkRequest{r}
	}
	return []*nl.NetlinkRequest{r, c.queueRequest(dev, q)}
}

// options returns the parameters of an HTB class. They name the link layer, so the kernel does not require rate tables.
func (c class) options() *nl.RtAttr {
	const maxUint32 = 1<<32 - 1
	floor, ceil := c.floor/bitsPerByte, c.ceil/bitsPerByte
	rate := nl.TcRateSpec{Linklayer: nl.LINKLAYER_ETHERNET, Overhead: c.overhead}
	if c.overhead != 0 {
		rate.Mpu = minFrame + c.overhead
	}
	floorRate, ceilRate := rate, rate
	floorRate.Rate, ceilRate.Rate = uint32(min(floor, maxUint32)), uint32(min(ceil, maxUint32))
	params := nl.TcHtbCopt{
		Rate:    floorRate,
		Ceil:    ceilRate,
		Buffer:  ticks(burstBytes(c.floor), c.floor),
		Cbuffer: ticks(burstBytes(c.ceil), c.ceil),
		Quantum: max(c.quantum, maxGSO),
		Prio:    c.prio,
	}
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	options.AddRtAttr(nl.TCA_HTB_PARMS, params.Serialize())
	if floor > maxUint32 {
		options.AddRtAttr(nl.TCA_HTB_RATE64, nl.Uint64Attr(floor))
	}
	if ceil > maxUint32 {
		options.AddRtAttr(nl.TCA_HTB_CEIL64, nl.Uint64Attr(ceil))
	}
	return options
}
