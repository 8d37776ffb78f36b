// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package examplekind is the device kind that docs/dev/device-kinds.md adds step by step: license keys, which are
// files on the node. Claims are granted a key's seats, and a container finds the key and its number of seats in a
// file. The package's test runs the kind in the driver. None of this project's programs link it.
package examplekind

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/device/attribute"
	"github.com/dra-shared/dra-driver-shared/device/capacity"
	"github.com/dra-shared/dra-driver-shared/device/containeredits"
	"github.com/dra-shared/dra-driver-shared/device/inventory"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// Name is the name of the kind. This driver's own kinds have theirs in api/v1alpha1.
const Name = "license"

// capacitySeats is the capacity that claims request.
const capacitySeats = "seats"

// refreshInterval is how long it takes to notice a missing or changed key. Reading a few small files is cheap.
const refreshInterval = time.Second

// License is the configuration of one device. This driver's own kinds have theirs in api/config/v1alpha1.
type License struct {
	// Name is the name of the device.
	Name string
	// Path is the path of the key, relative to the root of the node's filesystem.
	Path string
	config.Capacities
}

// Kind implements driver.Kind for license keys.
type Kind struct {
	node     fs.FS
	licenses []License
	devices  inventory.Set[device]
}

// device is a license key of the node.
type device struct {
	License
	key    string
	absent bool // the file is missing while claims hold shares of it
}

var (
	_ driver.Kind              = (*Kind)(nil)
	_ driver.ReadinessChecker  = (*Kind)(nil)
	_ driver.HealthReporter    = (*Kind)(nil)
	_ driver.ConditionReporter = (*Kind)(nil)
)

// New builds the kind. node is the node's filesystem. New accesses nothing before the first Refresh.
func New(node fs.FS, licenses []License) *Kind { return &Kind{node: node, licenses: licenses} }

// Name implements driver.Kind.
func (k *Kind) Name() string { return Name }

// Refresh implements driver.Kind. It reads the configured keys.
func (k *Kind) Refresh(_ context.Context, shares []record.Share) (refreshed driver.Refreshed, err error) {
	refreshed.RequeueAfter = refreshInterval // no event reports changes of files
	next := map[string]*device{}
	for _, license := range k.licenses {
		key, err := fs.ReadFile(k.node, license.Path)
		switch {
		case err == nil:
			next[license.Name] = &device{License: license, key: string(key)}
		case errors.Is(err, fs.ErrNotExist) && hasShare(shares, license.Name):
			next[license.Name] = &device{License: license, absent: true}
		case !errors.Is(err, fs.ErrNotExist):
			return refreshed, fmt.Errorf("license %s: %w", license.Name, err)
		}
	}
	k.devices.Replace(next)
	return refreshed, nil
}

func hasShare(shares []record.Share, device string) bool {
	return slices.ContainsFunc(shares, func(s record.Share) bool { return s.Device == device })
}

// Ready implements driver.ReadinessChecker.
func (k *Kind) Ready() error {
	if !k.devices.IsDiscovered() {
		return errors.New("the plugin has not read the license keys yet")
	}
	return nil
}

// Devices implements driver.Kind.
func (k *Kind) Devices() (devices []resourceapi.Device) {
	for _, d := range k.devices.Sorted() {
		out := resourceapi.Device{
			Name:                     d.Name,
			Attributes:               attribute.Map{v1alpha1.AttributeKind: attribute.Text(Name)},
			Capacity:                 capacity.Publish(d.Capacities, false),
			AllowMultipleAllocations: ptr.To(true),
		}
		if d.absent {
			out.Taints = []resourceapi.DeviceTaint{attribute.AbsentTaint()}
		}
		devices = append(devices, out)
	}
	return devices
}

// Has implements driver.Kind.
func (k *Kind) Has(name string) bool { return k.devices.Get(name) != nil }

func (k *Kind) device(name string) (*device, error) {
	if d := k.devices.Get(name); d != nil {
		return d, nil
	}
	return nil, fmt.Errorf("this node has no license %s", name)
}

// Configure implements driver.Kind. Its result is the CDI edits.
func (k *Kind) Configure(
	_ context.Context, _ string, share record.Share, parameters [][]byte,
) (json.RawMessage, error) {
	d, err := k.device(share.Device)
	switch {
	case err != nil:
		return nil, err
	case len(parameters) > 0:
		return nil, errors.New("a license takes no parameters")
	case share.AdminAccess:
		return json.Marshal(containeredits.AdminAccess(share.Request))
	case d.absent:
		return nil, errors.New(d.problem())
	}
	seats := share.Capacity[capacitySeats]
	edits := containeredits.Merge(config.Edits{}, containeredits.GrantVariables(share.Request, share.Capacity))
	// The path contains the share because a container's claims may have requests of the same name.
	edits.Files = []cdi.File{{
		ContainerPath: "/var/run/" + v1alpha1.Group + "/" + share.Name + "/license",
		Content:       fmt.Sprintf("key=%s\nseats=%s\n", d.key, capacity.Decimal(seats)),
	}}
	return json.Marshal(edits)
}

// Edits implements driver.Kind.
func (k *Kind) Edits(share record.Share) (cdi.Edits, error) {
	return containeredits.Decode(share.Name, share.Parameters)
}

// Admit implements driver.Kind.
func (k *Kind) Admit(share record.Share, others []*record.Share) error {
	d, err := k.device(share.Device)
	if err != nil {
		return err
	}
	return capacity.Admit(d.Name, d.Capacities, share.ShareID == "", share.Capacity, record.CapacitiesOf(others))
}

// problem returns why the device does not work, or "".
func (d *device) problem() string {
	if d.absent {
		return fmt.Sprintf("the key of license %s is missing from the node: %s does not exist", d.Name, d.Path)
	}
	return ""
}

// Health implements driver.HealthReporter.
func (k *Kind) Health() (all []driver.Health) {
	for _, d := range k.devices.Sorted() {
		message := d.problem()
		all = append(all, driver.Health{Device: d.Name, Healthy: message == "", Message: message})
	}
	return all
}

// Conditions implements driver.ConditionReporter.
func (k *Kind) Conditions(share record.Share) []metav1.Condition {
	ready := metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonPrepared,
		Message: "containers that reference the claim find the license key",
	}
	if d, err := k.device(share.Device); err != nil || d.absent {
		ready.Status, ready.Reason = metav1.ConditionFalse, v1alpha1.ReasonDeviceGone
		ready.Message = "the license key is missing from the node or from the driver's configuration"
	}
	return []metav1.Condition{ready}
}
