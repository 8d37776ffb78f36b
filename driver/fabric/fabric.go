// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fabric implements the device kind fabric: a device that spans nodes, such as the accelerator interconnect
// of a rack or a slice of a torus. The controller publishes a fabric once, for all of its nodes. On each node, the
// plugin prepares environment variables and a file that name the fabric and the container's share.
package fabric

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/device/capacity"
	"github.com/dra-shared/dra-driver-shared/device/containeredits"
	"github.com/dra-shared/dra-driver-shared/device/fabricpool"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// Name is the name of the kind.
const Name = v1alpha1.DeviceKindFabric

// Kind implements driver.Kind for fabrics.
type Kind struct {
	config *config.DriverConfig
	node   string
}

var (
	_ driver.Kind      = (*Kind)(nil)
	_ driver.MultiNode = (*Kind)(nil)
)

// New builds the kind for the node of that name.
func New(c *config.DriverConfig, node string) *Kind { return &Kind{config: c, node: node} }

// Name implements driver.Kind.
func (k *Kind) Name() string { return Name }

// HasPool implements driver.MultiNode.
func (k *Kind) HasPool(pool string) bool { return fabricpool.Is(pool) }

// Refresh implements driver.Kind. Fabrics follow from the configuration alone.
func (k *Kind) Refresh(context.Context, []record.Share) (driver.Refreshed, error) {
	return driver.Refreshed{}, nil
}

// Devices implements driver.Kind.
func (k *Kind) Devices() (devices []resourceapi.Device) {
	for i := range k.config.Fabrics {
		devices = append(devices, fabricpool.Device(&k.config.Fabrics[i]))
	}
	return devices
}

// Has implements driver.Kind.
func (k *Kind) Has(name string) bool { return k.fabric(name) != nil }

// fabric returns the configured fabric of that name, or nil.
func (k *Kind) fabric(name string) *config.Fabric {
	for i := range k.config.Fabrics {
		if k.config.Fabrics[i].Name == name {
			return &k.config.Fabrics[i]
		}
	}
	return nil
}

func errMissing(fabric string) error {
	return fmt.Errorf("the driver's configuration has no fabric %s: was it removed from config.fabrics while claims "+
		"hold it?", fabric)
}

// Configure implements driver.Kind. Its result is the CDI edits.
func (k *Kind) Configure(
	_ context.Context, _ string, share record.Share, parameters [][]byte,
) (json.RawMessage, error) {
	f := k.fabric(share.Device)
	if f == nil {
		return nil, errMissing(share.Device)
	}
	if len(parameters) > 0 {
		return nil, errors.New("a fabric takes no parameters: remove them, or list in the configuration's field `requests` " +
			"only the requests for other devices")
	}
	edits, err := k.edits(f, share)
	if err != nil {
		return nil, err
	}
	return json.Marshal(edits)
}

// edits returns the CDI edits of containers with the share.
func (k *Kind) edits(f *config.Fabric, share record.Share) (cdi.Edits, error) {
	if share.AdminAccess {
		return containeredits.AdminAccess(share.Request), nil
	}
	granted := share.Capacity
	if share.ShareID == "" {
		granted = f.Capacity
	}
	granted = maps.Clone(granted)
	delete(granted, v1alpha1.CapacityGroups) // it counts PodGroups and grants nothing to a pod
	variables := containeredits.ShareVariables(containeredits.Share{
		Name: share.Name, Request: share.Request, Device: share.Device, Node: k.node,
	}, f.Capacities, granted)
	expanded, err := f.Edits.Expand(variables)
	if err != nil {
		return cdi.Edits{}, fmt.Errorf("edits of fabric %q: %w", f.Name, err)
	}
	// The path contains the share because a container's claims may have requests of the same name.
	path := v1alpha1.ContainerDir + "/" + share.Name + "/membership.json"
	edits := containeredits.Merge(expanded, containeredits.GrantVariables(share.Request, granted), map[string]string{
		containeredits.Variable(share.Request, v1alpha1.EnvironmentFabric):     f.Name,
		containeredits.Variable(share.Request, v1alpha1.EnvironmentMembership): path,
	})
	content, err := json.MarshalIndent(k.membership(f, share, granted), "", "  ")
	edits.Files = []cdi.File{{ContainerPath: path, Content: string(content) + "\n"}}
	return edits, err
}

// membership describes the share to programs in the container.
func (k *Kind) membership(
	f *config.Fabric, share record.Share, granted map[string]resource.Quantity,
) v1alpha1.FabricMembership {
	m := v1alpha1.FabricMembership{TypeMeta: v1alpha1.TypeMeta(v1alpha1.FabricMembershipKind),
		Fabric: f.Name, Attributes: f.Attributes, Node: k.node, Request: share.Request, ShareID: string(share.ShareID)}
	for name, q := range granted {
		if m.Granted == nil {
			m.Granted = map[string]string{}
		}
		m.Granted[name] = capacity.Decimal(q)
	}
	return m
}

// Admit implements driver.Kind. It considers only the shares on this node; the scheduler considers other nodes'
// shares.
func (k *Kind) Admit(share record.Share, others []*record.Share) error {
	f := k.fabric(share.Device)
	if f == nil {
		return errMissing(share.Device)
	}
	whole := f.Exclusive || share.ShareID == ""
	return capacity.Admit(f.Name, f.Capacities, whole, share.Capacity, record.CapacitiesOf(others))
}

// Edits implements driver.Kind.
func (k *Kind) Edits(share record.Share) (cdi.Edits, error) {
	return containeredits.Decode(share.Name, share.Parameters)
}
