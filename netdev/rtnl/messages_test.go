// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package rtnl_test

import (
	"encoding/binary"
	"reflect"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// FuzzAppendMessages compares the parser with the parser in package syscall.
func FuzzAppendMessages(f *testing.F) {
	message := make([]byte, 22)
	message[0], message[4], message[8] = 21, unix.RTM_NEWNEIGH, 7
	for _, seed := range [][]byte{
		nil, message[:unix.SizeofNlMsghdr-1], message, append(message, 0, 0),
		append(append([]byte{}, append(message, 0, 0)...), message...),
		make([]byte, unix.SizeofNlMsghdr), {0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := rtnl.AppendMessages(nil, b)
		want, wantErr := syscall.ParseNetlinkMessage(b)
		if (err != nil) != (wantErr != nil) {
			t.Fatalf("%x: got error %v, package syscall has %v", b, err, wantErr)
		}
		if err == nil && !reflect.DeepEqual(got, want) {
			t.Errorf("%x: got %v, want %v", b, got, want)
		}
	})
}

// The kernel may name the attribute that it refuses without giving a message.
func TestParseError_withoutMessage(t *testing.T) {
	refusal := make([]byte, 4+unix.SizeofNlMsghdr)
	binary.NativeEndian.PutUint32(refusal, ^uint32(unix.EINVAL)+1) // -EINVAL
	data := append(refusal, nl.NewRtAttr(unix.NLMSGERR_ATTR_OFFS, nl.Uint32Attr(20)).Serialize()...)
	err := rtnl.ParseError(syscall.NetlinkMessage{
		Header: syscall.NlMsghdr{Type: unix.NLMSG_ERROR, Flags: unix.NLM_F_ACK_TLVS | unix.NLM_F_CAPPED}, Data: data,
	})
	if err == nil || err.Errno != unix.EINVAL || err.Message != "" {
		t.Errorf("got error %v, want EINVAL without a message", err)
	}
}
