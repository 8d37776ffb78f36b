// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package crash tests the node plugin under faults: plugins that are killed before and after each failpoint, hundreds
// of pods at the same time, full disks, corrupt files, and an API server that fails. The test takes the roles of the
// kubelet, the container runtime, and the API server. Links, queues, and BPF programs are real, in a private network
// namespace.
package crash

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/attach/install"
	"github.com/dra-shared/dra-driver-shared/device/fabricpool"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/fabric"
	"github.com/dra-shared/dra-driver-shared/driver/lock"
	"github.com/dra-shared/dra-driver-shared/driver/nic"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint/failpointtest"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint/httpfailpoint"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/classify/trial"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
	"github.com/dra-shared/dra-driver-shared/test/fakeapi"
)

const (
	driverName = "dra-shared.dev"
	nodeName   = "n1"
	namespace  = "default"
	deviceName = "nic0"
	timeout    = 30 * time.Second
)

// Sandboxes never run on the first thread, because its namespaces count as the process's namespaces.
func init() { runtime.LockOSThread() }

func TestMain(m *testing.M) {
	if raw := os.Getenv(pluginVariable); raw != "" {
		if err := runPlugin(raw); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	nstest.Main(m, nstest.Root)
}

// pluginVariable is an environment variable that makes the test binary run a
// plugin. Its value is a pluginConfig as JSON.
const pluginVariable = "CRASH_TEST_PLUGIN"

type pluginConfig struct {
	Node, Dir, BPFFS, URL, Instance string
	// Key and AttachPoint, if not empty, are the way to classify frames that passed earlier
	// trials on this node. Otherwise the plugin runs the trials.
	Key         classify.Key
	AttachPoint classify.AttachPoint
	BootIDFile  string
	// Interfaces of the configured network; the default is nic0.
	Interfaces string
	// Network is the name of the configured network; the default is storage.
	Network string
	// Enforcement of the configured network; the default is Shape.
	Enforcement string
	// Bandwidth of the configured network; the default is 10G.
	Bandwidth string
	// Kill is the point where the plugin kills itself.
	Kill failpointtest.Point
	// Fail are operations that fail.
	Fail []string
	// KillLog, if not empty, is a file that the plugin appends the point to just before it kills itself.
	KillLog string
	// Production makes the plugin collect memory and garbage as in production.
	Production bool
	// Program, if not empty, is the path of the plugin's program, which runs instead of the test binary. Of the
	// other fields, it uses Node, Dir, BPFFS, URL, Instance, Interfaces, and Bandwidth.
	Program string
	// Record, if not empty, is a file that the plugin appends each failpoint to.
	Record string
	// Profiles are the profiles that the plugin writes.
	Profiles profiles
	// Opener, if not empty, is the socket of an opener: all links lease addresses.
	Opener string
	// Pools makes the plugin assign addresses of AddressPools.
	Pools bool
	// AddressWait is how long an attach waits for other nodes to return addresses; the default
	// comes from ipam.
	AddressWait time.Duration
	// OrphanGrace is how long orphans stay before they are removed; the default is 100 ms.
	OrphanGrace time.Duration
	// Faults, if not 0, makes one in so many operations fail once the plugin has started, half of them after
	// their effect.
	Faults int
}

func runPlugin(raw string) error {
	var c pluginConfig
	if err := json.Unmarshal([]byte(raw), &c); err != nil {
		return err
	}
	c.Profiles.run()
	var started atomic.Bool
	p, err := newPlugin(c, c.injector(&started))
	if err != nil {
		return err
	}
	defer p.node.Close()
	wait, err := p.Start(context.Background())
	if err != nil {
		return err
	}
	started.Store(true)
	return wait()
}

// plugin is a driver and the network of its node.
type plugin struct {
	*driver.Driver
	node *netdev.Node
}

func newPlugin(c pluginConfig, failpoints failpoint.Injector) (*plugin, error) {
	restConfig := &rest.Config{
		Host: c.URL, QPS: 1000, Burst: 1000, UserAgent: userAgent(c.Node), WrapTransport: httpfailpoint.Transport(failpoints),
	}
	client, err := kubernetes.NewForConfig(restConfig)
	if err != nil {
		return nil, err
	}
	o := netdev.Options{BPFFS: c.BPFFS, Failpoints: failpoints}
	if c.Key != "" {
		o.Trials = []trial.Result{{Key: c.Key, AttachPoint: c.AttachPoint}}
	}
	node, err := netdev.NewNode(o)
	if err != nil {
		return nil, err
	}
	driverConfig, err := config.Load([]byte(c.driverConfig()))
	if err != nil {
		return nil, err
	}
	hook := filepath.Join(c.Dir, "hook")
	source := filepath.Join(c.Dir, "hook-source")
	if err := os.WriteFile(source, []byte("#!/bin/sh\n"), 0o600); err != nil {
		return nil, err
	}
	installation, err := install.New(source, hook, "", failpoints)
	if err != nil {
		return nil, err
	}
	orphanGrace := cmp.Or(c.OrphanGrace, 100*time.Millisecond)
	if c.Production {
		orphanGrace = 0 // the default
	}
	nicOptions := nic.Options{
		Node: node, Inventory: netdev.NewInventory("/sys"), Config: driverConfig,
		StateFile: filepath.Join(c.Dir, "run/nics.json"), Failpoints: failpoints,
	}
	if c.Opener != "" {
		nicOptions.OpenSockets = func(ctx context.Context, r attach.Record) (attach.Sockets, error) {
			return attach.OpenIn(ctx, c.Opener, r)
		}
	}
	if c.Pools {
		if nicOptions.AddressPools, err = addressPoolOptions(c, restConfig, failpoints); err != nil {
			return nil, err
		}
	}
	nics, err := nic.New(nicOptions)
	if err != nil {
		return nil, err
	}
	d, err := driver.New(driver.Options{
		DriverName: driverName, NodeName: c.Node, Client: client, Instance: c.Instance, RollingUpdate: true,
		Kinds:     []driver.Kind{nics, fabric.New(driverConfig, c.Node)},
		PluginDir: filepath.Join(c.Dir, "plugin"), RegistryDir: filepath.Join(c.Dir, "registry"),
		CDIDir: filepath.Join(c.Dir, "cdi"), RunDir: filepath.Join(c.Dir, "run"),
		Installation: installation, BootIDFile: c.BootIDFile, Failpoints: failpoints,
		OrphanGrace: orphanGrace,
	})
	return &plugin{Driver: d, node: node}, err
}

// driverConfig returns the plugin's DriverConfig.
func (c pluginConfig) driverConfig() string {
	return `
apiVersion: config.dra-shared.dev/v1alpha1
kind: DriverConfig
networks:
- name: ` + cmp.Or(c.Network, "storage") + `
  interfaces: [` + cmp.Or(c.Interfaces, "nic0") + `]
  bandwidth: ` + cmp.Or(c.Bandwidth, "10G") + `
  shares: 3000
  enforcement: ` + cmp.Or(c.Enforcement, "Shape") + `
  allow: {modes: [Private, Bridge], subnets: [10.0.0.0/8], dhcp: [IPv4]}` + dhcpDefault(c) + `
fabrics:
- {name: rack1, nodeSelector: {rack: "1"}}`
}

// addressPoolOptions returns the options of the allocator of the addresses of pools, as the program of the plugin does.
func addressPoolOptions(
	c pluginConfig, restConfig *rest.Config, failpoints failpoint.Injector,
) (*ipam.Options, error) {
	api, err := ipam.NewAPI(restConfig)
	if err != nil {
		return nil, err
	}
	locks, err := lock.Open(filepath.Join(c.Dir, "run/locks"))
	if err != nil {
		return nil, err
	}
	return &ipam.Options{
		Node: c.Node, Instance: c.Instance, API: api, Locks: locks, Failpoints: failpoints,
		Wait:           c.AddressWait,
		NodeLabels:     func(context.Context) (map[string]string, error) { return nil, nil },
		LastPluginFile: filepath.Join(c.Dir, "run/addresses-holder"),
	}, nil
}

// dhcpDefault makes all links of the network lease addresses, if c says so.
func dhcpDefault(c pluginConfig) string {
	if c.Opener == "" {
		return ""
	}
	return "\n  dhcp: [IPv4]"
}

// userAgent identifies the plugin of a node in requests to the API server.
func userAgent(node string) string { return "plugin-on-" + node }

// injector records failpoints, lets them fail, and kills the process as c says.
func (c pluginConfig) injector(started *atomic.Bool) failpoint.Injector {
	k := &failpointtest.Killer{Point: c.Kill, Kill: func(operation string) error {
		appendLine(c.KillLog, killLogLine(c.Kill, operation))
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		select {}
	}}
	if c.Record != "" {
		k.Record = func(operation string, n int) { appendLine(c.Record, fmt.Sprintf("%s#%d", operation, n)) }
	}
	return func(name string, operation func() error) error {
		if slices.Contains(c.Fail, name) {
			operation = func() error { return errInjected }
		} else if c.Faults > 0 && started.Load() && rand.N(c.Faults) == 0 {
			operation = failing(operation)
		}
		return k.Inject(name, operation)
	}
}

// failing returns an operation that fails, with or without the effect of another.
func failing(operation func() error) func() error {
	if rand.N(2) == 0 {
		return func() error { return errInjected }
	}
	return func() error { return errors.Join(operation(), errInjected) }
}

// killLogLine is the line that a plugin writes before it kills itself.
func killLogLine(p failpointtest.Point, operation string) string {
	if p.After {
		return "after " + operation
	}
	return "before " + operation
}

// appendLine appends a line to a file. It ends the plugin if that fails, because
// the test would check an incomplete file.
func appendLine(file, line string) {
	if file == "" {
		return
	}
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err == nil {
		_, err = fmt.Fprintln(f, line)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		panic(err)
	}
}

// testEnv is a node with one NIC of 10 Gbit/s, its API server, and the plugin
// process that currently runs.
type testEnv struct {
	t     testing.TB
	api   *fakeapi.Server
	node  string // its name
	nic   string // the name of its NIC, and of the device
	dir   string
	bpffs string
	wire  *nstest.Namespace // the network of the NIC

	instance int // number of plugins started
	config   pluginConfig
	plugin   *process
	kubelet  *grpc.ClientConn // see connect
	pods     []*sandbox       // see longLivedPods
	way      trial.Result     // see pluginConfig.Key
}

// process is a plugin process.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed after cmd.Wait has returned
}

