// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package claimstatus builds and writes entries of a ResourceClaim's
// status.devices.
//
// The plugin, the controller, and other drivers may each own fields of one claim's status. Apply therefore uses
// server-side apply: it replaces what the same field manager wrote before and leaves other managers' fields alone. A
// component builds its entries with NewEntry, and calls Apply unless Contains or its Log reports that the API server
// already has them.
package claimstatus

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// MaxMessageLength is the length in bytes that components truncate a condition's message to. The API server accepts
// 32 KiB; a claim may have many entries and must stay readable.
const MaxMessageLength = 1024

// NewEntry returns the entry for an allocated device. data may be nil.
func NewEntry(result resourceapi.DeviceRequestAllocationResult, data *runtime.RawExtension,
	conditions ...metav1.Condition) resourceapi.AllocatedDeviceStatus {
	entry := resourceapi.AllocatedDeviceStatus{
		Driver: result.Driver, Pool: result.Pool, Device: result.Device, Data: data, Conditions: conditions,
	}
	if result.ShareID != nil {
		entry.ShareID = ptr.To(string(*result.ShareID))
	}
	return entry
}

// Truncate shortens text to at most length bytes of valid UTF-8. It replaces the middle with three dots, because
// messages start with what happened, and end with what to do.
func Truncate(text string, length int) string {
	if len(text) <= length {
		return text
	}
	const omission = "..."
	kept := length - len(omission)
	start, end := text[:kept/2], text[len(text)-(kept-kept/2):]
	return strings.ToValidUTF8(start, "") + omission + strings.ToValidUTF8(end, "")
}

// Apply writes the entries to the status of claim as fieldManager. claim is what the caller last read. Apply omits
// entries for devices that are not in the allocation, because the API server would refuse the whole write, and keeps
// the transition time of each condition with an unchanged status. If the claim no longer exists, Apply returns nil.
// If another claim has its name, Apply returns a conflict.
func Apply(ctx context.Context, client kubernetes.Interface, claim *resourceapi.ResourceClaim, fieldManager string,
	entries []resourceapi.AllocatedDeviceStatus) error {
	status := resourceapply.ResourceClaimStatus()
	for _, entry := range entries {
		if isAllocated(claim, entry) {
			status.WithDevices(applyConfiguration(keepTransitionTimes(claim, entry)))
		}
	}
	apply := resourceapply.ResourceClaim(claim.Name, claim.Namespace).WithUID(claim.UID).WithStatus(status)
	options := metav1.ApplyOptions{FieldManager: fieldManager, Force: true}
	_, err := client.ResourceV1().ResourceClaims(claim.Namespace).ApplyStatus(ctx, apply, options)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write status of claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	return nil
}

// Contains reports whether the claim's status has every entry with the same
// conditions, apart from transition times. It does not compare data.
func Contains(claim *resourceapi.ResourceClaim, entries []resourceapi.AllocatedDeviceStatus) bool {
	for _, entry := range entries {
		current := CurrentConditions(claim, entry)
		for _, wanted := range entry.Conditions {
			found := meta.FindStatusCondition(current, wanted.Type)
			if found == nil || found.Status != wanted.Status || found.Reason != wanted.Reason ||
				found.Message != wanted.Message {
				return false
			}
		}
	}
	return true
}

// Matches reports whether the claim's status has every entry that Apply would write, with the same
// conditions, apart from transition times, and the same data and network data. It ignores
// additional conditions.
func Matches(claim *resourceapi.ResourceClaim, entries []resourceapi.AllocatedDeviceStatus) bool {
	for _, wanted := range entries {
		if !isAllocated(claim, wanted) {
			continue // Apply omits it
		}
		current := currentEntry(claim, wanted)
		if current == nil || !sameJSON(current.Data, wanted.Data) ||
			!apiequality.Semantic.DeepEqual(current.NetworkData, wanted.NetworkData) ||
			!Contains(claim, []resourceapi.AllocatedDeviceStatus{wanted}) {
			return false
		}
	}
	return true
}

