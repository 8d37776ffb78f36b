// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

// envControlPlane is the directory of a control plane of test/cluster with the objects of whereabouts; see
// addresses.sh.
const envControlPlane = "BENCH_CONTROL_PLANE"

// whereaboutsUser is the user that whereabouts.kubeconfig names.
const whereaboutsUser = "system:serviceaccount:kube-system:whereabouts"

// controlPlane is an API server with etcd, in its own network namespace.
type controlPlane struct {
	directory string
	audit     *bufio.Reader // the audit log, read up to the requests in counted
	counted   requests
}

// requests are numbers of requests to an API server.
type requests struct{ reads, writes int }

func (r *requests) add(other requests) {
	r.reads, r.writes = r.reads+other.reads, r.writes+other.writes
}

func (r requests) minus(other requests) requests {
	return requests{reads: r.reads - other.reads, writes: r.writes - other.writes}
}

// newControlPlane connects the namespace of the benchmark with the control plane.
func newControlPlane(b *testing.B, directory string) *controlPlane {
	b.Helper()
	c := &controlPlane{directory: directory}
	if err := c.connect(b); err != nil {
		b.Fatalf("connect to the control plane in %s: %v", directory, err)
	}
	audit, err := os.Open(c.path("logs", "audit.log"))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = audit.Close() })
	c.audit = bufio.NewReader(audit)
	return c
}

func (c *controlPlane) path(elem ...string) string {
	return filepath.Join(append([]string{c.directory}, elem...)...)
}

// connect creates a link to the bridge of the control plane, as a node of test/cluster has one.
func (c *controlPlane) connect(b *testing.B) error {
	const address = "192.168.77.200/24" // the nodes have the first addresses
	pid, err := os.ReadFile(c.path("init.pid"))
	if err != nil {
		return err
	}
	number, err := strconv.Atoi(strings.TrimSpace(string(pid)))
	if err != nil {
		return err
	}
	namespace, err := netns.GetFromPid(number)
	if err != nil {
		return err
	}
	defer namespace.Close()
	h, err := netlink.NewHandleAt(namespace)
	if err != nil {
		return err
	}
	b.Cleanup(h.Close)
	link, err := addPort(h, "m-bench", nstest.Current(b))
	if err != nil {
		return err
	}
	b.Cleanup(func() {
		if err := h.LinkDel(link); err != nil {
			b.Error(err)
		}
	})
	return nstest.ConfigureLink(managementLink, address)
}

// managementLink is the name of the bridge of the control plane, and of a node's link to it.
const managementLink = "node0"

// addPort adds a port to the bridge of the control plane. h works in the control plane's namespace. The port's other
// end is in peer.
func addPort(h *netlink.Handle, name string, peer *nstest.Namespace) (netlink.Link, error) {
	bridge, err := h.LinkByName(managementLink)
	if err != nil {
		return nil, err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex = name, bridge.Attrs().Index
	link := &netlink.Veth{LinkAttrs: attrs, PeerName: managementLink, PeerNamespace: netlink.NsFd(peer.File.Fd())}
	if err := h.LinkAdd(link); err != nil {
		return nil, fmt.Errorf("create %s: %w", name, err)
	}
	return link, h.LinkSetUp(link)
}

// count returns the requests of whereabouts since the start of the control plane. The API server writes its audit log
// before it ends a response.
func (c *controlPlane) count(b *testing.B) requests {
	b.Helper()
	for {
		line, err := c.audit.ReadBytes('\n')
		if errors.Is(err, io.EOF) && len(line) == 0 {
			return c.counted
		}
		if err != nil {
			b.Fatalf("read the audit log: %v", err)
		}
		if err := c.counted.addEvent(line); err != nil {
			b.Fatalf("read the audit log: %v", err)
		}
	}
}

// addEvent counts the request of an event of the audit log, if it is one of whereabouts.
func (r *requests) addEvent(line []byte) error {
	var event struct {
		Verb, Stage string
		User        struct{ Username string }
	}
	if err := json.Unmarshal(line, &event); err != nil {
		return err
	}
	if event.User.Username != whereaboutsUser || event.Stage != "ResponseComplete" {
		return nil
	}
	switch event.Verb {
	case "get", "list", "watch":
		r.reads++
	default:
		r.writes++
	}
	return nil
}

// allocated returns the number of addresses in all IPPools.
func (c *controlPlane) allocated(b *testing.B) int {
	b.Helper()
	out, err := exec.Command(c.path("kubectl"), "get", "ippools.whereabouts.cni.cncf.io", "-A", "-o", "json").Output()
	if err != nil {
		b.Fatalf("list the IPPools: %v", err)
	}
	var pools struct {
		Items []struct {
			Spec struct{ Allocations map[string]any }
		}
	}
	if err := json.Unmarshal(out, &pools); err != nil {
		b.Fatalf("list the IPPools: %v", err)
	}
	count := 0
	for _, pool := range pools.Items {
		count += len(pool.Spec.Allocations)
	}
	return count
}

func TestRequests_countsRequestsOfWhereabouts(t *testing.T) {
	var r requests
	for _, line := range []string{
		`{"stage": "ResponseComplete", "verb": "get", "user": {"username": "` + whereaboutsUser + `"}}`,
		`{"stage": "ResponseComplete", "verb": "list", "user": {"username": "` + whereaboutsUser + `"}}`,
		`{"stage": "ResponseComplete", "verb": "patch", "user": {"username": "` + whereaboutsUser + `"}}`,
		`{"stage": "ResponseStarted", "verb": "watch", "user": {"username": "` + whereaboutsUser + `"}}`,
		`{"stage": "ResponseComplete", "verb": "update", "user": {"username": "system:serviceaccount:default:other"}}`,
	} {
		if err := r.addEvent([]byte(line)); err != nil {
			t.Fatal(err)
		}
	}
	if want := (requests{reads: 2, writes: 1}); r != want {
		t.Errorf("requests: got %+v, want %+v", r, want)
	}
}
