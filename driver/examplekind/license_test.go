// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package examplekind_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/klog/v2/ktesting"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/conformance"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/examplekind"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

const (
	driverName = "dra-shared.dev"
	nodeName   = "n1"
	namespace  = "default"
	keyPath    = "etc/licenses/cad.key"
	// ownSpecs are the claims' CDI specs, without device metadata specs.
	ownSpecs = "cdi/dra-shared.dev-*"
	// timeout is for effects of the driver's goroutines.
	timeout = 15 * time.Second
)

// node is a node with one license of 10 seats, and the driver that runs there. The
// test acts as the kubelet.
type node struct {
	t      *testing.T
	dir    string
	client *fake.Clientset
	stop   func()
}

func newNode(t *testing.T) *node {
	t.Helper()
	// Paths of sockets have at most 107 characters, and t.TempDir() is longer.
	dir, err := os.MkdirTemp("", "dra")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	n := &node{t: t, dir: dir, client: fake.NewClientset(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "node"},
	})}
	for _, d := range []string{"plugin", "registry", "cdi", "run", "root/" + filepath.Dir(keyPath)} {
		if err := os.MkdirAll(n.path(d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	n.writeKey()
	n.start()
	t.Cleanup(func() { n.stop() })
	return n
}

func (n *node) path(name string) string { return filepath.Join(n.dir, name) }

func (n *node) writeKey() {
	n.t.Helper()
	if err := os.WriteFile(n.path("root/"+keyPath), []byte("secret"), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

// licenses returns the configuration of a license of 10 seats.
func licenses(path string) []examplekind.License {
	return []examplekind.License{{
		Name: "cad", Path: path,
		Capacities: config.Capacities{
			Capacity: map[string]resource.Quantity{"seats": resource.MustParse("10")},
			Policy: map[string]config.CapacityPolicy{
				"seats": {Default: ptr.To(resource.MustParse("1")), Min: ptr.To(resource.MustParse("1"))},
			},
		},
	}}
}

// start starts the driver, for the first time or again.
func (n *node) start() {
	n.t.Helper()
	kind := examplekind.New(os.DirFS(n.path("root")), licenses(keyPath))
	d, err := driver.New(driver.Options{
		DriverName: driverName, NodeName: nodeName, Client: n.client, Kinds: []driver.Kind{kind}, Instance: "1",
		Hook: "/hook", PluginDir: n.path("plugin"), RegistryDir: n.path("registry"), CDIDir: n.path("cdi"),
		RunDir: n.path("run"),
	})
	if err != nil {
		n.t.Fatal(err)
	}
	_, ctx := ktesting.NewTestContext(n.t)
	ctx, cancel := context.WithCancel(ctx)
	wait, err := d.Start(ctx)
	if err != nil {
		cancel()
		n.t.Fatal(err)
	}
	n.stop = sync.OnceFunc(func() {
		cancel()
		if err := wait(); err != nil {
			n.t.Error(err)
		}
	})
}

func (n *node) restart() {
	n.t.Helper()
	n.stop()
	n.start()
}

// claim creates a claim to seats, allocated as the scheduler does.
func (n *node) claim(name string, seats string) *resourceapi.ResourceClaim {
	n.t.Helper()
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: uuid.NewUUID()}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{
			Request: "cad", Driver: driverName, Pool: nodeName, Device: "cad", ShareID: ptr.To(uuid.NewUUID()),
			ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"seats": resource.MustParse(seats)},
		}},
	}}
	c, err := n.client.ResourceV1().ResourceClaims(namespace).Create(n.t.Context(), c, metav1.CreateOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	return c
}

// call calls the driver as the kubelet does.
func (n *node) call(f func(drapb.DRAPluginClient) error) error {
	n.t.Helper()
	socket := "unix://" + n.path("plugin/dra.sock")
	conn, err := grpc.NewClient(socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		n.t.Fatal(err)
	}
	defer conn.Close()
	return f(drapb.NewDRAPluginClient(conn))
}