func newTestEnv(t testing.TB) *testEnv {
	t.Helper()
	return newNode(t, newAPI(t, nodeName), nodeName, deviceName)
}

// newAPI starts an API server with nodes.
func newAPI(t testing.TB, names ...string) *fakeapi.Server {
	t.Helper()
	if err := nstest.ConfigureLink("lo"); err != nil { // carries the requests to the API server
		t.Fatal(err)
	}
	var nodes []apiruntime.Object
	for _, name := range names {
		nodes = append(nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("node-" + name)}})
	}
	api := fakeapi.New(nodes...)
	t.Cleanup(api.Close)
	return api
}

// newNode creates a node with a NIC. All nodes of a test are in one network namespace.
func newNode(t testing.TB, api *fakeapi.Server, name, nic string) *testEnv {
	t.Helper()
	_, wire := nstest.NIC(t, nic, 9000)
	// The path of a socket has at most 107 characters, so t.TempDir() is too long.
	dir, err := os.MkdirTemp("", "dra")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	// A kill does not lose written data, so synchronous writes to a disk would only cost time.
	mountTmpfs(t, dir, "")
	for _, d := range []string{"plugin", "registry", "cdi", "run", "hook"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	e := &testEnv{t: t, node: name, nic: nic, dir: dir, wire: wire, bpffs: nstest.MountBPFFS(t), api: api}
	t.Cleanup(e.kill)
	return e
}

// mountTmpfs mounts a tmpfs on dir until the test ends.
func mountTmpfs(t testing.TB, dir, options string) {
	t.Helper()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Fatalf("mount a tmpfs on %s: %v", dir, err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}

// path returns a path below the node's directory.
func (e *testEnv) path(elements ...string) string {
	return filepath.Join(append([]string{e.dir}, elements...)...)
}

// strongest returns the strongest way to classify frames that works here.
func (e *testEnv) strongest() trial.Result {
	e.t.Helper()
	results, err := trial.Run(e.bpffs, nil, classify.Keys()...)
	if err != nil {
		e.t.Fatal(err)
	}
	way, err := trial.Strongest(results)
	if err != nil {
		e.t.Fatal(err)
	}
	return way
}

// start starts a plugin process under a new instance name, as a pod that
// replaces another, and waits until it serves or was killed.
func (e *testEnv) start(change func(*pluginConfig)) {
	e.t.Helper()
	e.instance++
	c := pluginConfig{
		Node: e.node, Dir: e.dir, BPFFS: e.bpffs, URL: e.api.URL, Instance: fmt.Sprintf("plugin-%d", e.instance),
		Interfaces: e.nic, Key: e.way.Key, AttachPoint: e.way.AttachPoint,
	}
	if change != nil {
		change(&c)
	}
	raw, err := json.Marshal(c)
	if err != nil {
		e.t.Fatal(err)
	}
	log, err := os.OpenFile(e.path("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		e.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), pluginVariable+"="+string(raw))
	if c.Program != "" {
		cmd = e.program(c)
	}
	if !c.Production {
		// The process is short-lived: it does not need garbage collection of its memory.
		cmd.Env = append(cmd.Env, "GOGC=off", "GOMEMLIMIT=256MiB")
	}
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		e.t.Fatalf("start plugin %s: %v", c.Instance, err)
	}
	e.config, e.plugin = c, &process{cmd: cmd, exited: make(chan struct{})}
	go func(p *process) {
		_ = p.cmd.Wait() // running checks the status
		close(p.exited)
	}(e.plugin)
	e.eventually("plugin "+c.Instance+" serves the kubelet and hooks, or was killed", func() error {
		if !e.running() {
			return nil
		}
		conn, err := net.Dial("unix", e.socket()) // the file exists before the plugin listens
		if err == nil {
			err = conn.Close()
		}
		return errors.Join(err, attach.Ping(e.path("run"), c.Instance))
	})
}

// socket returns the path of the socket that the plugin serves the kubelet on.
func (e *testEnv) socket() string {
	return e.path("plugin", "dra-"+e.config.Instance+".sock")
}

// running reports whether the plugin runs. It fails the test if the plugin has ended
// without being killed.
func (e *testEnv) running() bool {
	e.t.Helper()
	select {
	case <-e.plugin.exited:
	default:
		return true
	}
	state := e.plugin.cmd.ProcessState
	if status, ok := state.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		e.t.Fatalf("plugin %s ended without being killed: %s\n%s", e.config.Instance, state, e.logTail())
	}
	return false
}

// kill kills the plugin, if one runs.
func (e *testEnv) kill() {
	if e.plugin == nil {
		return
	}
	_ = e.plugin.cmd.Process.Kill() // it may have ended already
	<-e.plugin.exited
	e.plugin = nil
}

// retry repeats f until it succeeds, as the kubelet and the container runtime
// do, and starts a plugin when the last one was killed.
func (e *testEnv) retry(condition string, f func(context.Context) error) {
	e.t.Helper()
	e.eventually(condition, func() error {
		if e.plugin == nil || !e.running() {
			e.start(nil)
		}
		ctx, cancel := context.WithTimeout(e.t.Context(), 10*time.Second)
		defer cancel()
		return f(ctx)
	})
}

// eventually waits until check returns nil. On a timeout the test fails with the
// end of the plugin's log.
func (e *testEnv) eventually(condition string, check func() error) {
	e.t.Helper()
	if err := eventually.Poll(context.Background(), timeout, check); err != nil {
		e.t.Fatalf("condition not met: %s: %v\n%s", condition, err, e.logTail())
	}
}

func (e *testEnv) logTail() string {
	raw, err := os.ReadFile(e.path("log"))
	if err != nil {
		return fmt.Sprintf("the plugin's log is not readable: %v", err)
	}
	return "the plugin's log ends with\n" + string(raw[max(0, len(raw)-4000):])
}

// dra calls the plugin as the kubelet does. A plugin may have been killed since the last call, so each call has a
// separate connection, unless connect was called.
func (e *testEnv) dra(call func(drapb.DRAPluginClient) error) error {
	if e.kubelet != nil {
		return call(drapb.NewDRAPluginClient(e.kubelet))
	}
	conn, err := grpc.NewClient("unix://"+e.socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	return call(drapb.NewDRAPluginClient(conn))
}

// connect makes the next calls use one connection, as the kubelet does while a plugin runs.
func (e *testEnv) connect() {
	e.t.Helper()
	conn, err := grpc.NewClient("unix://"+e.socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		e.t.Fatal(err)
	}
	e.kubelet = conn
	e.t.Cleanup(func() { _ = conn.Close() })
}

func references(claims []*resourceapi.ResourceClaim) (refs []*drapb.Claim) {
	for _, c := range claims {
		refs = append(refs, &drapb.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)})
	}
	return refs
}

// prepare calls NodePrepareResources and joins the errors of the claims.
func (e *testEnv) prepare(ctx context.Context, claims ...*resourceapi.ResourceClaim) error {
	request := &drapb.NodePrepareResourcesRequest{Claims: references(claims)}
	return e.dra(func(plugin drapb.DRAPluginClient) error {
		response, err := plugin.NodePrepareResources(ctx, request)
		if err == nil && len(response.Claims) != len(claims) {
			err = fmt.Errorf("NodePrepareResources returned %d results for %d claims", len(response.Claims), len(claims))
		}
		for uid, result := range response.GetClaims() {
			if result.Error != "" {
				err = errors.Join(err, fmt.Errorf("prepare claim %s: %s", uid, result.Error))
			}
		}
		return err
	})
}

// unprepare calls NodeUnprepareResources and joins the errors of the claims.
func (e *testEnv) unprepare(ctx context.Context, claims ...*resourceapi.ResourceClaim) error {
	request := &drapb.NodeUnprepareResourcesRequest{Claims: references(claims)}
	return e.dra(func(plugin drapb.DRAPluginClient) error {
		response, err := plugin.NodeUnprepareResources(ctx, request)
		if err == nil && len(response.Claims) != len(claims) {
			err = fmt.Errorf("NodeUnprepareResources returned %d results for %d claims", len(response.Claims), len(claims))
		}
		for uid, result := range response.GetClaims() {
			if result.Error != "" {
				err = errors.Join(err, fmt.Errorf("unprepare claim %s: %s", uid, result.Error))
			}
		}
		return err
	})
}

// claim creates a claim with a share of 10 Mbit/s, allocated as by the scheduler.
func (e *testEnv) claim(name string) *resourceapi.ResourceClaim {
	e.t.Helper()
	return e.addClaim(newClaim(name))
}

func (e *testEnv) addClaim(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	e.t.Helper()
	if err := e.api.Client.Tracker().Add(c); err != nil {
		e.t.Fatalf("create claim %s: %v", c.Name, err)
	}
	return c
}

func (e *testEnv) deleteClaim(name string) {
	e.t.Helper()
	claims := e.api.Client.ResourceV1().ResourceClaims(namespace)
	if err := claims.Delete(e.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		e.t.Fatalf("delete claim %s: %v", name, err)
	}
}

func newClaim(name string) *resourceapi.ResourceClaim { return newClaimOn(nodeName, deviceName, name) }

func newClaimOn(node, device, name string) *resourceapi.ResourceClaim {
	result := resourceapi.DeviceRequestAllocationResult{
		Request: "nic", Driver: driverName, Pool: node, Device: device, ShareID: ptr.To(uuid.NewUUID()),
		ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{
			"bandwidth": resource.MustParse("10M"), "shares": resource.MustParse("1"),
		},
	}
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: uuid.NewUUID()}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{result},
	}}
	return c
}

