// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if a, err = net.DialUnix(network, nil, &net.UnixAddr{Name: path, Net: network}); err != nil {
		t.Fatal(err)
	}
	if b, err = listener.AcceptUnix(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close(); _ = b.Close() })
	return a, b
}

func open(t *testing.T, n int) (files []*os.File) {
	t.Helper()
	for range n {
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		files = append(files, f)
	}
	return files
}

func request() Request {
	return Request{
		Version:   ProtocolVersion,
		ClaimUID:  "c",
		Share:     "s",
		Pod:       Pod{UID: "u", Namespace: "n", Name: "p"},
		SandboxID: "x",
	}
}

func TestReceive_returnsMessageAndDescriptors(t *testing.T) {
	a, b := pair(t)
	if err := send(a, request(), open(t, 2)...); err != nil {
		t.Fatal(err)
	}
	var got Request
	files, err := receive(b, &got, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(files)
	if diff := cmp.Diff(request(), got); diff != "" || len(files) != 2 {
		t.Errorf("%d descriptors, request (-want +got):\n%s", len(files), diff)
	}
}

func TestReceive_refusesWrongNumberOfDescriptors(t *testing.T) {
	before := descriptors(t)
	for _, n := range []int{0, 1, 3, 10} {
		a, b := pair(t)
		if err := send(a, request(), open(t, n)...); err != nil {
			t.Fatal(err)
		}
		var got Request
		if files, err := receive(b, &got, 2); err == nil {
			t.Errorf("%d descriptors were accepted: %v", n, files)
		}
	}
	// What the test itself holds: two ends of a pair, and the files it sent.
	if after, own := descriptors(t), 4*2+0+1+3+10; after-before > own {
		t.Errorf("%d descriptors more than before, the test has %d", after-before, own)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestReceive_refusesLongMessages(t *testing.T) {
	a, b := pair(t)
	if _, _, err := a.WriteMsgUnix(make([]byte, maxMessage+1), nil, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := receive(b, &Request{}, 0); err == nil || !strings.Contains(err.Error(), "longer than allowed") {
		t.Errorf("got %v", err)
	}
	if err := send(a, Request{Share: strings.Repeat("x", maxMessage)}); err == nil {
		t.Error("it was sent")
	}
}

type handler func(Request) (Response, error)

func (h handler) Attach(_ context.Context, r Request, _ Sockets) (Response, error) { return h(r) }

func (h handler) Refused(_ context.Context, r Request) { _, _ = h(r) }

func serve(t *testing.T, h handler) (dir string) {
	t.Helper()
	return listen(t, h)
}

func listen(t *testing.T, h Handler) (dir string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "att")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s, err := Listen(dir, "1", h)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestListen_restrictsDirectoryToRoot(t *testing.T) {
	dir := serve(t, nil)
	info, err := os.Stat(SocketDir(dir))
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v %v", info.Mode(), err)
	}
}

func TestServer_refusesNonNamespaceDescriptors(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the server speaks with root only: run as root")
	}
	dir := serve(t, func(Request) (Response, error) { return Response{}, errors.New("must not be asked") })
	other, err := os.Open("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for _, f := range []*os.File{open(t, 1)[0], other} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		r, err := roundTrip(ctx, filepath.Join(SocketDir(dir), "1.sock"), request(), f, f)
		if err != nil || r.Error != "the first descriptor does not refer to a network namespace" {
			t.Errorf("%s: %+v, %v", f.Name(), r, err)
		}
	}
}

func TestRequest_validate_refusesMissingFields(t *testing.T) {
	for name, change := range map[string]func(*Request){
		"version":       func(r *Request) { r.Version = 2 },
		"claimUID":      func(r *Request) { r.ClaimUID = "" },
		"pod.namespace": func(r *Request) { r.Pod.Namespace = strings.Repeat("x", 300) },
	} {
		r := request()
		change(&r)
		if err := r.validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRecords_findByNamespace(t *testing.T) {
	dir := t.TempDir()
	s := OpenRecords(dir, "boot", nil)
	one := Record{
		Version:   RecordVersion,
		BootID:    "boot",
		ClaimUID:  "c",
		Share:     "s",
		Namespace: Namespace{Inode: 1, Cookie: 10, NSID: 3},
		Payload:   []byte(`{"parent":0,"index":2,"name":"net1","mac":"02:00:00:00:00:01","mtu":0}`),
	}
	two := one
	two.Namespace = Namespace{Inode: 1, Cookie: 11} // an inode that was used again
	for _, r := range []Record{one, two, one} {
		if err := s.Write(r); err != nil {
			t.Fatal(err)
		}
	}
	got, err := s.Read("c", "s", Namespace{Inode: 1, Cookie: 10})
	if diff := cmp.Diff(one, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if _, err := s.Read("c", "s", Namespace{Inode: 2, Cookie: 10}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("another inode: %v", err)
	}
	if got, err := OpenRecords(dir, "another boot", nil).List(); err != nil || len(got) > 0 {
		t.Errorf("after a reboot: %v, %v", got, err)
	}
	for _, r := range []Record{one, one, two} {
		if err := s.Remove(r); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := os.ReadDir(s.dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v %v", left, err)
	}
}

func TestRecords_List_withUnreadableRecords(t *testing.T) {
	s := OpenRecords(t.TempDir(), "boot", nil)
	good := Record{ClaimUID: "good", Share: "s", Namespace: Namespace{Cookie: 1}}
	if err := s.Write(good); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"a": "{", "b": `{"version": 99}`} {
		if err := os.WriteFile(filepath.Join(s.dir, name+".json"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	records, err := s.List()
	if len(records) != 1 || err == nil || !strings.Contains(err.Error(), "it has version 99, this plugin reads up to 1") ||
		!strings.Contains(err.Error(), "a.json") {
		t.Errorf("%v, %v", records, err)
	}
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"version": 1, "claimUID": "c", "share": "s", "namespace": {"cookie": 1}}`))
	f.Add([]byte(`{"version": 1}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		r, err := decodeRecord(raw)
		if err == nil && (r.ClaimUID == "" || r.Share == "" || r.Namespace.Cookie == 0) {
			t.Errorf("%s: an incomplete record was accepted: %+v", raw, r)
		}
	})
}

// No argument of the hook leads out of the directory.
func FuzzRecordPath(f *testing.F) {
	f.Add("claim", "share", uint64(1))
	f.Add("../../etc", "a/b", uint64(0))
	f.Add(".", "", ^uint64(0))
	f.Fuzz(func(t *testing.T, claim, share string, cookie uint64) {
		s := &Records{dir: "/dir"}
		path := s.path(claim, share, Namespace{Cookie: cookie})
		if rel, err := filepath.Rel("/dir", path); err != nil || strings.HasPrefix(rel, "..") ||
			strings.Count(rel, "/") != 0 {
			t.Errorf("%q %q: %s", claim, share, path)
		}
	})
}

func TestHook_request(t *testing.T) {
	containerd := map[string]string{
		"io.kubernetes.cri.sandbox-id": "box", "io.kubernetes.cri.sandbox-uid": "uid",
		"io.kubernetes.cri.sandbox-name": "pod", "io.kubernetes.cri.sandbox-namespace": "ns",
	}
	crio := map[string]string{
		"io.kubernetes.cri-o.SandboxID": "box", "io.kubernetes.pod.uid": "uid",
		"io.kubernetes.pod.name": "pod", "io.kubernetes.pod.namespace": "ns",
	}
	with := func(annotations map[string]string, more ...string) map[string]string {
		annotations = maps.Clone(annotations)
		for i := 0; i < len(more); i += 2 {
			annotations[more[i]] = more[i+1]
		}
		return annotations
	}
	want := Pod{UID: "uid", Namespace: "ns", Name: "pod"}
	for _, tc := range []struct {
		name        string
		annotations map[string]string
		err         string // part of the error; empty means that the request names the pod
	}{
		{"containerd", containerd, ""},
		{"CRI-O", crio, ""},
		{"CRI-O, the user sets containerd's pod UID",
			with(crio, "io.kubernetes.cri.sandbox-uid", "other"), ""},
		{"containerd, the user sets CRI-O's pod UID", with(containerd, "io.kubernetes.pod.uid", "other"), ""},
		{"CRI-O, the user sets all of containerd's annotations",
			with(crio, "io.kubernetes.cri.sandbox-id", "box", "io.kubernetes.cri.sandbox-uid", "other"), "two runtimes"},
		{"containerd, the user sets all of CRI-O's annotations",
			with(containerd, "io.kubernetes.cri-o.SandboxID", "box", "io.kubernetes.pod.uid", "other"), "two runtimes"},
		{"another runtime", map[string]string{"io.kubernetes.pod.uid": "uid"}, "is the runtime containerd or CRI-O?"},
		{"no pod UID", map[string]string{"io.kubernetes.cri-o.SandboxID": "box"}, "request field pod."},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := Hook{ClaimUID: "c", Share: "s"}.request(state{Annotations: tc.annotations})
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Fatalf("error: got %v, want one that contains %q", err, tc.err)
				}
				return
			}
			if err != nil || got.Pod != want || got.SandboxID != "box" {
				t.Errorf("request: got %+v, %v, want pod %+v in sandbox box", got, err, want)
			}
		})
	}
}

// The plugin learns why the hook refuses a container, because crun does not report
// what a hook prints.
func TestHook_refuse_reportsToPlugin(t *testing.T) {
	requests := make(chan Request, 1)
	dir := serve(t, func(r Request) (Response, error) {
		requests <- r
		return Response{}, nil
	})
	reason := errors.New("the pod uses the node's network")
	if err := (Hook{RunDir: dir}).refuse(t.Context(), request(), reason); !errors.Is(err, reason) {
		t.Errorf("error of the hook: got %v, want %v", err, reason)
	}
	want := request()
	want.Refusal = reason.Error()
	if diff := cmp.Diff(want, <-requests); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
}

// An error that the API server caused may be io.EOF, and may be long.
func TestServer_answersWithEachError(t *testing.T) {
	long := strings.Repeat("\u00e9\"<", maxMessage)
	for name, failure := range map[string]error{
		"end of file": fmt.Errorf("list the AddressPools: %w", io.EOF),
		"long":        errors.New("x" + long), // with two-byte characters at odd positions
	} {
		t.Run(name, func(t *testing.T) {
			dir := serve(t, func(Request) (Response, error) { return Response{}, failure })
			namespace, err := os.Open("/proc/self/ns/net")
			if err != nil {
				t.Fatal(err)
			}
			defer namespace.Close()
			sockets, err := Hook{RunDir: dir}.sockets()
			if err != nil {
				t.Fatal(err)
			}
			response, err := roundTrip(t.Context(), sockets[0], request(), namespace, namespace)
			want := min(len(failure.Error()), maxError)
			if err != nil || len(response.Error) < want-1 || !strings.HasPrefix(failure.Error(), response.Error) {
				t.Errorf("got error %q (%v), want the start of %.30q", response.Error, err, failure)
			}
		})
	}
}

// Requests for one claim, which wait for each other, must leave room for other claims' requests.
func TestServer_limitsRequestsOfClaim(t *testing.T) {
	blocked := make(chan struct{})
	dir := serve(t, func(r Request) (Response, error) {
		if r.ClaimUID == "busy" {
			<-blocked
		}
		return Response{}, nil
	})
	namespace, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer namespace.Close()
	ask := func(claim string) (Response, error) {
		r := request()
		r.ClaimUID = claim
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		return roundTrip(ctx, socketPath(dir, "1"), r, namespace, namespace)
	}
	answers := make(chan Response, 2*maxConnections)
	var group sync.WaitGroup
	for range cap(answers) {
		group.Go(func() {
			response, err := ask("busy")
			if err != nil {
				t.Error(err)
			}
			answers <- response
		})
	}
	for range cap(answers) - maxConnectionsOfClaim {
		if response := <-answers; !response.Retry || response.Error == "" {
			t.Fatalf("got %+v, want one that makes the hook ask again", response)
		}
	}
	if response, err := ask("calm"); err != nil || response.Error != "" {
		t.Errorf("another claim: got %+v and error %v", response, err)
	}
	close(blocked)
	group.Wait()
	for range maxConnectionsOfClaim {
		if response := <-answers; response.Error != "" {
			t.Errorf("got %+v, want success", response)
		}
	}
	if response, err := ask("busy"); err != nil || response.Error != "" {
		t.Errorf("after the requests: got %+v and error %v", response, err)
	}
}

// The hook asks again if the plugin is about to repair the cause of its error.
func TestHook_attach_retriesTemporaryError(t *testing.T) {
	namespace, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer namespace.Close()
	missing := errors.New("the queues are missing")
	for name, tc := range map[string]struct {
		retry bool
		fails int // how many attempts
		want  string
	}{
		"a temporary error that ends":           {retry: true, fails: 3},
		"a temporary error that does not end":   {retry: true, fails: 1000, want: missing.Error()},
		"an error that trying again cannot end": {fails: 1, want: missing.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			asked := 0
			dir := serve(t, func(Request) (Response, error) {
				if asked++; asked > tc.fails {
					return Response{}, nil
				}
				return Response{Retry: tc.retry}, missing
			})
			err := Hook{RunDir: dir, Wait: time.Second}.attach(t.Context(), request(), namespace, namespace)
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || err.Error() != tc.want) {
				t.Errorf("ask returned %v, want %q", err, tc.want)
			}
		})
	}
}

