// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// slots is a device kind with attachments that exist only in its memory. What the core does with it does not depend
// on links, addresses, or rates.
type slots struct {
	changed chan driver.Change // for Watch

	mu       sync.Mutex
	attached map[slotKey]attach.Pod
	calls    []string
	refusal  error // the error of Attach
}

type slotKey struct {
	share     string
	namespace attach.Namespace
}

func newSlots() *slots {
	return &slots{changed: make(chan driver.Change), attached: map[slotKey]attach.Pod{}}
}

func (k *slots) call(format string, args ...any) {
	k.calls = append(k.calls, fmt.Sprintf(format, args...))
}

// takeCalls returns the calls since the last takeCalls.
func (k *slots) takeCalls() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	calls := strings.Join(k.calls, ", ")
	k.calls = nil
	return calls
}

func (k *slots) Name() string { return "slots" }

func (k *slots) Refresh(context.Context, []record.Share) (driver.Refreshed, error) {
	return driver.Refreshed{}, nil
}

func (k *slots) Devices() []resourceapi.Device {
	return []resourceapi.Device{{Name: "rack", AllowMultipleAllocations: ptr.To(true)}}
}

func (k *slots) Has(device string) bool { return device == "rack" }

func (k *slots) Configure(context.Context, string, record.Share, [][]byte) (json.RawMessage, error) {
	return json.RawMessage(`{}`), nil
}

func (k *slots) Admit(record.Share, []*record.Share) error { return nil }

func (k *slots) Edits(record.Share) (cdi.Edits, error) { return cdi.Edits{}, nil }

func (k *slots) Attaches(record.Share) bool { return true }

func (k *slots) ValidateConsumers(_ record.Share, others []string) error {
	if len(others) > 0 {
		return fmt.Errorf("pod %s has the slot", others[0])
	}
	return nil
}

func (k *slots) Attach(
	_ context.Context, s record.Share, r attach.Request, sandbox driver.Sandbox,
) (driver.Attached, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.call("attach to %s", r.Pod.Name)
	namespace, err := sandbox.Identify()
	if err = errors.Join(err, k.refusal); err != nil {
		return driver.Attached{}, err
	}
	k.attached[slotKey{s.Name, namespace}] = r.Pod
	return driver.Attached{Namespace: namespace, Payload: json.RawMessage(`"slot 1"`)}, nil
}

func (k *slots) Restore(_ context.Context, _ record.Share, r attach.Record) (exists bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.call("restore in %s", r.Pod.Name)
	_, exists = k.attached[slotKey{r.Share, r.Namespace}]
	return exists, nil
}

func (k *slots) Detach(_ context.Context, r attach.Record) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.call("detach %s from %s", r.Payload, r.Pod.Name)
	delete(k.attached, slotKey{r.Share, r.Namespace})
	return nil
}

func (k *slots) Release(_ context.Context, s record.Share) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.call("release %s", s.Device)
	return nil
}

func (k *slots) Read(_ context.Context, _ record.Share, r attach.Record) (driver.State, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, exists := k.attached[slotKey{r.Share, r.Namespace}]
	return driver.State{Exists: exists, Ready: exists, Data: string(r.Payload)}, nil
}

func (k *slots) StatusData(attachments []driver.PodState, failed int) any {
	return map[string]any{"slot": attachments[0].Data, "pod": attachments[0].Pod.Name, "failed": failed}
}

func (k *slots) Orphans(context.Context, []record.Share, []attach.Record) ([]driver.Orphan, error) {
	return nil, nil
}

func (k *slots) Watch(ctx context.Context, changed func(driver.Change)) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case c := <-k.changed:
			changed(c)
		}
	}
}

// endSandbox removes the attachments of a pod, as the kernel does with a namespace.
func (k *slots) endSandbox(pod string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.attached, func(_ slotKey, p attach.Pod) bool { return p.Name == pod })
}

// slotPlugin is a plugin with slots as its only device kind.
type slotPlugin struct {
	*plugin
	slots *slots
}

func newSlotPlugin(t *testing.T) *slotPlugin {
	t.Helper()
	p := &slotPlugin{newPluginWithoutNIC(t), newSlots()}
	p.options.Kinds = []driver.Kind{p.slots}
	p.start()
	t.Cleanup(func() { p.stop() })
	return p
}

// start starts the plugin, for the first time or again.
func (p *slotPlugin) start() {
	p.t.Helper()
	var err error
	if p.Driver, err = driver.New(p.options); err != nil {
		p.t.Fatal(err)
	}
	p.run(func() error { return nil })
}

// slotClaim makes a claim to a slot, allocated and reserved for pods as the scheduler would, and makes the pods.
func (p *slotPlugin) slotClaim(name string, pods ...string) *resourceapi.ResourceClaim {
	p.t.Helper()
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: uuid.NewUUID()}}
	c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{
			Request: "slot", Driver: driverName, Pool: nodeName, Device: "rack", ShareID: ptr.To(uuid.NewUUID()),
			ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"slots": resource.MustParse("1")},
		}},
	}}
	for _, pod := range pods {
		uid := types.UID(pod)
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{
			Resource: "pods", Name: pod, UID: uid,
		})
		object := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: pod, UID: uid}}
		if _, err := p.client.CoreV1().Pods(namespace).Create(p.t.Context(), object, metav1.CreateOptions{}); err != nil {
			p.t.Fatal(err)
		}
	}
	_, err := p.client.ResourceV1().ResourceClaims(namespace).Create(p.t.Context(), c, metav1.CreateOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	return c
}