func reference(c *resourceapi.ResourceClaim) []*drapb.Claim {
	return []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}
}

func (n *node) prepare(c *resourceapi.ResourceClaim) error {
	n.t.Helper()
	return n.call(func(plugin drapb.DRAPluginClient) error {
		response, err := plugin.NodePrepareResources(n.t.Context(), &drapb.NodePrepareResourcesRequest{Claims: reference(c)})
		if result := response.GetClaims()[string(c.UID)]; err == nil && result.GetError() != "" {
			err = errors.New(result.GetError())
		}
		return err
	})
}

func (n *node) mustPrepare(c *resourceapi.ResourceClaim) {
	n.t.Helper()
	if err := n.prepare(c); err != nil {
		n.t.Fatalf("prepare claim %s: %v", c.Name, err)
	}
}

func (n *node) unprepare(c *resourceapi.ResourceClaim) {
	n.t.Helper()
	err := n.call(func(plugin drapb.DRAPluginClient) error {
		request := &drapb.NodeUnprepareResourcesRequest{Claims: reference(c)}
		response, err := plugin.NodeUnprepareResources(n.t.Context(), request)
		if result := response.GetClaims()[string(c.UID)]; err == nil && result.GetError() != "" {
			err = errors.New(result.GetError())
		}
		return err
	})
	if err != nil {
		n.t.Fatalf("unprepare claim %s: %v", c.Name, err)
	}
}

// device returns the published device.
func (n *node) device() (device resourceapi.Device, err error) {
	list, err := n.client.ResourceV1().ResourceSlices().List(n.t.Context(), metav1.ListOptions{})
	if err != nil {
		return device, err
	}
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			if d.Name == "cad" {
				return d, nil
			}
		}
	}
	return device, fmt.Errorf("none of %d slices has the device", len(list.Items))
}

// awaitReason waits until the condition Ready of the claim has the reason.
func (n *node) awaitReason(c *resourceapi.ResourceClaim, reason string) {
	n.t.Helper()
	eventually.Eventually(n.t, timeout, "the status of claim "+c.Name+" is "+reason, func() error {
		now, err := n.client.ResourceV1().ResourceClaims(namespace).Get(n.t.Context(), c.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, d := range now.Status.Devices {
			if ready := meta.FindStatusCondition(d.Conditions, v1alpha1.ConditionReady); ready != nil && ready.Reason == reason {
				return nil
			}
		}
		return fmt.Errorf("the status is %+v", now.Status.Devices)
	})
}

// files returns the contents of the driver's files that match a pattern, by name.
func (n *node) files(pattern string) map[string]string {
	n.t.Helper()
	paths, err := filepath.Glob(n.path(pattern))
	if err != nil {
		n.t.Fatal(err)
	}
	found := map[string]string{}
	for _, path := range paths {
		raw, err := os.ReadFile(path)
		if err != nil {
			n.t.Fatal(err)
		}
		found[filepath.Base(path)] = string(raw)
	}
	return found
}

func TestKind_isPublishedForDeviceClass(t *testing.T) {
	n := newNode(t)
	eventually.Eventually(t, timeout, "the license is published", func() error {
		d, err := n.device()
		if err != nil {
			return err
		}
		kind := d.Attributes[v1alpha1.AttributeKind].StringValue
		seats := d.Capacity["seats"].Value
		if ptr.Deref(kind, "") != examplekind.Name || !ptr.Deref(d.AllowMultipleAllocations, false) || seats.Value() != 10 {
			return fmt.Errorf("got %+v, want kind %s, 10 seats, and that several claims may share it", d, examplekind.Name)
		}
		return nil
	})
}

func TestKind_conformance(t *testing.T) {
	conformance.Test(t, conformance.Config{
		Driver: driverName, Features: []string{"ConsumableCapacity", "SharedDevices", "RollingUpdate", "Status",
			"Health", "Metadata", "AdminAccess", "PrioritizedList", "WorkloadClaims", "DeviceTaints"},
		Serve: func(ctx context.Context, env conformance.Env) error {
			client, err := kubernetes.NewForConfig(env.REST)
			if err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(env.StateDir, "key"), []byte("secret"), 0o600); err != nil {
				return err
			}
			d, err := driver.New(driver.Options{
				DriverName: driverName, NodeName: env.Node, Client: client, Instance: env.PodUID, RollingUpdate: true,
				Kinds: []driver.Kind{examplekind.New(os.DirFS(env.StateDir), licenses("key"))},
				Hook:  "/hook", PluginDir: env.PluginDir, RegistryDir: env.RegistryDir, CDIDir: env.CDIDir, RunDir: env.StateDir,
			})
			if err != nil {
				return err
			}
			wait, err := d.Start(ctx)
			if err != nil {
				return err
			}
			return wait()
		},
		Skip: map[string]string{
			"REG-09": "the log of a driver in the test's process is not known",
			"PUB-13": "the log of a driver in the test's process is not known",
		},
	})
}

