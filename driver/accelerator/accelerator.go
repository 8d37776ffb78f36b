// Package accelerator makes accelerators a kind of device that the driver
// shares: what accel finds, in terms of claims, shares and parameters. A share
// is its device nodes, and what the administrator's edits and the claim's
// parameters put beside them; what of a grant is enforced, the device's own
// software enforces.
package accelerator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/accel"
	"github.com/dra-shared/dra-driver-shared/accel/dmem"
	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/device/capacity"
	"github.com/dra-shared/dra-driver-shared/device/containeredits"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// Name of the kind.
const Name = "accelerator"

// Kind implements driver.Kind for accelerators.
type Kind struct {
	host   accel.Host
	config *config.DriverConfig
	node   string

	mu      sync.RWMutex
	devices map[string]*device // nil before the first Refresh; a device is not changed once it is in
	told    map[string]string  // problems that have been logged, by device
}

var (
	_ driver.Reporter = (*Kind)(nil)
	_ driver.Watcher  = (*Kind)(nil)
)

// New returns the kind for the node of that name. It looks at nothing before
// the first Refresh.
func New(host accel.Host, c *config.DriverConfig, node string) *Kind {
	return &Kind{host: host, config: c, node: node, told: map[string]string{}}
}

// Name implements driver.Kind.
func (k *Kind) Name() string { return Name }

// Refresh implements driver.Kind: it reads which accelerators there are.
func (k *Kind) Refresh(ctx context.Context, shares []record.Share) (found driver.Refreshed, err error) {
	next, problems, err := find(k.host, k.config.Accelerators)
	if err != nil {
		return found, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, s := range shares {
		if next[s.Device] == nil {
			next[s.Device] = k.absent(s.Device)
		}
		next[s.Device].shared = next[s.Device].shared || s.ShareID != "" && !s.AdminAccess
	}
	k.log(ctx, next, problems)
	k.devices = next
	return found, nil
}

// Watch implements driver.Watcher.
func (k *Kind) Watch(ctx context.Context, changed func()) error {
	if len(k.config.Accelerators) == 0 {
		return nil
	}
	matches := make([]accel.Match, len(k.config.Accelerators))
	for i, group := range k.config.Accelerators {
		matches[i] = match(group)
	}
	return k.host.Watch(ctx, matches, changed)
}

// absent is a device that has shares and is not there. A copy: others may be
// reading the one that was.
func (k *Kind) absent(name string) *device {
	d := device{name: name}
	if last := k.devices[name]; last != nil {
		d = *last
	}
	d.absent = true
	return &d
}

// log says once what changed. It is called with the lock held.
func (k *Kind) log(ctx context.Context, next map[string]*device, problems map[string]error) {
	logger := klog.FromContext(ctx)
	for name, d := range next {
		switch old := k.devices[name]; {
		case d.absent && (old == nil || !old.absent):
			logger.Info("Shares are held of an accelerator that is gone, or not configured any more", "device", name)
		case !d.absent && (old == nil || old.absent || !slices.Equal(old.Nodes, d.Nodes)):
			logger.Info("Accelerator is published", "device", name, "accelerator", d.group.Name, "nodes", d.Nodes, "exclusive", d.group.Exclusive)
		}
	}
	for name := range k.devices {
		if next[name] == nil {
			logger.Info("Accelerator is no longer published", "device", name)
		}
	}
	told := map[string]string{}
	for name, err := range problems {
		if told[name] = err.Error(); k.told[name] != told[name] {
			logger.Error(err, "Accelerator cannot be published", "device", name)
		}
	}
	k.told = told
}

// Leave implements driver.Kind: nothing was done to the devices.
func (k *Kind) Leave(context.Context) error { return nil }

// Ready implements driver.Kind.
func (k *Kind) Ready() error {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if k.devices == nil {
		return errors.New("the accelerators have not been looked at yet")
	}
	return nil
}

// Devices implements driver.Kind.
func (k *Kind) Devices() []resourceapi.Device {
	var devices []resourceapi.Device
	for _, d := range k.all() {
		if d.group == nil {
			// Gone since before this plugin started. A device without the
			// attributes that selectors ask for is an error to the scheduler, which
			// then looks at no other.
			continue
		}
		devices = append(devices, d.publish())
	}
	return devices
}

// Health implements driver.Kind.
func (k *Kind) Health() []driver.Health {
	var all []driver.Health
	for _, d := range k.all() {
		message := d.trouble()
		all = append(all, driver.Health{Device: d.name, Healthy: message == "", Message: message})
	}
	return all
}

// all returns the devices by name.
func (k *Kind) all() []*device {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return slices.SortedFunc(maps.Values(k.devices), func(a, b *device) int { return strings.Compare(a.name, b.name) })
}

// Has implements driver.Kind.
func (k *Kind) Has(name string) bool {
	_, err := k.device(name)
	return err == nil
}

func (k *Kind) device(name string) (*device, error) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	d, ok := k.devices[name]
	if !ok {
		return nil, fmt.Errorf("this node has no accelerator %s", name)
	}
	return d, nil
}

