// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/netdev/dhcp"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// The namespace opener needs each of the capabilities and mounts that the chart gives to its container.
func TestOpener_needsEachPrivilege(t *testing.T) {
	container := openerContainer(t)
	capabilities := submatches(container, `(?m)^ +- ([A-Z_]+) +#`)
	mounts := submatches(container, `\{name: ([a-z]+), mountPath:`)
	if len(capabilities) == 0 || !slices.Equal(mounts, []string{"opener", "run", "netns"}) {
		t.Fatalf("the chart gives the opener capabilities %v and mounts %v, want some, and one for each of its flags",
			capabilities, mounts)
	}
	o := newOpenerEnv(t)
	if err := o.openWith(t, capabilities, mounts); err != nil {
		t.Fatalf("with all privileges: %v", err)
	}
	for _, removed := range append(slices.Clone(capabilities), mounts...) {
		others := func(all []string) []string {
			return slices.DeleteFunc(slices.Clone(all), func(p string) bool { return p == removed })
		}
		err := o.openWith(t, others(capabilities), others(mounts))
		if err == nil {
			t.Errorf("without %s, the opener works: remove the privilege from the chart", removed)
			continue
		}
		t.Logf("without %s: %v", removed, err)
	}
}

// openerContainer returns the part of the chart that defines the opener.
func openerContainer(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile("../../deployments/helm/dra-driver-shared/templates/plugin.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, container, found := strings.Cut(string(raw), "- name: namespace-opener")
	container, _, ended := strings.Cut(container, "volumes:")
	if !found || !ended {
		t.Fatal("the chart has no container namespace-opener")
	}
	return container
}

func submatches(text, pattern string) (found []string) {
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		found = append(found, m[1])
	}
	return found
}

// openerEnv is a pod with a lease, and the program of the opener.
type openerEnv struct {
	dir, program string
	pod          *nstest.Namespace
	record       attach.Record
}

func newOpenerEnv(t *testing.T) openerEnv {
	t.Helper()
	dir, err := os.MkdirTemp("", "opn") // paths of sockets are short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	o := openerEnv{
		dir: dir, program: buildProgram(t, "dra-shared-hook"), pod: nstest.New(t),
		record: attach.Record{ClaimUID: "c", Share: "s", Payload: []byte(`{"dhcp": {}}`)},
	}
	cookie, err := o.pod.Socket.Cookie()
	if err == nil {
		o.record.Namespace, err = attach.NamespaceOf(o.pod.File, cookie)
	}
	if err != nil {
		t.Fatal(err)
	}
	// The first descriptor that the program inherits refers to the namespace.
	err = errors.Join(attach.OpenRecords(filepath.Join(dir, "run"), "boot", nil).Write(o.record),
		os.Mkdir(filepath.Join(dir, "netns"), 0o700), os.Symlink("/proc/self/fd/3", filepath.Join(dir, "netns/pod")),
		os.Mkdir(filepath.Join(dir, "opener"), 0o700))
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// openWith runs the opener with capabilities and mounts only, and uses the sockets that it opens.
func (o openerEnv) openWith(t *testing.T, capabilities, mounts []string) error {
	t.Helper()
	socket := filepath.Join(o.dir, "opener/o.sock")
	set := []string{"-all"}
	for _, c := range capabilities {
		set = append(set, "+"+strings.ToLower(c))
	}
	paths := map[string]string{}
	for _, m := range []string{"opener", "run", "netns"} {
		if paths[m] = filepath.Join(o.dir, m); !slices.Contains(mounts, m) {
			paths[m] = filepath.Join(o.dir, "missing", m)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	opener := exec.CommandContext(ctx, "setpriv", "--bounding-set", strings.Join(set, ","), o.program,
		attach.OpenerCommand, "--socket="+filepath.Join(paths["opener"], "o.sock"), "--namespaces="+paths["netns"],
		"--run-dir="+paths["run"])
	opener.ExtraFiles = []*os.File{o.pod.File}
	var output strings.Builder
	opener.Stderr = &output
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if err := opener.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = opener.Wait() // it is killed, or says why it has failed
		close(ended)
	}()
	err := eventually.Poll(ctx, 10*time.Second, func() error {
		select {
		case <-ended:
			return nil
		default:
			_, err := os.Stat(socket)
			return err
		}
	})
	if err != nil {
		t.Fatalf("the opener neither listens nor ends: %v", err)
	}
	if err := o.use(ctx, socket); err != nil {
		cancel()
		<-ended
		return errors.Join(err, errors.New(strings.TrimSpace(output.String())))
	}
	return nil
}

// use does what a renewal does: it adds an address and sends a frame.
func (o openerEnv) use(ctx context.Context, socket string) error {
	sockets, err := attach.OpenIn(ctx, socket, o.record)
	if err != nil {
		return err
	}
	defer sockets.Close()
	const loopback = 1
	request := nl.NewNetlinkRequest(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	message := nl.NewIfAddrmsg(unix.AF_INET)
	message.Index, message.Prefixlen = loopback, 32
	request.AddData(message)
	request.AddData(nl.NewRtAttr(unix.IFA_LOCAL, []byte{127, 0, 0, 9}))
	fd, err := unix.FcntlInt(sockets.Netlink.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	conn, err := rtnl.New(os.NewFile(uintptr(fd), "rtnetlink"))
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.Do(request); err != nil {
		return err
	}
	packet, err := dhcp.NewConn(sockets.Packet, loopback)
	if err != nil {
		return err
	}
	defer packet.Close()
	return packet.Announce(net.HardwareAddr{2, 0, 0, 0, 0, 1}, netip.MustParseAddr("127.0.0.9"))
}
