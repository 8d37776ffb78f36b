// Package survive holds the tests of the bad day: plugins that are killed
// before and after every step they take, many at once, faults everywhere. The
// kubelet, the container runtime and the API server are the test; the links,
// queues and BPF programs are real, in a network namespace of their own.
package crash

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/device/fabricpool"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/fabric"
	"github.com/dra-shared/dra-driver-shared/driver/nic"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint/httpfailpoint"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
	"github.com/dra-shared/dra-driver-shared/test/fakeapi"
)

const (
	driverName = "dra-shared.dev"
	nodeName   = "n1"
	namespace  = "default"
	deviceName = "nic0"
	patience   = 30 * time.Second
)

// The first thread's namespaces are the process's: no sandbox may have it.
func init() { runtime.LockOSThread() }

func TestMain(m *testing.M) {
	if raw := os.Getenv(pluginVariable); raw != "" {
		if err := pluginProcess(raw); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	nstest.Main(m, nstest.Root)
}

// pluginVariable makes the test binary a plugin: its value is a pluginConfig.
const pluginVariable = "SURVIVE_PLUGIN"

type pluginConfig struct {
	Dir, BPFFS, URL, Instance string
	BootIDFile                string
	Interfaces                string // of the network; default nic0
	// Kill is the step to die at, as name#n for the n-th of that name;
	// Before or after it. Steps is a file that steps are written to.
	Kill   string
	Before bool
	Steps  string
	// Deaths is a file that the step is written to which the plugin dies at.
	Deaths string
}

func pluginProcess(raw string) error {
	var c pluginConfig
	if err := json.Unmarshal([]byte(raw), &c); err != nil {
		return err
	}
	p, err := newPlugin(c, c.failpoints())
	if err != nil {
		return err
	}
	defer p.node.Close()
	wait, err := p.Start(context.Background())
	if err != nil {
		return err
	}
	return wait()
}

// plugin is a driver over a node's network.
type plugin struct {
	*driver.Driver
	node *netdev.Node
}

func newPlugin(c pluginConfig, failpoints failpoint.Injector) (*plugin, error) {
	client, err := kubernetes.NewForConfig(rest.AddUserAgent(&rest.Config{Host: c.URL, QPS: 1000, Burst: 1000, WrapTransport: httpfailpoint.Transport(failpoints)}, "plugin"))
	if err != nil {
		return nil, err
	}
	node, err := netdev.NewNode(netdev.Options{BPFFS: c.BPFFS, Failpoints: failpoints})
	if err != nil {
		return nil, err
	}
	driverConfig, err := config.Load([]byte(`
apiVersion: config.dra-shared.dev/v1alpha1
kind: DriverConfig
networks:
- {name: storage, interfaces: [` + cmp.Or(c.Interfaces, "nic0") + `], bandwidth: 10G, shares: 1000, allow: {modes: [Private], subnets: [10.0.0.0/8]}}
fabrics:
- {name: rack1, nodeSelector: {rack: "1"}}`))
	if err != nil {
		return nil, err
	}
	hook := filepath.Join(c.Dir, "hook")
	source := filepath.Join(c.Dir, "hook-source")
	if err := os.WriteFile(source, []byte("the hook"), 0o600); err != nil {
		return nil, err
	}
	installed, err := attach.Install(source, hook, failpoints)
	if err != nil {
		return nil, err
	}
	d, err := driver.New(driver.Options{
		DriverName: driverName, NodeName: nodeName, Client: client, Instance: c.Instance, RollingUpdate: true,
		Kinds:     []driver.Kind{nic.New(node, netdev.NewInventory("/sys"), driverConfig), fabric.New(driverConfig, nodeName)},
		PluginDir: filepath.Join(c.Dir, "plugin"), RegistryDir: filepath.Join(c.Dir, "registry"), CDIDir: filepath.Join(c.Dir, "cdi"), RunDir: filepath.Join(c.Dir, "run"),
		Hook: installed, Watch: node.Watch, OrphanGrace: 100 * time.Millisecond, BootIDFile: c.BootIDFile, Failpoints: failpoints,
	})
	return &plugin{Driver: d, node: node}, err
}

// failpoints writes down each step and dies where it is told to.
func (c pluginConfig) failpoints() failpoint.Injector {
	var mu sync.Mutex
	seen := map[string]int{}
	return func(name string, do func() error) error {
		mu.Lock()
		seen[name]++
		at := name + "#" + strconv.Itoa(seen[name])
		due := at == c.Kill
		note(c.Steps, at)
		mu.Unlock()
		if due && c.Before {
			c.die("before " + name)
		}
		err := do()
		if due {
			c.die("after " + name)
		}
		return err
	}
}

func (c pluginConfig) die(at string) {
	note(c.Deaths, at)
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	select {}
}

func note(file, line string) {
	if file == "" {
		return
	}
	if f, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600); err == nil {
		_, _ = fmt.Fprintln(f, line)
		_ = f.Close()
	}
}

