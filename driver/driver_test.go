// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/nic"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// pauseVariable makes the test binary a process that holds a pod's namespace.
const pauseVariable = "DRIVER_TEST_PAUSE"

func TestMain(m *testing.M) {
	if os.Getenv(pauseVariable) != "" {
		fmt.Println("ready")
		_, _ = os.Stdin.Read(make([]byte, 1)) // until the test closes it
		return
	}
	if os.Getenv(servedVariable) != "" {
		if err := servePlugin(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	nstest.Main(m, nstest.User)
}

const (
	driverName = "dra-shared.dev"
	nodeName   = "n1"
	namespace  = "default"
	// timeout is for effects of the plugin's goroutines.
	timeout = 15 * time.Second
)

// plugin is a driver that runs on a node with one NIC of 1 Gbit/s, registered
// nowhere: the test acts as the kubelet and as the container runtime.
type plugin struct {
	t       *testing.T
	dir     string
	wire    *nstest.Namespace // the other end of the NIC
	client  *fake.Clientset
	options driver.Options
	refuse  atomic.Int32 // writes of status that are yet to fail
	*driver.Driver
	stop  func()
	sysfs string                        // /sys has nothing about the NICs of the test
	wrap  func(driver.Kind) driver.Kind // of the NIC kind; nil leaves it unchanged
}

func newPlugin(t *testing.T) *plugin {
	t.Helper()
	p := newPluginWithoutNIC(t)
	_, p.wire = nstest.NIC(t, "nic0", 9000)
	p.start()
	t.Cleanup(func() { p.stop() })
	return p
}

// newPluginWithoutNIC returns a plugin that was not started.
func newPluginWithoutNIC(t *testing.T) *plugin {
	t.Helper()
	// Paths of sockets have at most 107 characters, and t.TempDir() is longer.
	dir, err := os.MkdirTemp("", "dra")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	for _, d := range []string{"plugin", "registry", "cdi", "run"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	p := &plugin{
		t:      t,
		dir:    dir,
		sysfs:  "/sys",
		client: fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "node"}}),
	}
	p.client.PrependReactor("patch", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		if p.refuse.Add(-1) >= 0 {
			return true, nil, errors.New("the API server is unavailable")
		}
		return false, nil, nil
	})
	p.options = driver.Options{
		DriverName: driverName, NodeName: nodeName, Client: p.client, Instance: "1", Hook: "/hook",
		PluginDir: filepath.Join(dir, "plugin"), RegistryDir: filepath.Join(dir, "registry"),
		CDIDir: filepath.Join(dir, "cdi"), RunDir: filepath.Join(dir, "run"),
	}
	return p
}

// start starts the plugin, for the first time or again.
func (p *plugin) start() {
	p.t.Helper()
	p.startWith(oneNetwork)
}

// oneNetwork is the configuration of a network with one NIC.
const oneNetwork = `
- name: storage
  interfaces: [nic0]
  bandwidth: 1G
  enforcement: None
  allow: {modes: [Private, Bridge], subnets: [10.20.0.0/16]}`

// build builds the driver with a configuration. The node has no BPF file system.
func (p *plugin) build(networks string) *netdev.Node {
	p.t.Helper()
	node, err := netdev.NewNode(netdev.Options{BPFFS: p.dir})
	if err != nil {
		p.t.Fatal(err)
	}
	c, err := config.Load([]byte("apiVersion: config.dra-shared.dev/v1alpha1\nkind: DriverConfig\nnetworks: " + networks))
	if err != nil {
		p.t.Fatal(err)
	}
	nics, err := nic.New(nic.Options{
		Node: node, Inventory: netdev.NewInventory(p.sysfs), Config: c,
		StateFile: p.nicMemory(), Failpoints: p.options.Failpoints,
	})
	if err != nil {
		p.t.Fatal(err)
	}
	p.options.Kinds = []driver.Kind{nics}
	if p.wrap != nil {
		p.options.Kinds[0] = p.wrap(p.options.Kinds[0])
	}
	if p.Driver, err = driver.New(p.options); err != nil {
		p.t.Fatal(err)
	}
	return node
}

// startWith starts the plugin with a configuration.
func (p *plugin) startWith(networks string) {
	p.t.Helper()
	p.run(p.build(networks).Close)
}

// run starts the driver that was built. closeKinds is called after it has stopped.
func (p *plugin) run(closeKinds func() error) {
	p.t.Helper()
	_, ctx := ktesting.NewTestContext(p.t)
	ctx, cancel := context.WithCancel(ctx)
	wait, err := p.Start(ctx)
	if err != nil {
		cancel()
		p.t.Fatal(err)
	}
	p.stop = sync.OnceFunc(func() {
		cancel()
		if err := errors.Join(wait(), closeKinds()); err != nil {
			p.t.Error(err)
		}
	})
}

// nicMemory returns the path of the file in which the NIC kind keeps what it remembers.
func (p *plugin) nicMemory() string { return filepath.Join(p.options.RunDir, "nics.json") }

