// Package shape holds each share to its bandwidth, in both directions, with
// queues on the node: an HTB on the NIC for what pods send, and one on an IFB
// device, to which the classifier redirects what arrives for them.
//
// A share is one class in each, whatever the number of its links. Both queues
// are outside of the pods' reach; frames carry the class in their priority,
// which package classify sets.
package shape

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// Major is the major number of our qdiscs: how we know them again.
const Major = 0x0d5a

// ErrForeignQdisc means that the NIC's root qdisc is somebody else's.
var ErrForeignQdisc = errors.New("root qdisc belongs to somebody else")

// HTB shapes with hierarchical token buckets.
type HTB struct {
	conn       *rtnl.Conn
	failpoints failpoint.Injector
}

// New returns a shaper that works through conn.
func New(conn *rtnl.Conn, failpoints failpoint.Injector) *HTB {
	return &HTB{conn: conn, failpoints: failpoints}
}

// Setup puts the queues of a NIC in place, or its rates right if they are
// there, and returns the index of its IFB device. It replaces a root qdisc
// that the kernel chose; any other only if takeOver. Classes of shares that
// are there stay, with what is queued in them.
func (h *HTB) Setup(name string, index int, l NICRates, takeOver bool) (ifb int, err error) {
	foreign, err := rootOf(index)
	if err != nil {
		return 0, fmt.Errorf("list qdiscs of %s: %w", name, err)
	}
	if foreign != nil && !isOurs(foreign) && !takeOver {
		return 0, fmt.Errorf("%w: %s has %s %s: remove it, or set takeOver for this network",
			ErrForeignQdisc, name, foreign.Type(), netlink.HandleStr(foreign.Attrs().Handle))
	}
	if ifb, err = h.ifb(name); err != nil {
		return 0, err
	}
	for _, dev := range []int{index, ifb} {
		if err := h.setupDevice(dev, l); err != nil {
			return 0, fmt.Errorf("set up queues on %s: %w: does the kernel have sch_htb?", name, err)
		}
	}
	return ifb, nil
}

func (h *HTB) setupDevice(dev int, l NICRates) error {
	root, err := rootOf(dev)
	if err != nil {
		return err
	}
	var requests []*nl.NetlinkRequest
	if root == nil || !isOurs(root) {
		requests = append(requests, rootRequest(dev)) // an HTB cannot be changed once it is there
	}
	for _, c := range l.base() {
		requests = append(requests, classRequests(dev, c)...)
	}
	return h.failpoints.Do("set up queues", func() error { return h.conn.Do(requests...) })
}

// Intact tells whether a NIC's queues are as Setup left them: both roots and
// the classes that every NIC has.
func (h *HTB) Intact(name string, index, ifb int, l NICRates) (bool, error) {
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
	for _, dev := range []int{index, ifb} {
		root, err := rootOf(dev)
		if err != nil {
			return false, err
		}
		if root == nil || !isOurs(root) {
			return false, nil
		}
		states, err := h.classes(dev, func(minor uint16) bool { return minor < FirstMinor })
		if err != nil {
			return false, err
		}
		for _, c := range l.base() {
			if s := states[c.minor]; s.Floor/bitsPerByte != c.floor/bitsPerByte || s.Ceil/bitsPerByte != c.ceil/bitsPerByte {
				return false, nil
			}
		}
	}
	return true, nil
}

// Owned tells whether a NIC has a root qdisc of ours, also of an earlier process.
func Owned(index int) (bool, error) {
	root, err := rootOf(index)
	return err == nil && root != nil && isOurs(root), err
}

// rootOf returns the root qdisc that somebody configured; nil for what the
// kernel chose, which has no handle.
func rootOf(index int) (netlink.Qdisc, error) {
	qdiscs, err := netlink.QdiscList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}})
	if err != nil {
		return nil, err
	}
	for _, q := range qdiscs {
		if a := q.Attrs(); a.Parent == netlink.HANDLE_ROOT && a.Handle != 0 {
			return q, nil
		}
	}
	return nil, nil
}

func isOurs(q netlink.Qdisc) bool {
	return q.Type() == "htb" && q.Attrs().Handle == netlink.MakeHandle(Major, 0)
}

// IFBName is the name of the device that shapes what comes in on a NIC.
func IFBName(nic string) string {
	if name := "ifb-" + nic; len(name) < unix.IFNAMSIZ {
		return name
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(nic)) // never fails
	return fmt.Sprintf("ifb-%08x", h.Sum32())
}

