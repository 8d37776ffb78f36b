// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
)

// The functions below apply faults at the steps of prepare. Without a fault, they do not change anything and return
// nil.

// spoilCall applies faults of the start of a call.
func (d *Driver) spoilCall(ctx context.Context, c *dra.Claim) error {
	d.mu.Lock()
	busy, finished := d.busy[c.Uid], d.finished[c.Uid]
	d.busy[c.Uid] = busy || d.fault("PREP-24") && canceledSoon(ctx)
	canceled := d.busy[c.Uid] && !busy
	d.mu.Unlock()
	switch {
	case busy:
		return errors.New("another call is under way")
	case canceled:
		<-ctx.Done() // the claim stays busy
		return ctx.Err()
	case d.fault("UNPR-13") && finished:
		return errors.New("the claim has been unprepared")
	case d.fault("PREP-01/name") && len(c.Name) > 200:
		return fmt.Errorf("the name of claim %s is too long", c.Name)
	}
	if _, err := os.Stat(d.failedFile(c.Uid)); err == nil && d.fault("PREP-08") {
		return errors.New("the claim failed before")
	}
	return nil
}

// failedFile returns the name of a file that marks a claim after its preparation failed.
func (d *Driver) failedFile(uid string) string { return filepath.Join(d.claimsDir(), uid+".failed") }

// spoilFailure applies faults of a prepare that failed. r has the devices before the one that failed.
func (d *Driver) spoilFailure(uid string, r *record) error {
	switch {
	case d.fault("PREP-08"), d.fault("UNPR-11"):
		_ = os.WriteFile(d.failedFile(uid), nil, 0o600)
	case d.fault("UNPR-14/failed"):
		f, err := os.CreateTemp(d.StateDir, "failed")
		if err != nil {
			return err
		}
		return f.Close()
	case d.fault("UNPR-11/device") && r != nil && len(r.Devices) > 0:
		return d.save(&record{UID: "kept-" + r.Devices[0].Device, Devices: r.Devices[:1]})
	}
	return nil
}

// spoilBuilt applies faults before the record is saved.
func (d *Driver) spoilBuilt(ctx context.Context, uid string) error {
	if d.fault("PREP-24/busy") && ctx.Err() != nil {
		return d.stayBusy(uid)
	}
	if d.fault("PREP-13/race") {
		<-time.After(20 * time.Millisecond)
	}
	return nil
}

// stayBusy refuses later calls for a claim.
func (d *Driver) stayBusy(uid string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.busy[uid] = true
	return errors.New("the call was canceled")
}

// spoilSaved applies faults after the record was saved.
func (d *Driver) spoilSaved(uid string) {
	d.mu.Lock()
	d.own[uid] = true
	if d.fault("UNPR-14/again") && d.attempts[uid] > 1 {
		d.leaveOpen()
	}
	d.mu.Unlock()
	if d.fault("UNPR-15") { // most of this call's time, so the case finds the fault on a busy machine, too
		<-time.After(50 * time.Millisecond)
	}
}

// spoilAgain applies faults of a claim that has a record.
func (d *Driver) spoilAgain(old *record, claim *resourceapi.ResourceClaim) error {
	if old == nil || !d.fault("PREP-03/share") || len(old.Devices) == 0 || old.Devices[0].Share == "" {
		return nil
	}
	return d.room("", old.Devices[0], claim.Status.Allocation.Devices.Results[0])
}

// isNamesake reports whether a driver with a fault prepares a device of another driver, because it has a device of that
// name.
func (d *Driver) isNamesake(result resourceapi.DeviceRequestAllocationResult) bool {
	return d.fault("PREP-12/name") && d.has(result.Device)
}

// spoilForeign applies faults of a device of another driver.
func (d *Driver) spoilForeign(r *record, result resourceapi.DeviceRequestAllocationResult) {
	if d.fault("PREP-12") {
		r.Devices = append(r.Devices, prepared{Request: result.Request, Pool: result.Pool, Device: result.Device})
	}
}

// spoilDevice applies faults before a device is added to a record.
func (d *Driver) spoilDevice(r *record, next prepared) {
	if d.fault("SHARE-03") {
		r.Devices = slices.DeleteFunc(r.Devices, func(x prepared) bool { return x.Device == next.Device && x.Share != "" })
	}
}

// spoilDuration applies faults of claims with many devices.
func (d *Driver) spoilDuration(r *record) {
	if d.fault("PREP-17") && len(r.Devices) >= 10 || d.fault("PREP-17/few") && len(r.Devices) >= fewDevices {
		<-time.After(8 * time.Second)
	}
}

// spoil applies faults that concern the whole claim.
func (d *Driver) spoil(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	consumers := claim.Status.ReservedFor
	switch {
	case d.fault("PREP-15") && len(consumers) > 0 && consumers[0].Resource == "pods":
		return d.named(ctx, claim.Namespace, consumers[0].Name)
	case d.fault("WORK-02") && len(consumers) > 0 && consumers[0].Resource == "podgroups":
		return errors.New("the claim is not reserved for a pod")
	case d.fault("WORK-03") && claim.Annotations["torn-down"] != "":
		return errors.New("the device was torn down")
	case d.fault("SEC-04"):
		patch := `{"metadata":{"finalizers":["` + resourceapi.Finalizer + `","resource.kubernetes.io/reference"]}}`
		return d.patchClaim(ctx, claim.Namespace, claim.Name, patch)
	}
	return nil
}

// named returns an error if a pod exists, and none of its containers names a claim.
func (d *Driver) named(ctx context.Context, namespace, pod string) error {
	p, err := d.Client.CoreV1().Pods(namespace).Get(ctx, pod, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, c := range p.Spec.Containers {
		if len(c.Resources.Claims) > 0 {
			return nil
		}
	}
	return fmt.Errorf("no container of pod %s names the claim", pod)
}
