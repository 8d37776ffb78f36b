// Package fabric makes devices that span nodes a kind of device that the driver
// shares: the links among the accelerators of a rack, a slice of a torus. The
// controller publishes a fabric, once, for all nodes that are on it; here each
// node prepares its own part: variables, and a file that says which fabric a
// container is on, and by which share.
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
	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/cdi"
	"github.com/dra-shared/dra-driver-shared/device/capacity"
	"github.com/dra-shared/dra-driver-shared/device/containeredits"
	"github.com/dra-shared/dra-driver-shared/device/fabricpool"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// Name of the kind.
const Name = fabricpool.Kind

// Kind implements driver.Spanning for fabrics.
type Kind struct {
	config *config.DriverConfig
	node   string
}

var _ driver.Spanning = (*Kind)(nil)

// New returns the kind for the node of that name.
func New(c *config.DriverConfig, node string) *Kind { return &Kind{config: c, node: node} }

// Name implements driver.Kind.
func (k *Kind) Name() string { return Name }

// Spans implements driver.Spanning.
func (k *Kind) Spans(pool string) bool { return fabricpool.Is(pool) }

// Refresh implements driver.Kind: fabrics are what the configuration says.
func (k *Kind) Refresh(context.Context, []record.Share) (driver.Refreshed, error) {
	return driver.Refreshed{}, nil
}

// Leave implements driver.Kind: nothing was done.
func (k *Kind) Leave(context.Context) error { return nil }

// Ready implements driver.Kind.
func (k *Kind) Ready() error { return nil }

// Devices implements driver.Kind.
func (k *Kind) Devices() (devices []resourceapi.Device) {
	for i := range k.config.Fabrics {
		devices = append(devices, fabricpool.Device(&k.config.Fabrics[i]))
	}
	return devices
}

// Health implements driver.Kind: no single node knows.
func (k *Kind) Health() []driver.Health { return nil }

// Has implements driver.Kind.
func (k *Kind) Has(name string) bool { return k.fabric(name) != nil }

func (k *Kind) fabric(name string) *config.Fabric {
	for i := range k.config.Fabrics {
		if k.config.Fabrics[i].Name == name {
			return &k.config.Fabrics[i]
		}
	}
	return nil
}

// Configure implements driver.Kind: it returns the edits.
func (k *Kind) Configure(share record.Share, configurations [][]byte) (json.RawMessage, error) {
	f := k.fabric(share.Device)
	if f == nil {
		return nil, fmt.Errorf("there is no fabric %s in the driver's configuration", share.Device)
	}
	if len(configurations) > 0 {
		return nil, errors.New("a fabric takes no parameters: name the requests that each is for, in the configuration's requests")
	}
	edits, err := k.edits(f, share)
	if err != nil {
		return nil, err
	}
	return json.Marshal(edits)
}

// edits puts together what a container with the share finds: pure.
func (k *Kind) edits(f *config.Fabric, share record.Share) (cdi.Edits, error) {
	if share.AdminAccess {
		return containeredits.AdminAccess(share.Request), nil
	}
	granted := share.Capacity
	if share.ShareID == "" {
		granted = f.Capacity
	}
	granted = maps.Clone(granted)
	delete(granted, fabricpool.CapacityGroups) // it counts groups, and is no pod's
	variables := containeredits.TemplateVariables(f.Capacities, granted)
	maps.Copy(variables, map[string]string{
		config.VariableShare: share.Name, config.VariableRequest: share.Request, config.VariableDevice: share.Device, config.VariableNode: k.node,
	})
	expanded, err := f.Edits.Expand(variables)
	if err != nil {
		return cdi.Edits{}, fmt.Errorf("edits of fabric %q: %w", f.Name, err)
	}
	// Two claims of a container may have requests of one name: by the share.
	path := "/var/run/dra-shared.dev/" + share.Name + "/membership.json"
	edits := containeredits.Merge(expanded, containeredits.GrantVariables(share.Request, granted), map[string]string{
		containeredits.Variable(share.Request, "fabric"): f.Name, containeredits.Variable(share.Request, "membership"): path,
	})
	content, err := json.MarshalIndent(k.membership(f, share, granted), "", "  ")
	edits.Files = []cdi.File{{ContainerPath: path, Content: string(content) + "\n"}}
	return edits, err
}

func (k *Kind) membership(f *config.Fabric, share record.Share, granted map[string]resource.Quantity) params.FabricMembership {
	m := params.FabricMembership{TypeMeta: params.TypeMeta(params.FabricMembershipKind),
		Fabric: f.Name, Attributes: f.Attributes, Node: k.node, Request: share.Request, ShareID: string(share.ShareID)}
	for name, q := range granted {
		if m.Granted == nil {
			m.Granted = map[string]string{}
		}
		m.Granted[name] = capacity.Decimal(q)
	}
	return m
}

// Together implements driver.Kind.
func (k *Kind) Together([]record.Share) error { return nil }

// Admit implements driver.Kind. What is in use on other nodes only the
// scheduler knows.
func (k *Kind) Admit(share record.Share, others []record.Share) error {
	f := k.fabric(share.Device)
	if f == nil {
		return fmt.Errorf("there is no fabric %s in the driver's configuration", share.Device)
	}
	taken := make([]map[string]resource.Quantity, len(others))
	for i, o := range others {
		taken[i] = o.Capacity
	}
	return capacity.Admit(f.Name, f.Capacities, f.Exclusive || share.ShareID == "", share.Capacity, taken)
}

// Edits implements driver.Kind.
func (k *Kind) Edits(share record.Share) (edits cdi.Edits, err error) {
	if err = json.Unmarshal(share.Parameters, &edits); err != nil {
		err = fmt.Errorf("recorded edits of share %s: %w", share.Name, err)
	}
	return edits, err
}