// IsWritten reports whether Apply would not change anything, as far as the claim shows: its status Matches, and does
// not have other entries or conditions, which the component may have written before, for devices in the pools of
// entries.
func IsWritten(claim *resourceapi.ResourceClaim, entries []resourceapi.AllocatedDeviceStatus) bool {
	if !Matches(claim, entries) {
		return false
	}
	for _, current := range claim.Status.Devices {
		wanted := slices.IndexFunc(entries, func(e resourceapi.AllocatedDeviceStatus) bool {
			return isSameDevice(current, e)
		})
		switch {
		case wanted >= 0 && len(current.Conditions) > len(entries[wanted].Conditions):
			return false
		case wanted < 0 && slices.ContainsFunc(entries, func(e resourceapi.AllocatedDeviceStatus) bool {
			return e.Driver == current.Driver && e.Pool == current.Pool
		}):
			return false
		}
	}
	return true
}

// isSameDevice reports whether two entries are for the same device, or for the same share of it.
func isSameDevice(a, b resourceapi.AllocatedDeviceStatus) bool {
	return a.Driver == b.Driver && a.Pool == b.Pool && a.Device == b.Device && ptr.Equal(a.ShareID, b.ShareID)
}

// sameJSON reports whether two values are the same. The API server may have encoded one of
// them again.
func sameJSON(a, b *runtime.RawExtension) bool {
	if a == nil || b == nil {
		return a == b
	}
	var left, right any
	return json.Unmarshal(a.Raw, &left) == nil && json.Unmarshal(b.Raw, &right) == nil && reflect.DeepEqual(left, right)
}

// isAllocated reports whether an entry describes a device in the claim's allocation.
func isAllocated(claim *resourceapi.ResourceClaim, entry resourceapi.AllocatedDeviceStatus) bool {
	if claim.Status.Allocation == nil {
		return false
	}
	return slices.ContainsFunc(
		claim.Status.Allocation.Devices.Results,
		func(r resourceapi.DeviceRequestAllocationResult) bool {
			return r.Driver == entry.Driver && r.Pool == entry.Pool && r.Device == entry.Device &&
				ptr.Deref(r.ShareID, "") == types.UID(ptr.Deref(entry.ShareID, ""))
		},
	)
}

// keepTransitionTimes returns the entry with the claim's transition times for conditions with an unchanged status,
// and the current time for others.
func keepTransitionTimes(
	claim *resourceapi.ResourceClaim,
	entry resourceapi.AllocatedDeviceStatus,
) resourceapi.AllocatedDeviceStatus {
	current := CurrentConditions(claim, entry)
	wanted := entry.Conditions
	entry.Conditions = nil
	for _, condition := range wanted {
		merged := slices.Clone(current) // SetStatusCondition modifies its argument
		meta.SetStatusCondition(&merged, condition)
		entry.Conditions = append(entry.Conditions, *meta.FindStatusCondition(merged, condition.Type))
	}
	return entry
}

// CurrentConditions returns the claim's conditions for an entry's device.
func CurrentConditions(claim *resourceapi.ResourceClaim, entry resourceapi.AllocatedDeviceStatus) []metav1.Condition {
	if current := currentEntry(claim, entry); current != nil {
		return current.Conditions
	}
	return nil
}

// currentEntry returns the claim's entry for the same device, or nil.
func currentEntry(
	claim *resourceapi.ResourceClaim, entry resourceapi.AllocatedDeviceStatus,
) *resourceapi.AllocatedDeviceStatus {
	for i, current := range claim.Status.Devices {
		if isSameDevice(current, entry) {
			return &claim.Status.Devices[i]
		}
	}
	return nil
}

func applyConfiguration(
	entry resourceapi.AllocatedDeviceStatus,
) *resourceapply.AllocatedDeviceStatusApplyConfiguration {
	a := resourceapply.AllocatedDeviceStatus().WithDriver(entry.Driver).WithPool(entry.Pool).WithDevice(entry.Device)
	if entry.ShareID != nil {
		a.WithShareID(*entry.ShareID)
	}
	for _, c := range entry.Conditions {
		a.WithConditions(metaapply.Condition().WithType(c.Type).WithStatus(c.Status).WithReason(c.Reason).
			WithMessage(c.Message).WithLastTransitionTime(c.LastTransitionTime))
	}
	if entry.Data != nil {
		a.WithData(*entry.Data)
	}
	if n := entry.NetworkData; n != nil {
		a.WithNetworkData(resourceapply.NetworkDeviceData().WithInterfaceName(n.InterfaceName).WithIPs(n.IPs...).
			WithHardwareAddress(n.HardwareAddress))
	}
	return a
}
