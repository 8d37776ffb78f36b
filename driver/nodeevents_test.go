// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// The recorder of client-go counts equal events as one, and does not compare their notes.
func TestWarnings_eventForEachDevice(t *testing.T) {
	api := fake.NewClientset().EventsV1()
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: api})
	if err := broadcaster.StartRecordingToSinkWithContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(broadcaster.Shutdown)
	w := newWarnings(broadcaster.NewRecorder(scheme.Scheme, "test"), "n1")
	for _, device := range []string{"nic0", "nic1"} {
		w.warn("DeviceUnusable", device, "cannot share "+device)
	}
	want := []string{"devices{nic0}: cannot share nic0", "devices{nic1}: cannot share nic1"}
	eventually.Eventually(t, 10*time.Second, "each device has an event", func() error {
		list, err := api.Events(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		var got []string
		for _, e := range list.Items {
			got = append(got, e.Regarding.FieldPath+": "+e.Note)
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			return fmt.Errorf("got the events %q, want %q", got, want)
		}
		return nil
	})
}

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

// The cause of a problem can be long, and what to do is at the end of the message.
func TestWarnings_longMessageKeepsRemedy(t *testing.T) {
	const start, remedy = "cannot share nic0: ", ": set plugin.perfmon=true in the chart's values"
	recorder := events.NewFakeRecorder(1)
	w := newWarnings(recorder, "node")
	w.warn("DeviceUnusable", "nic0", start+strings.Repeat("the kernel refuses the program\n", 100)+remedy)
	got, found := strings.CutPrefix(<-recorder.Events, "Warning DeviceUnusable ")
	if !found || !strings.HasPrefix(got, start) || !strings.HasSuffix(got, remedy) || len(got) > maxNote {
		t.Errorf("got the event %q, want at most %d bytes that start with %q and end with %q", got, maxNote, start, remedy)
	}
}
