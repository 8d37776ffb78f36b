// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// Renewer is an Attacher with attachments that must be updated while their pods run, such as those that hold a lease.
type Renewer interface {
	// Renew keeps the attachments of the kind up to date until ctx ends.
	Renew(ctx context.Context, attachments Attachments)
}

// Attachments are the attachments that a Renewer keeps up to date.
type Attachments interface {
	// List returns the kind's selected attachments, or none while a newer plugin runs and keeps them up to date.
	List(selected func(*attach.Record) bool) ([]Attachment, error)
	// Update calls change with an attachment's current record while holding the claim's lock. change calls write to
	// record another payload. Afterward, Update requests a report of the claim's status. It returns ErrEnded if the
	// attachment is no longer recorded, and ErrOutdated if a newer plugin runs.
	Update(ctx context.Context, r attach.Record,
		change func(a Attachment, write func(payload json.RawMessage) error) error) error
}

// ErrOutdated means that the caller must not change an attachment.
var ErrOutdated = errors.New("the attachment has ended, or a newer plugin runs")

// ErrEnded wraps ErrOutdated and means that the attachment has ended.
var ErrEnded = fmt.Errorf("it is no longer recorded: %w", ErrOutdated)

// Reserver is an Attacher with attachments that need resources, such as addresses, that no other attachment may get
// meanwhile. The driver records the reservation before it calls Attach, and removes the record after Detach, so a
// crash does not lose the reservation.
type Reserver interface {
	// ReserveForClaim acquires the resources that only this claim may use, such as the addresses that its
	// parameters name. The driver calls it while it prepares the claim, after it has written the claim
	// record.
	ReserveForClaim(ctx context.Context, share record.Share, claim ReservingClaim, records Records) error
	// UnreserveForClaim gives up the resources that ReserveForClaim acquired for a share. The driver calls
	// it after it has removed the claim record.
	UnreserveForClaim(share record.Share)
	// Reserve calls record with the reservation for an attachment: the namespace, and a payload that Attach gets in
	// Sandbox.Reserved. If record fails, Reserve releases the reservation and returns the error. If Reserve fails for
	// another reason, a recorded reservation lasts until the next attempt or the end of the pod, because an interrupted
	// attempt may have left state behind that uses it. Reserve does not call record if the share needs no reservation.
	Reserve(ctx context.Context, share record.Share, r attach.Request, sandbox Sandbox,
		records Records, record func(Attached) error) error
	// Unreserve releases the reservation of an attachment. The driver calls it after it has removed
	// the attachment record.
	Unreserve(r attach.Record)
	// RecoverReservations finds the attachments that lost their reservations while no plugin ran, before the driver
	// serves, and returns the change. After an error, or if it takes too long, the driver serves without the change,
	// and MaintainReservations finds it later.
	RecoverReservations(ctx context.Context, records Records) (Change, error)
	// MaintainReservations keeps reservations available until ctx ends.
	MaintainReservations(ctx context.Context, records Records)
}

// ReservingClaim is a claim that is being prepared.
type ReservingClaim struct {
	UID, Namespace string
	// Pods are those that the claim is reserved for.
	Pods []string
}

// Records gives access to the claim records and attachment records of the node.
type Records interface {
	// Claims returns the readable records of claims that are prepared or are being prepared. It fails if the records
	// cannot be listed. The caller must not modify the records.
	Claims() ([]*record.Claim, error)
	// List returns the attachment records. It fails if some of them cannot be read.
	List() ([]attach.Record, error)
	// Unreadable returns the claim UIDs of attachment records that cannot be read and were renamed, by record path.
	// Their attachments may exist. Call Unreadable after List: a record may be renamed at any time.
	Unreadable() (claimUIDs map[string]string, err error)
}
