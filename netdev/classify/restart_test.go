// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/netdev"
)

// A plugin that starts keeps a NIC guarded that an earlier one has guarded, and as long.
func TestAttack_hiddenLinkWhilePluginRestarts(t *testing.T) {
	e := newTestEnv(t, enforced())
	attacker, victim := e.pod(0, 1, hardCap(100*mega), netdev.Private), e.pod(1, 2, hardCap(100*mega), netdev.Private)
	if !bytes.Equal(e.lastSource(victim), e.wireMAC()) {
		t.Fatal("the NIC is guarded before the attack")
	}
	first := attacker.hide(t, nil, e.wireMAC())
	e.inspect(true)
	first.Do(func() error { return deleteLink("more") })
	e.inspect(false)
	e.skip(10 * time.Second)
	if e.inspect(false) {
		t.Fatal("the NIC is still guarded after 10 seconds")
	}
	second := attacker.hide(t, nil, e.wireMAC())
	e.inspect(true)

	next := *e
	next.node = newNode(t, netdev.Options{BPFFS: e.bpffs, Now: e.now})
	next.manage()
	if bytes.Equal(e.lastSource(victim), e.wireMAC()) {
		t.Error("the next plugin shows senders while a link is hidden")
	}
	second.Do(func() error { return deleteLink("more") })
	e.skip(18 * time.Second)
	if !next.inspect(false) || bytes.Equal(e.lastSource(victim), e.wireMAC()) {
		t.Error("the next plugin shows senders earlier than the first would have")
	}
	e.skip(2 * time.Second)
	if next.inspect(false) || !bytes.Equal(e.lastSource(victim), e.wireMAC()) {
		t.Error("the next plugin guards the NIC longer than the first would have")
	}
}
