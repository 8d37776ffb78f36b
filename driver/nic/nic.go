// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nic implements the device kind NIC: it maps what package netdev
// discovers and enforces to claims, shares, and parameters. A share of a NIC is
// a macvlan link in each pod of the claim; all its links share one class on
// the node. The files are:
//
//	options.go    what the kind is built from
//	nic.go        the devices of the node, and the methods of driver.Kind
//	refresh.go    the node's NICs and the configuration -> enforcement, devices
//	problems.go   NICs that cannot be shared: events, readiness
//	takeover.go   whether this plugin can serve what the running one serves
//	devices.go    NICs of the node -> devices to publish
//	statefile.go  NIC state kept for the next plugin
//	stack.go      VLANs and bonds: the NICs below them
//	parameters.go a share's grant and parameters -> link and rates
//	attach.go     share -> link in a pod
//	addresses.go  addresses from pools, which the attachment record reserves
//	dhcp.go       leases of addresses from DHCP servers
//	renew.go      renewal of these leases
//	refusedlinks.go  links on the node with frames that the kernel drops
//	hidden.go     links that pods hide in network namespaces that they create
//	lost.go       pool addresses that the node has lost
//	duplicates.go addresses that another host on the network has
//	identity.go   the identity that the kernel checks in the frames of a link
//	status.go     link in the kernel -> conditions and data of the claim
//	checks.go     the features of the node's kernel
//	metrics.go    the kernel's counters, and the checks, as metrics
//	watch.go      kernel events -> changes for the driver
//	orphans.go    kernel objects that no share needs
package nic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/device/containeredits"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// Name is the name of the kind.
const Name = v1alpha1.DeviceKindNIC

// Kind implements driver.Kind and driver.Attacher for NICs.
type Kind struct {
	node      *netdev.Node
	inventory *netdev.Inventory
	config    *config.DriverConfig
	// addresses is nil if the kind assigns no addresses of AddressPools.
	addresses *ipam.Allocator
	// openSockets is nil if the kind leases no addresses; see Options.OpenSockets.
	openSockets func(ctx context.Context, r attach.Record) (attach.Sockets, error)
	failpoints  failpoint.Injector
	// leases counts the leases of links by state; nil until they were counted for the first time.
	leases atomic.Pointer[leaseStates]
	// leaseFailures has the message of the last failed attempt to keep or get the lease of a link, by leaseID.
	leaseFailures sync.Map
	// duplicates are the hosts that have addresses of links.
	duplicates *duplicates
	// lost are the addresses of links that the node has lost.
	lost *lostAddresses
	// hidden are the links that pods hide.
	hidden *hiddenLinks

	// mu is held during Refresh, including its requests to the kernel, so attaching a share waits for them.
	mu sync.RWMutex
	// stateFile is what is known about NICs since the node booted.
	stateFile stateFile
	// devices is nil before the first Refresh. A device in it is not modified.
	devices map[string]*device
	// failedNICs are the names of NICs, by index, where setting up or removing enforcement has failed, until either
	// succeeds.
	failedNICs map[int]string
	// loggedTrials reports whether the results of the trials were logged.
	loggedTrials bool
	// problems are the problems that the last Refresh found.
	problems []problem
	// refusedLinks are the last Refresh's warnings about links on the node with dropped frames.
	refusedLinks []driver.Warning
}

var (
	_ driver.Kind                 = (*Kind)(nil)
	_ driver.Attacher             = (*Kind)(nil)
	_ driver.Comparer             = (*Kind)(nil)
	_ driver.Protector            = (*Kind)(nil)
	_ driver.Reserver             = (*Kind)(nil)
	_ driver.Renewer              = (*Kind)(nil)
	_ driver.Watcher              = (*Kind)(nil)
	_ driver.HealthReporter       = (*Kind)(nil)
	_ driver.ReadinessChecker     = (*Kind)(nil)
	_ driver.Cleaner              = (*Kind)(nil)
	_ driver.CombinationValidator = (*Kind)(nil)
	_ driver.MetricsCollector     = (*Kind)(nil)
	_ driver.ProblemReporter      = (*Kind)(nil)
	_ driver.WarningReporter      = (*Kind)(nil)
	_ driver.TakeoverChecker      = (*Kind)(nil)
)

