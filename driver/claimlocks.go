// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	"github.com/dra-shared/dra-driver-shared/driver/lock"
)

// claimLocks serialize the steps of one claim, across both plugins of a rolling update. Lock order: a claim's lock
// before admissionLock, metadataDir, and the locks of device kinds.
type claimLocks struct{ lock.Dir }

// errClaimBusy means that a request timed out waiting for a claim's lock.
var errClaimBusy = errors.New("timed out waiting for other requests for the claim")

// withClaim runs f while holding a claim's lock. If ctx has ended, it returns the cause, because the request is out
// of date. The error wraps errClaimBusy if ctx ended while withClaim waited for the lock.
func (l claimLocks) withClaim(ctx context.Context, uid types.UID, f func(context.Context) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	release, err := l.Key(ctx, string(uid))
	if err == nil {
		defer release()
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", errClaimBusy, context.Cause(ctx))
	}
	if err != nil {
		return err
	}
	return f(ctx)
}
