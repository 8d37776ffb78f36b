// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package rtnl

import (
	"bytes"
	"iter"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Attributes returns the attributes in b (struct nlattr of linux/netlink.h): their types without flags, and their
// values, which share the memory of b. They end at the first attribute with an invalid length. Unlike
// nl.ParseRouteAttr, it allocates nothing: the plugin lists the links of all pods of a NIC again and again.
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		native := nl.NativeEndian()
		for len(b) >= unix.SizeofRtAttr {
			size := int(native.Uint16(b))
			if size < unix.SizeofRtAttr || size > len(b) {
				return
			}
			if !yield(native.Uint16(b[2:])&nl.NLA_TYPE_MASK, b[unix.SizeofRtAttr:size]) {
				return
			}
			b = b[min(len(b), (size+unix.RTA_ALIGNTO-1)&^(unix.RTA_ALIGNTO-1)):]
		}
	}
}

// Attribute returns the value of the first attribute of a type in b, which shares the memory of b; nil if there is
// none.
func Attribute(b []byte, attrType uint16) []byte {
	for t, value := range Attributes(b) {
		if t == attrType {
			return value
		}
	}
	return nil
}

// AttributeText returns the value of the first attribute of a type in b as text, which a zero byte may end; "" if there
// is none. Unlike nl.BytesToString, it accepts text without a zero byte.
func AttributeText(b []byte, attrType uint16) string {
	text, _, _ := bytes.Cut(Attribute(b, attrType), []byte{0})
	return string(text)
}
