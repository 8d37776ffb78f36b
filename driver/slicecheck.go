// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// The helper writes ResourceSlices in the background, and reports only failures. The plugin lists the slices to check
// that the API server has them: after starting, until it finds them, and after a failure. Without the slices, the
// scheduler does not allocate the node's devices, so the plugin is not ready.
//
// Only a response from the API server makes the plugin unready again. If it became unready while no API server
// responds, rollouts would stop after each outage.

// handleRefusal returns false unless err means that the API server refused to list or store ResourceSlices. Then, it
// records the refusal in the log, in a metric, in an event on the node, and in the readiness of the plugin.
func (p *publisher) handleRefusal(ctx context.Context, err error) bool {
	if !isRefusal(err) {
		return false
	}
	remedy := refusalRemedy(err)
	reason := fmt.Errorf("the API server refuses the ResourceSlices of this node: %s: %s", withoutName(err), remedy)
	p.publication.setRefused(reason)
	p.degradations.report(ctx, v1alpha1.DegradedSlicesRefused,
		"the scheduler uses an outdated list of this node's devices, or none: "+remedy, err)
	p.warnings.warn(v1alpha1.EventReasonSlicesRefused, "", reason.Error())
	return true
}

// isRefusal reports whether err is an API server response that stays the same until the cluster or the plugin's
// request changes. Outages, overload, and conflicts with other writers are not.
func isRefusal(err error) bool {
	var answer apierrors.APIStatus
	if !errors.As(err, &answer) {
		return false
	}
	status := answer.Status()
	switch status.Code {
	case http.StatusUnauthorized: // an API server that has just started does not know all service accounts
		return false
	case http.StatusRequestTimeout, http.StatusConflict, http.StatusGone, http.StatusTooManyRequests:
		return false
	case http.StatusNotFound: // if it names an object, this has been deleted
		return status.Details == nil || status.Details.Name == ""
	}
	return status.Code >= http.StatusBadRequest && status.Code < http.StatusInternalServerError
}

// withoutName returns the message of err without the name of the slice, which the API server generates for each
// attempt.
func withoutName(err error) string {
	message := err.Error()
	var answer apierrors.APIStatus
	if errors.As(err, &answer) && answer.Status().Details != nil && answer.Status().Details.Name != "" {
		message = strings.ReplaceAll(message, " "+strconv.Quote(answer.Status().Details.Name), "")
	}
	return message
}

// refusalRemedy describes what to check after a refusal.
func refusalRemedy(err error) string {
	switch {
	case apierrors.IsNotFound(err):
		return "does the API server serve resource.k8s.io/v1?"
	case apierrors.IsForbidden(err):
		return "do the plugin's ClusterRole and ClusterRoleBinding match the chart's, or does an admission policy or " +
			"webhook deny the request?"
	default:
		return "does an admission webhook or a ValidatingAdmissionPolicy, such as the chart's RELEASE-slices, deny the " +
			"request? If not, this is a bug of the driver"
	}
}

// handleDroppedFields returns false unless err means that the API server dropped fields of the ResourceSlices. Then, it
// records the consequence in the log, in a metric, in an event on the node, and, if no device can be shared, in the
// readiness of the plugin.
func (p *publisher) handleDroppedFields(ctx context.Context, err error) bool {
	var dropped *resourceslice.DroppedFieldsError
	if !errors.As(err, &dropped) {
		return false
	}
	features := dropped.DisabledFeatures()
	consequence := describeDisabled(features)
	reason := fmt.Errorf("the API server dropped fields of the ResourceSlices, because the feature gates %s are off: %s",
		strings.Join(features, ", "), consequence)
	p.degradations.report(ctx, v1alpha1.DegradedFeaturesDisabled, consequence, err)
	p.warnings.warn(v1alpha1.EventReasonFeaturesDisabled, "", reason.Error())
	if slices.Contains(features, consumableCapacity) {
		p.publication.setDropped(reason)
	} else {
		p.publication.setDropped(nil)
	}
	return true
}

// confirmTimeout limits how long confirmPublished delays the next refresh of the devices.
const confirmTimeout = 5 * time.Second

