// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// fakeAttacher is an Attacher with status data that lists pods.
type fakeAttacher struct{ Attacher }

func (fakeAttacher) StatusData(attachments []PodState, failed int) any {
	var pods []string
	for _, a := range attachments {
		pods = append(pods, a.Pod.Name)
	}
	return map[string]any{"pods": pods, "failed": failed}
}

func attachedTo(pod string) PodState {
	return PodState{Pod: attach.Pod{UID: pod, Namespace: "ns", Name: pod}, State: State{
		Exists: true, Ready: true, NetworkData: &resourceapi.NetworkDeviceData{InterfaceName: "net1"},
		Conditions: []metav1.Condition{{Type: "Enforced", Status: metav1.ConditionTrue, Reason: "R", Message: "m"}},
	}}
}

func stateOf(attachments ...PodState) shareState {
	s := share{
		Share:    record.Share{Name: "x", Pool: "n1", Device: "nic0", ShareID: "11111111-2222-3333-4444-555555555555"},
		attacher: fakeAttacher{},
	}
	return shareState{share: s, attachments: attachments}
}

// pendingAttacher is an Attacher with unfinished attachments to pods named "pending".
type pendingAttacher struct{ Attacher }

func (pendingAttacher) Read(_ context.Context, _ record.Share, r attach.Record) (State, error) {
	if r.Pod.Name == "pending" {
		return State{Pending: true}, nil
	}
	return attachedTo(r.Pod.Name).State, nil
}

func TestReadAttachments_omitsPending(t *testing.T) {
	s := shareState{share: share{Share: record.Share{Name: "x"}, attacher: pendingAttacher{}}}
	records := []attach.Record{
		{Share: "x", Pod: attach.Pod{Name: "pending"}},
		{Share: "x", Pod: attach.Pod{Name: "p"}},
		{Share: "y", Pod: attach.Pod{Name: "q"}},
	}
	if err := s.readAttachments(t.Context(), records); err != nil {
		t.Fatal(err)
	}
	if len(s.attachments) != 1 || s.attachments[0].Pod.Name != "p" || !s.pending {
		t.Errorf("got %+v and pending %t, want the attachment to p and pending", s.attachments, s.pending)
	}
}

func TestDeviceStatus_oneAttachment(t *testing.T) {
	entry, err := deviceStatus("dra-shared.dev", stateOf(attachedTo("p")))
	if err != nil {
		t.Fatal(err)
	}
	got, err := yaml.Marshal(entry)
	if err != nil {
		t.Fatal(err)
	}
	const want = `conditions:
- lastTransitionTime: null
  message: attached to 1 pod(s)
  reason: Attached
  status: "True"
  type: Ready
- lastTransitionTime: null
  message: m
  reason: R
  status: "True"
  type: Enforced
data:
  failed: 0
  pods:
  - p
device: nic0
driver: dra-shared.dev
networkData:
  interfaceName: net1
pool: n1
shareID: 11111111-2222-3333-4444-555555555555
`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("status entry (-want +got):\n%s", diff)
	}
}

func TestDeviceStatus_severalAttachmentsHaveNoNetworkData(t *testing.T) {
	entry, err := deviceStatus("dra-shared.dev", stateOf(attachedTo("p"), attachedTo("q")))
	if err != nil || entry.NetworkData != nil {
		t.Errorf("network data of one pod in the status of several: %+v, %v", entry.NetworkData, err)
	}
}

