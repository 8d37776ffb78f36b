// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package httpfailpoint makes each write to an API server a failpoint. It is
// separate from package failpoint because the OCI hook links that package and
// must not link net/http.
package httpfailpoint

import (
	"net/http"
	"strings"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
)

// Transport returns a wrapper that passes every request except GET through
// failpoints.
func Transport(failpoints failpoint.Injector) func(http.RoundTripper) http.RoundTripper {
	return func(next http.RoundTripper) http.RoundTripper { return transport{failpoints, next} }
}

type transport struct {
	failpoints failpoint.Injector
	next       http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t transport) RoundTrip(r *http.Request) (response *http.Response, err error) {
	if r.Method == http.MethodGet {
		return t.next.RoundTrip(r)
	}
	err = t.failpoints.Do(r.Method+" "+resource(r.URL.Path), func() (err error) {
		response, err = t.next.RoundTrip(r)
		return err
	})
	if err != nil && response != nil { // the request succeeded and the failpoint failed afterward
		_ = response.Body.Close()
		response = nil
	}
	return response, err
}

// resource returns the resource in an API path. Object names differ between
// runs and must not be part of a failpoint's name.
func resource(path string) string {
	for _, known := range []string{"resourceclaims", "resourceslices", "addressblocks", "events"} {
		if strings.Contains(path, "/"+known) {
			return known
		}
	}
	return "objects"
}
