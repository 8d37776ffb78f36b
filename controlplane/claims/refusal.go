// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// IsRefused reports whether the API server has refused a write for a reason that a user must remove, such as an
// admission webhook, a policy, or a quota.
//
// It returns false for conflicts and for missing objects, because the cache is stale then, and for an API server that
// is overloaded or slow: the next attempt usually succeeds, and a condition for each failure would add writes. It also
// returns false for errors that are not an answer of the API server, such as the end of a context.
func IsRefused(err error) bool {
	var answer apierrors.APIStatus
	if !errors.As(err, &answer) {
		return false
	}
	for _, passes := range []func(error) bool{
		apierrors.IsConflict, apierrors.IsNotFound, apierrors.IsAlreadyExists,
		apierrors.IsTooManyRequests, apierrors.IsServiceUnavailable, apierrors.IsTimeout, apierrors.IsServerTimeout,
	} {
		if passes(err) {
			return false
		}
	}
	return true
}

// isValidation reports whether an error of the kind Invalid comes from the validation of the object, which names
// fields. A ValidatingAdmissionPolicy refuses objects with the same kind of error, and does not name fields.
func isValidation(err error) bool {
	var answer apierrors.APIStatus
	if !errors.As(err, &answer) || answer.Status().Details == nil {
		return false
	}
	for _, cause := range answer.Status().Details.Causes {
		if cause.Field != "" {
			return true
		}
	}
	return false
}
