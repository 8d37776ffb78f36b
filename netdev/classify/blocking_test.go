// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// If the node has lost a link's address, the link does not send or receive. It stays blocked when a plugin starts that
// does not know the lost addresses yet.
func TestBlocking(t *testing.T) {
	e := newTestEnv(t, enforced())
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	wireMAC, wire := e.wire.Interface("wire").HardwareAddr, listen(t, e.wire, "wire")
	for i, c := range []struct {
		blocking netdev.Blocking
		sends    bool
	}{
		{netdev.BlockIfChanged, true},
		{netdev.BlockAsBefore, true},
		{netdev.BlockAlways, false},
		{netdev.BlockAsBefore, false},
		{netdev.BlockIfChanged, true},
	} {
		a := p.attachment
		a.Blocking = c.blocking
		if err := e.node.Restore(a, hardCap(100*mega)); err != nil { // leaves a blocked link blocked
			t.Fatal(err)
		}
		if s, err := e.node.ReadAndBlock(a); err != nil || s.Blocked != "" {
			t.Fatalf("step %d: Read returned %+v and error %v, want a link that its pod did not change", i, s, err)
		}
		frame := classify.EtherTo(wireMAC, a.MAC, 0x0800, classify.IPv4("10.20.0.1", 17, 0, classify.UDP(1, 2)))
		sendRaw(p.Namespace, "net1", append(frame, marker(i)...))
		if sent := wire.saw(marker(i), 300*time.Millisecond); sent != c.sends {
			t.Errorf("step %d: the link sent a frame: %t, want %t", i, sent, c.sends)
		}
	}
}
