package rtnl

import (
	"encoding/binary"
	"fmt"
	"os"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

func nativeUint32(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

// Namespace attributes, linux/net_namespace.h.
const (
	netnsaNSID = 1
	netnsaFD   = 3
)

// NamespaceID returns the ID by which the socket's namespace knows the one
// that ns refers to, giving it one if it has none. IDs live as long as the
// namespace they stand for.
func (c *Conn) NamespaceID(ns *os.File) (int, error) {
	if id, err := c.namespaceID(ns); err != nil || id >= 0 {
		return id, err
	}
	set := nl.NewNetlinkRequest(unix.RTM_NEWNSID, 0)
	set.AddData(&rtgenmsg{})
	set.AddData(nl.NewRtAttr(netnsaFD, nl.Uint32Attr(uint32(ns.Fd()))))
	set.AddData(nl.NewRtAttr(netnsaNSID, nl.Uint32Attr(^uint32(0)))) // the kernel chooses
	if err := c.Do(set); err != nil {
		return 0, fmt.Errorf("give the network namespace an ID: %w", err)
	}
	return c.namespaceID(ns)
}

func (c *Conn) namespaceID(ns *os.File) (int, error) {
	get := nl.NewNetlinkRequest(unix.RTM_GETNSID, 0)
	get.AddData(&rtgenmsg{})
	get.AddData(nl.NewRtAttr(netnsaFD, nl.Uint32Attr(uint32(ns.Fd()))))
	messages, err := c.Get(get)
	if err != nil {
		return 0, fmt.Errorf("ID of the network namespace: %w", err)
	}
	for _, m := range messages {
		if id, ok := NamespaceIDOf(m.Data); ok {
			return id, nil
		}
	}
	return -1, nil
}

// NamespaceIDs returns the IDs of all namespaces that have one here.
func (c *Conn) NamespaceIDs() ([]int, error) {
	dump := nl.NewNetlinkRequest(unix.RTM_GETNSID, unix.NLM_F_DUMP)
	dump.AddData(&rtgenmsg{})
	messages, err := c.Dump(dump)
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	var ids []int
	for _, m := range messages {
		if id, ok := NamespaceIDOf(m.Data); ok && id >= 0 {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// NamespaceIDOf reads the ID that an RTM_NEWNSID or RTM_DELNSID message is about.
func NamespaceIDOf(payload []byte) (int, bool) {
	if len(payload) < (&rtgenmsg{}).Len() {
		return 0, false
	}
	attrs, err := nl.ParseRouteAttr(payload[(&rtgenmsg{}).Len():])
	if err != nil {
		return 0, false
	}
	for _, a := range attrs {
		if a.Attr.Type == netnsaNSID && len(a.Value) >= 4 {
			return int(int32(nativeUint32(a.Value))), true
		}
	}
	return 0, false
}

// rtgenmsg is struct rtgenmsg of linux/rtnetlink.h, padded.
type rtgenmsg struct{}

// Len implements nl.NetlinkRequestData.
func (*rtgenmsg) Len() int { return 4 }

// Serialize implements nl.NetlinkRequestData.
func (*rtgenmsg) Serialize() []byte { return make([]byte, 4) }
