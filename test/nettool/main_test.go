// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"
)

func TestWaitUntil(t *testing.T) {
	for at, want := range map[string]string{
		"":     "",
		"soon": "--at: ",
		time.Now().Add(-time.Minute).Format(time.RFC3339Nano): "too late to start at ",
	} {
		err := waitUntil(at)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("wait until %q: got error %v, want one that contains %q", at, err, want)
		}
	}
	start := time.Now().Add(20 * time.Millisecond)
	if err := waitUntil(start.Format(time.RFC3339Nano)); err != nil || time.Now().Before(start) {
		t.Errorf("wait for a time in 20ms: ended %s before it, with error %v", time.Until(start), err)
	}
}
