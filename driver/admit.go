// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"
	"slices"

	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// admissionLock is the name of the lock that a plugin holds from reading a device's shares until it has written the
// record that adds one.
const admissionLock = "admission"

// admit checks each share against its device's other shares, numbers it, and writes the claim record. From then on,
// the shares count against the device. The scheduler checks first; the driver is the last component that can refuse.
func (d *Driver) admit(ctx context.Context, recorded *record.Claim, shares []share) error {
	release, err := d.locks.NamedContext(ctx, admissionLock)
	if err != nil {
		return err
	}
	defer release()
	others, err := d.records.sharesOfOtherClaims(ctx, recorded.UID, shares)
	if err != nil {
		return err
	}
	for i := range shares {
		s := &shares[i]
		if !s.AdminAccess {
			device := deviceOf(s.Share)
			if err := admitShare(*s, others[device]); err != nil {
				return shareError(s.Share, err)
			}
			s.Number = d.records.numberOf(recorded.UID, s.Share, others[device])
			others[device] = append(others[device], &s.Share)
		}
		recorded.Shares = append(recorded.Shares, s.Share)
	}
	return d.records.claims.Put(recorded)
}

// deviceKey identifies a device.
type deviceKey struct{ pool, device string }

func deviceOf(s record.Share) deviceKey { return deviceKey{s.Pool, s.Device} }

// admitShare checks a share against the other shares of its device.
func admitShare(s share, others []*record.Share) error {
	for _, o := range others {
		if o.ShareID == s.ShareID {
			return fmt.Errorf(
				"share %s is in use by another claim (CDI device %s): was that claim unprepared?",
				shareKey(s.Share),
				o.Name,
			)
		}
		if o.ShareID == "" {
			// The device was allocated as a whole before it became shared
			// (KEP-5075, device updates).
			return fmt.Errorf("another claim holds the whole device (CDI device %s): wait until it is released", o.Name)
		}
	}
	return s.kind.Admit(s.Share, others)
}

// freeNumber returns the lowest number that none of the other shares has.
func freeNumber(others []*record.Share) uint16 {
	taken := make([]bool, len(others)+1)
	for _, o := range others {
		if i := int(o.Number) - record.FirstNumber; i >= 0 && i < len(taken) {
			taken[i] = true
		}
	}
	return uint16(record.FirstNumber + slices.Index(taken, false))
}
