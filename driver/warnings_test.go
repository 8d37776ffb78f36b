// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/tools/events"
)

func TestWarnings_update(t *testing.T) {
	recorder := events.NewFakeRecorder(10)
	w := newWarnings(recorder, "node")
	a := Warning{Device: "nic0", Reason: "LinksHidden", Message: "links", EndReason: "LinksVisible", EndMessage: "none"}
	b := Warning{
		Device: "nic0", Reason: "DeviceUnusable", Message: "broken", EndReason: "DeviceUsable", EndMessage: "works",
	}
	changed := a
	changed.Message = "more links"
	for i, step := range []struct {
		current []Warning
		want    []string
	}{
		{nil, nil},
		{[]Warning{a}, []string{"Warning LinksHidden links"}},
		{[]Warning{a}, nil},
		{[]Warning{changed, b}, []string{"Warning LinksHidden more links", "Warning DeviceUnusable broken"}},
		{[]Warning{b}, []string{"Normal LinksVisible none"}},
		{nil, []string{"Normal DeviceUsable works"}},
		{nil, nil},
		{[]Warning{a}, []string{"Warning LinksHidden links"}},
	} {
		w.update(step.current)
		var got []string
		for len(recorder.Events) > 0 {
			got = append(got, <-recorder.Events)
		}
		if diff := cmp.Diff(step.want, got); diff != "" {
			t.Errorf("step %d: events (-want +got):\n%s", i, diff)
		}
	}
}