// Name implements driver.Kind.
func (k *Kind) Name() string { return Name }

// isShared reports whether the device is on the node and in the configuration.
func (d *device) isShared() bool { return !d.absent && d.network != nil }

// Cleanup implements driver.Cleaner.
func (k *Kind) Cleanup(context.Context) (failed error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.unmanage(k.managedInterfaces()) {
		failed = errors.Join(failed, fmt.Errorf("NIC %s: %w", p.nic, p.err))
	}
	k.devices = nil
	if k.addresses != nil {
		failed = errors.Join(failed, k.addresses.Cleanup())
	}
	return errors.Join(failed, k.stateFile.remove(), k.node.RemovePins())
}

// Devices implements driver.Kind.
func (k *Kind) Devices() []resourceapi.Device {
	var devices []resourceapi.Device
	for _, d := range k.sorted() {
		if d.network == nil {
			continue // missing since before this plugin started; see driver.Kind
		}
		devices = append(devices, d.publish())
	}
	return devices
}

// Health implements driver.HealthReporter.
func (k *Kind) Health() []driver.Health {
	var health []driver.Health
	for _, d := range k.sorted() {
		_, message := d.unhealthyReason()
		health = append(health, driver.Health{Device: d.name, Healthy: message == "", Message: message})
	}
	return health
}

// sorted returns all devices, by name.
func (k *Kind) sorted() []*device {
	k.mu.RLock()
	defer k.mu.RUnlock()
	devices := make([]*device, 0, len(k.devices))
	for _, d := range k.devices {
		devices = append(devices, d)
	}
	sort.Slice(devices, func(a, b int) bool { return devices[a].name < devices[b].name })
	return devices
}

// sharedDevices returns the devices that are on the node and in the configuration.
func (k *Kind) sharedDevices() []*device {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.sharedDevicesLocked()
}

// sharedDevicesLocked returns the devices that are on the node and in the configuration, by name. The
// caller holds k.mu.
func (k *Kind) sharedDevicesLocked() (devices []*device) {
	for _, d := range k.devices {
		if d.isShared() {
			devices = append(devices, d)
		}
	}
	slices.SortFunc(devices, func(a, b *device) int { return strings.Compare(a.name, b.name) })
	return devices
}

// Warnings implements driver.WarningReporter.
func (k *Kind) Warnings() []driver.Warning {
	k.mu.RLock()
	refused := k.refusedLinks
	k.mu.RUnlock()
	return slices.Concat(k.hiddenWarnings(), refused, k.leaseWarnings())
}

// Has implements driver.Kind.
func (k *Kind) Has(name string) bool {
	_, err := k.device(name)
	return err == nil
}

// device returns the device of that name.
func (k *Kind) device(name string) (*device, error) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	d, ok := k.devices[name]
	if !ok {
		return nil, fmt.Errorf(
			"this node has no NIC %s: was it removed from the node, or from the driver's configuration?", name)
	}
	return d, nil
}

// Configure implements driver.Kind.
func (k *Kind) Configure(
	ctx context.Context, namespace string, share record.Share, parameters [][]byte,
) (json.RawMessage, error) {
	d, err := k.device(share.Device)
	if err != nil {
		return nil, err
	}
	merged, err := mergeParameters(parameters)
	if err != nil {
		return nil, err
	}
	if merged.AdminLink && !share.AdminAccess {
		return nil, fmt.Errorf(
			"%s: adminLink: Forbidden: true: the request does not have adminAccess and gets a link without this field: "+
				"remove it", v1alpha1.NetworkAttachmentKind)
	}
	if d.network == nil {
		return nil, d.absentError()
	}
	if errs := merged.ValidateFor(d.network.Allowed(int32(d.nic.MTU))); len(errs) > 0 {
		return nil, fmt.Errorf("%s: %w", v1alpha1.NetworkAttachmentKind, errs.ToAggregate())
	}
	if err := k.configureDHCP(ctx, namespace, d.network, merged); err != nil {
		return nil, fmt.Errorf("%s: %w", v1alpha1.NetworkAttachmentKind, err)
	}
	if err := k.configurePools(ctx, namespace, d.network.Name, merged); err != nil {
		return nil, fmt.Errorf("%s: %w", v1alpha1.NetworkAttachmentKind, err)
	}
	if err := checkRuleSources(merged); err != nil {
		return nil, fmt.Errorf("%s: %w", v1alpha1.NetworkAttachmentKind, err)
	}
	return json.Marshal(merged)
}