func (p *plugin) published() error {
	list, err := p.client.ResourceV1().ResourceSlices().List(p.t.Context(), metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, s := range list.Items {
		if len(s.Spec.Devices) == 1 && s.Spec.Devices[0].Name == "nic0" {
			return nil
		}
	}
	return fmt.Errorf("nic0 is not published: %+v", list.Items)
}

// wantNothingLeft fails the test if the plugin left files of a claim. Device metadata does not count:
// a restore writes it through the helper, which these tests bypass when they unprepare a claim, so
// that the helper does not remove it.
func (p *plugin) wantNothingLeft() {
	p.t.Helper()
	for _, pattern := range []string{"plugin/claims/*", "cdi/*", "run/attached/*"} {
		left, err := filepath.Glob(filepath.Join(p.dir, pattern))
		left = slices.DeleteFunc(left, func(path string) bool { return strings.Contains(path, "_metadata_") })
		if err != nil || len(left) > 0 {
			p.t.Errorf("left behind: %v %v", left, err)
		}
	}
}

// claim makes a claim to a share, allocated as the scheduler would.
func (p *plugin) claim(name, bandwidth, parameters string, consumers ...string) *resourceapi.ResourceClaim {
	p.t.Helper()
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: uuid.NewUUID()}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{
			Request: "nic", Driver: driverName, Pool: nodeName, Device: "nic0", ShareID: ptr.To(uuid.NewUUID()),
			ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{
				"bandwidth": resource.MustParse(bandwidth),
				"shares":    resource.MustParse("1"),
			},
		}},
	}}
	if parameters != "" {
		c.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
			Source: resourceapi.AllocationConfigSourceClaim,
			DeviceConfiguration: resourceapi.DeviceConfiguration{
				Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driverName,
					Parameters: runtime.RawExtension{
						Raw: []byte(`{"apiVersion": "dra-shared.dev/v1alpha1", "kind": "NetworkAttachment", ` + parameters + `}`),
					}},
			},
		}}
	}
	for _, pod := range consumers {
		c.Status.ReservedFor = append(
			c.Status.ReservedFor,
			resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod, UID: uuid.NewUUID()},
		)
	}
	if _, err := p.client.ResourceV1().ResourceClaims(namespace).Create(p.t.Context(), c,
		metav1.CreateOptions{}); err != nil {
		p.t.Fatal(err)
	}
	return c
}

func (p *plugin) prepare(c *resourceapi.ResourceClaim) (kubeletplugin.PrepareResult, error) {
	p.t.Helper()
	results, err := p.PrepareResourceClaims(p.t.Context(), []*resourceapi.ResourceClaim{c})
	if err != nil {
		p.t.Fatal(err)
	}
	return results[c.UID], results[c.UID].Err
}

// mustPrepare returns the names of the CDI devices.
func (p *plugin) mustPrepare(c *resourceapi.ResourceClaim) (shares []string) {
	p.t.Helper()
	r, err := p.prepare(c)
	if err != nil {
		p.t.Fatal(err)
	}
	for _, d := range r.Devices {
		for _, id := range d.CDIDeviceIDs {
			_, name, _ := strings.Cut(id, "=")
			shares = append(shares, name)
		}
	}
	return shares
}

func (p *plugin) unprepare(c *resourceapi.ResourceClaim) {
	p.t.Helper()
	results, err := p.UnprepareResourceClaims(
		p.t.Context(),
		[]kubeletplugin.NamespacedObject{
			{UID: c.UID, NamespacedName: types.NamespacedName{Namespace: c.Namespace, Name: c.Name}},
		},
	)
	if err := errors.Join(err, results[c.UID]); err != nil {
		p.t.Fatal(err)
	}
}

// sandbox is a pod's sandbox as a container runtime makes it: a process in a
// network namespace, and a bundle that names it.
type sandbox struct {
	plugin *plugin
	name   string
	uid    types.UID
	pid    int
	bundle string
	kill   func()
}

func (p *plugin) sandbox(name string) *sandbox {
	p.t.Helper()
	return p.process(name, unix.CLONE_NEWNET)
}

// process starts a sandbox with the given new namespaces (CLONE_NEW* flags). Without CLONE_NEWNET,
// the pod uses the network of the node.
func (p *plugin) process(name string, namespaces uintptr) *sandbox {
	p.t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), pauseVariable+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces} // it ends with its standard input
	stdin, err := cmd.StdinPipe()
	if err != nil {
		p.t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		p.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	if _, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
		p.t.Fatal(err)
	}
	s := &sandbox{plugin: p, name: name, uid: uuid.NewUUID(), pid: cmd.Process.Pid, bundle: p.t.TempDir()}
	s.kill = sync.OnceFunc(func() { _ = stdin.Close(); _ = cmd.Wait() })
	p.t.Cleanup(s.kill)
	s.writeBundle(fmt.Sprintf("/proc/%d/ns/net", s.pid))
	return s
}

func (s *sandbox) writeBundle(namespacePath string) {
	s.plugin.t.Helper()
	raw := fmt.Sprintf(`{"linux": {"namespaces": [{"type": "pid"}, {"type": "network", "path": %q}]}}`, namespacePath)
	if err := os.WriteFile(filepath.Join(s.bundle, "config.json"), []byte(raw), 0o600); err != nil {
		s.plugin.t.Fatal(err)
	}
}

// hook runs the hook as the runtime does when a container of the pod starts.
func (s *sandbox) hook(c *resourceapi.ResourceClaim, share string) error {
	s.plugin.t.Helper()
	return s.hookWithin(attach.DefaultWait, c, share)
}

