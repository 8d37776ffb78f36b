// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// waitingKind is a kind where each claim waits for a reservation but does not get it.
type waitingKind struct {
	Kind
	Attacher
	Reserver
}

func (waitingKind) Name() string                              { return "waiting" }
func (waitingKind) Has(string) bool                           { return true }
func (waitingKind) Attaches(record.Share) bool                { return true }
func (waitingKind) Admit(record.Share, []*record.Share) error { return nil }

func (waitingKind) Release(context.Context, record.Share) error { return nil }
func (waitingKind) UnreserveForClaim(record.Share)              {}

func (waitingKind) Configure(context.Context, string, record.Share, [][]byte) (json.RawMessage, error) {
	return json.RawMessage("{}"), nil
}

func (waitingKind) ReserveForClaim(ctx context.Context, _ record.Share, _ ReservingClaim, _ Records) error {
	select {
	case <-ctx.Done():
	case <-time.After(20 * time.Second):
	}
	return errors.New("all addresses are assigned")
}

// The kubelet gets the errors of all claims of a pod before it gives up the call.
func TestPrepareResourceClaims_limitsWaitingOfAllClaims(t *testing.T) {
	const kubeletTimeout = 45 * time.Second
	d := newUnstarted(t, waitingKind{})
	var claims []*resourceapi.ResourceClaim
	for i := range 3 {
		uid := types.UID(fmt.Sprint(i))
		claims = append(claims, &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c" + string(uid), UID: uid},
			Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
				Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
					{Request: "r", Driver: "dra-shared.dev", Pool: "n1", Device: "d", ShareID: &uid},
				}},
			}},
		})
	}
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		results, err := d.PrepareResourceClaims(t.Context(), claims)
		if took := time.Since(start); took > kubeletTimeout-10*time.Second || err != nil {
			t.Errorf("the call took %v and returned error %v, want at most %v", took, err, kubeletTimeout-10*time.Second)
		}
		for i, want := range []string{"all addresses are assigned", "all addresses are assigned", "the pod's other claims"} {
			if err := results[claims[i].UID].Err; err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("claim %d: got error %v, want one with %q", i, err, want)
			}
		}
	})
}
