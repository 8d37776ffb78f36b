// Package httpstep makes requests to an API server steps. It is apart from
// package step because the hook, which links that, speaks no HTTP.
package httpstep

import (
	"net/http"
	"strings"

	"github.com/dra-shared/dra-driver-shared/internal/step"
)

// Transport makes writes to an API server steps; reads are not.
func Transport(seam step.Seam) func(http.RoundTripper) http.RoundTripper {
	return func(next http.RoundTripper) http.RoundTripper { return transport{seam, next} }
}

type transport struct {
	seam step.Seam
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t transport) RoundTrip(r *http.Request) (response *http.Response, err error) {
	if r.Method == http.MethodGet {
		return t.next.RoundTrip(r)
	}
	err = t.seam.Do(r.Method+" "+resource(r.URL.Path), func() (err error) {
		response, err = t.next.RoundTrip(r)
		return err
	})
	if err != nil && response != nil { // done, and failed afterwards
		_ = response.Body.Close()
		response = nil
	}
	return response, err
}

// resource is the last element of a path that is no name: names differ from
// run to run.
func resource(path string) string {
	for _, known := range []string{"resourceclaims", "resourceslices", "events"} {
		if strings.Contains(path, "/"+known) {
			return known
		}
	}
	return "objects"
}