// hookWithin runs the hook with a limit of the time that it waits for a plugin.
func (s *sandbox) hookWithin(wait time.Duration, c *resourceapi.ResourceClaim, share string) error {
	s.plugin.t.Helper()
	state, err := json.Marshal(map[string]any{"pid": s.pid, "bundle": s.bundle, "annotations": map[string]string{
		"io.kubernetes.cri.sandbox-id": s.name, "io.kubernetes.cri.sandbox-uid": string(s.uid),
		"io.kubernetes.cri.sandbox-name": s.name, "io.kubernetes.cri.sandbox-namespace": namespace,
	}})
	if err != nil {
		s.plugin.t.Fatal(err)
	}
	s.plugin.reserve(
		c,
		func(pods []resourceapi.ResourceClaimConsumerReference) []resourceapi.ResourceClaimConsumerReference {
			if slices.ContainsFunc(pods, s.is) {
				return pods
			}
			return append(pods, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: s.name, UID: s.uid})
		},
	)
	h := attach.Hook{RunDir: s.plugin.options.RunDir, ClaimUID: string(c.UID), Share: share, Wait: wait}
	return h.Run(s.plugin.t.Context(), strings.NewReader(string(state)))
}

func (s *sandbox) is(consumer resourceapi.ResourceClaimConsumerReference) bool {
	return consumer.UID == s.uid
}

