// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package accelerator implements the device kind accelerator: it maps what
// package accel discovers to claims, shares, and parameters. A share consists of
// device nodes, the edits that the administrator configured, and what the
// claim's parameters add. The device's own software enforces the grant, except
// for the memory of devices that the cgroup controller dmem supports.
package accelerator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/accel"
	"github.com/dra-shared/dra-driver-shared/accel/dmem"
	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/device/capacity"
	"github.com/dra-shared/dra-driver-shared/device/containeredits"
	"github.com/dra-shared/dra-driver-shared/device/inventory"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// Name is the name of the kind.
const Name = v1alpha1.DeviceKindAccelerator

// Kind implements driver.Kind for accelerators.
type Kind struct {
	host   accel.Host
	config *config.DriverConfig
	node   string

	devices inventory.Set[device]
	// mu is held during Refresh.
	mu sync.Mutex
	// loggedProblems are the problems that were logged, by device.
	loggedProblems map[string]string
}

var (
	_ driver.Kind              = (*Kind)(nil)
	_ driver.ConditionReporter = (*Kind)(nil)
	_ driver.HealthReporter    = (*Kind)(nil)
	_ driver.ReadinessChecker  = (*Kind)(nil)
	_ driver.Watcher           = (*Kind)(nil)
)

// New builds the kind for the node of that name. It accesses nothing before the
// first Refresh.
func New(host accel.Host, c *config.DriverConfig, node string) *Kind {
	return &Kind{host: host, config: c, node: node, loggedProblems: map[string]string{}}
}

// Name implements driver.Kind.
func (k *Kind) Name() string { return Name }

