// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
)

func TestTruncatingRecorder_longNote(t *testing.T) {
	fake := events.NewFakeRecorder(1)
	recorder := truncatingRecorder{fake}
	recorder.Eventf(&corev1.Pod{}, nil, corev1.EventTypeWarning, "Reason", "Action", "%s: %s; %s",
		"100% of the claims", strings.Repeat("é", 1000), "do this")
	note := strings.TrimPrefix(<-fake.Events, "Warning Reason ")
	if len(note) > 1024 || !strings.HasPrefix(note, "100% of the claims: é") || !strings.HasSuffix(note, "; do this") {
		t.Errorf("note of %d bytes: got %q, want at most 1024 bytes with the beginning and the end", len(note), note)
	}
}