func TestHook_refuse_withoutPlugin(t *testing.T) {
	reason := errors.New("the pod uses the node's network")
	err := (Hook{RunDir: t.TempDir()}).refuse(t.Context(), request(), reason)
	if !errors.Is(err, reason) || !strings.Contains(err.Error(), "the hook could not report this to the plugin") {
		t.Errorf("error of the hook without a plugin: %v", err)
	}
}

// The runtime provides the state, and users provide its annotations.
func FuzzHookState(f *testing.F) {
	f.Add(
		[]byte(
			`{"pid": 1, "bundle": "/b", "annotations": {"io.kubernetes.cri.sandbox-id": "i", ` +
				`"io.kubernetes.cri.sandbox-uid": "u", "io.kubernetes.cri.sandbox-name": "n", ` +
				`"io.kubernetes.cri.sandbox-namespace": "s"}}`,
		),
	)
	f.Add([]byte(`{"pid": -1}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var s state
		if json.Unmarshal(raw, &s) != nil {
			return
		}
		r, err := Hook{ClaimUID: "c", Share: "s"}.request(s)
		if err == nil && r.validate() != nil {
			t.Errorf("%s: an invalid request %+v", raw, r)
		}
		s.Pid = 0 // never the namespace of a process of this machine
		if _, err := podNamespace(s); err == nil {
			t.Error("pid 0 was accepted")
		}
	})
}

func FuzzRequest(f *testing.F) {
	raw, err := json.Marshal(request())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Fuzz(func(t *testing.T, raw []byte) {
		if len(raw) == 0 || len(raw) > maxMessage {
			return
		}
		a, b := pair(t)
		if _, _, err := a.WriteMsgUnix(raw, nil, nil); err != nil {
			t.Fatal(err)
		}
		var r Request
		if _, err := receive(b, &r, 0); err == nil {
			_ = r.validate()
		}
	})
}

type answering struct{}

func (answering) Attach(context.Context, Request, Sockets) (Response, error) {
	return Response{}, nil
}

func (answering) Refused(context.Context, Request) {}

// The hook tries the newest socket first, by the time of the file. A change of the
// clock affects only the order.
func TestHook_reachesPluginAfterClockChanges(t *testing.T) {
	dir := t.TempDir()
	server, err := Listen(dir, "alive", answering{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(ctx) }()
	dead, err := net.ListenUnix(network, &net.UnixAddr{Name: filepath.Join(SocketDir(dir), "dead.sock"), Net: network})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	_ = dead.Close()
	for _, jump := range []time.Duration{-100 * 365 * 24 * time.Hour, 100 * 365 * 24 * time.Hour} {
		then := time.Now().Add(jump)
		if err := os.Chtimes(filepath.Join(SocketDir(dir), "dead.sock"), then, then); err != nil {
			t.Fatal(err)
		}
		namespace, err := os.Open("/proc/self/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		if err := (Hook{RunDir: dir, Wait: time.Second}).attach(ctx, request(), namespace, namespace); err != nil {
			t.Errorf("after a jump of %s: %v", jump, err)
		}
		_ = namespace.Close()
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
