// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/nic"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

const (
	driverName = "dra-shared.dev"
	nodeName   = "n1"
	namespace  = "default"
	// timeout is for effects of the plugin's goroutines.
	timeout = 15 * time.Second
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

// awaitReason waits until the condition Ready of the claim's share has the reason.
func (p *plugin) awaitReason(c *resourceapi.ResourceClaim, reason string) {
	p.t.Helper()
	eventually.Eventually(p.t, timeout, fmt.Sprintf("claim %s is %s", c.Name, reason), func() error {
		return p.condition(c, v1alpha1.ConditionReady, reason)
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

// onlyRecord returns the only attachment record.
func (p *plugin) onlyRecord() attach.Record {
	p.t.Helper()
	records, err := attach.OpenRecords(p.options.RunDir, attach.AnyBoot, nil).List()
	if err != nil || len(records) != 1 {
		p.t.Fatalf("got %d attachment records and error %v, want one", len(records), err)
	}
	return records[0]
}

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

func must(t *testing.T) func([]string, error) []string {
	t.Helper()
	return func(s []string, err error) []string {
		if err != nil {
			t.Fatal(err)
		}
		return s
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
