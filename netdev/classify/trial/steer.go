// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"errors"
	"fmt"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// steeredTrees is how many transmit queues the link of Steer has.
const steeredTrees = 4

// Steer returns nil if frames leave through the transmit queue with their class in its HTB qdisc, with the program at
// an attach point; see shape.Trees. It sends frames of one flow through each queue: a kernel that ignores a part of the
// request sends all of them through one queue, or through any.
func Steer(lock string, failpoints failpoint.Injector, point classify.AttachPoint) error {
	return onLinks(lock, failpoints, steeredTrees, func(t *trial) error { return t.steer(point) })
}

func (t *trial) steer(point classify.AttachPoint) (err error) {
	// How the program identifies senders does not matter. This key does not need CAP_PERFMON.
	c, err := classify.OpenUnpinned(point, classify.KeyMAC, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	err = c.Attach(classify.NIC{Index: t.nic, IFBIndex: t.ifb, MAC: otherMAC, Major: t.trees.Major(), Steer: true})
	if err != nil {
		return err
	}
	for minor := uint16(class); minor < class+steeredTrees; minor++ { // they have different homes
		rate := shape.Rates{Floor: rates.MinShare, Ceil: rates.MinShare}
		if err := t.shaper.SetClass(t.nic, t.ifb, t.trees, rates, minor, rate); err != nil {
			return err
		}
		share := classify.Member{Parent: t.nic, Cookie: t.cookie, MAC: nicMAC}
		if err := c.AddMember(share, t.trees.Class(minor)); err != nil {
			return err
		}
		before, err := t.strayed()
		if err != nil {
			return err
		}
		if err := t.arrives(t.nic, t.sentBy(minor)); err != nil {
			return fmt.Errorf("no frame reached the queue of its class: %w", err)
		}
		after, err := t.strayed()
		if err != nil {
			return err
		}
		if after > before {
			return errors.New("a frame reached a queue other than its own")
		}
	}
	return nil
}

// strayed returns a counter that increases when a frame of the share arrives in a queue without its class.
func (t *trial) strayed() (uint64, error) {
	strays, err := t.shaper.Strays(t.nic, t.trees)
	if err != nil {
		return 0, err
	}
	unidentified, err := t.sentBy(shape.UnidentifiedMinor)()
	return strays + unidentified, err
}
