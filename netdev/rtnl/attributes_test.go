// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package rtnl_test

import (
	"bytes"
	"testing"

	"github.com/vishvananda/netlink/nl"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// FuzzAttributes compares the parser with the parser in package nl.
func FuzzAttributes(f *testing.F) {
	nested := nl.NewRtAttr(18|1<<15, nil) // NLA_F_NESTED
	nested.AddRtAttr(1, []byte("macvlan\x00"))
	for _, seed := range [][]byte{
		nil, {4}, {4, 0, 1, 0}, {5, 0, 1, 0, 7}, {3, 0, 1, 0}, {0xff, 0xff, 1, 0},
		append(nl.NewRtAttr(1, []byte{1, 2, 3}).Serialize(), nested.Serialize()...),
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		want, err := nl.ParseRouteAttr(pad(b))
		n := 0
		for attrType, value := range rtnl.Attributes(pad(b)) {
			switch {
			case n < len(want) && (attrType != want[n].Attr.Type&nl.NLA_TYPE_MASK || !bytes.Equal(value, want[n].Value)):
				t.Errorf("%x: attribute %d: got type %d and value %x, package nl has %v", b, n, attrType, value, want[n])
			case n >= len(want) && err == nil:
				t.Errorf("%x: got type %d and value %x, package nl has %d attributes", b, attrType, value, len(want))
			}
			n++
		}
		if n < len(want) {
			t.Errorf("%x: got %d attributes, package nl has %d", b, n, len(want))
		}
	})
}

// pad adds zeros to a multiple of four bytes: package nl panics if the last attribute is not padded.
func pad(b []byte) []byte { return append(bytes.Clone(b), make([]byte, -len(b)&3)...) }

func TestAttribute(t *testing.T) {
	b := append(nl.NewRtAttr(1, []byte("one")).Serialize(), nl.NewRtAttr(2, []byte("two")).Serialize()...)
	if got := string(rtnl.Attribute(b, 2)); got != "two" {
		t.Errorf("got %q, want the value of the attribute of type 2", got)
	}
	if got := rtnl.Attribute(b, 3); got != nil {
		t.Errorf("got %q for a type that is missing, want nil", got)
	}
	allocated := testing.AllocsPerRun(100, func() { rtnl.Attribute(b, 3) })
	if allocated != 0 {
		t.Errorf("got %v allocations, want none", allocated)
	}
}

func TestAttributeText(t *testing.T) {
	b := append(nl.NewRtAttr(1, []byte("macvlan\x00")).Serialize(), nl.NewRtAttr(2, []byte("macvtap")).Serialize()...)
	for attrType, want := range map[uint16]string{1: "macvlan", 2: "macvtap", 3: ""} {
		if got := rtnl.AttributeText(b, attrType); got != want {
			t.Errorf("type %d: got %q, want %q", attrType, got, want)
		}
	}
}