// testEnv is a node with one NIC of 10 Gbit/s, and everything around a plugin.
type testEnv struct {
	t     *testing.T
	api   *fakeapi.Server
	dir   string
	bpffs string

	instance int
	process  *exec.Cmd
	ended    chan struct{}
	config   pluginConfig
	stay     []*sandbox
}

func newTestEnv(t *testing.T) *testEnv {
	t.Helper()
	nstest.NIC(t, "nic0", 9000)
	if err := nstest.ConfigureLink("lo"); err != nil { // to the API server
		t.Fatal(err)
	}
	// Paths of sockets have 107 characters at the most: not t.TempDir().
	dir, err := os.MkdirTemp("", "dra")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	for _, d := range []string{"plugin", "registry", "cdi", "run", "hook"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	e := &testEnv{t: t, dir: dir, bpffs: nstest.MountBPFFS(t), api: fakeapi.New(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "node"}})}
	t.Cleanup(e.api.Close)
	t.Cleanup(e.kill)
	return e
}

// start starts a plugin process under a new instance name, as a pod that
// replaces another, and waits until it serves or has died.
func (e *testEnv) start(change func(*pluginConfig)) {
	e.t.Helper()
	e.instance++
	c := pluginConfig{Dir: e.dir, BPFFS: e.bpffs, URL: e.api.URL, Instance: fmt.Sprintf("plugin-%d", e.instance)}
	if change != nil {
		change(&c)
	}
	raw, err := json.Marshal(c)
	if err != nil {
		e.t.Fatal(err)
	}
	e.config = c
	e.process = exec.Command("/proc/self/exe")
	e.process.Env = append(os.Environ(), pluginVariable+"="+string(raw))
	log, err := os.OpenFile(filepath.Join(e.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		e.t.Fatal(err)
	}
	defer log.Close()
	e.process.Stderr = log
	if err := e.process.Start(); err != nil {
		e.t.Fatal(err)
	}
	e.ended = make(chan struct{})
	go func(p *exec.Cmd, ended chan struct{}) { _ = p.Wait(); close(ended) }(e.process, e.ended)
	e.eventually(func() error {
		if !e.running() {
			return nil
		}
		_, draErr := os.Stat(e.socket())
		return errors.Join(draErr, attach.Ping(filepath.Join(e.dir, "run"), c.Instance))
	})
}

func (e *testEnv) socket() string {
	return filepath.Join(e.dir, "plugin", "dra-"+e.config.Instance+".sock")
}

func (e *testEnv) running() bool {
	select {
	case <-e.ended:
		return false
	default:
		return true
	}
}

// kill ends the plugin if there is one.
func (e *testEnv) kill() {
	if e.process == nil {
		return
	}
	_ = e.process.Process.Kill()
	<-e.ended
	e.process = nil
}

// revive starts a plugin that lives, if the last one has died.
func (e *testEnv) revive() {
	e.t.Helper()
	if e.process == nil || !e.running() {
		e.start(nil)
	}
}

// surviving repeats what a plugin that died may have cut off, as the kubelet
// and the runtime do.
func (e *testEnv) surviving(f func(context.Context) error) {
	e.t.Helper()
	e.eventually(func() error {
		e.revive()
		ctx, cancel := context.WithTimeout(e.t.Context(), 10*time.Second)
		defer cancel()
		return f(ctx)
	})
}

func (e *testEnv) eventually(check func() error) {
	e.t.Helper()
	timeout, tick := time.After(patience), time.NewTicker(5*time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-timeout:
			raw, _ := os.ReadFile(filepath.Join(e.dir, "log"))
			e.t.Fatalf("%v\nthe plugin's log ends with\n%s", err, raw[max(0, len(raw)-4000):])
		case <-tick.C:
		}
	}
}

