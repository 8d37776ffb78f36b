// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// handlerOfSockets is a Handler that examines the descriptors.
type handlerOfSockets func(Request, Sockets) (Response, error)

func (h handlerOfSockets) Attach(_ context.Context, r Request, s Sockets) (Response, error) {
	return h(r, s)
}

func (handlerOfSockets) Refused(context.Context, Request) {}

// The hook opens a packet socket only for a plugin that asks for it.
func TestHook_opensPacketSocketOnRequest(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the hook enters namespaces: run as root")
	}
	for _, needed := range []bool{false, true} {
		var calls atomic.Int32
		dir := listen(t, handlerOfSockets(func(r Request, s Sockets) (Response, error) {
			calls.Add(1)
			switch {
			case needed && s.Packet == nil:
				return Response{}, fmt.Errorf("lease an address: %w", ErrPacketNeeded)
			case r.Packet != needed:
				return Response{}, errors.New("the request has a packet socket")
			case needed:
				domain, err := unix.GetsockoptInt(int(s.Packet.Fd()), unix.SOL_SOCKET, unix.SO_DOMAIN)
				if err != nil || domain != unix.AF_PACKET {
					return Response{}, errors.New("the third descriptor is not a packet socket")
				}
			}
			return Response{}, nil
		}))
		namespace, err := os.Open("/proc/self/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		defer namespace.Close()
		hook := Hook{RunDir: dir, Wait: 5 * time.Second}
		if err := hook.attach(t.Context(), request(), namespace, namespace); err != nil {
			t.Errorf("needed %t: %v", needed, err)
		}
		if got, want := calls.Load(), map[bool]int32{false: 1, true: 2}[needed]; got != want {
			t.Errorf("needed %t: the hook asked %d times, want %d", needed, got, want)
		}
	}
}

// A hook of an earlier release does not know Response.Packet: it reports the error.
func TestHook_earlierRelease_reportsMissingPacketSocket(t *testing.T) {
	raw, err := json.Marshal(Response{Version: ProtocolVersion, Error: "reason", Packet: true})
	if err != nil {
		t.Fatal(err)
	}
	var earlier struct {
		Error string `json:"error"`
		Retry bool   `json:"retry"`
	}
	if err := json.Unmarshal(raw, &earlier); err != nil || earlier.Error != "reason" || earlier.Retry {
		t.Errorf("got %+v and error %v, want the reason as final", earlier, err)
	}
}

// opener runs an Opener that finds this process's namespace, and returns the record of an attachment
// in it.
func opener(t *testing.T) (o Opener, record Record) {
	t.Helper()
	dir, err := os.MkdirTemp("", "opn")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	o = Opener{Socket: filepath.Join(dir, "o.sock"), Namespaces: filepath.Join(dir, "netns"), RunDir: dir}
	if err := os.Mkdir(o.Namespaces, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/proc/self/ns/net", filepath.Join(o.Namespaces, "pod")); err != nil {
		t.Fatal(err)
	}
	namespace, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer namespace.Close()
	socket, err := openNetlink()
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	record = Record{ClaimUID: "c", Share: "s", Payload: []byte(`{"dhcp": {}}`)}
	if record.Namespace, err = identifyNamespace(namespace, socket); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- o.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	eventually.Eventually(t, 10*time.Second, "the opener listens", func() error {
		conn, err := net.Dial(network, o.Socket) // the file exists before a connection is possible
		if err == nil {
			err = conn.Close()
		}
		return err
	})
	return o, record
}

func TestOpener(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the opener enters namespaces: run as root")
	}
	for name, tc := range map[string]struct {
		change func(*Record)
		want   string // of the error, or ""
	}{
		"link with a lease":    {change: func(*Record) {}},
		"link without a lease": {func(r *Record) { r.Payload = []byte(`{}`) }, "has no lease"},
		"another namespace":    {func(r *Record) { r.Namespace.Cookie++ }, "belongs to another pod"},
		"ended namespace":      {func(r *Record) { r.Namespace.Inode = 1 }, "has no namespace 1: has the pod ended"},
	} {
		t.Run(name, func(t *testing.T) {
			o, record := opener(t)
			tc.change(&record)
			if err := OpenRecords(o.RunDir, "boot", nil).Write(record); err != nil {
				t.Fatal(err)
			}
			sockets, err := OpenIn(t.Context(), o.Socket, record)
			if err == nil {
				defer sockets.Close()
			}
			if tc.want != "" {
				if err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("got error %v, want %q", err, tc.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for file, want := range map[*os.File]int{sockets.Netlink: unix.AF_NETLINK, sockets.Packet: unix.AF_PACKET} {
				domain, err := unix.GetsockoptInt(int(file.Fd()), unix.SOL_SOCKET, unix.SO_DOMAIN)
				if err != nil || domain != want {
					t.Errorf("got a socket of domain %d and error %v, want %d", domain, err, want)
				}
			}
		})
	}
}

// A request in progress has sockets in the namespace of a pod, so the opener closes them before it ends.
func TestOpener_Serve_waitsForRequestsInProgress(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the opener serves root only")
	}
	o, record := opener(t)
	o.Socket += "2"
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- o.Serve(ctx) }()
	var silent net.Conn // sends no request
	eventually.Eventually(t, 10*time.Second, "the opener listens", func() (err error) {
		silent, err = net.Dial(network, o.Socket)
		return err
	})
	defer func() { _ = silent.Close() }()
	// The opener accepts connections in order, so it has accepted the silent one when it answers this one.
	_, err := OpenIn(t.Context(), o.Socket, record)
	if err == nil || !strings.Contains(err.Error(), "open sockets in the pod") {
		t.Fatalf("got error %v, want an answer that refuses the request", err)
	}
	cancel()
	select {
	case err := <-ended:
		t.Fatalf("the opener ended before the request, with error %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	if err := silent.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the opener has not ended after the request")
	}
}

// Without a record of the attachment, the opener opens nothing: a record exists only while the plugin
// serves the pod.
func TestOpener_refusesUnknownAttachment(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the opener enters namespaces: run as root")
	}
	o, record := opener(t)
	if sockets, err := OpenIn(t.Context(), o.Socket, record); err == nil {
		sockets.Close()
		t.Error("it has opened sockets in a namespace without an attachment record")
	}
}

// The opener runs for months. A thread that stays in the namespace of an ended pod keeps its links.
func TestRunIn_leavesNoThreadInNamespace(t *testing.T) {
	namespace, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer namespace.Close()
	first := 0
	for range 500 {
		err := runIn(namespace, func() error {
			if unix.Gettid() == unix.Getpid() {
				first++
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if first > 0 {
		t.Errorf("the function ran %d times on the first thread of the process, which does not end", first)
	}
}
