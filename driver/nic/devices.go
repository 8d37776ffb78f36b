// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// carrierStableTime is how long a NIC must have had its carrier without interruption until it counts as up again: a
// NIC with a flapping carrier stays tainted.
const carrierStableTime = 5 * time.Second

// device is a shared NIC of a network.
type device struct {
	name    string
	nic     netdev.NIC
	network *config.Network // nil if the NIC has been missing since before this plugin started
	// base are the NICs that carry the frames: the NIC itself, or those at the
	// bottom of a VLAN or a bond.
	base []netdev.NIC
	// pci are the standard attributes of a NIC on PCI.
	pci     attribute.Map
	line    uint64 // line rate in bits per second
	reserve uint64 // the part of line for the node and unidentified frames, in bits per second
	// forwarded is the part of line for frames that the node forwards, in bits per
	// second; 0 if they have no class.
	forwarded uint64
	// senderKey is the key that the kernel uses to identify senders; "" without enforcement.
	senderKey classify.Key
	// checks are the results of the trials on the node's kernel; nil without enforcement.
	checks []check
	// queue is the kind of queues of shares; "" without enforcement.
	queue shape.Queue
	// shaping is how shares are limited; "" without enforcement.
	shaping string
	// singleQueue is why a NIC on a network with shaping MultiQueue has one queue; "" if it has several.
	singleQueue string
	// absent reports whether the NIC is missing, or cannot be shared (see unusable), while claims hold shares
	// of it.
	absent bool
	// unusable is why a present and configured NIC cannot be shared, and so counts as absent; nil if it is missing.
	unusable error
	// down reports whether the NIC has no carrier, or has had it for less than
	// carrierStableTime.
	down bool
	// upSince is when the NIC regained its carrier, while down is set.
	upSince time.Time
	// missed describes the frames that do not reach the classifier; "" if all do.
	missed string
	// granted is the sum of all grants, in bits per second. It exceeds
	// bandwidth if the NIC has become slower.
	granted uint64
}

// bandwidth returns the rate that can be granted, in bits per second.
func (d *device) bandwidth() uint64 { return d.line - d.reserve - d.forwarded }

// guaranteed returns the rate that is guaranteed to a share with a grant, in
// bits per second. It is less than the grant if the NIC has become slower than
// the sum of all grants.
func (d *device) guaranteed(grant uint64) uint64 {
	if d.granted <= d.bandwidth() {
		return grant
	}
	return uint64(float64(grant) * float64(d.bandwidth()) / float64(d.granted))
}

// guaranteesDiffer reports whether the guarantees of equal grants differ.
func (d *device) guaranteesDiffer(old *device) bool {
	const grant = 1 << 40
	return d.guaranteed(grant) != old.guaranteed(grant)
}

// debounceCarrier sets down and upSince from the NIC's carrier and its state at the last Refresh. It returns the time
// until Refresh must check again; 0 means never.
func (d *device) debounceCarrier(old *device, now time.Time) (requeueAfter time.Duration) {
	switch {
	case !d.nic.Up || !d.nic.Carrier:
		d.down = true
	case old == nil || !old.down:
	case old.upSince.IsZero():
		d.down, d.upSince, requeueAfter = true, now, carrierStableTime
	case now.Sub(old.upSince) < carrierStableTime:
		d.down, d.upSince, requeueAfter = true, old.upSince, carrierStableTime-now.Sub(old.upSince)
	}
	return requeueAfter
}

// unhealthyReason returns why the device does not work, or "" if it does.
func (d *device) unhealthyReason() (reason, message string) {
	switch {
	case errors.Is(d.unusable, shape.ErrForeignQdisc):
		return v1alpha1.ReasonDeviceUnusable, fmt.Sprintf("NIC %s cannot be shared, and nothing limits what its shares send "+
			"to the network: %s", d.name, d.unusable)
	case d.unusable != nil:
		return v1alpha1.ReasonDeviceUnusable, fmt.Sprintf("NIC %s cannot be shared: %s; "+
			"the existing limits of its shares stay in force", d.name, d.unusable)
	case d.absent:
		return v1alpha1.ReasonDeviceGone, fmt.Sprintf("NIC %s is missing from the node or from the driver's configuration; "+
			"the existing limits of its shares stay in force", d.name)
	case d.down && d.upSince.IsZero():
		return v1alpha1.ReasonLinkDown, fmt.Sprintf(
			"NIC %s has no carrier: is the cable plugged in, and is the interface %s up?", d.name, d.nic.Name)
	case d.down:
		return v1alpha1.ReasonLinkDown, fmt.Sprintf("NIC %s regained its carrier less than %s ago", d.name, carrierStableTime)
	default:
		return "", ""
	}
}

