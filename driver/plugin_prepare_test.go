// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/utils/ptr"
)

func TestPrepare_refusesSharesThatExcludeEachOther(t *testing.T) {
	p := newPlugin(t)
	for parameters, want := range map[string]string{
		`"interfaceName": "data0"`: `interfaceName: Duplicate value: "data0": ` +
			`the shares of requests nic and nic need different names`,
		`"addresses": ["10.20.0.5/16"]`: `addresses: Duplicate value: "10.20.0.5/16"`,
	} {
		c := p.claim("c", "100M", parameters)
		again := c.Status.Allocation.Devices.Results[0]
		again.ShareID = ptr.To(uuid.NewUUID())
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, again)
		if _, err := p.prepare(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
		if err := p.client.ResourceV1().ResourceClaims(namespace).Delete(t.Context(), "c",
			metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	p.wantNothingLeft()
}

func TestPrepare_withUnreadableRecord(t *testing.T) {
	p := newPlugin(t)
	torn := p.claim("torn", "100M", "")
	share := p.mustPrepare(torn)[0]
	s := p.sandbox("p")
	if err := s.hook(torn, share); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(p.options.PluginDir, "claims", string(torn.UID)+".json")
	if err := os.WriteFile(file, []byte(`{"version": 99}`), 0o600); err != nil {
		t.Fatal(err)
	}
	p.mustPrepare(p.claim("other", "100M", ""))
	p.unprepare(torn)
	if got := s.links(); slices.Contains(got, "net1") {
		t.Errorf("after unprepare the pod has %v", got)
	}
	if _, err := os.Stat(file + ".unreadable"); err != nil {
		t.Errorf("the record was not kept: %v", err)
	}
}

func TestPrepare_countsAttachedSharesWithoutClaimRecord(t *testing.T) {
	for name, damage := range map[string]func(record string) error{
		"lost":    os.Remove,
		"corrupt": func(record string) error { return os.WriteFile(record, []byte(`{"version": 1, "uid`), 0o600) },
		"newer":   func(record string) error { return os.WriteFile(record, []byte(`{"version": 99}`), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlugin(t)
			damaged := p.claim("damaged", "500M", "")
			if err := p.sandbox("p").hook(damaged, p.mustPrepare(damaged)[0]); err != nil {
				t.Fatal(err)
			}
			if err := damage(filepath.Join(p.options.PluginDir, "claims", string(damaged.UID)+".json")); err != nil {
				t.Fatal(err)
			}
			const want = "NIC nic0 has 990M bit/s to grant, and 500M are granted to other claims on this node"
			if _, err := p.prepare(p.claim("large", "600M", "")); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("prepare a claim that does not fit next to the damaged one: got error %v, want %q", err, want)
			}
			p.mustPrepare(p.claim("small", "400M", ""))
		})
	}
}

func TestPrepare_refusesGrantBeyondCapacity(t *testing.T) {
	p := newPlugin(t)
	p.mustPrepare(p.claim("a", "900M", ""))
	if _, err := p.prepare(p.claim("b", "100M", "")); err == nil ||
		!strings.Contains(
			err.Error(),
			"bandwidth 100M: NIC nic0 has 990M bit/s to grant, and 900M are granted to other claims on this node",
		) {
		t.Errorf("got %v", err)
	}
	p.mustPrepare(p.claim("c", "90M", ""))
}

func TestPrepare_afterReallocationDetachesOldShare(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	old := p.mustPrepare(c)[0]
	s := p.sandbox("p")
	if err := s.hook(c, old); err != nil {
		t.Fatal(err)
	}
	c.Status.Allocation.Devices.Results[0].ShareID = ptr.To(uuid.NewUUID())
	share := p.mustPrepare(c)[0]
	if got := s.links(); slices.Contains(got, "net1") {
		t.Errorf("the old share's link still exists: %v", got)
	}
	if err := p.sandbox("q").hook(c, share); err != nil {
		t.Error(err)
	}
}

func TestPrepare_repeatedlyKeepsLink(t *testing.T) {
	p := newPlugin(t)
	c := p.claim("c", "100M", "")
	share := p.mustPrepare(c)[0]
	s := p.sandbox("p")
	if err := s.hook(c, share); err != nil {
		t.Fatal(err)
	}
	var before, after int
	index := func(into *int) func() error {
		return func() error {
			link, err := net.InterfaceByName("net1")
			if err == nil {
				*into = link.Index
			}
			return err
		}
	}
	s.do(index(&before))
	// The spec may have been on a tmpfs.
	for _, f := range must(t)(filepath.Glob(filepath.Join(p.options.CDIDir, "*"))) {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	if again := p.mustPrepare(c)[0]; again != share {
		t.Errorf("CDI device %s, then %s", share, again)
	}
	s.do(index(&after))
	if before != after {
		t.Errorf("the link was recreated: index %d, then %d", before, after)
	}
	if specs := must(t)(filepath.Glob(filepath.Join(p.options.CDIDir, "*"))); len(specs) != 1 {
		t.Errorf("CDI specs: %v", specs)
	}
}
