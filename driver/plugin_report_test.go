// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

func TestReport_retriesAndKeepsEntriesOfOtherDrivers(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	theirs := resourceapi.AllocatedDeviceStatus{Driver: "other.example", Pool: "pool", Device: "device",
		Conditions: []metav1.Condition{
			{Type: "Theirs", Status: metav1.ConditionTrue, Reason: "R", LastTransitionTime: metav1.Now()},
		}}
	c.Status.Devices = append(c.Status.Devices, theirs)
	if _, err := p.client.ResourceV1().ResourceClaims(namespace).UpdateStatus(t.Context(), c,
		metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	p.refuse.Store(3)
	share := p.mustPrepare(c)[0]
	if err := p.sandbox("p").hook(c, share); err != nil {
		t.Fatal(err)
	}
	p.awaitReason(c, v1alpha1.ReasonAttached)
	if n := p.refuse.Load(); n >= 0 {
		t.Errorf("%d writes were still to be refused", n)
	}
	current, err := p.client.ResourceV1().ResourceClaims(namespace).Get(t.Context(), c.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(current.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
		return d.Driver == theirs.Driver && len(d.Conditions) == 1
	}) {
		t.Errorf("the other driver's entry is gone: %+v", current.Status.Devices)
	}
}

func TestReport_limitsWritesForRepeatedLinkChanges(t *testing.T) {
	for name, refused := range map[string]int32{"writes succeed": 0, "writes fail": math.MaxInt32} {
		t.Run(name, func(t *testing.T) {
			p := newPlugin(t)
			c := p.claim("c", "100M", "")
			share := p.mustPrepare(c)[0]
			s := p.sandbox("p")
			if err := s.hook(c, share); err != nil {
				t.Fatal(err)
			}
			p.awaitReason(c, "Attached")
			p.client.ClearActions()
			p.refuse.Store(refused)
			const duration = 3 * time.Second
			changes := 0
			for start := time.Now(); time.Since(start) < duration; changes++ {
				s.do(func() error {
					link, err := netlink.LinkByName("net1")
					if err != nil {
						return err
					}
					if changes%2 == 0 {
						return netlink.LinkSetDown(link)
					}
					return netlink.LinkSetUp(link)
				})
			}
			// The status may be written when the loop begins, and then once a second.
			got, most := p.statusWrites(), int(duration/time.Second)+1
			if got > most {
				t.Errorf("%d changes of the link in %s caused %d writes, want at most %d", changes, duration, got, most)
			}
			t.Logf("%d changes, %d writes", changes, got)
			// On a machine with a high load, the loop leaves no processor time for the first write.
			eventually.Eventually(t, 10*time.Second, "the status is written", func() error {
				if p.statusWrites() == 0 {
					return errors.New("there is no write")
				}
				return nil
			})
		})
	}
}

func TestReport_writesOnlyDifferencesAfterRestart(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	if err := p.sandbox("p").hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Fatal(err)
	}
	p.awaitReason(c, "Attached")
	restart := func() {
		t.Helper()
		p.stop()
		p.client.ClearActions()
		p.start()
		eventually.Eventually(t, timeout, "the plugin reads the claim", func() error {
			if p.requests("get") == 0 {
				return errors.New("it has not")
			}
			return nil
		})
		if err := p.ReportStatus(t.Context(), c.UID); err != nil {
			t.Fatal(err)
		}
	}
	if restart(); p.statusWrites() != 0 {
		t.Errorf("after a restart, the plugin wrote the unchanged status %d times", p.statusWrites())
	}
	api := p.client.ResourceV1().ResourceClaims(namespace)
	current, err := api.Get(t.Context(), c.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	entry := &current.Status.Devices[0]
	entry.Conditions = append(entry.Conditions, metav1.Condition{
		Type: "OfFormerRelease", Status: metav1.ConditionTrue, Reason: "R", LastTransitionTime: metav1.Now(),
	})
	if _, err := api.UpdateStatus(t.Context(), current, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if restart(); p.statusWrites() == 0 {
		t.Error("after a restart, the plugin did not write a status that has a condition of a former release")
	}
}

func TestReport_readsUnattachedClaimsInEveryRound(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"addresses": ["10.20.0.5/16"]`, "first")
	share := p.mustPrepare(c)[0]
	expect := func(when string, want int) {
		t.Helper()
		if got, err := p.RoundsDue(c.UID); got != want || err != nil {
			t.Errorf("%s: the status is read in %d of 10 rounds, error %v, want %d", when, got, err, want)
		}
	}
	expect("before the share is attached", 10)
	if err := p.sandbox("first").hook(c, share); err != nil {
		t.Fatal(err)
	}
	expect("after the share was attached", 1)
	if err := p.sandbox("second").hook(c, share); err == nil {
		t.Error("the share with an address was attached to a second pod")
	}
	expect("after an attempt failed", 10)
}

// A share that no pod gets attached is not unattached.
func TestReport_readsClaimsThatNeedNoAttachmentOnce(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("monitor", "100M", "")
	c.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	p.mustPrepare(c)
	if due, err := p.RoundsDue(c.UID); due != 1 || err != nil {
		t.Errorf("the status is read in %d of 10 rounds, error %v, want 1", due, err)
	}
}

func TestReporter_readsClaimBeforeRewritingStatus(t *testing.T) {
	p := newPluginWithoutNIC(t)
	nstest.NIC(t, "nic0", 9000)
	node := p.build(oneNetwork)
	p.ExpireStatusAtOnce()
	p.run(node.Close)
	t.Cleanup(func() { p.stop() })
	c := p.claim("c", "100M", "")
	if err := p.sandbox("p").hook(c, p.mustPrepare(c)[0]); err != nil {
		t.Fatal(err)
	}
	p.awaitReason(c, "Attached")
	api := p.client.ResourceV1().ResourceClaims(namespace)
	report := func() *resourceapi.ResourceClaim {
		t.Helper()
		if err := p.ReportStatus(t.Context(), c.UID); err != nil {
			t.Fatal(err)
		}
		current, err := api.Get(t.Context(), c.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return current
	}
	written := report() // the plugin now remembers what it wrote
	// At first, the plugin itself may also report the claim, because the pod was attached.
	eventually.Eventually(t, 5*time.Second, "the plugin only reads a status that is the same", func() error {
		p.client.ClearActions()
		report()
		cached := 0
		for _, a := range p.client.Actions() {
			if a.GetVerb() != "get" {
				return fmt.Errorf("the plugin sent %s %s", a.GetVerb(), a.GetResource().Resource)
			}
			if get, ok := a.(clienttesting.GetActionImpl); ok && get.GetOptions.ResourceVersion == "0" {
				cached++
			}
		}
		if cached != 1 {
			return fmt.Errorf("reads from the API server's cache: got %d of %v, want 1", cached, p.client.Actions())
		}
		return nil
	})
	changed := written.DeepCopy()
	changed.Status.Devices[0].NetworkData.HardwareAddress = "02:00:00:00:00:01"
	if _, err := api.UpdateStatus(t.Context(), changed, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	want := written.Status.Devices[0].NetworkData.HardwareAddress
	if got := report().Status.Devices[0].NetworkData.HardwareAddress; got != want {
		t.Errorf("after another client has changed the status: got %s, want %s", got, want)
	}
}

// A claim that was deleted and created again under its name is another claim.
func TestReport_ignoresAnotherClaimOfSameName(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	api := p.client.ResourceV1().ResourceClaims(namespace)
	if err := api.Delete(t.Context(), c.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	p.claim("c", "100M", "")
	share := p.mustPrepare(c)[0]
	if err := p.sandbox("p").hook(c, share); err != nil {
		t.Fatal(err)
	}
	other := p.claim("d", "100M", "") // reported after the first, by the same workers
	if err := p.sandbox("q").hook(other, p.mustPrepare(other)[0]); err != nil {
		t.Fatal(err)
	}
	p.awaitReason(other, v1alpha1.ReasonAttached)
	namesake, err := api.Get(t.Context(), c.Name, metav1.GetOptions{})
	if err != nil || len(namesake.Status.Devices) > 0 {
		t.Errorf("%+v, %v", namesake.Status.Devices, err)
	}
}