// confirmPublished compares the slices in the API server with those to be published, and reports the end of what
// handleRefusal and handleDroppedFields reported. It does not make a request if the API server is known to have the
// slices. While there is a problem, each PublishResources call writes the slices again.
func (p *publisher) confirmPublished(ctx context.Context, want resourceslice.DriverResources) error {
	fieldsDropped := p.degradations.has(v1alpha1.DegradedFeaturesDisabled)
	if p.publication.isConfirmed() && !fieldsDropped {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, confirmTimeout)
	defer cancel()
	stored, err := p.publishedSlices(limited)
	if err != nil {
		return fmt.Errorf("list the ResourceSlices of this node: %w", err)
	}
	var published []resourceapi.Device
	for i := range stored {
		published = append(published, stored[i].Spec.Devices...)
	}
	devices, complete := devicesOf(want), len(stored) == len(want.Pools[p.kinds.node].Slices)
	switch {
	case complete && resourceslice.DevicesDeepEqual(published, devices):
		p.reportStored()
		p.reportFieldsStored()
	case complete && fieldsDropped &&
		resourceslice.DevicesDeepEqual(withoutDroppedFields(published), withoutDroppedFields(devices)):
		p.reportStored()
	}
	return nil
}

// publishedDevices returns the devices in the ResourceSlices of the node. The result is never nil.
func (p *publisher) publishedDevices(ctx context.Context) ([]resourceapi.Device, error) {
	published, err := p.publishedSlices(ctx)
	if err != nil {
		return nil, err
	}
	devices := []resourceapi.Device{}
	for i := range published {
		devices = append(devices, published[i].Spec.Devices...)
	}
	return devices, nil
}

// publishedSlices returns the node's ResourceSlices, without slices from former generations of its pool.
func (p *publisher) publishedSlices(ctx context.Context) (newest []resourceapi.ResourceSlice, err error) {
	list, err := p.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector: fields.Set{
			resourceapi.ResourceSliceSelectorDriver:   p.driverName,
			resourceapi.ResourceSliceSelectorNodeName: p.kinds.node,
		}.String(),
	})
	if err != nil {
		return nil, err
	}
	generation := int64(-1)
	for _, s := range list.Items {
		pool := s.Spec.Pool
		if s.Spec.Driver != p.driverName || pool.Name != p.kinds.node || pool.Generation < generation {
			continue
		}
		if pool.Generation > generation {
			newest, generation = newest[:0], pool.Generation
		}
		newest = append(newest, s)
	}
	return newest, nil
}

// reportStored reports that the API server has the slices.
func (p *publisher) reportStored() {
	p.publication.confirm()
	p.degradations.end(v1alpha1.DegradedSlicesRefused)
	p.warnings.end(v1alpha1.EventReasonSlicesRefused, "", v1alpha1.EventReasonSlicesStored,
		"the API server now stores the ResourceSlices")
}

// reportFieldsStored reports that the API server has all fields of the slices.
func (p *publisher) reportFieldsStored() {
	p.publication.clearDropped()
	p.degradations.end(v1alpha1.DegradedFeaturesDisabled)
	p.warnings.end(v1alpha1.EventReasonFeaturesDisabled, "", v1alpha1.EventReasonFeaturesEnabled,
		"the API server now stores all fields of the ResourceSlices")
}

// withoutDroppedFields returns copies of devices without the fields that the API server drops while feature gates are
// off.
func withoutDroppedFields(devices []resourceapi.Device) []resourceapi.Device {
	out := make([]resourceapi.Device, len(devices))
	for i := range devices {
		devices[i].DeepCopyInto(&out[i])
		out[i].Taints, out[i].AllowMultipleAllocations = nil, nil
		for name, c := range out[i].Capacity {
			c.RequestPolicy = nil
			out[i].Capacity[name] = c
		}
	}
	return out
}

// consumableCapacity is the feature gate that sharing devices requires.
const consumableCapacity = "DRAConsumableCapacity"

// describeDisabled describes the features that do not work while feature gates are off, and the remedy.
func describeDisabled(features []string) string {
	switch {
	case slices.Contains(features, consumableCapacity):
		return "devices cannot be shared: the scheduler allocates whole devices, and this plugin refuses those claims; " +
			"enable the feature gate DRAConsumableCapacity in kube-apiserver, kube-scheduler, and kubelet (on by default " +
			"since Kubernetes 1.36)"
	case slices.Contains(features, "DRADeviceTaints"):
		return "the scheduler also allocates devices that are missing, cannot be used, or are unhealthy; enable the " +
			"feature gate DRADeviceTaints in kube-apiserver, kube-controller-manager, and kube-scheduler (on by default " +
			"since Kubernetes 1.36)"
	default:
		return "shares work, but these features are unavailable"
	}
}