// dra calls the plugin as the kubelet does.
func (e *testEnv) dra(ctx context.Context, call func(drapb.DRAPluginClient) error) error {
	conn, err := grpc.NewClient("unix://"+e.socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	return call(drapb.NewDRAPluginClient(conn))
}

func references(claims []*resourceapi.ResourceClaim) (refs []*drapb.Claim) {
	for _, c := range claims {
		refs = append(refs, &drapb.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)})
	}
	return refs
}

func (e *testEnv) prepare(ctx context.Context, claims ...*resourceapi.ResourceClaim) error {
	return e.dra(ctx, func(plugin drapb.DRAPluginClient) error {
		answer, err := plugin.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: references(claims)})
		for uid, result := range answer.GetClaims() {
			if result.Error != "" {
				err = errors.Join(err, fmt.Errorf("%s: %s", uid, result.Error))
			}
		}
		return err
	})
}

func (e *testEnv) unprepare(ctx context.Context, claims ...*resourceapi.ResourceClaim) error {
	return e.dra(ctx, func(plugin drapb.DRAPluginClient) error {
		answer, err := plugin.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: references(claims)})
		for uid, result := range answer.GetClaims() {
			if result.Error != "" {
				err = errors.Join(err, fmt.Errorf("%s: %s", uid, result.Error))
			}
		}
		return err
	})
}

// claim makes a claim to a share of 10 Mbit/s, allocated as the scheduler would.
func (e *testEnv) claim(name string) *resourceapi.ResourceClaim {
	e.t.Helper()
	return e.add(newClaim(name))
}

func (e *testEnv) add(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	e.t.Helper()
	if err := e.api.Client.Tracker().Add(c); err != nil {
		e.t.Fatal(err)
	}
	return c
}

func newClaim(name string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: uuid.NewUUID()}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{
			Request: "nic", Driver: driverName, Pool: nodeName, Device: deviceName, ShareID: ptr.To(uuid.NewUUID()),
			ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"bandwidth": resource.MustParse("10M"), "shares": resource.MustParse("1")},
		}},
	}}
	return c
}

// onFabric adds a share of a device that spans nodes, and is not attached: its
// files are steps of a claim's way too.
func onFabric(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
		Request: "fabric", Driver: driverName, Pool: fabricpool.Name("rack1"), Device: "rack1", ShareID: ptr.To(uuid.NewUUID()),
	})
	return c
}

// share is the name of the CDI device of a claim's NIC.
func share(c *resourceapi.ResourceClaim) string {
	return fmt.Sprintf("%s-nic-%s", c.UID, *c.Status.Allocation.Devices.Results[0].ShareID)
}

// sandbox is a pod's sandbox: a thread in a network namespace of its own, and a
// bundle that names it.
type sandbox struct {
	name   string
	uid    types.UID
	tid    int
	bundle string
	end    func()
}

func (e *testEnv) sandbox(name string) *sandbox {
	e.t.Helper()
	s, err := newSandbox(filepath.Join(e.dir, "bundle-"+name+"-"+string(uuid.NewUUID())), name)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(s.end)
	return s
}

func newSandbox(bundle, name string) (*sandbox, error) {
	started, end := make(chan error), make(chan struct{})
	s := &sandbox{name: name, uid: uuid.NewUUID(), bundle: bundle}
	gone := make(chan struct{})
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		defer close(gone)
		err := unix.Unshare(unix.CLONE_NEWNET)
		s.tid = unix.Gettid()
		started <- err
		<-end
	}()
	s.end = sync.OnceFunc(func() { close(end); <-gone; _ = os.RemoveAll(bundle) })
	if err := <-started; err != nil {
		return nil, err
	}
	raw := fmt.Sprintf(`{"linux": {"namespaces": [{"type": "network", "path": "/proc/%d/ns/net"}]}}`, s.tid)
	return s, errors.Join(os.MkdirAll(bundle, 0o700), os.WriteFile(filepath.Join(bundle, "config.json"), []byte(raw), 0o600))
}