// Refresh implements driver.Kind. It discovers the accelerators of the node.
func (k *Kind) Refresh(ctx context.Context, shares []record.Share) (refreshed driver.Refreshed, err error) {
	next, problems, err := discover(k.host, k.config.Accelerators)
	if err != nil {
		return refreshed, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, s := range shares {
		d := next[s.Device]
		if d == nil {
			d = k.absent(s.Device)
			next[s.Device] = d
		}
		d.shared = d.shared || s.ShareID != "" && !s.AdminAccess
	}
	k.log(ctx, next, problems)
	k.devices.Replace(next)
	return refreshed, nil
}

// Watch implements driver.Watcher. It watches the directories of the device nodes.
func (k *Kind) Watch(ctx context.Context, changed func(driver.Change)) error {
	if len(k.config.Accelerators) == 0 {
		return nil
	}
	matches := make([]accel.Match, len(k.config.Accelerators))
	for i, accelerator := range k.config.Accelerators {
		matches[i] = match(accelerator)
	}
	err := k.host.Watch(ctx, matches, func() { changed(driver.Change{Devices: true}) })
	if err == nil || ctx.Err() != nil {
		return nil //nolint:nilerr // the watch ended because the plugin is stopping
	}
	return fmt.Errorf("%w: %w", driver.ErrWatchUnavailable, err)
}

// absent returns a device that has shares and is missing from the node. It is a
// copy, because other goroutines may be reading the current one.
func (k *Kind) absent(name string) *device {
	d := device{name: name}
	if last := k.devices.Get(name); last != nil {
		d = *last
	}
	d.absent = true
	return &d
}

// log logs the changes since the last Refresh. It requires k.mu.
func (k *Kind) log(ctx context.Context, next map[string]*device, problems map[string]error) {
	logger := klog.FromContext(ctx)
	for name, d := range next {
		old := k.devices.Get(name)
		switch {
		case d.absent && (old == nil || !old.absent):
			logger.Info("Accelerator with shares is missing from the node or the configuration", "device", name)
		case !d.absent && (old == nil || old.absent || !slices.Equal(old.Nodes, d.Nodes)):
			logger.Info("Found accelerator to publish",
				"device", name, "accelerator", d.config.Name, "deviceNodes", d.Nodes, "exclusive", d.config.Exclusive)
		}
	}
	for _, name := range k.devices.Names() {
		if next[name] == nil {
			logger.Info("Stopped publishing accelerator", "device", name)
		}
	}
	logged := map[string]string{}
	for name, err := range problems {
		logged[name] = err.Error()
		if k.loggedProblems[name] != logged[name] {
			logger.Error(err, "Cannot publish accelerator", "device", name)
		}
	}
	k.loggedProblems = logged
}

// Ready implements driver.ReadinessChecker.
func (k *Kind) Ready() error {
	if !k.devices.IsDiscovered() {
		return errors.New("the plugin has not discovered the accelerators yet")
	}
	return nil
}

// Devices implements driver.Kind.
func (k *Kind) Devices() []resourceapi.Device {
	var devices []resourceapi.Device
	for _, d := range k.devices.Sorted() {
		if d.config == nil {
			continue // missing since before this plugin started; see driver.Kind
		}
		devices = append(devices, d.publish())
	}
	return devices
}

// Health implements driver.HealthReporter.
func (k *Kind) Health() []driver.Health {
	var all []driver.Health
	for _, d := range k.devices.Sorted() {
		message := d.problem()
		all = append(all, driver.Health{Device: d.name, Healthy: message == "", Message: message})
	}
	return all
}

// Has implements driver.Kind.
func (k *Kind) Has(name string) bool { return k.devices.Get(name) != nil }

// device returns the device of that name.
func (k *Kind) device(name string) (*device, error) {
	if d := k.devices.Get(name); d != nil {
		return d, nil
	}
	return nil, fmt.Errorf(
		"this node has no accelerator %s: was it removed from the node, or from the driver's configuration?", name)
}

// Configure implements driver.Kind. Its result is the CDI edits: a restarting container gets the same edits as
// before.
func (k *Kind) Configure(
	_ context.Context, _ string, share record.Share, parameters [][]byte,
) (json.RawMessage, error) {
	d, err := k.device(share.Device)
	if err != nil {
		return nil, err
	}
	if d.absent && !share.AdminAccess {
		return nil, errors.New(d.problem())
	}
	if d.config == nil { // admin access to a missing device: the container sees that it is missing
		return json.Marshal(containeredits.AdminAccess(share.Request))
	}
	merged, err := mergeParameters(parameters)
	if err != nil {
		return nil, err
	}
	if errs := merged.ValidateFor(d.config.Allowed()); len(errs) > 0 {
		return nil, fmt.Errorf("%s: %w", v1alpha1.AcceleratorShareKind, errs.ToAggregate())
	}
	edits, err := k.edits(d, share, merged)
	if err != nil {
		return nil, err
	}
	if share.AdminAccess {
		edits.DeviceNodes = slices.DeleteFunc(edits.DeviceNodes, func(node string) bool { return !k.host.IsNode(node) })
	}
	for _, node := range edits.DeviceNodes {
		if !k.host.IsNode(node) {
			return nil, fmt.Errorf(
				"device node %s does not exist on the node: is the device's driver loaded, and has it created its device nodes?",
				node)
		}
	}
	return json.Marshal(edits)
}

// mergeParameters decodes opaque parameters, and merges them in order: the claim's override the DeviceClass's.
func mergeParameters(parameters [][]byte) (*v1alpha1.AcceleratorShare, error) {
	var merged *v1alpha1.AcceleratorShare
	for _, raw := range parameters {
		p, err := v1alpha1.DecodeAs[*v1alpha1.AcceleratorShare](raw)
		if err != nil {
			return nil, err
		}
		merged = v1alpha1.MergeAcceleratorShares(merged, p)
	}
	return v1alpha1.MergeAcceleratorShares(merged, nil), nil
}

// edits returns the CDI edits of containers with the share.
func (k *Kind) edits(d *device, share record.Share, p *v1alpha1.AcceleratorShare) (cdi.Edits, error) {
	variables := containeredits.ShareVariables(containeredits.Share{
		Name: share.Name, Request: share.Request, Device: share.Device, Node: k.node,
	}, d.config.Capacities, granted(d, share))
	if d.PCIBusID != "" {
		variables[config.VariablePCIBusID] = d.PCIBusID
	}
	texts := d.config.Edits
	if share.AdminAccess { // keep only edits that do not depend on a grant
		texts = texts.Only(variables)
	}
	expanded, err := texts.Expand(variables)
	if err != nil {
		return cdi.Edits{}, fmt.Errorf("edits of accelerator %q: %w", d.config.Name, err)
	}
	edits := containeredits.Merge(expanded, p.Environment, containeredits.GrantVariables(share.Request, granted(d, share)))
	if share.AdminAccess {
		edits.Env = append(edits.Env, containeredits.AdminAccess(share.Request).Env...)
	}
	if memory, ok := granted(d, share)[v1alpha1.CapacityMemory]; ok && d.region != "" && share.ShareID != "" {
		edits.Hook = dmem.Args(d.region, uint64(memory.Value()))
	}
	edits.DeviceNodes = append(slices.Clone(d.Nodes), edits.DeviceNodes...)
	for _, node := range p.DeviceNodes {
		if !slices.Contains(edits.DeviceNodes, node) {
			edits.DeviceNodes = append(edits.DeviceNodes, node)
		}
	}
	return edits, nil
}

// granted returns a share's grant: an unshared device's whole capacity, or nothing for admin access, regardless of
// the allocation.
func granted(d *device, share record.Share) map[string]resource.Quantity {
	switch {
	case share.AdminAccess:
		return nil
	case share.ShareID == "":
		return d.config.Capacity
	default:
		return share.Capacity
	}
}

// Admit implements driver.Kind.
func (k *Kind) Admit(share record.Share, others []*record.Share) error {
	d, err := k.device(share.Device)
	if err != nil {
		return err
	}
	// A share without an ID is the whole device: it was allocated before the
	// device became shared, or by a scheduler without consumable capacity.
	whole := d.config.Exclusive || share.ShareID == ""
	return capacity.Admit(d.name, d.config.Capacities, whole, share.Capacity, record.CapacitiesOf(others))
}

// Edits implements driver.Kind.
func (k *Kind) Edits(share record.Share) (cdi.Edits, error) {
	return containeredits.Decode(share.Name, share.Parameters)
}

// Conditions implements driver.ConditionReporter.
func (k *Kind) Conditions(share record.Share) []metav1.Condition {
	ready := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonPrepared,
		Message: "containers that reference the claim can open the device"}
	d, err := k.device(share.Device)
	switch {
	case err != nil || d.problem() != "":
		ready.Status, ready.Reason = metav1.ConditionFalse, v1alpha1.ReasonDeviceGone
		ready.Message = "the device is missing from the node or from the driver's configuration"
	case !share.AdminAccess:
		if former := k.formerNodes(d, share); len(former) > 0 {
			ready.Status, ready.Reason = metav1.ConditionFalse, v1alpha1.ReasonDeviceChanged
			ready.Message = fmt.Sprintf("containers get device nodes %v, which no longer exist or belong to another device; "+
				"the device now has %v: delete the pods of the claim",
				former, d.Nodes)
		}
	}
	conditions := []metav1.Condition{ready}
	if memory, ok := share.Capacity[v1alpha1.CapacityMemory]; ok {
		conditions = append(conditions, k.memoryCondition(share, memory.String()))
	}
	return conditions
}

