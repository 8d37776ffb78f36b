// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

const (
	wholeDevices = 12  // devices that cannot be shared
	fewDevices   = 4   // all devices of the node, for a fault
	slotsTotal   = 100 // slots of the device that can
	perSlice     = 8
	netDevice    = "net-0" // the device of all nodes
	netPool      = "fabric"
	interval     = 50 * time.Millisecond // between looks at the slices
)

func (d *Driver) pool() string {
	if d.fault("PUB-06") {
		return d.Node + "_x"
	}
	return d.Node
}

func (d *Driver) removed(device string) bool {
	_, err := os.Stat(filepath.Join(d.StateDir, "removed-"+device))
	return err == nil
}

// wasRemoved reports whether the node lacks a device, or did at an earlier call.
func (d *Driver) wasRemoved(device string) bool {
	now := d.removed(device)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gone[device] = d.gone[device] || now
	return d.gone[device]
}

// has reports whether the node has a device now.
func (d *Driver) has(device string) bool {
	known := slices.ContainsFunc(d.all(), func(x resourceapi.Device) bool { return x.Name == device })
	return (known || device == netDevice) && !d.removed(device)
}

// all returns the devices of the node, including removed ones.
func (d *Driver) all() (all []resourceapi.Device) {
	number := wholeDevices
	if d.fault("PUB-05") {
		number = 129
	}
	for i := range number {
		all = append(all, resourceapi.Device{
			Name: fmt.Sprintf("device-%d", i),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"model": {StringValue: ptr.To("reference")}, "index": {IntValue: ptr.To(int64(i))},
			},
			Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("1Gi")}},
		})
	}
	one := resource.MustParse("1")
	slots := resourceapi.DeviceCapacity{Value: resource.MustParse(fmt.Sprint(slotsTotal)),
		RequestPolicy: &resourceapi.CapacityRequestPolicy{
			Default: &one, ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &one, Step: &one},
		}}
	share := resourceapi.Device{
		Name: "share-0", AllowMultipleAllocations: ptr.To(true),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"model": {StringValue: ptr.To("reference")}},
		Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"slots": slots},
	}
	all = d.spoilDevices(append(all, share))
	if d.fault("PREP-17/few") {
		return all[:fewDevices]
	}
	return all
}

// spoilDevices applies faults of devices to the last device that cannot be shared.
func (d *Driver) spoilDevices(all []resourceapi.Device) []resourceapi.Device {
	last, share := &all[wholeDevices-1], &all[len(all)-1]
	memory := last.Capacity["memory"]
	one, two, three := resource.MustParse("1"), resource.MustParse("2"), resource.MustParse("3")
	switch d.Fault {
	case "PUB-01":
		last.Name = all[0].Name
	case "ATTR-01":
		for i := range 40 {
			last.Attributes[resourceapi.QualifiedName(fmt.Sprint("extra",
				i))] = resourceapi.DeviceAttribute{BoolValue: ptr.To(true)}
		}
	case "ATTR-02":
		last.Attributes[resourceapi.QualifiedName(d.Name+"/extra")] = resourceapi.DeviceAttribute{BoolValue: ptr.To(true)}
	case "ATTR-03":
		last.Attributes["model"] = resourceapi.DeviceAttribute{StringValue: ptr.To(strings.Repeat("x", 70))}
	case "ATTR-03/list":
		last.Attributes["model"] = resourceapi.DeviceAttribute{StringValues: []string{"a", strings.Repeat("x", 70)}}
	case "NET-13", "ACCEL-01":
		last.Attributes, last.Capacity = nil, nil
	case "ATTR-07":
		last.BindingConditions = []string{"a", "b", "c", "d", "e"}
	case "PUB-04/device":
		last.NodeName = &d.Node
	case "TAINT-01":
		last.Taints = []resourceapi.DeviceTaint{{Key: "not a key", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	case "PART-01/counter":
		last.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{
			CounterSet: "set-0", Counters: map[string]resourceapi.Counter{"missing": {Value: one}},
		}}
	case "PART-01":
		last.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "missing"}}
	case "SHARE-05":
		memory.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: &one}
		last.Capacity["memory"] = memory
	case "SHARE-06":
		share.Capacity["lanes"] = resourceapi.DeviceCapacity{Value: three, RequestPolicy: &resourceapi.CapacityRequestPolicy{
			Default: &three, ValidValues: []resource.Quantity{one, two},
		}}
	case "SHARE-06/range":
		share.Capacity["slots"].RequestPolicy.ValidValues = []resource.Quantity{one, two}
	case "SHARE-06/value":
		share.Capacity["lanes"] = resourceapi.DeviceCapacity{Value: two, RequestPolicy: &resourceapi.CapacityRequestPolicy{
			Default: &one, ValidValues: []resource.Quantity{one, three},
		}}
	case "SHARE-09/value", "SHARE-09/policy":
		d.spoilShared(share)
	case "SHARE-07":
		slots := share.Capacity["slots"]
		slots.RequestPolicy.ValidRange.Max, slots.RequestPolicy.Default = &two, &three
	}
	return all
}

