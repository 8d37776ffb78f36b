// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/attach"
)

// The kernel reuses the inode of a network namespace that has ended, and never its cookie.
func TestInSandbox_comparesInodeAndCookie(t *testing.T) {
	namespace, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer namespace.Close()
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	socket := os.NewFile(uintptr(fd), "rtnetlink")
	defer socket.Close()
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		t.Fatal(err)
	}
	own, err := attach.NamespaceOf(namespace, cookie)
	if err != nil {
		t.Fatal(err)
	}
	own.NSID = 7
	for name, tc := range map[string]struct {
		namespace attach.Namespace
		want      bool
	}{
		"the same namespace":                          {own, true},
		"an earlier namespace that had the inode":     {attach.Namespace{Inode: own.Inode, Cookie: own.Cookie + 1}, false},
		"another namespace that exists, by its inode": {attach.Namespace{Inode: own.Inode + 1, Cookie: own.Cookie}, false},
	} {
		sandbox := Sandbox{Sockets: attach.Sockets{Namespace: namespace, Netlink: socket}}
		same, err := inSandbox(attach.Record{Namespace: tc.namespace}, sandbox)
		if err != nil || same != tc.want {
			t.Errorf("%s: inSandbox returned %t and error %v, want %t", name, same, err, tc.want)
		}
	}
}