func TestReadyCondition(t *testing.T) {
	down := attachedTo("q")
	down.Ready, down.Reason, down.Message = false, v1alpha1.ReasonLinkChanged, "the link is down in the pod"
	for _, tc := range []struct {
		name         string
		attachments  []PodState
		failed       []string
		unreferenced []attach.Pod
		want         string
	}{
		{"no container has started", nil, nil, nil, "False Prepared no container that references the claim"},
		{"no container references the claim", nil, nil, []attach.Pod{{Namespace: "ns", Name: "p"}},
			"False NotReferenced pod ns/p uses the claim, but no container references it"},
		{"attaching failed", nil, []string{"b", "a"}, nil, "False AttachFailed a; b"},
		{"attaching failed for one of two pods", []PodState{attachedTo("p")}, []string{"a"}, nil, "False AttachFailed a"},
		{"one of two links changed", []PodState{attachedTo("p"), down}, nil, nil, "False LinkChanged pod ns/q: the link " +
			"is down in the pod"},
		{"all attached", []PodState{attachedTo("p"), attachedTo("q")}, nil, nil, "True Attached attached to 2 pod(s)"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := stateOf(tc.attachments...)
			s.failed, s.unreferenced = tc.failed, tc.unreferenced
			c := readyCondition(s)
			if got := fmt.Sprintf("%s %s %s", c.Status, c.Reason, c.Message); !strings.HasPrefix(got, tc.want) {
				t.Errorf("condition Ready: got %s, want %s", got, tc.want)
			}
		})
	}
}

func TestWorstConditions_onePodWithoutEnforcement(t *testing.T) {
	bad := attachedTo("q")
	bad.Conditions = []metav1.Condition{
		{Type: "Enforced", Status: metav1.ConditionFalse, Reason: "NotClassified", Message: "why"},
	}
	for _, attachments := range [][]PodState{{attachedTo("p"), bad}, {bad, attachedTo("p")}} {
		c := worstConditions(attachments)
		if len(c) != 1 || c[0].Status != "False" || c[0].Reason != "NotClassified" || c[0].Message != "why" {
			t.Errorf("conditions of a share with one unenforced link: %+v", c)
		}
	}
}

func TestDeviceStatus_truncatesMessages(t *testing.T) {
	s := stateOf(attachedTo("p"))
	s.failed = []string{strings.Repeat("ü", 4000)}
	entry, err := deviceStatus("d", s)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range entry.Conditions {
		if len(c.Message) > claimstatus.MaxMessageLength {
			t.Errorf(
				"condition %s has a message of %d bytes, want at most %d",
				c.Type,
				len(c.Message),
				claimstatus.MaxMessageLength,
			)
		}
	}
}

func TestFailures_forgetsPodsThatSucceededOrEnded(t *testing.T) {
	var f failures
	shares := []share{{Share: record.Share{Name: "s"}}}
	for _, pod := range []string{"a", "b", "c"} {
		f.set("s", attach.Pod{UID: pod}, errors.New(pod))
	}
	f.set("s", attach.Pod{UID: "a"}, nil)
	f.keepOnly(shares, map[string]bool{"b": true})
	if got := f.messages("s"); len(got) != 1 || got[0] != "b" {
		t.Errorf("failures after a succeeded and c ended: %v, want b's", got)
	}
	f.forget(shares)
	if got := f.pods(shares); len(got) != 0 {
		t.Errorf("failures of a forgotten claim: %v", got)
	}
}

func TestEventFor(t *testing.T) {
	cond := func(status metav1.ConditionStatus, reason string) metav1.Condition {
		return metav1.Condition{Type: "Ready", Status: status, Reason: reason, Message: "m"}
	}
	attached, prepared := cond("True", v1alpha1.ReasonAttached), cond("False", v1alpha1.ReasonPrepared)
	failed, down := cond("False", v1alpha1.ReasonAttachFailed), cond("False", v1alpha1.ReasonLinkDown)
	for _, tc := range []struct {
		name string
		old  *metav1.Condition
		now  metav1.Condition
		want string
	}{
		{"first status", nil, prepared, ""},
		{"attached for the first time", nil, attached, ""},
		{"attached after a start", &prepared, attached, ""},
		{"attached after a failure that the kubelet reported", &failed, attached, ""},
		{"attaching failed, which the kubelet reports", &prepared, failed, ""},
		{"the link went down", &attached, down, "Warning LinkDown m"},
		{"still down", &down, down, ""},
		{"the link is back", &down, attached, "Normal SharedDeviceRecovered Ready: m"},
	} {
		got := ""
		if e, ok := eventFor(tc.old, tc.now); ok {
			got = strings.Join([]string{e.kind, e.reason, e.message}, " ")
		}
		if got != tc.want {
			t.Errorf("%s: event %q, want %q", tc.name, got, tc.want)
		}
	}
}
