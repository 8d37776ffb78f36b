// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A Sender sends raw Ethernet frames through one link, in a way other than plain sendto(2).
type Sender interface {
	// Send sends a frame. It returns nil if the kernel dropped the frame, or if its queues
	// are full.
	Send(frame []byte) error
	Close() error
}

// NewMarkSender returns a Sender of frames with a mark and a priority (SO_MARK, SO_PRIORITY).
func NewMarkSender(ns *Namespace, link string, mark, priority int) (Sender, error) {
	s, err := newPacketSender(ns, link)
	if err != nil {
		return nil, err
	}
	err = errors.Join(
		unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_MARK, mark),
		unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_PRIORITY, priority),
	)
	return s, s.closeOnError(err)
}

// NewTimeSender returns a Sender of frames with a transmit time (SO_TXTIME): immediately.
func NewTimeSender(ns *Namespace, link string) (Sender, error) {
	s, err := newPacketSender(ns, link)
	if err != nil {
		return nil, err
	}
	// struct sock_txtime (linux/net_tstamp.h): the clock and flags.
	config := binary.NativeEndian.AppendUint32(nil, unix.CLOCK_TAI)
	config = binary.NativeEndian.AppendUint32(config, 0)
	err = unix.SetsockoptString(s.fd, unix.SOL_SOCKET, unix.SO_TXTIME, string(config))
	var now unix.Timespec
	if err == nil {
		err = unix.ClockGettime(unix.CLOCK_TAI, &now)
	}
	s.control = make([]byte, unix.CmsgSpace(8))
	header := (*unix.Cmsghdr)(unsafe.Pointer(&s.control[0]))
	header.Level, header.Type = unix.SOL_SOCKET, unix.SCM_TXTIME
	header.SetLen(unix.CmsgLen(8))
	binary.NativeEndian.PutUint64(s.control[unix.CmsgLen(0):], uint64(now.Nano()))
	return s, s.closeOnError(err)
}

// Values of the field gso_type of struct virtio_net_hdr (linux/virtio_net.h).
const (
	SegmentTCP = 1 // TCP over IPv4
	SegmentUDP = 5 // UDP
)

// NewSegmentSender returns a Sender of frames with one packet of IPv4, without options, which the
// kernel or the NIC divides into segments with size bytes of payload (PACKET_VNET_HDR). kind is
// SegmentTCP or SegmentUDP.
func NewSegmentSender(ns *Namespace, link string, kind byte, size uint16) (Sender, error) {
	s, err := newPacketSender(ns, link)
	if err != nil {
		return nil, err
	}
	const transport = 34
	header, checksum := uint16(transport+20), uint16(16)
	if kind == SegmentUDP {
		header, checksum = transport+8, 6
	}
	return s, s.closeOnError(s.offload(kind, header, size, transport, checksum))
}

// NewChecksumSender returns a Sender of frames that get their checksum from the kernel or the NIC. It covers the bytes
// from start on, and is written offset bytes behind start (PACKET_VNET_HDR).
func NewChecksumSender(ns *Namespace, link string, start, offset uint16) (Sender, error) {
	s, err := newPacketSender(ns, link)
	if err != nil {
		return nil, err
	}
	return s, s.closeOnError(s.offload(0, 0, 0, start, offset))
}

// offload makes the kernel complete the frames of s. fields are the fields of struct virtio_net_hdr
// (linux/virtio_net.h) after the first two: hdr_len, gso_size, csum_start, and csum_offset.
func (s *packetSender) offload(kind byte, fields ...uint16) error {
	const needsChecksum = 1
	s.header = []byte{needsChecksum, kind}
	for _, field := range fields {
		s.header = binary.NativeEndian.AppendUint16(s.header, field)
	}
	return unix.SetsockoptInt(s.fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1)
}

// packetSender sends through a packet socket.
type packetSender struct {
	header  []byte // precedes each frame
	fd      int
	to      *unix.SockaddrLinklayer
	control []byte
}

func newPacketSender(ns *Namespace, link string) (s *packetSender, err error) {
	err = ns.run(func() error {
		nic, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		fd, err := packetSocket(false)
		s = &packetSender{fd: fd, to: &unix.SockaddrLinklayer{Ifindex: nic.Index, Halen: 6}}
		return err
	})
	return s, err
}

func (s *packetSender) closeOnError(err error) error {
	if err != nil {
		err = errors.Join(err, s.Close())
	}
	return err
}

// Send implements Sender.
func (s *packetSender) Send(frame []byte) error {
	if len(s.header) > 0 {
		frame = append(slices.Clone(s.header), frame...)
	}
	return ignoreDrop(unix.Sendmsg(s.fd, frame, s.control, s.to, unix.MSG_DONTWAIT))
}

// Close implements Sender.
func (s *packetSender) Close() error { return unix.Close(s.fd) }

// ignoreDrop returns nil for the errors that mean that the kernel did not take a frame.
func ignoreDrop(err error) error {
	if errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EBUSY) {
		return nil
	}
	return err
}

// ring is an io_uring with one entry. Its send requests use a packet socket.
type ring struct {
	*packetSender
	fd             int
	sq, cq, sqes   []byte
	sqTail, cqHead *uint32
	cqTail         *uint32
	completions    int // offset of the completions in cq
}

