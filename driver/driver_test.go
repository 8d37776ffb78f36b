// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

func TestDriver_attachesAtContainerStartAndDetachesAtUnprepare(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", `"interfaceName": "data0", "addresses": ["10.20.0.5/16"]`)
	share := p.mustPrepare(c)[0]
	s := p.sandbox("p")
	if slices.Contains(s.links(), "data0") {
		t.Fatal("prepare made a link")
	}
	for range 3 { // containers of one pod
		if err := s.hook(c, share); err != nil {
			t.Fatal(err)
		}
	}
	if got := s.links(); !slices.Equal(got, []string{"lo", "data0"}) {
		t.Errorf("links %v", got)
	}
	p.awaitReason(c, v1alpha1.ReasonAttached)
	p.unprepare(c)
	if got := s.links(); !slices.Equal(got, []string{"lo"}) {
		t.Errorf("links after unprepare: %v", got)
	}
	p.wantNothingLeft()
}

// The failure of a share that is not prepared is not remembered: no unprepare would forget it.
func TestPlugin_forgetsFailureOfUnpreparedClaim(t *testing.T) {
	p := newPlugin(t)
	pod := attach.Pod{UID: "u", Namespace: "default", Name: "p"}
	request := attach.Request{ClaimUID: "none", Share: "none-nic", Pod: pod}
	if _, err := p.Attach(t.Context(), request, attach.Sockets{}); err == nil {
		t.Fatal("Attach of a claim that is not prepared succeeded")
	}
	if n := p.Failures("none-nic"); n > 0 {
		t.Errorf("the driver remembers %d failures of a claim that is not prepared", n)
	}
}

func TestDriver_Start_detachesEndedPods(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	share := p.mustPrepare(c)[0]
	gone, stays := p.sandbox("gone"), p.sandbox("stays")
	for _, s := range []*sandbox{gone, stays} {
		if err := s.hook(c, share); err != nil {
			t.Fatal(err)
		}
	}
	id := p.namespaceID("gone")
	p.stop()
	gone.kill()
	// The kernel ends namespaces asynchronously, and no plugin is watching.
	eventually.Eventually(t, timeout, "the namespace of the ended pod has ended", func() error {
		live, err := nstest.NamespaceExists(id)
		if err == nil && live {
			err = fmt.Errorf("namespace %d still exists", id)
		}
		return err
	})
	p.start()
	p.awaitAttached(1)
	if got := stays.links(); !slices.Contains(got, "net1") {
		t.Errorf("the pod that stayed has %v", got)
	}
}
