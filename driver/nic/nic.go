// Package nic makes NICs a kind of device that the driver shares: what netdev
// finds and does, in terms of claims, shares and parameters.
package nic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/device/containeredits"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// Name of the kind.
const Name = "nic"

// Kind implements driver.Attacher for NICs.
type Kind struct {
	node      *netdev.Node
	inventory *netdev.Inventory
	config    *config.DriverConfig

	mu      sync.RWMutex
	devices map[string]*device // nil before the first Refresh; a device is not changed once it is in
	told    map[string]string  // problems that have been logged, by NIC
}

var _ driver.Attacher = (*Kind)(nil)

// New returns the kind. It looks at nothing before the first Refresh.
func New(node *netdev.Node, inventory *netdev.Inventory, c *config.DriverConfig) *Kind {
	return &Kind{node: node, inventory: inventory, config: c, told: map[string]string{}}
}

// Name implements driver.Kind.
func (k *Kind) Name() string { return Name }

// Refresh implements driver.Kind: it reads which NICs there are, makes those
// that the configuration names what they should be, whatever they are now, and
// gives back those it no longer names, also if an earlier plugin took them.
func (k *Kind) Refresh(ctx context.Context, shares []record.Share) (driver.Refreshed, error) {
	var found driver.Refreshed
	nics, err := k.inventory.List()
	if err != nil {
		return found, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.rememberSpeeds(nics)
	wanted, problems := plan(nics, k.config)
	live := grants(shares)
	problems = append(problems, k.leave(nics, wanted, live)...)
	next := map[string]*device{}
	for _, d := range wanted {
		d.granted, d.pci = live[d.name], attribute.PCI(k.inventory.Sysfs(), d.nic.PCIBusID)
		found.Again = soonest(found.Again, d.settle(k.devices[d.name], time.Now()))
		changed, err := k.node.Manage(d.parent())
		if err != nil {
			problems = append(problems, problem{d.nic.Name, err})
			continue
		}
		old := k.devices[d.name]
		found.Changed = found.Changed || changed || old == nil || old.absent || d.scaleDiffers(old)
		next[d.name] = d
	}
	for name := range live {
		if next[name] == nil {
			next[name] = k.absent(name)
		}
	}
	k.log(ctx, next, problems)
	k.devices = next
	return found, nil
}

// grants adds up what is granted of each device that has shares, in bits per
// second.
func grants(shares []record.Share) map[string]uint64 {
	sum := map[string]uint64{}
	for _, s := range shares {
		n, err := granted(s)
		if err != nil || s.AdminAccess {
			n = 0
		}
		sum[s.Device] += n
	}
	return sum
}

func soonest(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// rememberSpeeds fills in the speed of links that are down: they report none.
func (k *Kind) rememberSpeeds(nics []netdev.NIC) {
	for i := range nics {
		for _, d := range k.devices {
			if nics[i].Speed == 0 && !nics[i].Carrier && d.nic.Index == nics[i].Index {
				nics[i].Speed = d.nic.Speed
			}
		}
	}
}

// leave gives back NICs that are not wanted: those that were ours, and at the
// first look all others, which an earlier plugin may have managed. One that
// live shares are of stays as it is, whether it was taken out of the
// configuration or cannot be shared at present: they stay within their limits.
func (k *Kind) leave(nics []netdev.NIC, wanted []*device, live map[string]uint64) (problems []problem) {
	stays := map[int]bool{}
	for _, d := range wanted {
		stays[d.nic.Index] = true
	}
	goes := map[int]string{}
	for _, n := range nics {
		if _, used := live[deviceName(n)]; used {
			stays[n.Index] = true
		}
		if d := k.devices[deviceName(n)]; d != nil && d.absent { // no longer used, and there after all
			goes[n.Index] = n.Name
		}
	}
	for _, d := range k.devices {
		if d.network != nil && !d.absent {
			goes[d.nic.Index] = d.nic.Name
		}
	}
	if k.devices == nil {
		for _, n := range nics {
			goes[n.Index] = n.Name
		}
	}
	for index, name := range goes {
		if stays[index] {
			continue
		}
		if _, err := k.node.Unmanage(name, index); err != nil {
			problems = append(problems, problem{name, err})
		}
	}
	return problems
}

// Leave implements driver.Kind.
func (k *Kind) Leave(context.Context) (failed error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.leave(nil, nil, nil) {
		failed = errors.Join(failed, fmt.Errorf("NIC %s: %w", p.nic, p.err))
	}
	k.devices = nil
	return errors.Join(failed, k.node.RemovePins())
}

// absent is a NIC that has shares and is not there. A copy: others may be
// reading the one that was.
func (k *Kind) absent(name string) *device {
	d := device{name: name}
	if last := k.devices[name]; last != nil {
		d = *last
	}
	d.absent = true
	return &d
}

// parent is the NIC as netdev is to manage it.
func (d *device) parent() netdev.NICConfig {
	return netdev.NICConfig{
		Name: d.nic.Name, Index: d.nic.Index, MAC: d.nic.MAC,
		Enforce:  d.network.Enforcement == config.EnforcementShape,
		Rates:    shape.NICRates{Line: d.line, Reserve: d.reserve, MinShare: uint64(d.network.Policy.Min.Value())},
		TakeOver: d.network.TakeOver, TrustMAC: d.network.TrustMAC,
	}
}

// log says once what changed. It is called with the lock held.
func (k *Kind) log(ctx context.Context, next map[string]*device, problems []problem) {
	logger := klog.FromContext(ctx)
	for name, d := range next {
		if old := k.devices[name]; d.absent {
			if old == nil || !old.absent {
				logger.Info("Shares are held of a NIC that is gone, or not configured any more: their limits stay as they are", "device", name)
			}
			continue
		}
		if old := k.devices[name]; old == nil || old.absent != d.absent || old.down != d.down || old.line != d.line {
			logger.Info("NIC is shared", "device", name, "interface", d.nic.Name, "bitsPerSecond", d.line, "absent", d.absent, "linkDown", d.down, "key", k.node.ClassifierKey())
		}
	}
	for name, d := range k.devices {
		if next[name] == nil {
			logger.Info("NIC is no longer shared", "device", name, "interface", d.nic.Name)
		}
	}
	told := map[string]string{}
	for _, p := range problems {
		if told[p.nic] = p.err.Error(); k.told[p.nic] != told[p.nic] {
			logger.Error(p.err, "NIC cannot be shared", "interface", p.nic)
		}
	}
	k.told = told
}

// Ready implements driver.Kind.
func (k *Kind) Ready() error {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if k.devices == nil {
		return errors.New("the NICs have not been looked at yet")
	}
	return nil
}

// Devices implements driver.Kind.
func (k *Kind) Devices() []resourceapi.Device {
	k.mu.RLock()
	defer k.mu.RUnlock()
	devices := make([]resourceapi.Device, 0, len(k.devices))
	for _, d := range k.devices {
		if d.network == nil {
			// Gone since before this plugin started. A device without the
			// attributes that selectors ask for is an error to the scheduler, which
			// then looks at no other.
			continue
		}
		devices = append(devices, d.publish())
	}
	sort.Slice(devices, func(a, b int) bool { return devices[a].Name < devices[b].Name })
	return devices
}

// Health implements driver.Kind.
func (k *Kind) Health() []driver.Health {
	k.mu.RLock()
	defer k.mu.RUnlock()
	all := make([]driver.Health, 0, len(k.devices))
	for _, d := range k.devices {
		_, message := d.trouble()
		all = append(all, driver.Health{Device: d.name, Healthy: message == "", Message: message})
	}
	sort.Slice(all, func(a, b int) bool { return all[a].Device < all[b].Device })
	return all
}

// Traffic implements driver.Meter.
func (k *Kind) Traffic() (all []driver.Traffic) {
	for _, d := range k.present() {
		sent, received, err := k.node.Traffic(d.nic.Index)
		if err != nil {
			continue // not enforced, or gone meanwhile: nothing is counted
		}
		all = append(all, driver.Traffic{Device: d.name, SentBits: sent * 8, ReceivedBits: received * 8})
	}
	return all
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
		return nil, fmt.Errorf("this node has no NIC %s", name)
	}
	return d, nil
}

// Configure implements driver.Kind.
func (k *Kind) Configure(share record.Share, configurations [][]byte) (json.RawMessage, error) {
	d, err := k.device(share.Device)
	if err != nil {
		return nil, err
	}
	var merged *params.NetworkAttachment
	for _, raw := range configurations {
		a, err := params.DecodeAs[*params.NetworkAttachment](raw)
		if err != nil {
			return nil, err
		}
		merged = params.MergeNetworkAttachments(merged, a)
	}
	merged = params.MergeNetworkAttachments(merged, nil)
	params.SetDefaultsNetworkAttachment(merged)
	if merged.AdminLink && !share.AdminAccess {
		return nil, fmt.Errorf("%s: adminLink: Forbidden: true: the request has no adminAccess, and gets its link anyway: leave it out", params.NetworkAttachmentKind)
	}
	if d.network == nil {
		return nil, fmt.Errorf("NIC %s is gone from the node", share.Device)
	}
	if errs := merged.ValidateFor(d.network.Allowed(int32(d.nic.MTU))); len(errs) > 0 {
		return nil, fmt.Errorf("%s: %w", params.NetworkAttachmentKind, errs.ToAggregate())
	}
	return json.Marshal(merged)
}

// Together implements driver.Kind: a pod has a name and an address once.
func (k *Kind) Together(shares []record.Share) error {
	names, addresses := map[string]string{}, map[string]string{}
	for _, s := range shares {
		if !k.Attaches(s) {
			continue
		}
		p, err := parameters(s)
		if err != nil {
			return err
		}
		if other, taken := names[p.InterfaceName]; taken && p.InterfaceName != "" {
			return fmt.Errorf("%s: interfaceName: Duplicate value: %q: the shares of requests %s and %s need a name each; leave it out, or give each request its own parameters",
				params.NetworkAttachmentKind, p.InterfaceName, other, s.Request)
		}
		names[p.InterfaceName] = s.Request
		for _, a := range p.Addresses {
			if other, taken := addresses[a]; taken {
				return fmt.Errorf("%s: addresses: Duplicate value: %q: the shares of requests %s and %s need addresses of their own",
					params.NetworkAttachmentKind, a, other, s.Request)
			}
			addresses[a] = s.Request
		}
	}
	return nil
}

// Admit implements driver.Kind: no more is granted than there is.
func (k *Kind) Admit(share record.Share, others []record.Share) error {
	d, err := k.device(share.Device)
	if err != nil {
		return err
	}
	if d.absent {
		return fmt.Errorf("NIC %s is gone from the node", share.Device)
	}
	wanted, err := granted(share)
	if err != nil {
		return err
	}
	var taken, shares uint64
	for _, o := range others {
		if o.AdminAccess {
			continue
		}
		if n, err := granted(o); err == nil {
			taken += n
		}
		shares++
	}
	if room := d.bandwidth(); taken > room {
		return fmt.Errorf("bandwidth %s: NIC %s has %s bit/s to grant, less than the %s that are granted already: has its link become slower?",
			text(wanted), share.Device, text(room), text(taken))
	} else if taken+wanted > room {
		return fmt.Errorf("bandwidth %s: NIC %s has %s bit/s to grant, of which %s are granted to other claims on this node",
			text(wanted), share.Device, text(room), text(taken))
	}
	if limit := uint64(*d.network.Shares); shares >= limit {
		return fmt.Errorf("shares: NIC %s has %d shares already, its limit", share.Device, limit)
	}
	return nil
}

// granted is a share's bandwidth in bits per second.
func granted(share record.Share) (uint64, error) {
	q, ok := share.Capacity[CapacityBandwidth]
	if !ok || share.ShareID == "" {
		return 0, errors.New("the allocation has no shareID or no consumedCapacity for bandwidth: is the feature gate DRAConsumableCapacity on in kube-scheduler and kube-apiserver?")
	}
	value, ok := q.AsInt64()
	if !ok || value < 8 {
		return 0, fmt.Errorf("consumedCapacity.bandwidth %s: want whole bits per second, at least 8", q.String())
	}
	return uint64(value), nil
}

func text(n uint64) string { return resource.NewQuantity(int64(n), resource.DecimalSI).String() }

// Edits implements driver.Kind.
func (k *Kind) Edits(share record.Share) (edits cdi.Edits, err error) {
	if share.AdminAccess {
		return containeredits.AdminAccess(share.Request), nil // nothing is granted
	}
	n, err := granted(share)
	edits.Env = []string{fmt.Sprintf("%s=%d", containeredits.Variable(share.Request, "bandwidth_bits_per_second"), n)}
	return edits, err
}
