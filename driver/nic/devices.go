package nic

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

// Capacities of a published NIC.
const (
	// CapacityBandwidth is in bits per second, each direction.
	CapacityBandwidth = "bandwidth"
	// CapacityShares counts the shares a NIC can be divided into.
	CapacityShares = "shares"
)

// TaintLinkDown is on a NIC that has no link, or had none a moment ago.
const TaintLinkDown = "dra-shared.dev/link-down"

// steady is how long a link must have been up without interruption before it
// counts as up again: one that flaps stays tainted.
const steady = 5 * time.Second

// device is a NIC of a network, as it is shared.
type device struct {
	name    string
	nic     netdev.NIC
	network *config.Network
	// pci are the standard attributes of a NIC on PCI.
	pci     attribute.Map
	line    uint64 // bits per second
	reserve uint64 // bits per second, of line
	// absent: the NIC is gone, shares of it are not.
	absent bool
	// down: the NIC has no link, or has not been steady since.
	down bool
	// upSince is when the link came back, while it is not steady.
	upSince time.Time
	// granted to all shares together, in bits per second. More than
	// bandwidth if the link has become slower.
	granted uint64
}

// bandwidth is what can be granted, in bits per second.
func (d *device) bandwidth() uint64 { return d.line - d.reserve }

// guaranteed is what a share that was granted so much is sure of: less if the
// link has become slower than the sum of what was granted.
func (d *device) guaranteed(grant uint64) uint64 {
	if d.granted <= d.bandwidth() {
		return grant
	}
	return uint64(float64(grant) * float64(d.bandwidth()) / float64(d.granted))
}

func (d *device) scaleDiffers(old *device) bool {
	const probe = 1 << 40
	return d.guaranteed(probe) != old.guaranteed(probe)
}

// settle decides whether the link counts as down, by what it was at the last
// look, and returns when to look again.
func (d *device) settle(old *device, now time.Time) (again time.Duration) {
	switch {
	case !d.nic.Up || !d.nic.Carrier:
		d.down = true
	case old == nil || !old.down:
	case old.upSince.IsZero():
		d.down, d.upSince, again = true, now, steady
	case now.Sub(old.upSince) < steady:
		d.down, d.upSince, again = true, old.upSince, steady-now.Sub(old.upSince)
	}
	return again
}

// trouble is why the device does not work, empty if it does.
func (d *device) trouble() (reason, message string) {
	switch {
	case d.absent:
		return reasonGone, fmt.Sprintf("NIC %s is gone from the node, or from the driver's configuration; if it is there, its shares are limited as they were", d.name)
	case d.down && d.upSince.IsZero():
		return reasonLinkDown, fmt.Sprintf("NIC %s has no link: is the cable plugged in, the interface %s up?", d.name, d.nic.Name)
	case d.down:
		return reasonLinkDown, fmt.Sprintf("the link of NIC %s is back, but not for %s yet", d.name, steady)
	default:
		return "", ""
	}
}

// problem is a NIC that cannot be shared, and why.
type problem struct {
	nic string
	err error
}

// plan decides which NICs are shared: pure.
func plan(nics []netdev.NIC, c *config.DriverConfig) (devices []*device, problems []problem) {
	names := map[string]int{}
	for _, n := range nics {
		network := c.NetworkOf(n.Name, n.DefaultRoute)
		if network == nil {
			continue
		}
		d, err := newDevice(n, network)
		if err != nil {
			problems = append(problems, problem{n.Name, err})
			continue
		}
		devices = append(devices, d)
		names[d.name]++
	}
	for _, d := range devices {
		if names[d.name] > 1 {
			d.name = fmt.Sprintf("%.50s-%x", d.name, sha256.Sum256([]byte(d.nic.Name)))[:min(63, len(d.name)+9)]
		}
	}
	return devices, problems
}

// reservePercent of the line rate is kept where the configuration does not say.
const reservePercent = 1

