// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// listener receives the frames of a link.
type listener struct {
	t  *testing.T
	fd int
}

// listen starts to receive what arrives at a link of a namespace.
func listen(t *testing.T, ns *nstest.Namespace, link string) listener {
	t.Helper()
	return listenFor(t, ns, link, unix.ETH_P_ALL)
}

// listenFor starts to receive the frames of a protocol. A socket for all protocols sees a frame before macvlans take
// it.
func listenFor(t *testing.T, ns *nstest.Namespace, link string, protocol uint16) listener {
	t.Helper()
	l := listener{t: t}
	ns.Do(func() error {
		index, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		network := protocol<<8 | protocol>>8 // in the order of the network
		if l.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(network)); err != nil {
			return err
		}
		return unix.Bind(l.fd, &unix.SockaddrLinklayer{Protocol: network, Ifindex: index.Index})
	})
	t.Cleanup(func() { _ = unix.Close(l.fd) })
	return l
}

// marker ends each frame of an attack, to find it at the other end.
func marker(number int) []byte { return fmt.Appendf(nil, "attack %08d", number) }

// saw reports whether a frame with a marker arrives within a time.
func (l listener) saw(mark []byte, patience time.Duration) bool {
	return l.receive(mark, patience) != nil
}

// receive returns a frame with a marker that arrives within a time, or nil.
func (l listener) receive(mark []byte, patience time.Duration) []byte {
	l.t.Helper()
	return l.find(patience, func(frame []byte) bool { return bytes.Contains(frame, mark) })
}

// find returns the first frame with a property that arrives within a time, or nil.
func (l listener) find(patience time.Duration, has func(frame []byte) bool) []byte {
	l.t.Helper()
	deadline, buffer := time.Now().Add(patience), make([]byte, 2048)
	for time.Now().Before(deadline) {
		left := unix.NsecToTimeval(max(time.Until(deadline), time.Millisecond).Nanoseconds())
		if err := unix.SetsockoptTimeval(l.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &left); err != nil {
			l.t.Fatal(err)
		}
		n, from, err := unix.Recvfrom(l.fd, buffer, 0)
		if err != nil {
			continue
		}
		if sender, ok := from.(*unix.SockaddrLinklayer); ok && sender.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if has(buffer[:n]) {
			return buffer[:n]
		}
	}
	return nil
}

// sendRaw sends a frame through a link, as a pod with CAP_NET_RAW can.
func sendRaw(ns *nstest.Namespace, link string, frame []byte) {
	ns.Do(func() error {
		index, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		err = unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: index.Index})
		if errors.Is(err, unix.ENOBUFS) { // the program dropped the frame
			return nil
		}
		return err
	})
}