// formerNodes returns the device nodes in a share's edits that no longer exist or now belong to another device: since
// the claim was prepared, the device's driver was reloaded, or another device was removed.
func (k *Kind) formerNodes(d *device, share record.Share) (former []string) {
	edits, err := k.Edits(share)
	if err != nil {
		return nil
	}
	others := map[string]bool{}
	for _, other := range k.devices.Sorted() {
		for _, node := range other.Nodes {
			others[node] = other.name != d.name
		}
	}
	for _, node := range edits.DeviceNodes {
		if others[node] || !k.host.IsNode(node) {
			former = append(former, node)
		}
	}
	return former
}

// memoryCondition reports whether the kernel limits the memory. The recorded
// edits decide: no container of the share starts without the hook that sets the
// limit.
func (k *Kind) memoryCondition(share record.Share, memory string) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionMemoryEnforced}
	if edits, err := k.Edits(share); err == nil && len(edits.Hook) > 0 {
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonContainerLimited
		c.Message = fmt.Sprintf(
			"the cgroup controller dmem limits each container with the share to %s; if several containers have the "+
				"share, the limit applies to each of them separately", memory)
		return c
	}
	c.Status, c.Reason = metav1.ConditionFalse, v1alpha1.ReasonMemoryNotEnforced
	c.Message = fmt.Sprintf(
		"%s of memory are granted, but nothing on the node prevents the share's programs from using more: "+
			"they must obey the limit in their environment", memory)
	return c
}
