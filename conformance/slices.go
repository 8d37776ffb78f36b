// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"
)

// The functions in this file check published slices, and access nothing else.

// eachDevice calls f for each device and returns the first error.
func eachDevice(all []resourceapi.ResourceSlice, f func(resourceapi.Device) error) error {
	for _, s := range all {
		for _, d := range s.Spec.Devices {
			if err := f(d); err != nil {
				return fmt.Errorf("device %s of pool %s: %w", d.Name, s.Spec.Pool.Name, err)
			}
		}
	}
	return nil
}

func checkNames(_ string, all []resourceapi.ResourceSlice) error {
	for pool, generations := range pools(all) {
		for _, slices := range generations {
			seen := map[string]bool{}
			for _, s := range slices {
				for _, d := range s.Spec.Devices {
					if problems := validation.IsDNS1123Label(d.Name); len(problems) > 0 {
						return fmt.Errorf("device %q is not a DNS label: %v", d.Name, problems)
					}
					if seen[d.Name] {
						return fmt.Errorf("pool %s has two devices %s", pool, d.Name)
					}
					seen[d.Name] = true
				}
			}
		}
	}
	return nil
}

func checkCounts(_ string, all []resourceapi.ResourceSlice) error {
	for pool, generations := range pools(all) {
		if len(generations) > 1 {
			return fmt.Errorf("pool %s has slices of %d generations", pool, len(generations))
		}
		for generation, slices := range generations {
			for _, s := range slices {
				if n := s.Spec.Pool.ResourceSliceCount; n != int64(len(slices)) || n < 1 {
					return fmt.Errorf("pool %s has %d slices of generation %d, but one of them says %d",
						pool, len(slices), generation, n)
				}
			}
		}
	}
	return nil
}

func checkNodeSelection(_ string, all []resourceapi.ResourceSlice) error {
	for _, s := range all {
		var set []string
		if ptr.Deref(s.Spec.NodeName, "") != "" {
			set = append(set, "nodeName")
		}
		if s.Spec.NodeSelector != nil {
			set = append(set, "nodeSelector")
		}
		if ptr.Deref(s.Spec.AllNodes, false) {
			set = append(set, "allNodes")
		}
		if ptr.Deref(s.Spec.PerDeviceNodeSelection, false) {
			set = append(set, "perDeviceNodeSelection")
		}
		if len(set) != 1 {
			return fmt.Errorf("a ResourceSlice of pool %s sets %v: exactly one must be set", s.Spec.Pool.Name, set)
		}
		if err := checkSelectionOfDevices(s); err != nil {
			return err
		}
	}
	return nil
}

// checkSelectionOfDevices returns an error unless the devices of a slice select nodes if and only if
// the slice has perDeviceNodeSelection.
func checkSelectionOfDevices(s resourceapi.ResourceSlice) error {
	want := 0
	if ptr.Deref(s.Spec.PerDeviceNodeSelection, false) {
		want = 1
	}
	return eachDevice([]resourceapi.ResourceSlice{s}, func(d resourceapi.Device) error {
		n := 0
		for _, set := range []bool{d.NodeName != nil, d.NodeSelector != nil, d.AllNodes != nil} {
			if set {
				n++
			}
		}
		if n != want {
			return fmt.Errorf("it sets %d of nodeName, nodeSelector, and allNodes: %d must be set, by perDeviceNodeSelection "+
				"of the ResourceSlice", n, want)
		}
		return nil
	})
}

func checkSizes(_ string, all []resourceapi.ResourceSlice) error {
	for _, s := range all {
		limit := resourceapi.ResourceSliceMaxDevices
		for _, d := range s.Spec.Devices {
			if len(d.Taints) > 0 || len(d.ConsumesCounters) > 0 || hasLists(d) {
				limit = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
			}
		}
		if n := len(s.Spec.Devices); n > limit {
			return fmt.Errorf("a ResourceSlice of pool %s has %d devices; the limit is %d", s.Spec.Pool.Name, n, limit)
		}
	}
	return nil
}

