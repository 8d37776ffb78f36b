package published

import (
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
)

// KindFabric is the attribute "kind" of a fabric.
const KindFabric = "fabric"

// CapacityGroups is the capacity of a fabric that each group on it consumes one
// of. Further claims of a group, for more pods than one claim can be reserved
// for, consume none; users cannot ask for that.
const CapacityGroups = "groups"

// fabricPools is what the names of fabrics' pools begin with: no node is named
// so.
const fabricPools = "fabric/"

// FabricPool is the pool of a fabric.
func FabricPool(name string) string { return fabricPools + name }

// IsFabricPool tells whether a pool is a fabric's.
func IsFabricPool(pool string) bool { return strings.HasPrefix(pool, fabricPools) }

// Fabric is a fabric as it stands in a ResourceSlice.
func Fabric(f *config.Fabric) resourceapi.Device {
	d := resourceapi.Device{Name: f.Name, Capacity: Capacity(f.Capacities, f.Exclusive),
		Attributes: Attributes{AttributeKind: Text(KindFabric), "fabric": Text(f.Name)}}
	for name, value := range f.Attributes {
		d.Attributes[resourceapi.QualifiedName(name)] = Text(value)
	}
	if !f.Exclusive {
		d.AllowMultipleAllocations = ptr.To(true)
	}
	if f.Groups > 0 {
		if d.Capacity == nil {
			d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{}
		}
		none, one := resource.MustParse("0"), resource.MustParse("1")
		d.Capacity[CapacityGroups] = resourceapi.DeviceCapacity{Value: *resource.NewQuantity(int64(f.Groups), resource.DecimalSI),
			RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &one, ValidValues: []resource.Quantity{none, one}}}
	}
	return d
}