// Offsets and numbers of linux/io_uring.h.
const (
	ringOpSend         = 26
	ringEnterGetEvents = 1
	ringOffsetCQ       = 0x8000000
	ringOffsetSQEs     = 0x10000000
	ringEntryBytes     = 64
)

// ringParams is struct io_uring_params.
type ringParams struct {
	sqEntries, cqEntries, flags, threadCPU, threadIdle, features, workers uint32
	_                                                                     [3]uint32
	sq                                                                    struct {
		head, tail, mask, entries, flags, dropped, array, _ uint32
		_                                                   uint64
	}
	cq struct {
		head, tail, mask, entries, overflow, cqes, flags, _ uint32
		_                                                   uint64
	}
}

// NewRingSender returns a Sender that sends through an io_uring.
func NewRingSender(ns *Namespace, link string) (Sender, error) {
	s, err := newPacketSender(ns, link)
	if err != nil {
		return nil, err
	}
	if err := unix.Bind(s.fd, &unix.SockaddrLinklayer{Ifindex: s.to.Ifindex}); err != nil {
		return nil, s.closeOnError(err)
	}
	var p ringParams
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&p)), 0)
	if errno != 0 {
		return nil, s.closeOnError(os.NewSyscallError("io_uring_setup", errno))
	}
	r := &ring{packetSender: s, fd: int(fd), completions: int(p.cq.cqes)}
	return r, s.closeOnError(r.mmap(p))
}

func (r *ring) mmap(p ringParams) (err error) {
	const protection, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED | unix.MAP_POPULATE
	if r.sq, err = unix.Mmap(r.fd, 0, int(p.sq.array+4*p.sqEntries), protection, flags); err != nil {
		return err
	}
	if r.cq, err = unix.Mmap(r.fd, ringOffsetCQ, int(p.cq.cqes+16*p.cqEntries), protection, flags); err != nil {
		return err
	}
	r.sqes, err = unix.Mmap(r.fd, ringOffsetSQEs, int(ringEntryBytes*p.sqEntries), protection, flags)
	r.sqTail = word(r.sq, p.sq.tail) // the only entry has the index 0 of the array, which is zero
	r.cqHead, r.cqTail = word(r.cq, p.cq.head), word(r.cq, p.cq.tail)
	return err
}

// word returns the 32-bit number at an offset of memory that the kernel shares.
func word(memory []byte, offset uint32) *uint32 { return (*uint32)(unsafe.Pointer(&memory[offset])) }

// Send implements Sender.
func (r *ring) Send(frame []byte) error {
	clear(r.sqes[:ringEntryBytes])
	r.sqes[0] = ringOpSend
	binary.NativeEndian.PutUint32(r.sqes[4:], uint32(r.packetSender.fd))
	binary.NativeEndian.PutUint64(r.sqes[16:], uint64(uintptr(unsafe.Pointer(&frame[0]))))
	binary.NativeEndian.PutUint32(r.sqes[24:], uint32(len(frame)))
	binary.NativeEndian.PutUint32(r.sqes[28:], unix.MSG_DONTWAIT)
	atomic.AddUint32(r.sqTail, 1)
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), 1, 1, ringEnterGetEvents, 0, 0)
	if errno != 0 {
		return os.NewSyscallError("io_uring_enter", errno)
	}
	if atomic.LoadUint32(r.cqTail) == atomic.LoadUint32(r.cqHead) {
		return errors.New("io_uring_enter returned without a completion")
	}
	const completionBytes, result = 16, 8
	entry := r.completions + int(*r.cqHead&1)*completionBytes // the ring of completions has two
	code := int32(binary.NativeEndian.Uint32(r.cq[entry+result:]))
	atomic.AddUint32(r.cqHead, 1)
	if code < 0 {
		return ignoreDrop(unix.Errno(-code))
	}
	return nil
}

// Close implements Sender.
func (r *ring) Close() error {
	return errors.Join(unix.Munmap(r.sq), unix.Munmap(r.cq), unix.Munmap(r.sqes), unix.Close(r.fd), r.packetSender.Close())
}

// xdpSender is an AF_XDP socket in copy mode. It does not have an XDP program, and only sends.
type xdpSender struct {
	fd         int
	frames     []byte // memory that the kernel reads frames from
	tx, done   []byte
	txOffset   unix.XDPRingOffset
	doneOffset unix.XDPRingOffset
	next       uint32
}

const (
	xdpEntries   = 64
	xdpFrameSize = 4096
)

