// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
)

// userAgent is the user agent of the suite's requests to the API server.
const userAgent = "dra-conformance"

// apiLog keeps the last requests to the API server for reports: the requests of the suite and,
// if the suite serves the API, the writes of the driver.
type apiLog struct {
	mu    sync.Mutex
	calls []string
}

// keepCalls is the number of requests that are kept.
const keepCalls = 16

// note keeps a request, unless it repeats the last one.
func (l *apiLog) note(who, method, path string, request []byte, response string) {
	call := fmt.Sprintf("%s: %s %s\n  request:  %s\n  response: %s", who, method, path, short(string(request)),
		short(response))
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.calls); n > 0 && l.calls[n-1] == call {
		return
	}
	l.calls = append(l.calls, call)
	l.calls = l.calls[max(0, len(l.calls)-keepCalls):]
}

// take returns the requests since the last call.
func (l *apiLog) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	calls := l.calls
	l.calls = nil
	return calls
}

// short returns the beginning of a text, without line breaks at its end.
func short(text string) string {
	const length = 700
	text = strings.TrimSpace(text)
	if len(text) > length {
		return text[:length] + " [...]"
	}
	return text
}

// served notes a write of the driver to the API server of the suite.
func (l *apiLog) served(r *http.Request, body []byte, err error) {
	if r.Method == http.MethodGet || strings.HasPrefix(r.UserAgent(), userAgent) {
		return
	}
	response := "accepted"
	if err != nil {
		response = err.Error()
	}
	l.note("driver", r.Method, r.URL.RequestURI(), body, response)
}

// wrap returns a transport that notes the suite's requests.
func (l *apiLog) wrap(next http.RoundTripper) http.RoundTripper { return &loggedTransport{l, next} }

// loggedTransport notes requests and responses.
type loggedTransport struct {
	log  *apiLog
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t *loggedTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	var request []byte
	if r.GetBody != nil {
		if body, err := r.GetBody(); err == nil {
			request, _ = io.ReadAll(body) // it is for the report only
		}
	}
	response, err := t.next.RoundTrip(r)
	if err != nil {
		t.log.note("suite", r.Method, r.URL.RequestURI(), request, err.Error())
		return nil, err
	}
	body, err := io.ReadAll(response.Body) // the suite watches nothing
	_ = response.Body.Close()
	if err != nil {
		return nil, err
	}
	response.Body = io.NopCloser(bytes.NewReader(body))
	t.log.note("suite", r.Method, r.URL.RequestURI(), request, response.Status+": "+string(body))
	return response, nil
}