// withFabric adds a share of a fabric to a claim. It is not attached to pods, but
// its files add failpoints to the claim's lifecycle.
func withFabric(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	devices := &c.Status.Allocation.Devices
	devices.Results = append(devices.Results, resourceapi.DeviceRequestAllocationResult{
		Request: "fabric", Driver: driverName, Pool: fabricpool.Name("rack1"), Device: "rack1",
		ShareID: ptr.To(uuid.NewUUID()),
	})
	return c
}

// withHairpin gives the share of the NIC the link mode Bridge. Its frames then pass the hairpin. The hairpin adds
// failpoints to the claim's lifecycle.
func withHairpin(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	devices := &c.Status.Allocation.Devices
	devices.Config = append(devices.Config, resourceapi.DeviceAllocationConfiguration{
		Source: resourceapi.AllocationConfigSourceClaim, Requests: []string{"nic"},
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: driverName, Parameters: apiruntime.RawExtension{Raw: []byte(
				`{"apiVersion": "dra-shared.dev/v1alpha1", "kind": "NetworkAttachment", "mode": "Bridge"}`)},
		}},
	})
	return c
}

// nicShare returns the name of the CDI device of a claim's NIC.
func nicShare(c *resourceapi.ResourceClaim) string {
	return fmt.Sprintf("%s-nic-%s", c.UID, *c.Status.Allocation.Devices.Results[0].ShareID)
}

