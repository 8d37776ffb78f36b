// Package published is what devices of all kinds have in common where users
// see them: names, standard attributes, capacities and the variables of a
// share.
package published

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/cdi"
)

// AttributeKind tells kinds of devices apart; DeviceClasses select by it.
const AttributeKind = "kind"

// TaintAbsent is on a device that is gone while claims still hold shares of it.
const TaintAbsent = "dra-shared.dev/absent"

// Attributes of a device.
type Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

// Text is an attribute's value.
func Text(value string) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{StringValue: &value}
}

// PCIName names a device by its address: it does not change when devices are
// found in another order.
func PCIName(busID string) string { return "pci-" + Label(busID) }

// Label makes a DNS label (RFC 1123) of any name; where that loses something,
// a hash keeps names apart.
func Label(name string) string {
	mapped := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-':
			return r
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		default:
			return '-'
		}
	}, name)
	trimmed := strings.Trim(mapped, "-")
	if trimmed == strings.NewReplacer(":", "-", ".", "-").Replace(name) {
		return trimmed
	}
	return strings.Trim(fmt.Sprintf("%s-%x", trimmed, sha256.Sum256([]byte(name)))[:len(trimmed)+9], "-")
}

// PCI returns the standard attributes of a PCI device. What sysfs does not
// know (no NUMA node, a root that is not PCIe) is left out.
func PCI(sysfs fs.ReadLinkFS, busID string) Attributes {
	attributes := Attributes{}
	if busID == "" {
		return attributes
	}
	from := deviceattribute.WithFS(sysfs)
	if a, err := deviceattribute.GetPCIBusIDAttribute(busID); err == nil {
		attributes[a.Name] = a.Value
	}
	if a, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(busID, from); err == nil {
		attributes[a.Name] = a.Value
	}
	if a, err := deviceattribute.GetNUMANodeAttributeByPCIBusID(busID, deviceattribute.ScalarAttribute, from); err == nil {
		attributes[a.Name] = a.Value
	}
	return attributes
}

// Capacity is what a configuration says of the capacities of a device.
// exclusive devices have no policies: they are not requested in parts.
func Capacity(c config.Capacities, exclusive bool) map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	if len(c.Capacity) == 0 {
		return nil
	}
	capacity := make(map[resourceapi.QualifiedName]resourceapi.DeviceCapacity, len(c.Capacity))
	for name, value := range c.Capacity {
		published := resourceapi.DeviceCapacity{Value: value}
		if p, ok := c.Policy[name]; ok && !exclusive {
			published.RequestPolicy = policy(p)
		}
		capacity[resourceapi.QualifiedName(name)] = published
	}
	return capacity
}

func policy(p config.CapacityPolicy) *resourceapi.CapacityRequestPolicy {
	if len(p.Values) > 0 {
		return &resourceapi.CapacityRequestPolicy{Default: p.Default, ValidValues: p.Values}
	}
	return &resourceapi.CapacityRequestPolicy{Default: p.Default,
		ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: p.Min, Max: p.Max, Step: p.Step}}
}

// Admit refuses what a device has no room for beside what others have of it:
// more of a capacity than is left, and the whole of a device that others have
// shares of. The scheduler has checked too.
func Admit(device string, c config.Capacities, whole bool, wanted map[string]resource.Quantity, others []map[string]resource.Quantity) error {
	if whole && len(others) > 0 {
		return fmt.Errorf("the whole device %s is wanted, and %d shares of it are in use on this node: it becomes free when they are gone", device, len(others))
	}
	for name, q := range wanted {
		limit, ok := c.Capacity[name]
		if !ok {
			continue // it was taken out of the configuration after the allocation
		}
		var taken resource.Quantity
		for _, o := range others {
			taken.Add(o[name])
		}
		sum := taken.DeepCopy()
		sum.Add(q)
		if sum.Cmp(limit) > 0 {
			return fmt.Errorf("%s %s: device %s has %s, of which %s are granted to other shares on this node", name, q.String(), device, limit.String(), taken.String())
		}
	}
	return nil
}

// Variable names a variable in the environment of containers with a share of a
// request.
func Variable(request, what string) string {
	return params.ReservedEnvironment + strings.ToUpper(strings.NewReplacer("-", "_", "/", "_", ".", "_").Replace(request+"_"+what))
}

// GrantVariables are the variables that tell containers what is granted: for
// memory in bytes, for all else as a decimal number.
func GrantVariables(request string, granted map[string]resource.Quantity) map[string]string {
	variables := make(map[string]string, len(granted))
	for name, q := range granted {
		variables[Variable(request, config.GrantVariable(name))] = Decimal(q)
	}
	return variables
}

// Edits are what the texts of a configuration have become, with further
// variables; of variables that are there twice, the configuration's count, then
// those of the later maps.
func Edits(expanded config.Edits, environments ...map[string]string) (edits cdi.Edits) {
	all := map[string]string{}
	for _, environment := range append(environments, expanded.Environment) {
		maps.Copy(all, environment)
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		edits.Env = append(edits.Env, name+"="+all[name])
	}
	edits.DeviceNodes = expanded.DeviceNodes
	for _, m := range expanded.Mounts {
		edits.Mounts = append(edits.Mounts, cdi.Mount(m))
	}
	return edits
}

// AdminEdits tell containers that they may look at a device, and have nothing
// of it.
func AdminEdits(request string) cdi.Edits {
	return cdi.Edits{Env: []string{Variable(request, "admin_access") + "=true"}}
}

// Decimal writes a quantity without suffix or exponent.
func Decimal(q resource.Quantity) string {
	dec := q.AsDec()
	if dec.Scale() <= 0 {
		return fmt.Sprint(q.Value())
	}
	return strings.TrimRight(strings.TrimRight(dec.String(), "0"), ".")
}

// Variables are the values of what the texts of a configuration's edits may
// say about a grant; see config.CapacitySuffixes.
func Variables(c config.Capacities, granted map[string]resource.Quantity) map[string]string {
	variables := map[string]string{}
	for name, whole := range c.Capacity {
		q, ok := granted[name]
		if !ok {
			continue // it was not configured when the share was allocated
		}
		variables[name] = Decimal(q)
		for suffix, unit := range map[string]int64{".Ki": 1 << 10, ".Mi": 1 << 20, ".Gi": 1 << 30} {
			variables[name+suffix] = fmt.Sprint(q.Value() / unit)
		}
		percent := 100 * q.AsApproximateFloat64() / whole.AsApproximateFloat64()
		variables[name+".percent"] = fmt.Sprint(int64(math.Floor(percent + 1e-9)))
	}
	return variables
}

// GrantAttributes are the attributes that tell a container what is granted,
// for the metadata file: grantedMemory, ...
func GrantAttributes(granted map[string]resource.Quantity) Attributes {
	attributes := Attributes{}
	for name, q := range granted {
		key := resourceapi.QualifiedName("granted" + strings.ToUpper(name[:1]) + name[1:])
		if value, ok := q.AsInt64(); ok {
			attributes[key] = resourceapi.DeviceAttribute{IntValue: ptr.To(value)}
		} else {
			attributes[key] = Text(Decimal(q))
		}
	}
	return attributes
}