// ValidateCombination implements driver.CombinationValidator: within a pod, the
// names and addresses of links must differ.
func (k *Kind) ValidateCombination(shares []record.Share) error {
	names, addresses := map[string]string{}, map[string]string{}
	for _, s := range shares {
		if !k.Attaches(s) {
			continue
		}
		p, err := parametersOf(s)
		if err != nil {
			return err
		}
		if other, taken := names[p.InterfaceName]; taken && p.InterfaceName != "" {
			return fmt.Errorf("%s: interfaceName: Duplicate value: %q: the shares of requests %s and %s need different names: "+
				"remove interfaceName, or give each request its own parameters",
				v1alpha1.NetworkAttachmentKind, p.InterfaceName, other, s.Request)
		}
		names[p.InterfaceName] = s.Request
		for _, a := range p.Addresses {
			if other, taken := addresses[a]; taken {
				return fmt.Errorf("%s: addresses: Duplicate value: %q: the shares of requests %s and %s need different addresses",
					v1alpha1.NetworkAttachmentKind, a, other, s.Request)
			}
			addresses[a] = s.Request
		}
	}
	return nil
}

// Admit implements driver.Kind: the sum of all grants must not exceed the NIC's bandwidth, and the number of shares
// must not exceed its limit.
func (k *Kind) Admit(share record.Share, others []*record.Share) error {
	d, err := k.device(share.Device)
	if err != nil {
		return err
	}
	if d.absent {
		return d.absentError()
	}
	grant, err := grantOf(share)
	if err != nil {
		return err
	}
	var granted, shares uint64
	for _, o := range others {
		if o.AdminAccess {
			continue
		}
		if n, err := grantOf(*o); err == nil {
			granted += n
		}
		shares++
	}
	switch total := d.bandwidth(); {
	case granted > total:
		return fmt.Errorf(
			"bandwidth %s: NIC %s has %s bit/s to grant, less than the %s that are already granted: has its link become slower?",
			formatRate(grant), share.Device, formatRate(total), formatRate(granted))
	case granted+grant > total:
		return fmt.Errorf("bandwidth %s: NIC %s has %s bit/s to grant, and %s are granted to other claims on this node",
			formatRate(grant), share.Device, formatRate(total), formatRate(granted))
	}
	if limit := uint64(*d.network.Shares); shares >= limit {
		return fmt.Errorf("shares: NIC %s already has %d shares, its limit", share.Device, limit)
	}
	return nil
}

// Edits implements driver.Kind.
func (k *Kind) Edits(share record.Share) (edits cdi.Edits, err error) {
	if share.AdminAccess {
		return containeredits.AdminAccess(share.Request), nil
	}
	grant, err := grantOf(share)
	variable := containeredits.Variable(share.Request, v1alpha1.EnvironmentBandwidth)
	edits.Env = []string{fmt.Sprintf("%s=%d", variable, grant)}
	if p, paramsErr := parametersOf(share); paramsErr == nil && hasOnlyIPv4(p) {
		edits.Hook = []string{"--" + attach.AnnounceIPv6Flag + "=false"}
	}
	return edits, err
}

// nicConfig returns the NIC as package netdev manages it.
func (d *device) nicConfig() netdev.NICConfig {
	return netdev.NICConfig{
		Name: d.nic.Name, Index: d.nic.Index, MAC: d.nic.MAC,
		Enforce: d.network.Enforcement == config.EnforcementShape,
		Rates: shape.NICRates{Line: d.line, Reserve: d.reserve, MinShare: uint64(d.network.Policy.Min.Value()),
			Multicast: d.multicast(), Overhead: uint16(d.network.Overhead)},
		QueuePerShare: d.network.Shaping == config.ShapingMultiQueue,
		TakeOver:      d.network.TakeOver, TrustMAC: d.network.TrustMAC, Forwarded: d.forwarded,
		Policy: identityPolicy(d.network),
	}
}

// formatRate formats a rate in bits per second with a unit prefix, such as 200M.
func formatRate(bitsPerSecond uint64) string {
	return resource.NewQuantity(int64(bitsPerSecond), resource.DecimalSI).String()
}
