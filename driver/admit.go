// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/dra-shared/dra-driver-shared/attach"
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
	others, err := d.sharesOfOtherClaims(ctx, recorded.UID, shares)
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
			s.Number = d.numberOf(recorded.UID, s.Share, others[device])
			others[device] = append(others[device], &s.Share)
		}
		recorded.Shares = append(recorded.Shares, s.Share)
	}
	return d.claims.Put(recorded)
}

// deviceKey identifies a device.
type deviceKey struct{ pool, device string }

func deviceOf(s record.Share) deviceKey { return deviceKey{s.Pool, s.Device} }

// sharesOfOtherClaims returns the shares that claims other than uid hold on the same devices. If a claim's record is
// lost or unreadable, the shares attached to its pods count. It returns an error if records cannot be listed, because
// any other claim may then have shares.
func (d *Driver) sharesOfOtherClaims(
	ctx context.Context, uid types.UID, shares []share,
) (map[deviceKey][]*record.Share, error) {
	others := map[deviceKey][]*record.Share{}
	for _, s := range shares {
		others[deviceOf(s.Share)] = nil
	}
	add := func(s *record.Share) {
		device := deviceOf(*s)
		if on, wanted := others[device]; wanted && !s.AdminAccess {
			others[device] = append(on, s)
		}
	}
	claims, err := d.claims.List()
	if err = withoutUnreadable(ctx, err); err != nil {
		return nil, err
	}
	counted := make(map[types.UID]bool, len(claims)+1)
	counted[uid] = true
	for _, c := range claims {
		if c.UID == uid {
			continue
		}
		counted[c.UID] = true
		for i := range c.Shares {
			add(&c.Shares[i])
		}
	}
	added := map[string]bool{} // several pods may have the same share
	attached, err := d.attachments.Select(func(r *attach.Record) bool { return !counted[types.UID(r.ClaimUID)] })
	if err = withoutUnreadable(ctx, err); err != nil {
		return nil, err
	}
	for _, r := range attached {
		if !added[r.Share] {
			added[r.Share] = true
			s := d.shareInRecord(r)
			add(&s)
		}
	}
	return others, nil
}

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

// numberOf returns the number that the share's attachments already have, if there
// are any, because the claim's record may have been lost. Otherwise it returns a
// free number.
func (d *Driver) numberOf(uid types.UID, s record.Share, others []*record.Share) uint16 {
	attached, _ := d.attachments.OfClaim(string(uid)) // unreadable records contain no number
	for _, a := range attached {
		if a.Share == s.Name {
			return a.Number
		}
	}
	return freeNumber(others)
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
