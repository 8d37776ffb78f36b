// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// unattachedKind is a kind with shares that are not attached to pods, such as accelerators.
type unattachedKind struct{ Kind }

func (unattachedKind) Name() string { return "unattached" }

// A pod that was deleted by force, together with its claim, may use a device until its grace period is over. No
// attachment shows that the pod runs.
func TestGC_keepsDevicesOfForceDeletedPod(t *testing.T) {
	d := newUnstarted(t, unattachedKind{}, waitingKind{})
	synctest.Test(t, func(t *testing.T) {
		gc := d.newGarbageCollector()
		expect := func(when string, want ...string) {
			t.Helper()
			orphans, err := gc.claimRecords(t.Context())
			if err := gc.removeDue(t.Context(), orphans); err != nil {
				t.Fatalf("%s: %v", when, err)
			}
			gc.grace.endRound()
			claims, listErr := d.records.claims.List()
			var got []string
			for _, c := range claims {
				got = append(got, c.Name)
			}
			if diff := cmp.Diff(want, got); diff != "" || err != nil || listErr != nil {
				t.Errorf("%s: errors %v, %v; claims (-want +got):\n%s", when, err, listErr, diff)
			}
		}
		for name, claim := range map[string]record.Claim{
			"device":       {Phase: record.Prepared, Shares: []record.Share{{Name: "d", Device: "d", Kind: "unattached"}}},
			"unfinished":   {Phase: record.Preparing, Shares: []record.Share{{Name: "d", Device: "d", Kind: "unattached"}}},
			"not-in-a-pod": {Phase: record.Prepared, Shares: []record.Share{{Name: "n", Device: "n", Kind: "waiting"}}},
		} {
			claim.Namespace, claim.Name, claim.UID = "default", name, types.UID(name)
			if err := d.records.claims.Put(&claim); err != nil {
				t.Fatal(err)
			}
		}
		expect("at first", "device", "not-in-a-pod", "unfinished")
		time.Sleep(d.options.OrphanGrace) //nolint:forbidigo // the time of synctest
		expect("after the grace period of other orphans", "device")
		time.Sleep(unattachedGrace) //nolint:forbidigo // the time of synctest
		expect("after a pod must have ended")
	})
}
