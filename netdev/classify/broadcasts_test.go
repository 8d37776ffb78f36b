// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"encoding/binary"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// Parameters of a macvlan; see linux/if_link.h.
const (
	queueLength   = 7
	cutoff        = 9
	defaultCutoff = 1
)

// setParameter sets a parameter of a macvlan in the pod, as ip link set type macvlan does.
func (p *pod) setParameter(name string, parameter int, value int32) {
	p.Do(func() error {
		link, err := net.InterfaceByName(name)
		if err != nil {
			return err
		}
		request := nl.NewNetlinkRequest(unix.RTM_NEWLINK, 0)
		message := nl.NewIfInfomsg(unix.AF_UNSPEC)
		message.Index = int32(link.Index)
		request.AddData(message)
		info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
		info.AddRtAttr(nl.IFLA_INFO_KIND, nl.ZeroTerminated("macvlan"))
		info.AddRtAttr(nl.IFLA_INFO_DATA, nil).AddRtAttr(parameter, nl.Uint32Attr(uint32(value)))
		request.AddData(info)
		conn, err := rtnl.Open()
		if err != nil {
			return err
		}
		return errors.Join(conn.Do(request), conn.Close())
	})
}

// cutoff returns how many links at most get a multicast frame without the queue. All links of a NIC share the value.
// The kernel reports it only if it is not the default.
func (p *pod) cutoff() (value int32) {
	value = defaultCutoff
	p.Do(func() error {
		link, err := net.InterfaceByName("net1")
		if err != nil {
			return err
		}
		request := nl.NewNetlinkRequest(unix.RTM_GETLINK, 0)
		message := nl.NewIfInfomsg(unix.AF_UNSPEC)
		message.Index = int32(link.Index)
		request.AddData(message)
		messages, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
		if err != nil {
			return err
		}
		attrs := messages[0][unix.SizeofIfInfomsg:]
		for _, nested := range []uint16{unix.IFLA_LINKINFO, nl.IFLA_INFO_DATA, cutoff} {
			if attrs = attributeOf(attrs, nested); attrs == nil {
				return nil
			}
		}
		value = int32(binary.NativeEndian.Uint32(attrs))
		return nil
	})
	return value
}

// attributeOf returns the value of an attribute; nil if it is missing.
func attributeOf(payload []byte, kind uint16) []byte {
	attrs, err := nl.ParseRouteAttr(payload)
	if err != nil {
		return nil
	}
	for _, a := range attrs {
		if a.Attr.Type&nl.NLA_TYPE_MASK == kind {
			return a.Value
		}
	}
	return nil
}

// The longest queue that a link requests applies to the broadcasts for all links of the NIC. The node cannot
// change it, but blocks the pod's link.
func TestAttack_broadcastQueue(t *testing.T) {
	for name, further := range map[string]bool{"net1": false, "more": true} {
		t.Run(name, func(t *testing.T) {
			e := newTestEnv(t, enforced())
			attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
			if further {
				attacker.Do(func() error {
					net1, err := netlink.LinkByName("net1")
					if err != nil {
						return err
					}
					attrs := netlink.NewLinkAttrs()
					attrs.Name, attrs.ParentIndex = name, net1.Attrs().Index
					return netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE})
				})
			}
			blocked := func(p *pod) string {
				state, err := e.node.ReadAndBlock(p.attachment)
				if err != nil {
					t.Fatal(err)
				}
				return state.Blocked
			}
			for _, allowed := range []int32{10, 1000} {
				attacker.setParameter(name, queueLength, allowed)
				if text := blocked(attacker); text != "" {
					t.Errorf("a link with a queue of %d frames is blocked: %s", allowed, text)
				}
			}
			attacker.setParameter(name, queueLength, 1_000_000)
			text := blocked(attacker)
			if !strings.Contains(text, "queue of "+name) || !strings.Contains(text, "1000000 frames") {
				t.Errorf("Blocked is %q after the pod requested a longer queue", text)
			}
			if text := blocked(victim); text != "" {
				t.Errorf("the link of another pod is blocked: %s", text)
			}
			if e.inspect(false) {
				t.Error("the NIC is guarded, although no pod can receive other pods' frames")
			}
			attacker.setParameter(name, queueLength, 1000)
			if text := blocked(attacker); text != "" {
				t.Errorf("Blocked is %q after the pod reverted the change", text)
			}
		})
	}
}

// The cutoff applies to all links of the NIC: beyond it, the kernel delivers multicast to all of them before it
// handles the next frame. The node resets it.
func TestAttack_broadcastCutoff(t *testing.T) {
	e := newTestEnv(t, enforced())
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	attacker.setParameter("net1", cutoff, 1000)
	if victim.cutoff() == defaultCutoff {
		t.Skip("the kernel has no cutoff")
	}
	for _, value := range []int32{1000, -1} {
		attacker.setParameter("net1", cutoff, value)
		if err := e.node.UpdateBlocking(attacker.attachment); err != nil {
			t.Fatal(err)
		}
		if got := victim.cutoff(); got != defaultCutoff {
			t.Errorf("the cutoff is %d after the pod set it to %d", got, value)
		}
	}
	state, err := e.node.ReadAndBlock(victim.attachment)
	if err != nil || state.Blocked != "" {
		t.Errorf("Read returned %+v and error %v, want a link that is not blocked", state, err)
	}
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if l.Type() == "macvlan" {
			t.Errorf("the link %s remains on the node", l.Attrs().Name)
		}
	}
	mark := marker(1)
	link := listen(t, victim.Namespace, "net1")
	sendRaw(e.wire, "wire", append(classify.EtherTo(broadcast, e.wireMAC(), 0x88b5), mark...))
	if !link.saw(mark, time.Second) {
		t.Error("a broadcast does not arrive")
	}
}