// absentError returns the error for a request for an absent device.
func (d *device) absentError() error {
	if d.unusable != nil {
		return fmt.Errorf("NIC %s cannot be shared: %w", d.name, d.unusable)
	}
	return fmt.Errorf("NIC %s is missing from the node or from the driver's configuration", d.name)
}

// plan returns the NICs to share, and the NICs that cannot be shared.
func plan(nics []netdev.NIC, c *config.DriverConfig) (devices []*device, problems []problem) {
	stack := newStack(nics, c)
	for _, n := range stack.lowestFirst() {
		network := c.NetworkOf(n.Name, n.Uplink)
		if network == nil {
			if pattern := c.NetworkOf(n.Name, false); pattern != nil {
				problems = append(problems, problem{n.Name, deviceName(n), &uplinkError{
					network: pattern.Name, toShare: cmp.Or(n.Master, n.Name),
				}})
			}
			continue
		}
		d, err := newDevice(n, stack, network)
		if err == nil {
			err = stack.conflict(d, devices)
		}
		if err != nil {
			problems = append(problems, problem{n.Name, deviceName(n), err})
			continue
		}
		devices = append(devices, d)
	}
	return devices, problems
}

// nameUniquely makes the names of devices differ: it adds a hash of the interface name to a name that several devices
// have. A device keeps its name when another one appears or disappears, because claims refer to it: the device with
// the lowest interface index, which is the oldest, keeps the name without a hash, and devices already known by a name
// with a hash keep that name.
func nameUniquely(devices []*device, isKnown func(name string) bool) {
	taken := map[string]bool{}
	byAge := slices.SortedFunc(slices.Values(devices), func(a, b *device) int { return a.nic.Index - b.nic.Index })
	for _, d := range byAge {
		hashed := fmt.Sprintf("%.50s-%x", d.name, sha256.Sum256([]byte(d.nic.Name)))[:min(63, len(d.name)+9)]
		if taken[d.name] || isKnown(hashed) {
			d.name = hashed
		}
		taken[d.name] = true
	}
}

// Parts of the line rate by default. An uplink carries the frames of all pods in
// the cluster network.
const (
	reservePercent   = 1
	forwardedPercent = 10 // for an uplink
)

// Values of v1alpha1.AttributeShaping.
const (
	shapingHTB   = "htb"
	shapingHTBMQ = "htb-mq"
)

// setShaping sets shaping and singleQueue from the NIC's queues.
func (d *device) setShaping(trees shape.Trees, multiQueueErr error) {
	d.shaping, d.singleQueue = shapingHTBMQ, ""
	if trees == shape.OneTree {
		d.shaping = shapingHTB
	}
	if multiQueueErr != nil {
		d.singleQueue = multiQueueErr.Error()
	}
}

// openVSwitch is the name that the kernel module of Open vSwitch gives the master of its ports. It cannot be shared.
const openVSwitch = "ovs-system"

// newDevice returns the device of a NIC of a stack.
func newDevice(n netdev.NIC, s stack, network *config.Network) (*device, error) {
	if n.Master == openVSwitch {
		return nil, errors.New("the NIC is a port of Open vSwitch and cannot have links of its own: " +
			"to share it, remove it from the switch, or name an internal port of the switch in interfaces instead")
	}
	if n.Master != "" {
		return nil, fmt.Errorf(
			"the NIC belongs to %s and cannot have links of its own: to share %s, name that in interfaces instead",
			n.Master, n.Master)
	}
	if n.MacvlanOffload && network.Enforcement != config.EnforcementNone {
		return nil, fmt.Errorf(
			"the NIC delivers frames of pods in hardware (l2-fwd-offload), past the queues that limit shares: "+
				"switch that off with \"ethtool -K %s l2-fwd-offload off\", and make that persistent", n.Name)
	}
	d := &device{name: deviceName(n), nic: n, base: s.base(n), network: network, line: s.line(n, network)}
	if d.line == 0 && !n.Carrier {
		return nil, fmt.Errorf("%w: connect the NIC, or set bandwidth for network %q", errNoCarrier, network.Name)
	}
	if d.line == 0 {
		return nil, fmt.Errorf("the link reports no speed: set bandwidth for network %q", network.Name)
	}
	d.reserve = d.part(network.Reserve, reservePercent)
	switch {
	case network.Enforcement == config.EnforcementNone:
	case n.Uplink:
		d.forwarded = d.part(network.Forwarded, forwardedPercent)
	default:
		d.forwarded = d.part(network.Forwarded, 0)
	}
	if d.reserve+d.forwarded >= d.line {
		return nil, fmt.Errorf(
			"reserve and forwarded of network %q, %s and %s bit/s, leave nothing of the link's %s bit/s: reduce them",
			network.Name, formatRate(d.reserve), formatRate(d.forwarded), formatRate(d.line))
	}
	return d, nil
}