func (h *HTB) ifb(nic string) (int, error) {
	name := IFBName(nic)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	if err := h.failpoints.Do("add IFB", func() error { return netlink.LinkAdd(&netlink.Ifb{LinkAttrs: attrs}) }); err != nil && !errors.Is(err, unix.EEXIST) {
		return 0, fmt.Errorf("create %s: %w: does the kernel have ifb?", name, err)
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	if link.Type() != "ifb" {
		return 0, fmt.Errorf("link %s is a %s, want an ifb: is the name in use?", name, link.Type())
	}
	return link.Attrs().Index, h.failpoints.Do("bring up IFB", func() error { return netlink.LinkSetUp(link) })
}

// Teardown removes the queues. The kernel then puts its default back.
func (h *HTB) Teardown(name string, index int) error {
	root, failed := rootOf(index)
	if root != nil && isOurs(root) {
		failed = h.failpoints.Do("remove queues", func() error { return netlink.QdiscDel(root) })
	}
	if failed = errors.Join(failed, h.RemoveIFB(name)); failed != nil {
		return fmt.Errorf("remove queues of %s: %w", name, failed)
	}
	return nil
}

// RemoveIFB removes the IFB device of a NIC. It is no error if there is none.
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

// Set creates a share's class on both devices or changes its rates. What is
// queued stays queued.
func (h *HTB) SetClass(index, ifb int, l NICRates, minor uint16, r Rates) error {
	c := l.share(minor, r)
	requests := append(classRequests(index, c), classRequests(ifb, c)...)
	if err := h.failpoints.Do("set class", func() error { return h.conn.Do(requests...) }); err != nil {
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("class %x:%x: %w: the NIC's queues are gone and will be back in a moment: who removed them?", Major, minor, err)
		}
		return fmt.Errorf("class %x:%x: %w", Major, minor, err)
	}
	return nil
}

// Remove removes a share's class from both devices. It is no error if there is none.
func (h *HTB) RemoveClass(index, ifb int, minor uint16) error {
	var failed error
	for _, dev := range []int{index, ifb} {
		del := nl.NewNetlinkRequest(unix.RTM_DELTCLASS, 0)
		del.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(dev), Handle: netlink.MakeHandle(Major, minor), Parent: netlink.MakeHandle(Major, classRoot)})
		err := h.failpoints.Do("remove class", func() error { return h.conn.Do(del) })
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EINVAL) {
			failed = errors.Join(failed, fmt.Errorf("remove class %x:%x: %w", Major, minor, err))
		}
	}
	return failed
}

// State is a class as the kernel has it.
type ClassState struct {
	Rates
	// SentBytes that went through the class, with Ethernet headers.
	SentBytes uint64
}

// Read returns a share's class on a device, nil if there is none.
func (h *HTB) ReadClass(index int, minor uint16) (*ClassState, error) {
	states, err := h.classes(index, func(m uint16) bool { return m == minor })
	if s, ok := states[minor]; ok {
		return &s, err
	}
	return nil, err
}

// Shares returns the classes of all shares on a device, by minor number.
func (h *HTB) ShareClasses(index int) (map[uint16]ClassState, error) {
	return h.classes(index, func(minor uint16) bool { return minor >= FirstMinor })
}

// Total is what went through a device's queues.
func (h *HTB) RootClass(index int) (ClassState, error) {
	s, err := h.ReadClass(index, classRoot)
	if s == nil {
		return ClassState{}, err
	}
	return *s, err
}

// classes reads a device's classes. The kernel has no way to ask for one that
// announces nothing (before Linux 6.8 the answer goes to every listener), so
// all are dumped and those that are wanted are looked into.
func (h *HTB) classes(index int, wanted func(minor uint16) bool) (map[uint16]ClassState, error) {
	dump := nl.NewNetlinkRequest(unix.RTM_GETTCLASS, unix.NLM_F_DUMP)
	dump.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(index)})
	messages, err := h.conn.Dump(dump)
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list classes of link %d: %w", index, err)
	}
	states := map[uint16]ClassState{}
	for _, m := range messages {
		if len(m.Data) < nl.SizeofTcMsg {
			continue
		}
		major, minor := netlink.MajorMinor(nl.DeserializeTcMsg(m.Data).Handle)
		if major != Major || !wanted(minor) {
			continue
		}
		if states[minor], err = parseClass(m.Data[nl.SizeofTcMsg:]); err != nil {
			return nil, fmt.Errorf("class %x:%x of link %d: %w", Major, minor, index, err)
		}
	}
	return states, nil
}

