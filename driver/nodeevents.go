// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// warnings are the events about this node as a whole. They regard the Node and not
// the plugin's pod: the problems belong to the node, outlast the pod, and are found
// by `kubectl describe node`, where an administrator looks for a missing device.
// The kubelet adds the text of a failed readiness probe to the events of the pod.
type warnings struct {
	recorder events.EventRecorder
	node     *corev1.ObjectReference

	mu      sync.Mutex
	active  map[warningKey]sentEvent
	current map[warningKey]Warning // the warnings of the last update
}

// warningKey identifies a problem: the reason of its event, and the device, if any.
type warningKey struct{ reason, subject string }

type sentEvent struct {
	message string
	at      time.Time
}

// warningInterval is how often a lasting problem's event is sent again. The API server removes events after one hour.
const warningInterval = 30 * time.Minute

func newWarnings(recorder events.EventRecorder, node string) *warnings {
	return &warnings{
		recorder: recorder,
		// The kubelet, too, uses the name as the UID in events on its node.
		node:   &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: node, UID: types.UID(node)},
		active: map[warningKey]sentEvent{},
	}
}

// warn sends a Warning event, unless it sent the same a short time ago.
func (w *warnings) warn(reason, subject, message string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := warningKey{reason, subject}
	if last, ok := w.active[key]; ok && last.message == message && time.Since(last.at) < warningInterval {
		return
	}
	w.active[key] = sentEvent{message, time.Now()}
	w.send(corev1.EventTypeWarning, reason, subject, message)
}

// end sends a Normal event if warn reported the problem.
func (w *warnings) end(reason, subject, recovered, message string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := warningKey{reason, subject}
	if _, ok := w.active[key]; !ok {
		return
	}
	delete(w.active, key)
	w.send(corev1.EventTypeNormal, recovered, subject, message)
}

// Warn sends an event about a problem found outside the driver and its kinds. Keep calling it while the problem
// lasts: it sends the event again when the API server has removed the earlier one.
func (d *Driver) Warn(w Warning) { d.warnings.warn(w.Reason, w.Device, w.Message) }

// EndWarning sends the event that ends a problem, if Warn reported it. It ignores the problem's message.
func (d *Driver) EndWarning(w Warning) { d.warnings.end(w.Reason, w.Device, w.EndReason, w.EndMessage) }

// update sends the events of problems that have begun or ended since the last call. current lists
// all problems that exist now.
func (w *warnings) update(current []Warning) {
	next := map[warningKey]Warning{}
	for _, c := range current {
		next[warningKey{c.Reason, c.Device}] = c
		w.warn(c.Reason, c.Device, c.Message)
	}
	w.mu.Lock()
	last := w.current
	w.current = next
	w.mu.Unlock()
	for key, l := range last {
		if _, lasts := next[key]; !lasts {
			w.end(key.reason, key.subject, l.EndReason, l.EndMessage)
		}
	}
}

// send sends an event. The recorder counts events that differ only in their note as one, so the field path names the
// device, just as a pod event's field path names the container.
func (w *warnings) send(kind, reason, subject, message string) {
	node := *w.node
	if subject != "" {
		node.FieldPath = "devices{" + subject + "}"
	}
	w.recorder.Eventf(&node, nil, kind, reason, v1alpha1.EventActionServe, "%s", claimstatus.Truncate(message, maxNote))
}

// problemsOf returns warnings of configured devices that are not shared, and the kinds' warnings about shared devices.
func problemsOf(ks kinds) (current []Warning) {
	for _, reporter := range kindsOf[ProblemReporter](ks) {
		for _, p := range reporter.Problems() {
			current = append(current, Warning{
				Device: p.Device,
				Reason: v1alpha1.EventReasonDeviceUnusable, Message: "cannot share " + p.Device + ": " + p.Message,
				EndReason: v1alpha1.EventReasonDeviceUsable, EndMessage: p.Device + " can be shared again",
			})
		}
	}
	for _, reporter := range kindsOf[WarningReporter](ks) {
		current = append(current, reporter.Warnings()...)
	}
	return current
}