// reserve changes the consumers of a claim, as the scheduler and the controller do.
func (p *plugin) reserve(
	c *resourceapi.ResourceClaim,
	change func([]resourceapi.ResourceClaimConsumerReference) []resourceapi.ResourceClaimConsumerReference,
) {
	p.t.Helper()
	api := p.client.ResourceV1().ResourceClaims(namespace)
	current, err := api.Get(p.t.Context(), c.Name, metav1.GetOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	current.Status.ReservedFor = change(current.Status.ReservedFor)
	if _, err := api.UpdateStatus(p.t.Context(), current, metav1.UpdateOptions{}); err != nil {
		p.t.Fatal(err)
	}
}

// links are the names of the pod's links.
func (s *sandbox) links() (names []string) {
	s.plugin.t.Helper()
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", s.pid))
	if err != nil {
		s.plugin.t.Fatal(err)
	}
	defer ns.Close()
	nstest.RunIn(s.plugin.t, ns, func() error {
		links, err := net.Interfaces()
		for _, l := range links {
			names = append(names, l.Name)
		}
		return err
	})
	return names
}

func TestDriver_attachesAtContainerStartAndDetachesAtUnprepare(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"interfaceName": "data0", "addresses": ["10.20.0.5/16"]`)
	share := p.mustPrepare(c)[0]
	s := p.sandbox("p")
	if slices.Contains(s.links(), "data0") {
		t.Fatal("prepare made a link")
	}
	for range 3 { // containers of one pod
		if err := s.hook(c, share); err != nil {
			t.Fatal(err)
		}
	}
	if got := s.links(); !slices.Equal(got, []string{"lo", "data0"}) {
		t.Errorf("links %v", got)
	}
	p.awaitReason(c, params.ReasonAttached)
	p.unprepare(c)
	if got := s.links(); !slices.Equal(got, []string{"lo"}) {
		t.Errorf("links after unprepare: %v", got)
	}
	p.wantNothingLeft()
}

// awaitReason waits until the condition Ready of the claim's share has the reason.
func (p *plugin) awaitReason(c *resourceapi.ResourceClaim, reason string) {
	p.t.Helper()
	eventually.Eventually(p.t, timeout, fmt.Sprintf("claim %s is %s", c.Name, reason), func() error {
		return p.condition(c, params.ConditionReady, reason)
	})
}

func (p *plugin) condition(c *resourceapi.ResourceClaim, kind, reason string) error {
	current, err := p.client.ResourceV1().ResourceClaims(namespace).Get(p.t.Context(), c.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, d := range current.Status.Devices {
		if found := meta.FindStatusCondition(d.Conditions, kind); d.Driver == driverName && found != nil &&
			found.Reason == reason {
			return nil
		}
	}
	return fmt.Errorf("no condition %s with reason %s: %+v", kind, reason, current.Status.Devices)
}

func TestDetach_oneOfTwoPods(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	share := p.mustPrepare(c)[0]
	first, second := p.sandbox("first"), p.sandbox("second")
	for _, s := range []*sandbox{first, second} {
		if err := s.hook(c, share); err != nil {
			t.Fatal(err)
		}
	}
	p.awaitAttached(2)
	first.kill()
	p.awaitAttached(1)
	if got := second.links(); !slices.Contains(got, "net1") {
		t.Errorf("the pod that stayed has %v", got)
	}
	p.unprepare(c)
	p.wantNothingLeft()
}

// onlyRecord returns the only attachment record.
func (p *plugin) onlyRecord() attach.Record {
	p.t.Helper()
	records, err := attach.OpenRecords(p.options.RunDir, attach.AnyBoot, nil).List()
	if err != nil || len(records) != 1 {
		p.t.Fatalf("got %d attachment records and error %v, want one", len(records), err)
	}
	return records[0]
}

// The kernel reports the end of an earlier namespace with the same ID while a pod is attached. The record that
// the driver has read before it gets the claim's lock has addresses, but no link yet.
func TestDetach_recordOfUnfinishedAttach(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	pod := p.sandbox("pod")
	if err := pod.hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Fatal(err)
	}
	reserved := p.onlyRecord()
	reserved.Payload = []byte(`{"parent": 1, "mac": "02:00:00:00:00:01", "addresses": ["10.20.0.5/16"]}`)
	p.DetachEnded(t.Context(), reserved)
	if err := p.attached(1); err != nil {
		t.Errorf("the attachment of a running pod: %v", err)
	}
	if got := pod.links(); !slices.Contains(got, "net1") {
		t.Errorf("the pod has the links %v", got)
	}
}

// A namespace ends before the driver detaches the share. Meanwhile, the status must not say that the link is gone.
func TestRead_namespaceHasEnded(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	pod := p.sandbox("pod")
	if err := pod.hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Fatal(err)
	}
	ended := p.onlyRecord()
	ended.Namespace.NSID = unusedNSID
	if diff := cmp.Diff(driver.State{Pending: true}, p.read(ended)); diff != "" {
		t.Errorf("state (-want +got):\n%s", diff)
	}
}

// While a link is being created, its record has addresses and no index. The link may exist until its namespace has
// ended: a plugin that was killed may have created it.
func TestRead_linkIsBeingCreated(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	pod := p.sandbox("pod")
	if err := pod.hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Fatal(err)
	}
	created := p.onlyRecord()
	created.Payload = []byte(`{"parent": 1, "mac": "02:00:00:00:00:01", "network": "storage", ` +
		`"addresses": ["10.20.0.5/16"]}`)
	if diff := cmp.Diff(driver.State{Exists: true, Pending: true}, p.read(created)); diff != "" {
		t.Errorf("state in a namespace that exists (-want +got):\n%s", diff)
	}
	created.Namespace.NSID = unusedNSID
	if diff := cmp.Diff(driver.State{Pending: true}, p.read(created)); diff != "" {
		t.Errorf("state in a namespace that has ended (-want +got):\n%s", diff)
	}
}

// unusedNSID is an ID that no namespace has.
const unusedNSID = 1 << 20

// read returns the state that the NIC kind reads for an attachment.
func (p *plugin) read(r attach.Record) driver.State {
	p.t.Helper()
	attacher, ok := p.options.Kinds[0].(driver.Attacher)
	if !ok {
		p.t.Fatalf("kind %T is not an Attacher", p.options.Kinds[0])
	}
	state, err := attacher.Read(p.t.Context(), record.Share{Device: "nic0"}, r)
	if err != nil {
		p.t.Fatal(err)
	}
	return state
}

// awaitAttached waits until the plugin has recorded want attachments.
func (p *plugin) awaitAttached(want int) {
	p.t.Helper()
	eventually.Eventually(p.t, timeout, fmt.Sprintf("%d pods are attached", want), func() error {
		return p.attached(want)
	})
}

func (p *plugin) attached(want int) error {
	records, err := attach.OpenRecords(p.options.RunDir, attach.AnyBoot, nil).List()
	if err == nil && len(records) != want {
		err = fmt.Errorf("%d attachment records, want %d", len(records), want)
	}
	return err
}

// The failure of a share that is not prepared is not remembered: no unprepare would forget it.
func TestPlugin_forgetsFailureOfUnpreparedClaim(t *testing.T) {
	p := newPlugin(t)
	pod := attach.Pod{UID: "u", Namespace: "default", Name: "p"}
	request := attach.Request{ClaimUID: "none", Share: "none-nic", Pod: pod}
	if _, err := p.Attach(t.Context(), request, attach.Sockets{}); err == nil {
		t.Fatal("Attach of a claim that is not prepared succeeded")
	}
	if n := p.Failures("none-nic"); n > 0 {
		t.Errorf("the driver remembers %d failures of a claim that is not prepared", n)
	}
}

func TestHook_withoutAPlugin(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	share := p.mustPrepare(c)[0]
	running, fresh := p.sandbox("running"), p.sandbox("fresh")
	if err := running.hook(c, share); err != nil {
		t.Fatal(err)
	}
	p.stop()
	if err := running.hook(c, share); err != nil {
		t.Errorf("a container that starts again: %v", err)
	}
	if err := fresh.hookWithin(300*time.Millisecond, c, share); err == nil ||
		!strings.Contains(err.Error(), "no dra-shared-plugin answered for 300ms: is its pod running on this node?") {
		t.Errorf("a new pod: %v", err)
	}
	p.start()
	if err := fresh.hook(c, share); err != nil {
		t.Errorf("once the plugin is back: %v", err)
	}
	p.awaitAttached(2)
}

func TestDriver_Start_detachesEndedPods(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	share := p.mustPrepare(c)[0]
	gone, stays := p.sandbox("gone"), p.sandbox("stays")
	for _, s := range []*sandbox{gone, stays} {
		if err := s.hook(c, share); err != nil {
			t.Fatal(err)
		}
	}
	id := p.namespaceID("gone")
	p.stop()
	gone.kill()
	// The kernel ends namespaces asynchronously, and no plugin is watching.
	eventually.Eventually(t, timeout, "the namespace of the ended pod has ended", func() error {
		live, err := nstest.NamespaceExists(id)
		if err == nil && live {
			err = fmt.Errorf("namespace %d still exists", id)
		}
		return err
	})
	p.start()
	p.awaitAttached(1)
	if got := stays.links(); !slices.Contains(got, "net1") {
		t.Errorf("the pod that stayed has %v", got)
	}
}

// A sandbox ended while no plugin was watching, and the kernel gave the ID of its namespace to that of another pod.
func TestAttach_detachesShareFromFormerNamespaceWithSameID(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"addresses": ["10.20.0.5/16"]`)
	ended := p.sandbox("ended")
	if err := ended.hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Fatal(err)
	}
	old := p.onlyRecord()
	other, next := p.claim("other", "100M", ""), p.sandbox("next")
	p.stop()
	ended.kill()
	old.Namespace.NSID = next.namespaceID()
	if err := attach.OpenRecords(p.options.RunDir, old.BootID, nil).Write(old); err != nil {
		t.Fatal(err)
	}
	p.start()
	if err := next.hook(other, p.mustPrepare(other)[0]); err != nil {
		t.Fatal(err)
	}
	p.awaitAttached(1)
	restarted := p.sandbox("ended")
	if err := restarted.hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Errorf("the pod does not start again: %v", err)
	}
}