// sandbox is a pod sandbox: a thread in a new network namespace, and an OCI
// bundle that refers to the namespace.
type sandbox struct {
	name   string
	uid    types.UID
	tid    int
	bundle string
	end    func() // removes the sandbox; more calls do not have an effect
}

func (e *testEnv) sandbox(name string) *sandbox {
	e.t.Helper()
	s, err := newSandbox(e.path("bundle-"+name+"-"+string(uuid.NewUUID())), name)
	if err != nil {
		e.t.Fatalf("create the sandbox of pod %s: %v", name, err)
	}
	e.t.Cleanup(s.end)
	return s
}

func newSandbox(bundle, name string) (*sandbox, error) {
	started, end, ended := make(chan error), make(chan struct{}), make(chan struct{})
	s := &sandbox{name: name, uid: uuid.NewUUID(), bundle: bundle}
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		defer close(ended)
		err := unix.Unshare(unix.CLONE_NEWNET)
		s.tid = unix.Gettid()
		started <- err
		<-end
	}()
	s.end = sync.OnceFunc(func() {
		close(end)
		<-ended
		_ = os.RemoveAll(bundle)
	})
	if err := <-started; err != nil {
		return nil, err
	}
	if err := os.MkdirAll(bundle, 0o700); err != nil {
		return nil, err
	}
	raw := fmt.Sprintf(`{"linux": {"namespaces": [{"type": "network", "path": "/proc/%d/ns/net"}]}}`, s.tid)
	return s, os.WriteFile(filepath.Join(bundle, "config.json"), []byte(raw), 0o600)
}

