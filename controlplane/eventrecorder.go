// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"

	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// maxNote is the length in bytes of the longest note of an event that the API server accepts. It refuses an event with
// a longer note, and the library drops the event then.
const maxNote = 1024

// truncatingRecorder shortens the notes of events to what the API server accepts.
type truncatingRecorder struct{ events.EventRecorder }

// Eventf implements events.EventRecorder.
func (r truncatingRecorder) Eventf(
	regarding, related runtime.Object, kind, reason, action, note string, args ...any,
) {
	text := claimstatus.Truncate(fmt.Sprintf(note, args...), maxNote)
	r.EventRecorder.Eventf(regarding, related, kind, reason, action, "%s", text)
}