// A pod gets a new sandbox while the kernel has not removed the namespace of its former one.
func TestAttach_replacesLinkInFormerSandboxOfPod(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"addresses": ["10.20.0.5/16"]`)
	share, former, current := p.mustPrepare(c)[0], p.sandbox("pod"), p.sandbox("pod")
	current.uid = former.uid
	for _, s := range []*sandbox{former, current} {
		if err := s.hook(c, share); err != nil {
			t.Fatal(err)
		}
	}
	if got := former.links(); slices.Contains(got, "net1") {
		t.Errorf("the former sandbox has %v", got)
	}
	p.awaitAttached(1)
}

// namespaceID returns the namespace ID of an attached pod.
func (p *plugin) namespaceID(pod string) int {
	p.t.Helper()
	records, err := attach.OpenRecords(p.options.RunDir, attach.AnyBoot, nil).List()
	if err != nil {
		p.t.Fatal(err)
	}
	for _, r := range records {
		if r.Pod.Name == pod {
			return r.Namespace.NSID
		}
	}
	p.t.Fatalf("pod %s is not attached: %+v", pod, records)
	return 0
}

func TestHook_refusesNamespaceOfAnotherPodOrTheNode(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	share := p.mustPrepare(c)[0]
	hostNetwork := p.process("hostnetwork", 0)
	other := p.sandbox("other")
	other.writeBundle(fmt.Sprintf("/proc/%d/ns/net", hostNetwork.pid))
	unnamed := p.sandbox("unnamed")
	unnamed.writeBundle("")
	for _, tc := range []struct {
		s    *sandbox
		want string
	}{
		{hostNetwork, "the pod uses the node's network (hostNetwork)"},
		{other, "the container is not in the network namespace that its config.json names"},
		{unnamed, "the container's config.json does not contain the path of a network namespace"},
	} {
		if err := tc.s.hook(c, share); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %s", tc.s.name, err, tc.want)
		}
	}
	if err := p.sandbox("p").hook(c, "another-share"); err == nil ||
		!strings.Contains(err.Error(), "has no share another-share") {
		t.Errorf("a share that is not prepared: %v", err)
	}
	p.unprepare(c)
	if err := p.sandbox("p").hook(c, share); err == nil || !strings.Contains(err.Error(), "is not prepared on this node") {
		t.Errorf("a claim that is not prepared: %v", err)
	}
}

func TestAttach_staticAddressServesOnePod(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"addresses": ["10.20.0.5/16"]`, "first", "second")
	if _, err := p.prepare(c); err == nil ||
		!strings.Contains(err.Error(), "reserved for 2 pods: addresses [10.20.0.5/16] belong to pod default/first") {
		t.Errorf("reserved for two pods: %v", err)
	}
	p.wantNothingLeft()

	c = p.claim("d", "100M", `"addresses": ["10.20.0.5/16"]`, "first")
	share := p.mustPrepare(c)[0]
	first, second := p.sandbox("first"), p.sandbox("second")
	if err := first.hook(c, share); err != nil {
		t.Fatal(err)
	}
	if err := second.hook(c, share); err == nil ||
		!strings.Contains(err.Error(), "belong to pod default/first, which uses the same claim") {
		t.Errorf("the second pod: %v", err)
	}
	p.awaitReason(c, params.ReasonAttachFailed)
	// The second pod ends before it was attached.
	p.reserve(c, func(pods []resourceapi.ResourceClaimConsumerReference) []resourceapi.ResourceClaimConsumerReference {
		return slices.DeleteFunc(pods, second.is)
	})
	first.do(func() error { // changes the link, so that the plugin reports the claim again
		link, err := netlink.LinkByName("net1")
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(link, 1400)
	})
	p.awaitReason(c, params.ReasonAttached)
	first.kill()
	eventually.Eventually(t, timeout, "the hook attaches the second pod", func() error { return second.hook(c, share) })
	p.awaitReason(c, params.ReasonAttached)
}

