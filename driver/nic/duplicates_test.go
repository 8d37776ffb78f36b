// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// testLink returns a link with n addresses.
func testLink(i, n int) attach.Link {
	link := attach.Link{Parent: 1, MAC: fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8, i&0xff)}
	for j := range n {
		link.Sources = append(link.Sources, fmt.Sprintf("10.%d.%d.%d", i>>8, i&0xff, j))
	}
	return link
}

var otherHost = net.HardwareAddr{2, 0xff, 0, 0, 0, 1}

func TestDuplicates_probesEachLinkOnce(t *testing.T) {
	d := newDuplicates()
	const links = 100
	for i := range links {
		d.add("nic0", testLink(i, 1))
	}
	d.add("nic1", testLink(links, 1))
	d.add("nic0", testLink(links+1, 0)) // has no address
	asked := map[string]int{}
	for {
		device, batch := d.next()
		if len(batch) == 0 {
			break
		}
		if len(batch) > reportBatch {
			t.Errorf("asked for %d addresses at a time, want at most %d", len(batch), reportBatch)
		}
		asked[device] += len(batch)
		d.record(device, batch, nil)
	}
	if asked["nic0"] != links || asked["nic1"] != 1 {
		t.Errorf("asked for addresses of %v links, want %d of nic0 and 1 of nic1", asked, links)
	}
}

func TestDuplicates_probesAgainUntilOtherHostIsGone(t *testing.T) {
	d := newDuplicates()
	link := testLink(1, 2)
	address := netip.MustParseAddr("10.0.1.1")
	d.add("nic0", link)
	for i, found := range []addressOwners{{address: otherHost}, {address: otherHost}, nil} {
		d.recheck()
		device, links := d.next()
		if len(links) != 1 {
			t.Fatalf("attempt %d: asked for %d links, want 1", i, len(links))
		}
		isNew := d.record(device, links, found)
		if got, want := len(isNew) == 1, i == 0; got != want {
			t.Errorf("attempt %d: new duplicates %v, want some: %t", i, isNew, want)
		}
		if got, want := len(d.takeAltered()) == 1, i != 1; got != want {
			t.Errorf("attempt %d: the result changed: %t, want %t", i, got, want)
		}
		if got := d.ownersOf(link.Parent, link.MAC); len(got) != len(found) {
			t.Errorf("attempt %d: hosts %v, want %v", i, got, found)
		}
		if _, links := d.next(); len(links) != 0 {
			t.Errorf("attempt %d: asks again at once", i)
		}
	}
	d.recheck()
	if _, links := d.next(); len(links) != 0 {
		t.Error("asks again although no other host has the address")
	}
}

func TestDuplicates_forgetsDetachedLink(t *testing.T) {
	d := newDuplicates()
	link := testLink(1, 1)
	d.add("nic0", link)
	device, links := d.next()
	d.forget(link.Parent, link.MAC) // while the plugin waits for answers
	d.record(device, links, addressOwners{netip.MustParseAddr("10.0.1.0"): otherHost})
	d.retry(device, links)
	if got := d.ownersOf(link.Parent, link.MAC); len(got) != 0 {
		t.Errorf("hosts for a link that is detached: got %v, want none", got)
	}
	d.recheck()
	if _, links := d.next(); len(links) != 0 {
		t.Error("asks for the addresses of a link that is detached")
	}
}

// A host that uses the address of a link makes the plugin ask for the addresses of that link.
func TestDuplicates_addConflicting_addsLinksWithNewConflicts(t *testing.T) {
	record := func(device string, link attach.Link) attach.Record {
		payload, err := json.Marshal(link)
		if err != nil {
			t.Fatal(err)
		}
		return attach.Record{Kind: Name, Device: device, Payload: payload}
	}
	conflict := func(parent int, link attach.Link, address string) classify.Conflict {
		mac, err := net.ParseMAC(link.MAC)
		if err != nil {
			t.Fatal(err)
		}
		return classify.Conflict{Parent: parent, Address: netip.MustParseAddr(address), Link: mac, Host: otherHost}
	}
	asked, other, known := testLink(1, 2), testLink(2, 1), testLink(3, 1)
	d := newDuplicates()
	d.add("nic0", known)
	device, links := d.next()
	d.record(device, links, addressOwners{netip.MustParseAddr("10.0.3.0"): otherHost})
	records := []attach.Record{record("nic0", asked), record("nic0", other), record("nic0", known), {Kind: "Fabric"}}
	d.addConflicting(records, []classify.Conflict{
		conflict(1, asked, "10.0.1.1"),
		conflict(2, other, "10.0.2.0"), // the NIC is another one
		conflict(1, known, "10.0.3.0"), // the plugin asks again after recheckInterval anyway
	})
	device, links = d.next()
	if diff := cmp.Diff([]attach.Link{asked}, links); device != "nic0" || diff != "" {
		t.Errorf("asks for addresses of links of %q (-want +got):\n%s", device, diff)
	}
}

// After recheckInterval, the plugin asks again for the addresses of all links that have
// duplicates, however many there are.
func TestDuplicates_recheckCoversAllLinks(t *testing.T) {
	d := newDuplicates()
	const links = 3 * reportBatch
	for i := range links {
		d.add(fmt.Sprint("nic", i%2), testLink(i, 1))
	}
	for round := range 2 {
		asked := 0
		for {
			device, batch := d.next()
			if len(batch) == 0 {
				break
			}
			asked += len(batch)
			found := addressOwners{}
			for _, l := range batch {
				found[targets(l)[0].Address] = otherHost
			}
			d.record(device, batch, found)
		}
		if asked != links {
			t.Errorf("round %d: asked for the addresses of %d links, want %d", round, asked, links)
		}
		d.recheck()
	}
}