func newDevice(n netdev.NIC, network *config.Network) (*device, error) {
	if n.Master != "" {
		return nil, fmt.Errorf("the NIC belongs to %s: no link can be made of it; name %s in interfaces instead, if that is to be shared", n.Master, n.Master)
	}
	d := &device{name: deviceName(n), nic: n, network: network, line: n.Speed}
	if network.Bandwidth != nil {
		d.line = uint64(network.Bandwidth.Value())
		if n.PCIBusID != "" && n.Speed > 0 { // hardware knows what it has negotiated; what virtual links say means little
			d.line = min(d.line, n.Speed)
		}
	}
	if d.line == 0 {
		return nil, fmt.Errorf("the link reports no speed: set bandwidth for network %q", network.Name)
	}
	d.reserve = d.line * reservePercent / 100
	if network.Reserve != nil {
		d.reserve = uint64(network.Reserve.Value())
		if network.Bandwidth != nil && d.line < uint64(network.Bandwidth.Value()) { // of what the link has left
			d.reserve = uint64(float64(d.reserve) * float64(d.line) / float64(network.Bandwidth.Value()))
		}
	}
	if d.reserve >= d.line {
		return nil, fmt.Errorf("reserve %d of network %q leaves nothing of the link's %d bit/s", d.reserve, network.Name, d.line)
	}
	return d, nil
}

// deviceName is made of what does not change when links are renamed or found
// in another order, as far as there is such a thing.
func deviceName(n netdev.NIC) string {
	switch {
	case n.PCIBusID != "":
		return attribute.PCIName(n.PCIBusID)
	case len(n.PermanentMAC) > 0:
		return "mac-" + attribute.Label(n.PermanentMAC.String())
	default:
		return attribute.Label(n.Name)
	}
}

// publish is the device as it stands in a ResourceSlice.
func (d *device) publish() resourceapi.Device {
	out := resourceapi.Device{
		Name:                     d.name,
		AllowMultipleAllocations: ptr.To(true),
		Attributes:               attribute.Map{attribute.Kind: attribute.Text(Name)},
	}
	switch {
	case d.absent:
		out.Taints = []resourceapi.DeviceTaint{{Key: attribute.TaintAbsent, Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	case d.down && d.network.LinkDown != config.TaintNone:
		out.Taints = []resourceapi.DeviceTaint{{Key: TaintLinkDown, Effect: resourceapi.DeviceTaintEffect(d.network.LinkDown)}}
	}
	d.addAttributes(out.Attributes)
	maps.Copy(out.Attributes, d.pci)
	out.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		CapacityBandwidth: {Value: bits(d.bandwidth()), RequestPolicy: bandwidthPolicy(d.bandwidth(), d.network.Policy)},
		CapacityShares: {
			Value:         *resource.NewQuantity(int64(*d.network.Shares), resource.DecimalSI),
			RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: ptr.To(resource.MustParse("1")), ValidValues: []resource.Quantity{resource.MustParse("1")}},
		},
	}
	return out
}

func (d *device) addAttributes(attributes attribute.Map) {
	for name, value := range map[resourceapi.QualifiedName]string{
		"interfaceName": d.nic.Name, "network": d.network.Name, "mac": d.nic.MAC.String(), "driver": d.nic.Driver,
	} {
		if value != "" {
			attributes[name] = attribute.Text(value)
		}
	}
	attributes["mtu"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(d.nic.MTU))}
	attributes["speedMbps"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(d.line / 1e6))}
}

// bandwidthPolicy derives the request policy for a NIC with that much to
// grant. The API server demands min <= default <= value, default on a step and
// room for one step; on a slow link the configured numbers are lowered to that,
// or the whole slice would be refused.
func bandwidthPolicy(value uint64, p config.Policy) *resourceapi.CapacityRequestPolicy {
	low := min(uint64(p.Min.Value()), value)
	step := uint64(p.Step.Value())
	wanted := min(max(uint64(p.Default.Value()), low), value)
	policy := &resourceapi.CapacityRequestPolicy{ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(bits(low))}}
	if low+step <= value {
		wanted = low + (wanted-low)/step*step
		policy.ValidRange.Step = ptr.To(bits(step))
	} else {
		wanted = low // one size only
		policy.ValidRange.Max = ptr.To(bits(low))
	}
	policy.Default = ptr.To(bits(wanted))
	return policy
}

func bits(n uint64) resource.Quantity {
	return *resource.NewQuantity(int64(min(n, 1<<62)), resource.DecimalSI)
}