// Another host on the network has the address of the claim.
func TestAttach_duplicateAddress(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"addresses": ["10.20.0.5/16"]`)
	share := p.mustPrepare(c)[0]
	p.wire.Do(func() error { return nstest.ConfigureLink("wire", "10.20.0.5/16") })
	if err := p.sandbox("p").hook(c, share); err != nil {
		t.Fatalf("with detection Report, which is the default: %v", err)
	}
	p.awaitReason(c, params.ReasonDuplicateAddress)
	p.unprepare(c)

	p.stop()
	p.startWith(strings.Replace(oneNetwork, "bandwidth", "duplicateAddressDetection: Refuse\n  bandwidth", 1))
	c = p.claim("d", "100M", `"addresses": ["10.20.0.5/16"]`)
	share = p.mustPrepare(c)[0]
	second := p.sandbox("p")
	want := "addresses: another host on the network has the address: 10.20.0.5 (MAC address " +
		p.wire.Interface("wire").HardwareAddr.String() + ") on network storage"
	if err := second.hook(c, share); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("with detection Refuse: got error %v, want one that contains %q", err, want)
	}
	p.wire.Do(func() error {
		link, err := netlink.LinkByName("wire")
		if err != nil {
			return err
		}
		address, err := netlink.ParseAddr("10.20.0.5/16")
		return errors.Join(err, netlink.AddrDel(link, address))
	})
	if err := second.hook(c, share); err != nil {
		t.Errorf("after the other host has lost the address: %v", err)
	}
	p.awaitReason(c, params.ReasonAttached)
}

func TestAttach_reportsFailureAndSucceedsLater(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"interfaceName": "wanted"`)
	share := p.mustPrepare(c)[0]
	s := p.sandbox("p")
	blocker := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "wanted"}}
	s.do(func() error { return netlink.LinkAdd(blocker) })
	if err := s.hook(c, share); err == nil ||
		!strings.Contains(err.Error(), "the pod already has an interface wanted: choose another interfaceName") {
		t.Errorf("got %v", err)
	}
	p.awaitReason(c, params.ReasonAttachFailed)
	s.do(func() error { return netlink.LinkDel(blocker) })
	if err := s.hook(c, share); err != nil {
		t.Error(err)
	}
	p.awaitReason(c, params.ReasonAttached)
}

// namespaceID returns the ID of the sandbox's namespace in the namespace of the test.
func (s *sandbox) namespaceID() int {
	s.plugin.t.Helper()
	conn, err := rtnl.Open()
	if err != nil {
		s.plugin.t.Fatal(err)
	}
	defer conn.Close()
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", s.pid))
	if err != nil {
		s.plugin.t.Fatal(err)
	}
	defer namespace.Close()
	id, err := conn.NamespaceID(namespace)
	if err != nil {
		s.plugin.t.Fatal(err)
	}
	return id
}

func (s *sandbox) do(f func() error) {
	s.plugin.t.Helper()
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", s.pid))
	if err != nil {
		s.plugin.t.Fatal(err)
	}
	defer ns.Close()
	nstest.RunIn(s.plugin.t, ns, f)
}