// hasLists reports whether a device has attributes with lists as values.
func hasLists(d resourceapi.Device) bool {
	for _, a := range d.Attributes {
		if len(a.IntValues)+len(a.BoolValues)+len(a.StringValues)+len(a.VersionValues) > 0 {
			return true
		}
	}
	return false
}

func checkPoolNames(_ string, all []resourceapi.ResourceSlice) error {
	for _, s := range all {
		name := s.Spec.Pool.Name
		if len(name) > resourceapi.PoolNameMaxLength {
			return fmt.Errorf("the name of pool %s has %d characters; the limit is %d", name, len(name),
				resourceapi.PoolNameMaxLength)
		}
		for part := range strings.SplitSeq(name, "/") {
			if problems := validation.IsDNS1123Subdomain(part); len(problems) > 0 {
				return fmt.Errorf("pool %q: %q is not a DNS subdomain: %v", name, part, problems)
			}
		}
	}
	return nil
}

func checkNodePools(_ string, all []resourceapi.ResourceSlice) error {
	for _, s := range all {
		if node := ptr.Deref(s.Spec.NodeName, ""); node != "" && !strings.Contains(s.Spec.Pool.Name, node) {
			return fmt.Errorf("pool %s of node %s does not contain the node's name", s.Spec.Pool.Name, node)
		}
	}
	return nil
}

func checkOwners(_ string, all []resourceapi.ResourceSlice) error {
	for _, s := range all {
		if ptr.Deref(s.Spec.NodeName, "") == "" {
			continue
		}
		if len(s.OwnerReferences) != 1 || s.OwnerReferences[0].Kind != "Node" {
			return fmt.Errorf("a ResourceSlice of pool %s belongs to a node, and is not owned by the Node: %v", s.Spec.Pool.Name,
				s.OwnerReferences)
		}
	}
	return nil
}

// names returns the names of attributes and capacities.
func names(d resourceapi.Device) (all []string) {
	for name := range d.Attributes {
		all = append(all, string(name))
	}
	for name := range d.Capacity {
		all = append(all, string(name))
	}
	slices.Sort(all)
	return all
}

func checkAttributeNames(_ string, all []resourceapi.ResourceSlice) error {
	identifier := regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	return eachDevice(all, func(d resourceapi.Device) error {
		if n := len(d.Attributes) + len(d.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
			return fmt.Errorf("%d attributes and capacities; the limit is %d", n,
				resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice)
		}
		for _, name := range names(d) {
			domain, id, found := strings.Cut(name, "/")
			if !found {
				domain, id = "", name
			}
			switch {
			case len(id) > resourceapi.DeviceMaxIDLength || !identifier.MatchString(id):
				return fmt.Errorf("attribute or capacity %q: %q is not a C identifier of at most %d characters",
					name, id, resourceapi.DeviceMaxIDLength)
			case found && (len(domain) > resourceapi.DeviceMaxDomainLength || len(validation.IsDNS1123Subdomain(domain)) > 0):
				return fmt.Errorf("attribute or capacity %q: %q is not a DNS subdomain of at most %d characters",
					name, domain, resourceapi.DeviceMaxDomainLength)
			}
		}
		return nil
	})
}

func checkAttributeDomains(driver string, all []resourceapi.ResourceSlice) error {
	return eachDevice(all, func(d resourceapi.Device) error {
		for _, name := range names(d) {
			if strings.HasPrefix(name, driver+"/") {
				return fmt.Errorf("%s: the driver's own attributes and capacities have no prefix", name)
			}
		}
		return nil
	})
}

