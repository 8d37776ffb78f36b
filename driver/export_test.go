// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// ExpireStatusAtOnce makes a driver that was not started behave as if checkInterval had passed since each write of
// a status.
func (d *Driver) ExpireStatusAtOnce() {
	d.reporter.written = claimstatus.NewLog(clock.RealClock{}, time.Nanosecond)
}

// RoundsDue returns in how many of statusRounds rounds the status of a claim is read.
func (d *Driver) RoundsDue(uid types.UID) (due int, err error) {
	claim, err := d.records.claims.Get(uid)
	if err != nil {
		return 0, err
	}
	for round := range uint32(statusRounds) {
		if d.reporter.isDue(claim, round) {
			due++
		}
	}
	return due, nil
}

// Failures returns how many failed attempts to attach a share the driver remembers.
func (d *Driver) Failures(share string) int { return len(d.failures.messages(share)) }

// DetachEnded does what the driver does when the sandbox of an attachment has reportedly ended.
func (d *Driver) DetachEnded(ctx context.Context, r attach.Record) {
	d.withEachClaimLocked(ctx, []attach.Record{r}, d.detachEnded)
}

// ReportStatus reports the status of a claim.
func (d *Driver) ReportStatus(ctx context.Context, uid types.UID) error {
	_, err := d.reporter.report(ctx, uid)
	return err
}

// RefreshDevices makes the driver refresh and publish the devices, as an event of the kernel does.
func (d *Driver) RefreshDevices() { d.publisher.requestRefresh() }

// EnsureHook checks the hook, as the driver does from time to time, and installs it if necessary.
func (d *Driver) EnsureHook(ctx context.Context) (installed bool) { return d.hook.ensure(ctx) }

// WaitForChange waits until the hook may have changed. It returns false after ctx has ended.
var WaitForChange = waitForChange