func TestPrepare_refusesSharesThatExcludeEachOther(t *testing.T) {
	p := newPlugin(t)
	for parameters, want := range map[string]string{
		`"interfaceName": "data0"`: `interfaceName: Duplicate value: "data0": ` +
			`the shares of requests nic and nic need different names`,
		`"addresses": ["10.20.0.5/16"]`: `addresses: Duplicate value: "10.20.0.5/16"`,
	} {
		c := p.claim("c", "100M", parameters)
		again := c.Status.Allocation.Devices.Results[0]
		again.ShareID = ptr.To(uuid.NewUUID())
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, again)
		if _, err := p.prepare(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
		if err := p.client.ResourceV1().ResourceClaims(namespace).Delete(t.Context(), "c",
			metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	p.wantNothingLeft()
}

func TestPrepare_withAnUnreadableRecord(t *testing.T) {
	p := newPlugin(t)
	torn := p.claim("torn", "100M", "")
	share := p.mustPrepare(torn)[0]
	s := p.sandbox("p")
	if err := s.hook(torn, share); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(p.options.PluginDir, "claims", string(torn.UID)+".json")
	if err := os.WriteFile(file, []byte(`{"version": 99}`), 0o600); err != nil {
		t.Fatal(err)
	}
	p.mustPrepare(p.claim("other", "100M", ""))
	p.unprepare(torn)
	if got := s.links(); slices.Contains(got, "net1") {
		t.Errorf("after unprepare the pod has %v", got)
	}
	if _, err := os.Stat(file + ".unreadable"); err != nil {
		t.Errorf("the record was not kept: %v", err)
	}
}

func TestPrepare_countsAttachedSharesWithoutClaimRecord(t *testing.T) {
	for name, damage := range map[string]func(record string) error{
		"lost":    os.Remove,
		"corrupt": func(record string) error { return os.WriteFile(record, []byte(`{"version": 1, "uid`), 0o600) },
		"newer":   func(record string) error { return os.WriteFile(record, []byte(`{"version": 99}`), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlugin(t)
			damaged := p.claim("damaged", "500M", "")
			if err := p.sandbox("p").hook(damaged, p.mustPrepare(damaged)[0]); err != nil {
				t.Fatal(err)
			}
			if err := damage(filepath.Join(p.options.PluginDir, "claims", string(damaged.UID)+".json")); err != nil {
				t.Fatal(err)
			}
			const want = "NIC nic0 has 990M bit/s to grant, of which 500M are granted to other claims on this node"
			if _, err := p.prepare(p.claim("large", "600M", "")); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("prepare a claim that does not fit next to the damaged one: got error %v, want %q", err, want)
			}
			p.mustPrepare(p.claim("small", "400M", ""))
		})
	}
}

func TestPrepare_refusesGrantBeyondCapacity(t *testing.T) {
	p := newPlugin(t)
	p.mustPrepare(p.claim("a", "900M", ""))
	if _, err := p.prepare(p.claim("b", "100M", "")); err == nil ||
		!strings.Contains(
			err.Error(),
			"bandwidth 100M: NIC nic0 has 990M bit/s to grant, of which 900M are granted to other claims on this node",
		) {
		t.Errorf("got %v", err)
	}
	p.mustPrepare(p.claim("c", "90M", ""))
}

func TestPrepare_afterReallocationDetachesTheOldShare(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	old := p.mustPrepare(c)[0]
	s := p.sandbox("p")
	if err := s.hook(c, old); err != nil {
		t.Fatal(err)
	}
	c.Status.Allocation.Devices.Results[0].ShareID = ptr.To(uuid.NewUUID())
	share := p.mustPrepare(c)[0]
	if got := s.links(); slices.Contains(got, "net1") {
		t.Errorf("the old share's link still exists: %v", got)
	}
	if err := p.sandbox("q").hook(c, share); err != nil {
		t.Error(err)
	}
}

func TestPrepare_againKeepsTheLink(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	share := p.mustPrepare(c)[0]
	s := p.sandbox("p")
	if err := s.hook(c, share); err != nil {
		t.Fatal(err)
	}
	var before, after int
	index := func(into *int) func() error {
		return func() error {
			link, err := net.InterfaceByName("net1")
			if err == nil {
				*into = link.Index
			}
			return err
		}
	}
	s.do(index(&before))
	// The spec may have been on a tmpfs.
	for _, f := range must(t)(filepath.Glob(filepath.Join(p.options.CDIDir, "*"))) {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	if again := p.mustPrepare(c)[0]; again != share {
		t.Errorf("CDI device %s, then %s", share, again)
	}
	s.do(index(&after))
	if before != after {
		t.Errorf("the link was recreated: index %d, then %d", before, after)
	}
	if specs := must(t)(filepath.Glob(filepath.Join(p.options.CDIDir, "*"))); len(specs) != 1 {
		t.Errorf("CDI specs: %v", specs)
	}
}

func must(t *testing.T) func([]string, error) []string {
	t.Helper()
	return func(s []string, err error) []string {
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
}

func TestReport_retriesAndKeepsEntriesOfOtherDrivers(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	theirs := resourceapi.AllocatedDeviceStatus{Driver: "other.example", Pool: "pool", Device: "device",
		Conditions: []metav1.Condition{
			{Type: "Theirs", Status: metav1.ConditionTrue, Reason: "R", LastTransitionTime: metav1.Now()},
		}}
	c.Status.Devices = append(c.Status.Devices, theirs)
	if _, err := p.client.ResourceV1().ResourceClaims(namespace).UpdateStatus(t.Context(), c,
		metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	p.refuse.Store(3)
	share := p.mustPrepare(c)[0]
	if err := p.sandbox("p").hook(c, share); err != nil {
		t.Fatal(err)
	}
	p.awaitReason(c, params.ReasonAttached)
	if n := p.refuse.Load(); n >= 0 {
		t.Errorf("%d writes were still to be refused", n)
	}
	current, err := p.client.ResourceV1().ResourceClaims(namespace).Get(t.Context(), c.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(current.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
		return d.Driver == theirs.Driver && len(d.Conditions) == 1
	}) {
		t.Errorf("the other driver's entry is gone: %+v", current.Status.Devices)
	}
}

func TestReport_limitsWritesForAPodThatChangesItsLinkInALoop(t *testing.T) {
	for name, refused := range map[string]int32{"writes succeed": 0, "writes fail": math.MaxInt32} {
		t.Run(name, func(t *testing.T) {
			p := newPlugin(t)
			c := p.claim("c", "100M", "")
			share := p.mustPrepare(c)[0]
			s := p.sandbox("p")
			if err := s.hook(c, share); err != nil {
				t.Fatal(err)
			}
			p.awaitReason(c, "Attached")
			p.client.ClearActions()
			p.refuse.Store(refused)
			const duration = 3 * time.Second
			changes := 0
			for start := time.Now(); time.Since(start) < duration; changes++ {
				s.do(func() error {
					link, err := netlink.LinkByName("net1")
					if err != nil {
						return err
					}
					if changes%2 == 0 {
						return netlink.LinkSetDown(link)
					}
					return netlink.LinkSetUp(link)
				})
			}
			// The status may be written when the loop begins, and then once a second.
			got, most := p.statusWrites(), int(duration/time.Second)+1
			if got > most {
				t.Errorf("%d changes of the link in %s caused %d writes, want at most %d", changes, duration, got, most)
			}
			t.Logf("%d changes, %d writes", changes, got)
			// On a machine with a high load, the loop leaves no processor time for the first write.
			eventually.Eventually(t, 10*time.Second, "the status is written", func() error {
				if p.statusWrites() == 0 {
					return errors.New("there is no write")
				}
				return nil
			})
		})
	}
}

// statusWrites returns how many writes of the status of claims the plugin has sent.
func (p *plugin) statusWrites() int { return p.requests("patch") }

// requests returns how many requests with a verb for claims the plugin has sent.
func (p *plugin) requests(verb string) (n int) {
	for _, a := range p.client.Actions() {
		if a.GetVerb() == verb && a.GetResource().Resource == "resourceclaims" {
			n++
		}
	}
	return n
}

func TestReport_writesOnlyDifferencesAfterRestart(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	if err := p.sandbox("p").hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Fatal(err)
	}
	p.awaitReason(c, "Attached")
	restart := func() {
		t.Helper()
		p.stop()
		p.client.ClearActions()
		p.start()
		eventually.Eventually(t, timeout, "the plugin reads the claim", func() error {
			if p.requests("get") == 0 {
				return errors.New("it has not")
			}
			return nil
		})
		if err := p.ReportStatus(t.Context(), c.UID); err != nil {
			t.Fatal(err)
		}
	}
	if restart(); p.statusWrites() != 0 {
		t.Errorf("after a restart, the plugin wrote the unchanged status %d times", p.statusWrites())
	}
	api := p.client.ResourceV1().ResourceClaims(namespace)
	current, err := api.Get(t.Context(), c.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	entry := &current.Status.Devices[0]
	entry.Conditions = append(entry.Conditions, metav1.Condition{
		Type: "OfFormerRelease", Status: metav1.ConditionTrue, Reason: "R", LastTransitionTime: metav1.Now(),
	})
	if _, err := api.UpdateStatus(t.Context(), current, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if restart(); p.statusWrites() == 0 {
		t.Error("after a restart, the plugin did not write a status that has a condition of a former release")
	}
}

func TestReport_readsUnattachedClaimsInEveryRound(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"addresses": ["10.20.0.5/16"]`, "first")
	share := p.mustPrepare(c)[0]
	expect := func(when string, want int) {
		t.Helper()
		if got, err := p.RoundsDue(c.UID); got != want || err != nil {
			t.Errorf("%s: the status is read in %d of 10 rounds, error %v, want %d", when, got, err, want)
		}
	}
	expect("before the share is attached", 10)
	if err := p.sandbox("first").hook(c, share); err != nil {
		t.Fatal(err)
	}
	expect("after the share was attached", 1)
	if err := p.sandbox("second").hook(c, share); err == nil {
		t.Error("the share with an address was attached to a second pod")
	}
	expect("after an attempt failed", 10)
}

// A share that no pod gets attached is not unattached.
func TestReport_readsClaimsThatAreNotAttachedInOneRound(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("monitor", "100M", "")
	c.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	p.mustPrepare(c)
	if due, err := p.RoundsDue(c.UID); due != 1 || err != nil {
		t.Errorf("the status is read in %d of 10 rounds, error %v, want 1", due, err)
	}
}

func TestReporter_readsClaimBeforeRewritingStatus(t *testing.T) {
	p := newPluginWithoutNIC(t)
	nstest.NIC(t, "nic0", 9000)
	node := p.build(oneNetwork)
	p.ExpireStatusAtOnce()
	p.run(node.Close)
	t.Cleanup(func() { p.stop() })
	c := p.claim("c", "100M", "")
	if err := p.sandbox("p").hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Fatal(err)
	}
	p.awaitReason(c, "Attached")
	api := p.client.ResourceV1().ResourceClaims(namespace)
	report := func() *resourceapi.ResourceClaim {
		t.Helper()
		if err := p.ReportStatus(t.Context(), c.UID); err != nil {
			t.Fatal(err)
		}
		current, err := api.Get(t.Context(), c.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return current
	}
	written := report() // the plugin now remembers what it wrote
	// At first, the plugin itself may also report the claim, because the pod was attached.
	eventually.Eventually(t, 5*time.Second, "the plugin only reads a status that is the same", func() error {
		p.client.ClearActions()
		report()
		cached := 0
		for _, a := range p.client.Actions() {
			if a.GetVerb() != "get" {
				return fmt.Errorf("the plugin sent %s %s", a.GetVerb(), a.GetResource().Resource)
			}
			if get, ok := a.(clienttesting.GetActionImpl); ok && get.GetOptions.ResourceVersion == "0" {
				cached++
			}
		}
		if cached != 1 {
			return fmt.Errorf("reads from the API server's cache: got %d of %v, want 1", cached, p.client.Actions())
		}
		return nil
	})
	changed := written.DeepCopy()
	changed.Status.Devices[0].NetworkData.HardwareAddress = "02:00:00:00:00:01"
	if _, err := api.UpdateStatus(t.Context(), changed, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	want := written.Status.Devices[0].NetworkData.HardwareAddress
	if got := report().Status.Devices[0].NetworkData.HardwareAddress; got != want {
		t.Errorf("after another client has changed the status: got %s, want %s", got, want)
	}
}

// A claim that was deleted and created again under its name is another claim.
func TestReport_ignoresAnotherClaimOfTheSameName(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	api := p.client.ResourceV1().ResourceClaims(namespace)
	if err := api.Delete(t.Context(), c.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	p.claim("c", "100M", "")
	share := p.mustPrepare(c)[0]
	if err := p.sandbox("p").hook(c, share); err != nil {
		t.Fatal(err)
	}
	other := p.claim("d", "100M", "") // reported after the first, by the same workers
	if err := p.sandbox("q").hook(other, p.mustPrepare(other)[0]); err != nil {
		t.Fatal(err)
	}
	p.awaitReason(other, params.ReasonAttached)
	namesake, err := api.Get(t.Context(), c.Name, metav1.GetOptions{})
	if err != nil || len(namesake.Status.Devices) > 0 {
		t.Errorf("%+v, %v", namesake.Status.Devices, err)
	}
}