// NewXDPSender returns a Sender that sends through an AF_XDP socket.
func NewXDPSender(ns *Namespace, link string) (Sender, error) {
	s := &xdpSender{fd: -1}
	err := ns.run(func() (err error) {
		nic, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		if s.fd, err = unix.Socket(unix.AF_XDP, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return fmt.Errorf("open an AF_XDP socket: %w", err)
		}
		if err := s.setUp(); err != nil {
			return err
		}
		return unix.Bind(s.fd, &unix.SockaddrXDP{Flags: unix.XDP_COPY, Ifindex: uint32(nic.Index)})
	})
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// setUp registers the memory of frames, and maps the rings.
func (s *xdpSender) setUp() (err error) {
	const protection = unix.PROT_READ | unix.PROT_WRITE
	s.frames, err = unix.Mmap(-1, 0, xdpEntries*xdpFrameSize, protection, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	memory := unix.XDPUmemReg{
		Addr: uint64(uintptr(unsafe.Pointer(&s.frames[0]))), Len: uint64(len(s.frames)), Size: xdpFrameSize,
	}
	if err := s.setOption(unix.XDP_UMEM_REG, unsafe.Pointer(&memory), unsafe.Sizeof(memory)); err != nil {
		return err
	}
	for _, option := range []int{unix.XDP_UMEM_FILL_RING, unix.XDP_UMEM_COMPLETION_RING, unix.XDP_TX_RING} {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_XDP, option, xdpEntries); err != nil {
			return err
		}
	}
	var offsets unix.XDPMmapOffsets
	size := uint32(unsafe.Sizeof(offsets))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(s.fd), unix.SOL_XDP, unix.XDP_MMAP_OFFSETS,
		uintptr(unsafe.Pointer(&offsets)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return os.NewSyscallError("getsockopt", errno)
	}
	s.txOffset, s.doneOffset = offsets.Tx, offsets.Cr
	const shared = unix.MAP_SHARED | unix.MAP_POPULATE
	s.tx, err = unix.Mmap(s.fd, unix.XDP_PGOFF_TX_RING, int(offsets.Tx.Desc)+xdpEntries*16, protection, shared)
	if err != nil {
		return err
	}
	length := int(offsets.Cr.Desc) + xdpEntries*8
	s.done, err = unix.Mmap(s.fd, unix.XDP_UMEM_PGOFF_COMPLETION_RING, length, protection, shared)
	return err
}

func (s *xdpSender) setOption(option int, value unsafe.Pointer, size uintptr) error {
	_, _, errno := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(s.fd), unix.SOL_XDP, uintptr(option),
		uintptr(value), size, 0)
	if errno != 0 {
		return os.NewSyscallError("setsockopt", errno)
	}
	return nil
}

// Send implements Sender.
func (s *xdpSender) Send(frame []byte) error {
	produced := word(s.done, uint32(s.doneOffset.Producer))
	if s.next-atomic.LoadUint32(produced) < xdpEntries { // otherwise all frames are on their way
		slot := s.next % xdpEntries
		copy(s.frames[slot*xdpFrameSize:], frame)
		descriptor := s.tx[uint32(s.txOffset.Desc)+slot*16:]
		binary.NativeEndian.PutUint64(descriptor, uint64(slot*xdpFrameSize))
		binary.NativeEndian.PutUint32(descriptor[8:], uint32(len(frame)))
		s.next++
		atomic.StoreUint32(word(s.tx, uint32(s.txOffset.Producer)), s.next)
		atomic.StoreUint32(word(s.done, uint32(s.doneOffset.Consumer)), atomic.LoadUint32(produced))
	}
	return ignoreDrop(unix.Sendto(s.fd, nil, unix.MSG_DONTWAIT, &unix.SockaddrXDP{}))
}

// Close implements Sender.
func (s *xdpSender) Close() (err error) {
	for _, memory := range [][]byte{s.tx, s.done} {
		if memory != nil {
			err = errors.Join(err, unix.Munmap(memory))
		}
	}
	if s.fd >= 0 {
		err = errors.Join(err, unix.Close(s.fd))
	}
	if s.frames != nil {
		err = errors.Join(err, unix.Munmap(s.frames))
	}
	return err
}

// SetSegmentation permits or forbids the kernel to pass packets to a link of this namespace that the
// link divides into segments.
func SetSegmentation(link string, allowed bool) error {
	const setTSO, setGSO = 0x1f, 0x24 // ETHTOOL_STSO and ETHTOOL_SGSO of linux/ethtool.h
	for _, command := range []uint32{setTSO, setGSO} {
		value := struct{ command, data uint32 }{command: command}
		if allowed {
			value.data = 1
		}
		if err := ethtool(link, unsafe.Pointer(&value)); err != nil {
			return err
		}
	}
	return nil
}

// SetTransmitQueues sets how many transmit queues a link of the current namespace uses, as "ethtool -L" does.
func SetTransmitQueues(link string, queues uint32) error {
	value := struct { // struct ethtool_channels
		command, maxRX, maxTX, maxOther, maxCombined, rx, tx, other, combined uint32
	}{command: unix.ETHTOOL_GCHANNELS}
	if err := ethtool(link, unsafe.Pointer(&value)); err != nil {
		return err
	}
	value.command, value.tx = unix.ETHTOOL_SCHANNELS, queues
	return ethtool(link, unsafe.Pointer(&value))
}

// ethtool passes a command of linux/ethtool.h to the driver of a link of the current namespace.
func ethtool(link string, command unsafe.Pointer) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	request := struct { // struct ifreq
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: command}
	copy(request.name[:], link)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		return os.NewSyscallError("ioctl", errno)
	}
	return nil
}