// part returns a configured part of the line rate, or a percentage if it is not configured, in bits per second. If
// the link is slower than configured, the part shrinks proportionally.
func (d *device) part(configured *resource.Quantity, percent uint64) uint64 {
	if configured == nil {
		return d.line * percent / 100
	}
	part := uint64(configured.Value())
	if bandwidth := d.network.Bandwidth; bandwidth != nil && d.line < uint64(bandwidth.Value()) {
		part = uint64(float64(part) * float64(d.line) / float64(bandwidth.Value()))
	}
	return part
}

// deviceName returns a name that does not depend on the discovery order, other NICs, or, except for virtual NICs, the
// interface name.
func deviceName(n netdev.NIC) string {
	switch {
	case n.Bus == "pci" && n.Port != "":
		return attribute.PCIName(n.PCIBusID) + "-" + attribute.Label(n.Port)
	case n.Bus == "pci":
		return attribute.PCIName(n.PCIBusID)
	case len(n.PermanentMAC) > 0:
		return "mac-" + attribute.Label(n.PermanentMAC.String())
	default:
		return attribute.Label(n.Name)
	}
}

// publish returns the device for the ResourceSlice.
func (d *device) publish() resourceapi.Device {
	out := resourceapi.Device{
		Name:                     d.name,
		AllowMultipleAllocations: ptr.To(true),
		Attributes:               attribute.Map{v1alpha1.AttributeKind: attribute.Text(Name)},
	}
	switch {
	case d.unusable != nil:
		out.Taints = []resourceapi.DeviceTaint{{Key: v1alpha1.TaintUnusable, Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	case d.absent:
		out.Taints = []resourceapi.DeviceTaint{attribute.AbsentTaint()}
	case d.down && d.network.LinkDown != config.TaintNone:
		out.Taints = []resourceapi.DeviceTaint{
			{Key: v1alpha1.TaintLinkDown, Effect: resourceapi.DeviceTaintEffect(d.network.LinkDown)},
		}
	}
	d.addAttributes(out.Attributes)
	maps.Copy(out.Attributes, d.pci)
	out.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		v1alpha1.CapacityBandwidth: {
			Value:         bits(d.bandwidth()),
			RequestPolicy: bandwidthPolicy(d.bandwidth(), d.network.Policy),
		},
		v1alpha1.CapacityShares: {
			Value: *resource.NewQuantity(int64(*d.network.Shares), resource.DecimalSI),
			RequestPolicy: &resourceapi.CapacityRequestPolicy{
				Default:     ptr.To(resource.MustParse("1")),
				ValidValues: []resource.Quantity{resource.MustParse("1")},
			},
		},
	}
	return out
}

func (d *device) addAttributes(attributes attribute.Map) {
	for name, value := range map[resourceapi.QualifiedName]string{
		v1alpha1.AttributeInterfaceName: d.nic.Name, v1alpha1.AttributeNetwork: d.network.Name,
		v1alpha1.AttributeMAC: d.nic.MAC.String(), v1alpha1.AttributeDriver: d.nic.Driver,
		v1alpha1.AttributeResourceName: d.network.ResourceName,
		v1alpha1.AttributeSenderKey:    string(d.senderKey), v1alpha1.AttributeQueue: string(d.queue),
		v1alpha1.AttributeShaping: d.shaping,
	} {
		if value != "" {
			attributes[name] = attribute.Text(value)
		}
	}
	for _, c := range d.checks {
		if name, published := attributesOfKernelChecks[c.name]; published {
			attributes[name] = resourceapi.DeviceAttribute{BoolValue: ptr.To(c.passed)}
		}
	}
	attributes[v1alpha1.AttributeMTU] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(d.nic.MTU))}
	attributes[v1alpha1.AttributeSpeedMbps] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(d.line / 1e6))}
}

// bandwidthPolicy derives the request policy for a NIC that has value bits per second to grant. The API server
// requires min <= default <= value, a default on a step, and room for one step (KEP-5075). On a slow link, it lowers
// the configured numbers accordingly; otherwise the API server would refuse the whole slice.
func bandwidthPolicy(value uint64, p config.Policy) *resourceapi.CapacityRequestPolicy {
	low := min(uint64(p.Min.Value()), value)
	step := uint64(p.Step.Value())
	wanted := min(max(uint64(p.Default.Value()), low), value)
	policy := &resourceapi.CapacityRequestPolicy{
		ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(bits(low))},
	}
	if low+step <= value {
		wanted = low + (wanted-low)/step*step
		policy.ValidRange.Step = ptr.To(bits(step))
	} else {
		wanted = low // there is room for one size only
		policy.ValidRange.Max = ptr.To(bits(low))
	}
	policy.Default = ptr.To(bits(wanted))
	return policy
}

func bits(n uint64) resource.Quantity {
	return *resource.NewQuantity(int64(min(n, 1<<62)), resource.DecimalSI)
}
