// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package rtnl_test

import (
	"reflect"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// FuzzAppendMessages compares the parser with that of package syscall.
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