func TestKind_lifecycleOfClaims(t *testing.T) {
	n := newNode(t)
	four, six, one := n.claim("four", "4"), n.claim("six", "6"), n.claim("one", "1")
	n.mustPrepare(four)
	n.mustPrepare(six)
	err := n.prepare(one)
	if want := "device cad has 10, and 10 are granted"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("prepare a share of a license without free seats: got error %v, want %q", err, want)
	}
	specs := n.files(ownSpecs)
	if len(specs) != 2 {
		t.Errorf("got CDI specs %v, want one for each prepared claim", specs)
	}
	for _, spec := range specs {
		if !strings.Contains(spec, "DRA_SHARED_CAD_SEATS=") || !strings.Contains(spec, "/license") {
			t.Errorf("CDI spec %s: want the seats and the file", spec)
		}
	}
	var contents []string
	for _, content := range n.files("plugin/files/*/*") {
		contents = append(contents, content)
	}
	if all := strings.Join(contents, ""); !strings.Contains(all, "key=secret\nseats=4\n") ||
		!strings.Contains(all, "key=secret\nseats=6\n") {
		t.Errorf("got files %q, want one with 4 seats and one with 6", contents)
	}
	n.awaitReason(four, v1alpha1.ReasonPrepared)

	// Another plugin continues with the records: nothing changes.
	n.restart()
	n.mustPrepare(four)
	if now := n.files(ownSpecs); !maps.Equal(specs, now) {
		t.Errorf("CDI specs after a restart: got %v, want %v", now, specs)
	}
	n.unprepare(six)
	n.mustPrepare(one)
	n.unprepare(four)
	n.unprepare(one)
	for _, pattern := range []string{"cdi/*", "plugin/claims/*", "plugin/files/*", "plugin/dra-device-metadata/*"} {
		if left := n.files(pattern); len(left) > 0 {
			t.Errorf("%s after all claims were unprepared: got %v, want no files", pattern, left)
		}
	}
}

func TestKind_deviceDisappears(t *testing.T) {
	n := newNode(t)
	held := n.claim("held", "4")
	n.mustPrepare(held)
	if err := os.Remove(n.path("root/" + keyPath)); err != nil {
		t.Fatal(err)
	}
	eventually.Eventually(t, timeout, "the license has the taint for absent devices", func() error {
		d, err := n.device()
		if err == nil && (len(d.Taints) != 1 || d.Taints[0].Key != v1alpha1.TaintAbsent) {
			err = fmt.Errorf("it has the taints %v", d.Taints)
		}
		return err
	})
	n.awaitReason(held, v1alpha1.ReasonDeviceGone)
	err := n.prepare(n.claim("late", "1"))
	if want := "the key of license cad is missing from the node"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("prepare a share of a missing license: got error %v, want %q", err, want)
	}
	n.unprepare(held)
}