// hook runs the hook as the runtime does when a container of the pod starts. The
// hook waits up to wait for a plugin.
func (s *sandbox) hook(ctx context.Context, dir string, c *resourceapi.ResourceClaim, wait time.Duration) error {
	state, err := s.state()
	if err != nil {
		return err
	}
	h := attach.Hook{RunDir: filepath.Join(dir, "run"), ClaimUID: string(c.UID), Share: nicShare(c), Wait: wait}
	return h.Run(ctx, strings.NewReader(state))
}

// state returns the container's state that the runtime passes to the hook.
func (s *sandbox) state() (string, error) {
	raw, err := json.Marshal(map[string]any{"pid": s.tid, "bundle": s.bundle, "annotations": map[string]string{
		"io.kubernetes.cri.sandbox-id":        s.name,
		"io.kubernetes.cri.sandbox-uid":       string(s.uid),
		"io.kubernetes.cri.sandbox-name":      s.name,
		"io.kubernetes.cri.sandbox-namespace": namespace,
	}})
	return string(raw), err
}

// do calls f on a thread in the pod's namespace.
func (s *sandbox) do(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", s.tid))
		if err != nil {
			done <- err
			return
		}
		defer ns.Close()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

// link returns the index of the pod's link, or 0 if the pod does not have a link that is up.
func (s *sandbox) link() (index int, err error) {
	err = s.do(func() error {
		links, err := net.Interfaces()
		for _, l := range links {
			if l.Name == "net1" && l.Flags&net.FlagUp != 0 {
				index = l.Index
			}
		}
		return err
	})
	return index, err
}

// mustLink returns the index of the pod's link, and fails the test if the pod does not have a link that is up.
func (s *sandbox) mustLink(t testing.TB) int {
	t.Helper()
	index, err := s.link()
	if err != nil || index == 0 {
		t.Fatalf("pod %s has no link net1 that is up: error %v", s.name, err)
	}
	return index
}

// checkNoLink fails the test if the pod has a link that is up.
func (s *sandbox) checkNoLink(t testing.TB) {
	t.Helper()
	if index, err := s.link(); err != nil || index != 0 {
		t.Errorf("pod %s: got link index %d and error %v, want no link", s.name, index, err)
	}
}

// reported returns an error unless the Ready condition of a device in the
// claim's status has the reason.
func (e *testEnv) reported(ctx context.Context, c *resourceapi.ResourceClaim, reason string) error {
	current, err := e.api.Client.ResourceV1().ResourceClaims(namespace).Get(ctx, c.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, d := range current.Status.Devices {
		ready := meta.FindStatusCondition(d.Conditions, v1alpha1.ConditionReady)
		if ready != nil && ready.Reason == reason {
			return nil
		}
	}
	return fmt.Errorf("the status of claim %s does not have reason %s: %+v", c.Name, reason, current.Status.Devices)
}

// awaitReason waits until the claim's status has the reason.
func (e *testEnv) awaitReason(c *resourceapi.ResourceClaim, reason string) {
	e.t.Helper()
	condition := fmt.Sprintf("the status of claim %s has reason %s", c.Name, reason)
	e.eventually(condition, func() error { return e.reported(e.t.Context(), c, reason) })
}

// statePatterns match the files that a plugin keeps for claims, and the sockets
// of plugins.
var statePatterns = []string{
	"plugin/claims/*", "plugin/dra-device-metadata/*", "plugin/files/*", "cdi/*", "run/attached/*", "hook/*",
	"run/attach.d/*", "run/health/*", "plugin/dra-*.sock", "registry/*.sock", "run/*.writing",
}

// nothingLeft returns an error if the node has files, classes, or classifier
// entries of claims, or sockets of plugins that ended.
func (e *testEnv) nothingLeft() error {
	var left []string
	for _, pattern := range statePatterns {
		paths, err := filepath.Glob(e.path(pattern))
		if err != nil {
			return err
		}
		left = append(left, slices.DeleteFunc(paths, e.isOfRunningPlugin)...)
	}
	kernel, err := e.kernelState()
	left = append(left, kernel...)
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("found %s", strings.Join(left, ", "))
	}
	return err
}

// isOfRunningPlugin reports whether a file is a socket or the hook of the plugin
// that runs.
func (e *testEnv) isOfRunningPlugin(path string) bool {
	name := filepath.Base(path)
	hooks, err := install.Hooks(e.path("hook"))
	isHook := err == nil && len(hooks) > 0 && name == filepath.Base(hooks[0])
	return isHook || strings.Contains(name, e.config.Instance+".") || strings.Contains(name, e.config.Instance+"-reg")
}

// kernelState returns the classes of shares and the entries of the classifier,
// as "class ..." and "classification ...".
func (e *testEnv) kernelState() (found []string, err error) {
	conn, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	shaper := shape.New(conn, nil)
	outer, _ := shape.HairpinNames(e.nic)
	for _, name := range []string{e.nic, shape.IFBName(e.nic), outer} {
		link, err := net.InterfaceByName(name)
		if err != nil && name == outer {
			continue // no share has needed it
		}
		if err != nil {
			return nil, err
		}
		classes, err := shaper.ShareClasses(link.Index)
		if err != nil {
			return nil, err
		}
		for minor := range classes {
			found = append(found, fmt.Sprintf("class %x on %s", minor, name))
		}
	}
	classifier, err := classify.Open(e.bpffs, nil, classify.AttachClsact, classify.KeyMAC)
	if err != nil {
		return nil, err
	}
	members, err := classifier.Members()
	for _, m := range members {
		found = append(found, "classification of "+m.MAC.String())
	}
	return found, errors.Join(err, classifier.Close())
}