// Configure implements driver.Kind. What it returns are the edits themselves:
// a container that starts again finds what the first one did.
func (k *Kind) Configure(share record.Share, configurations [][]byte) (json.RawMessage, error) {
	d, err := k.device(share.Device)
	if err != nil {
		return nil, err
	}
	if d.absent && !share.AdminAccess {
		return nil, errors.New(d.trouble())
	}
	if d.group == nil { // who looks after devices sees that this one is gone
		return json.Marshal(containeredits.AdminAccess(share.Request))
	}
	var merged *params.AcceleratorShare
	for _, raw := range configurations {
		p, err := params.DecodeAs[*params.AcceleratorShare](raw)
		if err != nil {
			return nil, err
		}
		merged = params.MergeAcceleratorShares(merged, p)
	}
	merged = params.MergeAcceleratorShares(merged, nil)
	if errs := merged.ValidateFor(d.group.Allowed()); len(errs) > 0 {
		return nil, fmt.Errorf("%s: %w", params.AcceleratorShareKind, errs.ToAggregate())
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
			return nil, fmt.Errorf("device node %s is not on the node: is the device's driver loaded, are its device nodes made?", node)
		}
	}
	return json.Marshal(edits)
}

// edits puts together what a container with the share finds: pure.
func (k *Kind) edits(d *device, share record.Share, p *params.AcceleratorShare) (cdi.Edits, error) {
	variables := containeredits.TemplateVariables(d.group.Capacities, granted(d, share))
	maps.Copy(variables, map[string]string{
		config.VariableShare: share.Name, config.VariableRequest: share.Request, config.VariableDevice: share.Device, config.VariableNode: k.node,
	})
	if d.PCIBusID != "" {
		variables[config.VariablePCIBusID] = d.PCIBusID
	}
	texts := d.group.Edits
	if share.AdminAccess { // to look, with what looking needs, and no limit that is of a grant
		texts = texts.Only(variables)
	}
	expanded, err := texts.Expand(variables)
	if err != nil {
		return cdi.Edits{}, fmt.Errorf("edits of accelerator %q: %w", d.group.Name, err)
	}
	edits := containeredits.Merge(expanded, p.Environment, containeredits.GrantVariables(share.Request, granted(d, share)))
	if share.AdminAccess {
		edits.Env = append(edits.Env, containeredits.AdminAccess(share.Request).Env...)
	}
	if memory, ok := granted(d, share)[config.CapacityMemory]; ok && d.region != "" && share.ShareID != "" {
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

// granted is what a share has of the device: all of it, if that is not shared.
// What an allocation for admin access says of capacity counts for nothing.
func granted(d *device, share record.Share) map[string]resource.Quantity {
	switch {
	case share.AdminAccess:
		return nil
	case share.ShareID == "":
		return d.group.Capacity
	default:
		return share.Capacity
	}
}

// Together implements driver.Kind.
func (k *Kind) Together([]record.Share) error { return nil }

// Admit implements driver.Kind.
func (k *Kind) Admit(share record.Share, others []record.Share) error {
	d, err := k.device(share.Device)
	if err != nil {
		return err
	}
	taken := make([]map[string]resource.Quantity, len(others))
	for i, o := range others {
		taken[i] = o.Capacity
	}
	// One that was allocated before the device was shared, or by a scheduler
	// that does not share, is of the whole device too.
	whole := d.group.Exclusive || share.ShareID == ""
	return capacity.Admit(d.name, d.group.Capacities, whole, share.Capacity, taken)
}

// Edits implements driver.Kind.
func (k *Kind) Edits(share record.Share) (edits cdi.Edits, err error) {
	if err = json.Unmarshal(share.Parameters, &edits); err != nil {
		err = fmt.Errorf("recorded edits of share %s: %w", share.Name, err)
	}
	return edits, err
}

// Reasons of conditions.
const (
	reasonPrepared = "Prepared"
	reasonGone     = "DeviceGone"
	// ReasonMemoryNotEnforced: nothing here holds the share to its memory.
	ReasonMemoryNotEnforced = "MemoryNotEnforced"
	// ReasonContainerLimited: the kernel holds each container to it.
	ReasonContainerLimited = "ContainerLimited"
)

// Conditions implements driver.Reporter.
func (k *Kind) Conditions(share record.Share) []metav1.Condition {
	ready := metav1.Condition{Type: driver.ConditionReady, Status: metav1.ConditionTrue, Reason: reasonPrepared,
		Message: "containers that name the claim find the device's nodes"}
	if d, err := k.device(share.Device); err != nil || d.trouble() != "" {
		ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, reasonGone, "the device is gone from the node, or from the driver's configuration"
	}
	conditions := []metav1.Condition{ready}
	if memory, ok := share.Capacity[config.CapacityMemory]; ok {
		conditions = append(conditions, k.memoryCondition(share, memory.String()))
	}
	return conditions
}

// memoryCondition says whether the kernel limits the memory: by what was
// prepared, without which no container of the share starts.
func (k *Kind) memoryCondition(share record.Share, memory string) metav1.Condition {
	if edits, err := k.Edits(share); err == nil && len(edits.Hook) > 0 {
		return metav1.Condition{Type: driver.ConditionMemoryEnforced, Status: metav1.ConditionTrue, Reason: ReasonContainerLimited,
			Message: fmt.Sprintf("the cgroup controller dmem keeps each container that has the share within %s; several containers of one share have as much each", memory)}
	}
	return metav1.Condition{Type: driver.ConditionMemoryEnforced, Status: metav1.ConditionFalse, Reason: ReasonMemoryNotEnforced,
		Message: fmt.Sprintf("%s of memory are granted; nothing on the node keeps the share's programs from using more: their environment says what they should keep to", memory)}
}
