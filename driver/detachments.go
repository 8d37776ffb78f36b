// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// detachLag is how long a pod's status may still show containers of a sandbox that has ended.
const detachLag = resyncInterval

// detachments are the times when a claim's share was last detached, by claim UID. It keeps a time until detachLag has
// passed or the claim is unprepared.
type detachments struct{ byClaim sync.Map }

// add notes that a share of the claim was detached.
func (d *detachments) add(claim types.UID) { d.byClaim.Store(claim, time.Now()) }

// isRecent reports whether a share of the claim was detached within detachLag.
func (d *detachments) isRecent(claim types.UID) bool {
	at, _ := d.byClaim.Load(claim)
	last, ok := at.(time.Time)
	return ok && time.Since(last) < detachLag
}

// forgetOld removes the time of the claim's last detachment if isRecent no longer needs it.
func (d *detachments) forgetOld(claim types.UID) {
	if !d.isRecent(claim) {
		d.forget(claim)
	}
}

// forget removes the time of the claim's last detachment.
func (d *detachments) forget(claim types.UID) { d.byClaim.Delete(claim) }
