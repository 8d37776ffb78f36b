// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"testing"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

func TestTransmitQueues_followsEthtool(t *testing.T) {
	nic, _ := nstest.NICWithQueues(t, "nic0", 1500, 4)
	for _, want := range []uint32{4, 2, 1, 3} {
		if err := nstest.SetTransmitQueues(nic.Name, want); err != nil {
			t.Fatalf("set %d queues: %v", want, err)
		}
		if got, err := netdev.TransmitQueues(nic.Index); err != nil || got != int(want) {
			t.Errorf("TransmitQueues returned %d and error %v, want %d", got, err, want)
		}
	}
}

func TestTransmitQueues_linkWithoutChannels(t *testing.T) {
	const loopback = 1
	if got, err := netdev.TransmitQueues(loopback); err != nil || got != 1 {
		t.Errorf("TransmitQueues of the loopback interface returned %d and error %v, want 1", got, err)
	}
}
