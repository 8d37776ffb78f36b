// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/classify/trial"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
)

// errNotSteered means that frames may not come to the queue of their class.
var errNotSteered = errors.New("other programs run before the driver's queue filter and may stop processing of a frame")

// steering is the result of trying whether the kernel steers frames to the queue of their class.
type steering struct{ err error }

// Trees returns the Trees of a NIC. multiQueueErr is the reason why NICConfig.QueuePerShare is not applied; nil if it
// is applied or not requested.
func (n *Node) Trees(index int) (t shape.Trees, multiQueueErr error) {
	m, enforced := n.enforcedNIC(index)
	if !enforced {
		return shape.OneTree, nil
	}
	return m.trees, m.multiQueueErr
}

// trees returns the Trees that a NIC gets. While shares use its Trees, the NIC keeps them, except trees of queues that
// it no longer has. Otherwise, it gets the Trees that the configuration and the node permit. old are the Trees of the
// last call of Manage, if the NIC is known. The caller holds n.mu.
func (n *Node) trees(c NICConfig, old shape.Trees, known bool) (t shape.Trees, multiQueueErr, err error) {
	wanted := shape.OneTree
	if c.QueuePerShare {
		wanted, multiQueueErr = n.possibleTrees(c)
	}
	if known && wanted == old {
		return wanted, multiQueueErr, nil
	}
	inUse, hasShares, err := n.shaper.TreesInUse(c.Name, c.Index)
	switch {
	case err != nil || !hasShares:
		return wanted, multiQueueErr, err
	case inUse == shape.OneTree && wanted != shape.OneTree:
		return inUse, fmt.Errorf(
			"%s has shares that use one queue: shaping changes when the last of them is released", c.Name), nil
	case inUse == shape.OneTree:
		return inUse, multiQueueErr, nil
	}
	if queues, err := transmitQueues(c.Index); err == nil {
		inUse = min(inUse, shape.Trees(max(queues, 1)))
	}
	return inUse, nil, nil
}

// possibleTrees returns the Trees that the node and a NIC without shares permit; if these are
// OneTree, the error is the reason. The caller holds n.mu and has opened the classifier.
func (n *Node) possibleTrees(c NICConfig) (shape.Trees, error) {
	queues, err := transmitQueues(c.Index)
	switch {
	case err != nil:
		return shape.OneTree, err
	case queues < 2:
		return shape.OneTree, fmt.Errorf("%s uses one transmit queue", c.Name)
	}
	if n.steering == nil {
		n.steering = &steering{trial.Steer(n.bpffs, n.failpoints, n.classifier.AttachPoint())}
	}
	if n.steering.err != nil {
		return shape.OneTree, n.steering.err
	}
	before, err := n.classifier.BeforeSteering(c.Index)
	if err != nil {
		return shape.OneTree, err
	}
	if len(before) > 0 {
		return shape.OneTree, fmt.Errorf("%w: %s", errNotSteered, strings.Join(before, ", "))
	}
	return min(shape.Trees(queues), shape.MaxTrees), nil
}

// isSteered reports whether the kernel takes the queues of a NIC's frames from their class, if the NIC
// has several.
func isSteered(m managedNIC) (steered bool, err error) {
	if m.trees == shape.OneTree {
		return true, nil
	}
	for _, dev := range []int{m.Index, m.ifb} {
		if steered, err = classify.Steered(dev); err != nil || !steered {
			return false, err
		}
	}
	return true, nil
}

// transmitQueues returns how many transmit queues a NIC uses, as "ethtool -l" shows them; 1 if the driver
// of the NIC does not report it.
func transmitQueues(index int) (int, error) {
	payload, err := ethtool(index, unix.ETHTOOL_MSG_CHANNELS_GET, unix.ETHTOOL_A_CHANNELS_HEADER)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return 1, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the number of queues of link %d: %w", index, err)
	}
	queues := 0
	for _, message := range payload {
		for attrType, value := range rtnl.Attributes(message) {
			isCount := attrType == unix.ETHTOOL_A_CHANNELS_TX_COUNT || attrType == unix.ETHTOOL_A_CHANNELS_COMBINED_COUNT
			if isCount && len(value) >= 4 {
				queues += int(nl.NativeEndian().Uint32(value))
			}
		}
	}
	return queues, nil
}