// parseClass reads the attributes of an HTB class.
func parseClass(payload []byte) (s ClassState, err error) {
	attrs, err := nl.ParseRouteAttr(payload)
	if err != nil {
		return s, err
	}
	for _, a := range attrs {
		switch a.Attr.Type {
		case nl.TCA_OPTIONS:
			err = errors.Join(err, s.parseOptions(a.Value))
		case nl.TCA_STATS2:
			err = errors.Join(err, s.parseStatistics(a.Value))
		}
	}
	return s, err
}

func (s *ClassState) parseOptions(payload []byte) error {
	attrs, err := nl.ParseRouteAttr(payload)
	if err != nil {
		return err
	}
	for _, a := range attrs {
		switch {
		case a.Attr.Type == nl.TCA_HTB_PARMS && len(a.Value) >= nl.SizeofTcHtbCopt:
			options := nl.DeserializeTcHtbCopt(a.Value)
			s.Floor, s.Ceil = max(s.Floor, uint64(options.Rate.Rate)*bitsPerByte), max(s.Ceil, uint64(options.Ceil.Rate)*bitsPerByte)
		case a.Attr.Type == nl.TCA_HTB_RATE64 && len(a.Value) >= 8:
			s.Floor = nl.NativeEndian().Uint64(a.Value) * bitsPerByte
		case a.Attr.Type == nl.TCA_HTB_CEIL64 && len(a.Value) >= 8:
			s.Ceil = nl.NativeEndian().Uint64(a.Value) * bitsPerByte
		}
	}
	return nil
}

// parseStatistics reads struct gnet_stats_basic (linux/gen_stats.h).
func (s *ClassState) parseStatistics(payload []byte) error {
	attrs, err := nl.ParseRouteAttr(payload)
	if err != nil {
		return err
	}
	for _, a := range attrs {
		if a.Attr.Type == nl.TCA_STATS_BASIC && len(a.Value) >= 8 {
			s.SentBytes = nl.NativeEndian().Uint64(a.Value)
		}
	}
	return nil
}

func rootRequest(dev int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	r.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(dev), Handle: netlink.MakeHandle(Major, 0), Parent: netlink.HANDLE_ROOT})
	r.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("htb")))
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	glob := nl.TcHtbGlob{Version: 3, Rate2Quantum: 10, Defcls: classUnidentified}
	options.AddRtAttr(nl.TCA_HTB_INIT, glob.Serialize())
	r.AddData(options)
	return r
}

func classRequests(dev int, c class) []*nl.NetlinkRequest {
	parent := netlink.MakeHandle(Major, c.parent)
	if c.parent == 0 {
		parent = netlink.MakeHandle(Major, 0)
	}
	handle := netlink.MakeHandle(Major, c.minor)
	r := nl.NewNetlinkRequest(unix.RTM_NEWTCLASS, unix.NLM_F_CREATE)
	r.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(dev), Handle: handle, Parent: parent})
	r.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("htb")))
	r.AddData(c.options())
	if c.queue == 0 {
		return []*nl.NetlinkRequest{r}
	}
	leaf := nl.NewNetlinkRequest(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	leaf.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(dev), Handle: netlink.MakeHandle(c.minor, 0), Parent: handle})
	leaf.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("bfifo")))
	leaf.AddData(nl.NewRtAttr(nl.TCA_OPTIONS, nl.Uint32Attr(c.queue)))
	return []*nl.NetlinkRequest{r, leaf}
}

// options are the parameters of an HTB class. With the link layer given, the
// kernel needs no rate tables.
func (c class) options() *nl.RtAttr {
	const maxUint32 = 1<<32 - 1
	floor, ceil := c.floor/bitsPerByte, c.ceil/bitsPerByte
	params := nl.TcHtbCopt{
		Rate:    nl.TcRateSpec{Rate: uint32(min(floor, maxUint32)), Linklayer: nl.LINKLAYER_ETHERNET},
		Ceil:    nl.TcRateSpec{Rate: uint32(min(ceil, maxUint32)), Linklayer: nl.LINKLAYER_ETHERNET},
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