// container attaches a share as the hook of a container does.
func (p *slotPlugin) container(c *resourceapi.ResourceClaim, share, pod string, sandbox attach.Sockets) error {
	p.t.Helper()
	_, err := p.Attach(p.t.Context(), attach.Request{
		ClaimUID: string(c.UID), Share: share, SandboxID: pod, Pod: attach.Pod{UID: pod, Namespace: namespace, Name: pod},
	}, sandbox)
	return err
}

// networkOf returns what the hook sends from a new sandbox.
func networkOf(t *testing.T, ns *nstest.Namespace) attach.Sockets {
	t.Helper()
	var socket *os.File
	ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
		socket = os.NewFile(uintptr(fd), "rtnetlink")
		return err
	})
	t.Cleanup(func() { _ = socket.Close() })
	return attach.Sockets{Namespace: ns.File, Netlink: socket}
}

func (p *slotPlugin) wantCalls(want string) {
	p.t.Helper()
	if got := p.slots.takeCalls(); got != want {
		p.t.Errorf("the core called: %s; want: %s", got, want)
	}
}

// wantStatus waits for the condition Ready of a claim, and for its data.
func (p *slotPlugin) wantStatus(c *resourceapi.ResourceClaim, reason, data string) {
	p.t.Helper()
	eventually.Eventually(p.t, timeout, "the status of claim "+c.Name+" is "+reason, func() error {
		now, err := p.client.ResourceV1().ResourceClaims(namespace).Get(p.t.Context(), c.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(now.Status.Devices) != 1 {
			return fmt.Errorf("status.devices is %+v", now.Status.Devices)
		}
		d := now.Status.Devices[0]
		var got string
		if d.Data != nil {
			got = string(d.Data.Raw)
		}
		ready := meta.FindStatusCondition(d.Conditions, v1alpha1.ConditionReady)
		if ready == nil || ready.Reason != reason || got != data {
			return fmt.Errorf("the conditions are %+v, the data %s", d.Conditions, got)
		}
		return nil
	})
}

// The life of an attachment: containers of one sandbox share it, another pod is refused, and it is detached when its
// sandbox ends or the claim is unprepared.
func TestDriver_attachesSharesOfAnyKind(t *testing.T) {
	p := newSlotPlugin(t)
	c := p.slotClaim("c")
	share := p.mustPrepare(c)[0]
	p.slots.takeCalls()
	first, second := networkOf(t, nstest.New(t)), networkOf(t, nstest.New(t))
	for range 2 { // the second is another container of the sandbox
		if err := p.container(c, share, "a", first); err != nil {
			t.Fatal(err)
		}
	}
	p.wantCalls("attach to a")
	p.wantStatus(c, v1alpha1.ReasonAttached, `{"failed":0,"pod":"a","slot":"\"slot 1\""}`)
	if err := p.container(c, share, "b", second); err == nil || err.Error() != "pod default/a has the slot" {
		t.Errorf("attach to a second pod: got error %v", err)
	}
	p.wantCalls("")

	p.slots.endSandbox("a")
	p.slots.changed <- driver.Change{Detached: func(r *attach.Record) bool { return r.Pod.Name == "a" }}
	eventually.Eventually(t, timeout, "the slot is detached from pod a", func() error {
		records, err := attach.OpenRecords(p.options.RunDir, attach.AnyBoot, nil).OfClaim(string(c.UID))
		if err == nil && len(records) > 0 {
			err = fmt.Errorf("it has %d attachment records", len(records))
		}
		return err
	})
	p.wantCalls(`detach "slot 1" from a`)
	if err := p.container(c, share, "b", second); err != nil {
		t.Fatal(err)
	}
	p.unprepare(c)
	p.wantCalls(`attach to b, detach "slot 1" from b, release rack`)
	p.wantNothingLeft()
}

// A plugin that starts again restores the attachments that exist, and detaches the others.
func TestDriver_restoresSharesOfAnyKind(t *testing.T) {
	p := newSlotPlugin(t)
	kept, lost := p.slotClaim("kept"), p.slotClaim("lost")
	network := networkOf(t, nstest.New(t))
	for _, c := range []*resourceapi.ResourceClaim{kept, lost} {
		if err := p.container(c, p.mustPrepare(c)[0], c.Name, network); err != nil {
			t.Fatal(err)
		}
	}
	p.stop()
	p.slots.takeCalls()
	p.slots.endSandbox("lost")
	p.start()
	calls := strings.Split(p.slots.takeCalls(), ", ")
	for _, want := range []string{"restore in kept", "restore in lost", `detach "slot 1" from lost`} {
		if !slices.Contains(calls, want) {
			t.Errorf("the core called %v, want %s too", calls, want)
		}
	}
	if unwanted := `detach "slot 1" from kept`; slices.Contains(calls, unwanted) {
		t.Errorf("the core called %v, want it not to %s", calls, unwanted)
	}
}

// The status of a claim, and not only the container, says why a share could not be attached.
func TestDriver_reportsFailuresOfAnyKind(t *testing.T) {
	p := newSlotPlugin(t)
	c := p.slotClaim("c", "a")
	share := p.mustPrepare(c)[0]
	p.slots.refusal = errors.New("the rack is open")
	network := networkOf(t, nstest.New(t))
	if err := p.container(c, share, "a", network); err == nil || err.Error() != "the rack is open" {
		t.Errorf("attach: got error %v", err)
	}
	p.wantStatus(c, v1alpha1.ReasonAttachFailed, "")
	p.slots.refusal = nil
	if err := p.container(c, share, "a", network); err != nil {
		t.Fatal(err)
	}
	p.wantStatus(c, v1alpha1.ReasonAttached, `{"failed":0,"pod":"a","slot":"\"slot 1\""}`)
}
