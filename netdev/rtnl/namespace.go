// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

func nativeUint32(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

// Attributes of namespace messages, from linux/net_namespace.h.
const (
	netnsaNSID = 1
	netnsaFD   = 3
)

// NamespaceID returns the ID of the network namespace ns in the socket's namespace, and assigns one if ns does not have
// one. An ID is valid until the namespace that it identifies ends; then the kernel may reuse it.
func (c *Conn) NamespaceID(ns *os.File) (int, error) {
	id, err := c.namespaceID(ns)
	if err != nil || id >= 0 {
		return id, err
	}
	// The kernel answers with the ID that it has chosen, because of NLM_F_ECHO.
	set := nl.NewNetlinkRequest(unix.RTM_NEWNSID, unix.NLM_F_ECHO|unix.NLM_F_ACK)
	set.AddData(&rtgenmsg{})
	set.AddData(nl.NewRtAttr(netnsaFD, nl.Uint32Attr(uint32(ns.Fd()))))
	set.AddData(nl.NewRtAttr(netnsaNSID, nl.Uint32Attr(^uint32(0)))) // the kernel chooses the ID
	messages, err := c.Get(set)
	if err != nil {
		return 0, fmt.Errorf("assign ID to network namespace: %w", err)
	}
	for _, m := range messages {
		if id, ok := NamespaceIDOf(m.Data); ok {
			return id, nil
		}
	}
	return c.namespaceID(ns)
}

// namespaceID returns the ID of a network namespace, or -1 if it has none.
func (c *Conn) namespaceID(ns *os.File) (int, error) {
	get := nl.NewNetlinkRequest(unix.RTM_GETNSID, 0)
	get.AddData(&rtgenmsg{})
	get.AddData(nl.NewRtAttr(netnsaFD, nl.Uint32Attr(uint32(ns.Fd()))))
	messages, err := c.Get(get)
	if err != nil {
		return 0, fmt.Errorf("read ID of network namespace: %w", err)
	}
	for _, m := range messages {
		if id, ok := NamespaceIDOf(m.Data); ok {
			return id, nil
		}
	}
	return -1, nil
}

// OwnNamespaceID returns the ID of the socket's namespace in itself, and assigns one if it does not have one. By this
// ID, the kernel reports that the parent of a link in another namespace belongs to the socket's namespace. It is valid
// until the namespace ends.
func (c *Conn) OwnNamespaceID() (int, error) {
	fd, err := unix.IoctlRetInt(c.fd, unix.SIOCGSKNS)
	if err != nil {
		return 0, fmt.Errorf("open the network namespace of the socket: %w: is CAP_NET_ADMIN missing?", err)
	}
	ns := os.NewFile(uintptr(fd), "netns")
	id, err := c.NamespaceID(ns)
	return id, errors.Join(err, ns.Close())
}

// NamespaceExists reports whether an ID in the socket's namespace identifies a network
// namespace. It needs Linux 5.0.
func (c *Conn) NamespaceExists(id int) (bool, error) {
	get := nl.NewNetlinkRequest(unix.RTM_GETNSID, 0)
	get.AddData(&rtgenmsg{})
	get.AddData(nl.NewRtAttr(netnsaNSID, nl.Uint32Attr(uint32(id))))
	switch _, err := c.Get(get); {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.ENOENT):
		return false, nil
	default:
		return false, fmt.Errorf("look up network namespace %d: %w", id, err)
	}
}

const (
	// completeDump is a number of IDs that fit into the smallest buffer that the kernel
	// uses for a dump.
	completeDump = 128
	// largestGap is the number of consecutive unused IDs that make NamespaceIDs assume that no more IDs are in use. The
	// kernel assigns the lowest free ID.
	largestGap = 1024
)

// NamespaceIDs returns the IDs of all network namespaces that have an ID in the
// socket's namespace. If there may be more than one dump lists, it looks up each following
// ID.
func (c *Conn) NamespaceIDs() ([]int, error) {
	ids, err := c.ListNamespaceIDs()
	if err != nil || len(ids) < completeDump {
		return ids, err
	}
	last := slices.Max(ids)
	for id := last + 1; id <= last+largestGap; id++ {
		exists, err := c.NamespaceExists(id)
		if err != nil {
			return nil, err
		}
		if exists {
			ids, last = append(ids, id), id
		}
	}
	return ids, nil
}

// ListNamespaceIDs returns the result of one dump: IDs of network namespaces in the socket's
// namespace. An ID that is missing may still be in use, because Linux 6.18 ends the dump after the
// first message (docs/dev/limits.md). NamespaceExists returns the correct answer for one ID.
func (c *Conn) ListNamespaceIDs() ([]int, error) {
	dump := nl.NewNetlinkRequest(unix.RTM_GETNSID, unix.NLM_F_DUMP)
	dump.AddData(&rtgenmsg{})
	ids, err := Collect(c, dump, func(payload []byte) (int, bool) {
		id, ok := NamespaceIDOf(payload)
		return id, ok && id >= 0
	})
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	return ids, nil
}

// NamespaceIDOf returns the namespace ID in the payload of an RTM_NEWNSID or
// RTM_DELNSID message. ok is false if the payload has none.
func NamespaceIDOf(payload []byte) (id int, ok bool) {
	if len(payload) < (&rtgenmsg{}).Len() {
		return 0, false
	}
	value := Attribute(payload[(&rtgenmsg{}).Len():], netnsaNSID)
	if len(value) < 4 {
		return 0, false
	}
	return int(int32(nativeUint32(value))), true
}

// rtgenmsg is struct rtgenmsg of linux/rtnetlink.h, with padding.
type rtgenmsg struct{}

// Len implements nl.NetlinkRequestData.
func (*rtgenmsg) Len() int { return 4 }

// Serialize implements nl.NetlinkRequestData.
func (*rtgenmsg) Serialize() []byte { return make([]byte, 4) }