// spoilShared makes a capacity depend on the amounts that claims use.
func (d *Driver) spoilShared(share *resourceapi.Device) {
	used := int64(0)
	for _, r := range d.records() {
		for _, p := range r.Devices {
			if p.Share != "" {
				used++
			}
		}
	}
	free := resource.NewQuantity(slotsTotal-used, resource.DecimalSI)
	if d.fault("SHARE-09/policy") {
		share.Capacity["slots"].RequestPolicy.ValidRange.Max = free
		return
	}
	none := resource.MustParse("0")
	share.Capacity["lanes"] = resourceapi.DeviceCapacity{
		Value: *free, RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &none},
	}
}

// counters returns the slice with the shared counters of a driver with a fault of counters, or none.
func (d *Driver) counters() []resourceapi.CounterSet {
	number := map[string]int{"PART-01/counter": 1, "PART-01/sets": 9}[d.Fault]
	var sets []resourceapi.CounterSet
	for i := range number {
		sets = append(sets, resourceapi.CounterSet{Name: fmt.Sprint("set-", i), Counters: map[string]resourceapi.Counter{
			"slots": {Value: resource.MustParse("1")},
		}})
	}
	return sets
}

// desired returns the slices that the node should have, without their generation.
func (d *Driver) desired() (slices []resourceapi.ResourceSlice) {
	var present []resourceapi.Device
	for _, x := range d.all() {
		if d.fault("PUB-14/back") && d.wasRemoved(x.Name) {
			continue
		}
		if d.removed(x.Name) && d.fault("PUB-14") {
			x.Attributes["gone"] = resourceapi.DeviceAttribute{BoolValue: ptr.To(true)}
			present = append(present, x)
		} else if !d.removed(x.Name) {
			present = append(present, x)
		}
	}
	size := perSlice
	if d.fault("PUB-05") {
		size = len(present)
	}
	var chunks [][]resourceapi.Device
	for len(present) > size {
		chunks, present = append(chunks, present[:size]), present[size:]
	}
	chunks = append(chunks, present)
	counters := d.counters()
	if len(counters) > 0 {
		chunks = append(chunks, nil)
	}
	for i, devices := range chunks {
		slice := resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{
			Name:            fmt.Sprintf("%s-%s-%d", d.Node, d.Name, i),
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: d.Node, UID: "node"}},
		}}
		slice.Spec = resourceapi.ResourceSliceSpec{
			Driver: d.Name, NodeName: &d.Node, Devices: devices,
			Pool: resourceapi.ResourcePool{Name: d.pool(), ResourceSliceCount: int64(len(chunks))},
		}
		if devices == nil {
			slice.Spec.SharedCounters = counters
		}
		switch {
		case d.fault("PUB-02"):
			slice.Spec.Pool.ResourceSliceCount++
		case d.fault("SKIP-01"):
			slice.Spec.SkipNodeOperations = []resourceapi.SkipNodeOperation{
				resourceapi.SkipNodeOperationNodePrepareResources,
			}
		case d.fault("PUB-04"):
			slice.Spec.AllNodes = ptr.To(true)
		}
		slices = append(slices, slice)
	}
	return slices
}