func checkAttributeValues(_ string, all []resourceapi.ResourceSlice) error {
	// semver.org, spec 2.0.0.
	version := regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?$`)
	const limit = resourceapi.DeviceAttributeMaxValueLength
	isLong := func(v string) bool { return len(v) > limit }
	return eachDevice(all, func(d resourceapi.Device) error {
		for name, a := range d.Attributes {
			switch {
			case a.StringValue != nil && len(*a.StringValue) > limit:
				return fmt.Errorf("attribute %s has %d characters; the limit is %d", name, len(*a.StringValue), limit)
			case a.VersionValue != nil && (len(*a.VersionValue) > limit || !version.MatchString(*a.VersionValue)):
				return fmt.Errorf("attribute %s: %q is not a semantic version of at most %d characters", name, *a.VersionValue,
					limit)
			case slices.ContainsFunc(slices.Concat(a.StringValues, a.VersionValues), isLong):
				return fmt.Errorf("attribute %s has a value with more than %d characters", name, limit)
			case slices.ContainsFunc(a.VersionValues, func(v string) bool { return !version.MatchString(v) }):
				return fmt.Errorf("attribute %s has a value that is not a semantic version: %v", name, a.VersionValues)
			case countSet(a) != 1:
				return fmt.Errorf("attribute %s has %d values: exactly one must be set", name, countSet(a))
			}
		}
		return nil
	})
}

func countSet(a resourceapi.DeviceAttribute) (n int) {
	for _, set := range []bool{
		a.IntValue != nil, a.BoolValue != nil, a.StringValue != nil, a.VersionValue != nil,
		len(a.IntValues) > 0, len(a.BoolValues) > 0, len(a.StringValues) > 0, len(a.VersionValues) > 0,
	} {
		if set {
			n++
		}
	}
	return n
}

func checkAttributeTypes(_ string, all []resourceapi.ResourceSlice) error {
	types := map[resourceapi.QualifiedName]string{}
	return eachDevice(all, func(d resourceapi.Device) error {
		for name, a := range d.Attributes {
			t := fmt.Sprint(a.IntValue != nil, a.BoolValue != nil, a.StringValue != nil, a.VersionValue != nil)
			if other, ok := types[name]; ok && other != t {
				return fmt.Errorf("attribute %s has another type than on another device", name)
			}
			types[name] = t
		}
		return nil
	})
}

func checkBindingConditions(_ string, all []resourceapi.ResourceSlice) error {
	return eachDevice(all, func(d resourceapi.Device) error {
		for _, list := range [][]string{d.BindingConditions, d.BindingFailureConditions} {
			if len(list) > resourceapi.BindingConditionsMaxSize {
				return fmt.Errorf("%d binding conditions; the limit is %d", len(list), resourceapi.BindingConditionsMaxSize)
			}
			for _, c := range list {
				if problems := validation.IsQualifiedName(c); len(problems) > 0 {
					return fmt.Errorf("binding condition %q: %v", c, problems)
				}
			}
		}
		return nil
	})
}

func checkTaints(_ string, all []resourceapi.ResourceSlice) error {
	effects := []resourceapi.DeviceTaintEffect{"None", "NoSchedule", "NoExecute"}
	return eachDevice(all, func(d resourceapi.Device) error {
		if len(d.Taints) > resourceapi.DeviceTaintsMaxLength {
			return fmt.Errorf("%d taints; the limit is %d", len(d.Taints), resourceapi.DeviceTaintsMaxLength)
		}
		for _, t := range d.Taints {
			problems := slices.Concat(validation.IsQualifiedName(t.Key), validation.IsValidLabelValue(t.Value))
			if len(problems) > 0 || !slices.Contains(effects, t.Effect) {
				return fmt.Errorf("taint %s=%s:%s: %v; effects are %v", t.Key, t.Value, t.Effect, problems, effects)
			}
		}
		return nil
	})
}

func checkTaintDomains(_ string, all []resourceapi.ResourceSlice) error {
	return eachDevice(all, func(d resourceapi.Device) error {
		for _, t := range d.Taints {
			if domain, _, _ := strings.Cut(t.Key, "/"); domain == "kubernetes.io" || strings.HasSuffix(domain,
				".kubernetes.io") {
				return fmt.Errorf("taint %s is in a domain of Kubernetes", t.Key)
			}
		}
		return nil
	})
}

func checkSkipped(_ string, all []resourceapi.ResourceSlice) error {
	for _, s := range all {
		skips := func(o resourceapi.SkipNodeOperation) bool {
			return slices.Contains(s.Spec.SkipNodeOperations, o) ||
				slices.Contains(s.Spec.SkipNodeOperations, resourceapi.SkipNodeOperationAll)
		}
		if skips(resourceapi.SkipNodeOperationNodePrepareResources) &&
			!skips(resourceapi.SkipNodeOperationNodeUnprepareResources) {
			return fmt.Errorf("a ResourceSlice of pool %s skips %v: prepare can be skipped only together with unprepare",
				s.Spec.Pool.Name, s.Spec.SkipNodeOperations)
		}
	}
	return nil
}

func checkCounters(_ string, all []resourceapi.ResourceSlice) error {
	sets := map[string]resourceapi.CounterSet{}
	for _, s := range all {
		if len(s.Spec.SharedCounters) > 0 && len(s.Spec.Devices) > 0 {
			return fmt.Errorf("a ResourceSlice of pool %s has shared counters and devices: only one of them can be set",
				s.Spec.Pool.Name)
		}
		if n := len(s.Spec.SharedCounters); n > resourceapi.ResourceSliceMaxCounterSets {
			return fmt.Errorf("a ResourceSlice of pool %s has %d counter sets; the limit is %d", s.Spec.Pool.Name, n,
				resourceapi.ResourceSliceMaxCounterSets)
		}
		for _, c := range s.Spec.SharedCounters {
			key := s.Spec.Pool.Name + "/" + c.Name
			if _, known := sets[key]; known || len(validation.IsDNS1123Label(c.Name)) > 0 {
				return fmt.Errorf("counter set %q is not a DNS label, or is not unique in pool %s", c.Name, s.Spec.Pool.Name)
			}
			if n := len(c.Counters); n > resourceapi.ResourceSliceMaxCountersPerCounterSet {
				return fmt.Errorf("counter set %s of pool %s has %d counters; the limit is %d", c.Name, s.Spec.Pool.Name, n,
					resourceapi.ResourceSliceMaxCountersPerCounterSet)
			}
			sets[key] = c
		}
	}
	for _, s := range all {
		err := eachDevice([]resourceapi.ResourceSlice{s}, func(d resourceapi.Device) error {
			return checkConsumption(d, func(name string) (resourceapi.CounterSet, bool) {
				c, ok := sets[s.Spec.Pool.Name+"/"+name]
				return c, ok
			})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// checkConsumption returns an error unless the pool has the counters that a device consumes.
func checkConsumption(d resourceapi.Device, find func(string) (resourceapi.CounterSet, bool)) error {
	if n := len(d.ConsumesCounters); n > resourceapi.ResourceSliceMaxDeviceCounterConsumptionsPerDevice {
		return fmt.Errorf("it consumes %d counter sets; the limit is %d", n,
			resourceapi.ResourceSliceMaxDeviceCounterConsumptionsPerDevice)
	}
	for _, c := range d.ConsumesCounters {
		set, ok := find(c.CounterSet)
		if !ok {
			return fmt.Errorf("it consumes counter set %s, which the pool does not have", c.CounterSet)
		}
		for name, amount := range c.Counters {
			if available, ok := set.Counters[name]; !ok || amount.Value.Cmp(available.Value) > 0 {
				return fmt.Errorf("it consumes %v of counter %s in set %s, which has %v", &amount.Value, name, c.CounterSet,
					&available.Value)
			}
		}
	}
	return nil
}

// maxValidValues is the limit of CapacityRequestPolicy.validValues.
const maxValidValues = 10

// eachCapacity calls f for each capacity and returns the first error.
func eachCapacity(all []resourceapi.ResourceSlice, f func(resourceapi.Device, resourceapi.DeviceCapacity) error) error {
	return eachDevice(all, func(d resourceapi.Device) error {
		for name, c := range d.Capacity {
			if err := f(d, c); err != nil {
				return fmt.Errorf("capacity %s: %w", name, err)
			}
		}
		return nil
	})
}

func checkPolicyShared(_ string, all []resourceapi.ResourceSlice) error {
	return eachCapacity(all, func(d resourceapi.Device, c resourceapi.DeviceCapacity) error {
		if c.RequestPolicy != nil && !ptr.Deref(d.AllowMultipleAllocations, false) {
			return fmt.Errorf("a request policy on a device that does not allow multiple allocations")
		}
		return nil
	})
}

func checkPolicyValues(_ string, all []resourceapi.ResourceSlice) error {
	return eachCapacity(all, func(_ resourceapi.Device, c resourceapi.DeviceCapacity) error {
		p := c.RequestPolicy
		if p == nil || len(p.ValidValues) == 0 {
			return nil
		}
		ascending := slices.IsSortedFunc(p.ValidValues, func(a, b resource.Quantity) int { return a.Cmp(b) })
		repeated := len(slices.CompactFunc(slices.Clone(p.ValidValues),
			func(a, b resource.Quantity) bool { return a.Cmp(b) == 0 })) < len(p.ValidValues)
		last := p.ValidValues[len(p.ValidValues)-1]
		hasDefault := p.Default != nil && slices.ContainsFunc(p.ValidValues,
			func(q resource.Quantity) bool { return q.Cmp(*p.Default) == 0 })
		switch {
		case len(p.ValidValues) > maxValidValues || !ascending || repeated || !hasDefault:
			return fmt.Errorf("valid values %v with default %v: they must be at most %d, ascending, and contain the default",
				p.ValidValues, p.Default, maxValidValues)
		case p.ValidRange != nil:
			return fmt.Errorf("it has valid values and a valid range: only one of them can be set")
		case last.Cmp(c.Value) > 0:
			return fmt.Errorf("the valid value %v is larger than the capacity, %v", &last, &c.Value)
		}
		return nil
	})
}

func checkPolicyRange(_ string, all []resourceapi.ResourceSlice) error {
	return eachCapacity(all, func(_ resourceapi.Device, c resourceapi.DeviceCapacity) error {
		p := c.RequestPolicy
		if p == nil || p.ValidRange == nil {
			return nil
		}
		r := p.ValidRange
		limit := ptr.Deref(r.Max, c.Value)
		switch {
		case r.Min == nil || p.Default == nil:
			return fmt.Errorf("a valid range needs min and default")
		case r.Min.Sign() < 0 || r.Min.Cmp(*p.Default) > 0 || p.Default.Cmp(limit) > 0 || limit.Cmp(c.Value) > 0:
			return fmt.Errorf("min %v, default %v, max %v, value %v: they must ascend", r.Min, p.Default, &limit, &c.Value)
		}
		if r.Step == nil {
			return nil
		}
		next := r.Min.DeepCopy()
		next.Add(*r.Step)
		if next.Cmp(c.Value) > 0 || !aligned(*p.Default, *r.Min, *r.Step) || r.Max != nil && !aligned(*r.Max, *r.Min,
			*r.Step) {
			return fmt.Errorf("step %v from min %v does not reach default %v and max %v within %v", r.Step, r.Min, p.Default,
				r.Max, &c.Value)
		}
		return nil
	})
}

// aligned reports whether q is from plus a multiple of step.
func aligned(q, from, step resource.Quantity) bool {
	s := step.MilliValue()
	return s > 0 && (q.MilliValue()-from.MilliValue())%s == 0
}

func checkPolicyConcrete(_ string, all []resourceapi.ResourceSlice) error {
	return eachCapacity(all, func(d resourceapi.Device, c resourceapi.DeviceCapacity) error {
		if ptr.Deref(d.AllowMultipleAllocations, false) && (c.RequestPolicy == nil || c.RequestPolicy.Default == nil) {
			return fmt.Errorf("no default: a claim without a request for it consumes the whole capacity")
		}
		return nil
	})
}
