// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// ExpireStatus makes the driver forget what it wrote, and then behave as if checkInterval had
// passed since each write.
func (d *Driver) ExpireStatus() {
	d.status.written = claimstatus.NewLog(clock.RealClock{}, time.Nanosecond)
}

// ReportStatus reports the status of a claim.
func (d *Driver) ReportStatus(ctx context.Context, uid types.UID) error {
	_, err := d.status.report(ctx, uid)
	return err
}