// publish keeps the slices as they should be until the context ends.
func (d *Driver) publish(ctx context.Context) {
	p := publisher{Driver: d, written: map[string]string{}}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	if d.fault("PUB-11") && d.crashed {
		return // the slices of the last instance exist
	}
	removed := 0
	for done := false; ; {
		if removals := len(d.removals()); !done || !d.fault("PUB-10") || removals != removed {
			removed = removals
			err := errors.Join(p.shareNet(ctx), p.sync(ctx))
			done = err == nil
			if err != nil && ctx.Err() == nil && !d.fault("PUB-13") {
				log.Printf("Failed to publish ResourceSlices: %v", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (d *Driver) removals() []string {
	paths, _ := filepath.Glob(filepath.Join(d.StateDir, "removed-*")) // the pattern is valid
	return paths
}

// publisher writes slices.
type publisher struct {
	*Driver
	last    []resourceapi.ResourceSlice // desired at the last write
	written map[string]string           // resource versions after the last write
}

// sync writes the slices if something differs.
func (p *publisher) sync(ctx context.Context) error {
	api := p.Client.ResourceV1().ResourceSlices()
	if p.fault("PUB-11/foreign") {
		p.removeForeign(ctx)
	}
	list, err := api.List(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + p.Name + ",spec.nodeName=" + p.Node})
	if err != nil {
		return err
	}
	desired := p.desired()
	if p.fault("PUB-10/generation") && len(list.Items) > 0 && len(list.Items) < len(desired) {
		return p.addMissing(ctx, desired, list.Items)
	}
	current := map[string]*resourceapi.ResourceSlice{}
	generation := int64(0)
	changed := !equality.Semantic.DeepEqual(desired, p.last) || len(list.Items) != len(desired)
	for i, s := range list.Items {
		current[s.Name] = &list.Items[i]
		generation = max(generation, s.Spec.Pool.Generation)
		changed = changed || p.written[s.Name] != s.ResourceVersion && !p.fault("PUB-10/edit")
	}
	if p.last == nil {
		changed = !p.sameAs(desired, current)
	}
	if p.fault("PUB-15") {
		changed = !p.sameAs(desired, current)
	}
	if !changed {
		p.remember(desired, list.Items)
		return nil
	}
	if !p.fault("PUB-03") || generation == 0 {
		generation++
	}
	for i := range desired {
		s := desired[i].DeepCopy()
		s.Spec.Pool.Generation = generation
		var result *resourceapi.ResourceSlice
		if old := current[s.Name]; old == nil {
			result, err = api.Create(ctx, s, metav1.CreateOptions{})
		} else {
			s.ResourceVersion = old.ResourceVersion
			result, err = api.Update(ctx, s, metav1.UpdateOptions{})
		}
		if err != nil {
			return err
		}
		p.written[s.Name] = result.ResourceVersion
		if !equality.Semantic.DeepEqual(result.Spec.Devices, s.Spec.Devices) && !p.fault("PUB-13/dropped") {
			log.Printf("The API server dropped fields of ResourceSlice %s: some features are disabled", s.Name)
		}
	}
	p.last = desired
	return p.removeOthers(ctx, desired, list.Items)
}

// removeOthers deletes slices that the node should not have, such as an earlier release's slices.
func (p *publisher) removeOthers(ctx context.Context, desired, items []resourceapi.ResourceSlice) error {
	if p.fault("PUB-02/left") {
		return nil
	}
	for _, s := range items {
		isWanted := func(x resourceapi.ResourceSlice) bool { return x.Name == s.Name }
		if slices.ContainsFunc(desired, isWanted) {
			continue
		}
		err := p.Client.ResourceV1().ResourceSlices().Delete(ctx, s.Name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// removeForeign deletes the slices of other nodes, which is a fault.
func (p *publisher) removeForeign(ctx context.Context) {
	api := p.Client.ResourceV1().ResourceSlices()
	list, err := api.List(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + p.Name})
	if err != nil {
		return
	}
	for _, s := range list.Items {
		if node := ptr.Deref(s.Spec.NodeName, ""); node != "" && node != p.Node {
			_ = api.Delete(ctx, s.Name, metav1.DeleteOptions{})
		}
	}
}

// addMissing creates the missing slices in a separate generation, which is a fault.
func (p *publisher) addMissing(ctx context.Context, desired, items []resourceapi.ResourceSlice) error {
	p.remember(desired, items)
	for _, s := range desired {
		s.Spec.Pool.Generation = items[0].Spec.Pool.Generation + 1
		result, err := p.Client.ResourceV1().ResourceSlices().Create(ctx, &s, metav1.CreateOptions{})
		if err == nil {
			p.written[s.Name] = result.ResourceVersion
		} else if !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return nil
}

func (p *publisher) remember(desired []resourceapi.ResourceSlice, items []resourceapi.ResourceSlice) {
	p.last = desired
	for _, s := range items {
		p.written[s.Name] = s.ResourceVersion
	}
}

// sameAs reports whether the slices of the API server are as desired.
func (p *publisher) sameAs(desired []resourceapi.ResourceSlice, current map[string]*resourceapi.ResourceSlice) bool {
	for _, s := range desired {
		c := current[s.Name]
		if c == nil {
			return false
		}
		s.Spec.Pool.Generation = c.Spec.Pool.Generation
		if !equality.Semantic.DeepEqual(s.Spec, c.Spec) {
			return false
		}
	}
	return len(desired) == len(current)
}

// shareNet publishes the device of all nodes, unless another node has published it.
func (p *publisher) shareNet(ctx context.Context) error {
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: netPool + "-" + p.Name}}
	slice.Spec = resourceapi.ResourceSliceSpec{
		Driver: p.Name, AllNodes: ptr.To(true), Devices: []resourceapi.Device{{Name: netDevice,
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"model": {StringValue: ptr.To("reference")}},
		}},
		Pool: resourceapi.ResourcePool{Name: netPool, Generation: 1, ResourceSliceCount: 1},
	}
	api := p.Client.ResourceV1().ResourceSlices()
	_, err := api.Get(ctx, slice.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err = api.Create(ctx, slice, metav1.CreateOptions{})
	}
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// status is the part of a claim that the driver applies.
func (d *Driver) status(r *record) []map[string]any {
	var all []map[string]any
	devices := r.Devices
	if d.fault("STAT-01/second") {
		devices = devices[:1]
	}
	for _, p := range devices {
		entry := map[string]any{
			"driver": d.Name, "pool": p.Pool, "device": p.Device, "conditions": []any{map[string]any{
				"type": "Ready", "status": "True", "reason": "Prepared", "message": "", "lastTransitionTime": metav1.Now(),
			}},
		}
		if p.Share != "" && !d.fault("STAT-01") {
			entry["shareID"] = p.Share
		}
		network := network(p.Device)
		if d.fault("STAT-05") {
			network.IPs = []string{"198.51.100.1/24"}
		}
		entry["networkData"] = network
		if d.fault("STAT-04") {
			entry["data"] = map[string]any{"text": strings.Repeat("x", 11*1024)}
		}
		all = append(all, entry)
	}
	return all
}

// report writes the status of a prepared claim, now or as soon as the API server
// accepts it.
func (d *Driver) report(r *record) {
	if len(r.Devices) == 0 {
		return
	}
	go func() {
		for {
			err := d.writeStatus(r, d.status(r))
			if err == nil && d.fault("META-06") {
				<-time.After(interval) // so that readers have seen the metadata
			}
			if err == nil {
				err = d.updateMetadata(r)
			}
			if err == nil || apierrors.IsNotFound(err) || d.fault("STAT-06") {
				return
			}
			<-time.After(interval)
			if now, err := d.load(r.UID); err != nil || now == nil {
				return // unprepared meanwhile
			}
		}
	}()
}

func (d *Driver) unreport(r *record) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	claim, err := d.Client.ResourceV1().ResourceClaims(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
	if err == nil && string(claim.UID) == r.UID {
		_ = d.writeStatus(r, nil) // the claim is about to lose its allocation anyway
	}
}

func (d *Driver) writeStatus(r *record, entries []map[string]any) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	api := d.Client.ResourceV1().ResourceClaims(r.Namespace)
	if d.fault("STAT-02/consumers") {
		claim, err := api.Get(ctx, r.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		claim.Status.ReservedFor = nil
		if _, err := api.UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	if d.fault("STAT-02") {
		claim, err := api.Get(ctx, r.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		claim.Status.Devices = nil
		for _, e := range entries {
			var s resourceapi.AllocatedDeviceStatus
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(map[string]any{
				"driver": e["driver"], "pool": e["pool"], "device": e["device"],
			}, &s); err != nil {
				return err
			}
			s.Conditions = []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Prepared"}}
			claim.Status.Devices = append(claim.Status.Devices, s)
		}
		_, err = api.UpdateStatus(ctx, claim, metav1.UpdateOptions{})
		return err
	}
	raw, err := json.Marshal(map[string]any{
		"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
		"metadata": map[string]any{"name": r.Name, "namespace": r.Namespace, "uid": r.UID},
		"status":   map[string]any{"devices": entries},
	})
	if err != nil {
		return err
	}
	_, err = api.Patch(ctx, r.Name, types.ApplyPatchType, raw,
		metav1.PatchOptions{FieldManager: d.Name, Force: ptr.To(true)}, "status")
	return err
}

func (d *Driver) patchClaim(ctx context.Context, namespace, name, patch string) error {
	_, err := d.Client.ResourceV1().ResourceClaims(namespace).Patch(
		ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

// RBAC returns the ClusterRole of the driver, as YAML.
func RBAC(fault string) string {
	role := `apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: reference}
rules:
- {apiGroups: [resource.k8s.io], resources: [resourceslices], verbs: [get, list, watch, create, update, delete]}
- {apiGroups: [resource.k8s.io], resources: [resourceclaims], verbs: [get]}
- {apiGroups: [resource.k8s.io], resources: [resourceclaims/status], verbs: [update, patch]}
`
	if fault != "STAT-08" {
		role += `- {apiGroups: [resource.k8s.io], resources: [resourceclaims/driver], verbs: ["associated-node:patch"]}
`
	}
	if fault == "SEC-01/group" {
		role += "- {apiGroups: [vendor.conformance.test], resources: [resourceslices], verbs: [get, update]}\n"
	}
	role += "- {apiGroups: [network.reference.conformance.example], resources: [blocks], verbs: [get, update]}\n"
	if fault == "SEC-01/proxy" {
		role += "- {apiGroups: [''], resources: [nodes/proxy], verbs: [get]}\n"
	}
	if fault == "BIND-02" {
		role += "- {apiGroups: [resource.k8s.io], resources: [resourceclaims/binding], verbs: [update]}\n"
	}
	if fault == "SEC-01" {
		role += "- {apiGroups: [''], resources: [nodes], verbs: [get, update]}\n"
	}
	return role
}