// hook runs the hook as the runtime does when a container of the pod starts.
func (s *sandbox) hook(ctx context.Context, dir string, c *resourceapi.ResourceClaim, wait time.Duration) error {
	state, err := json.Marshal(map[string]any{"pid": s.tid, "bundle": s.bundle, "annotations": map[string]string{
		"io.kubernetes.cri.sandbox-uid": string(s.uid), "io.kubernetes.cri.sandbox-name": s.name, "io.kubernetes.cri.sandbox-namespace": namespace,
	}})
	if err != nil {
		return err
	}
	h := attach.Hook{RunDir: filepath.Join(dir, "run"), ClaimUID: string(c.UID), Share: share(c), Wait: wait}
	return h.Run(ctx, strings.NewReader(string(state)))
}

// link is the index of the pod's link, 0 if it has none that is up.
func (s *sandbox) link() (index int, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		var ns *os.File
		if ns, err = os.Open(fmt.Sprintf("/proc/%d/ns/net", s.tid)); err != nil {
			return
		}
		defer ns.Close()
		if err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return
		}
		if l, lookErr := net.InterfaceByName("net1"); lookErr == nil && l.Flags&net.FlagUp != 0 {
			index = l.Index
		}
	}()
	<-done
	return index, err
}

// reported returns nil if the claim's status says that its share is ready.
func (e *testEnv) reported(ctx context.Context, c *resourceapi.ResourceClaim, reason string) error {
	current, err := e.api.Client.ResourceV1().ResourceClaims(namespace).Get(ctx, c.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, d := range current.Status.Devices {
		if found := meta.FindStatusCondition(d.Conditions, driver.ConditionReady); found != nil && found.Reason == reason {
			return nil
		}
	}
	return fmt.Errorf("claim %s is not reported as %s: %+v", c.Name, reason, current.Status.Devices)
}

// nothingLeft tells what there is of shares: files, classes, map entries.
func (e *testEnv) nothingLeft() error {
	var left []string
	for _, pattern := range []string{"plugin/claims/*", "plugin/dra-device-metadata/*", "plugin/files/*", "cdi/*", "run/attached/*", "hook/*", "run/attach.d/*", "run/health/*", "plugin/dra-*.sock", "registry/*.sock"} {
		paths, err := filepath.Glob(filepath.Join(e.dir, pattern))
		if err != nil {
			return err
		}
		left = append(left, slices.DeleteFunc(paths, func(path string) bool {
			name := filepath.Base(path)
			return strings.Contains(name, e.config.Instance+".") || strings.Contains(name, e.config.Instance+"-reg") || name == filepath.Base(e.hookPath())
		})...)
	}
	kernel, err := e.leftInKernel()
	left = append(left, kernel...)
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("left: %s", strings.Join(left, ", "))
	}
	return err
}

// leftInKernel are classes of shares and entries of the classifier.
func (e *testEnv) leftInKernel() (left []string, err error) {
	conn, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	shaper := shape.New(conn, nil)
	for _, name := range []string{"nic0", shape.IFBName("nic0")} {
		link, err := net.InterfaceByName(name)
		if err != nil {
			return nil, err
		}
		classes, err := shaper.ShareClasses(link.Index)
		if err != nil {
			return nil, err
		}
		for minor := range classes {
			left = append(left, fmt.Sprintf("class %x on %s", minor, name))
		}
	}
	classifier, err := classify.Open(e.bpffs, nil)
	if err != nil {
		return nil, err
	}
	members, err := classifier.Members()
	for _, m := range members {
		left = append(left, "classification of "+m.MAC.String())
	}
	return left, errors.Join(err, classifier.Close())
}

func (e *testEnv) hookPath() string {
	hooks, _ := attach.Hooks(filepath.Join(e.dir, "hook"))
	return append(hooks, "")[0]
}
