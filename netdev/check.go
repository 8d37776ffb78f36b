// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"slices"

	"github.com/dra-shared/dra-driver-shared/netdev/bpffs"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/classify/trial"
)

// Check returns the error that Manage would return for a NIC, as far as it can find out without
// changing the NIC, which another process may be managing. With Enforce, it tries the classifier on
// links that it creates.
func (n *Node) Check(c NICConfig) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !c.Enforce {
		return nil
	}
	if err := n.shaper.Check(c.Name, c.Index, c.TakeOver); err != nil {
		return err
	}
	selected, err := n.tryKeys()
	if err != nil {
		return err
	}
	// The maps of the other process must fit. They must not stay open: that process may remove their pins
	// when it stops, and this one must then create others.
	classifier, err := classify.Open(n.bpffs, n.failpoints, selected.AttachPoint, selected.Key)
	if err != nil {
		return err
	}
	return classifier.Close()
}

// RetryTrials makes the next Manage or Check with Enforce try the classifier's keys again if none has passed.
// Until then, they return the error of the last trial: it can take seconds, which a caller that manages many
// NICs would otherwise spend on each. Call it before a pass over the NICs.
func (n *Node) RetryTrials() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.trialErr = nil
}

// tryKeys tries the classifier's keys on this node, unless one has passed, and returns the result for the strongest
// that passes. After a failure, it tries them again after RetryTrials. The caller holds n.mu.
func (n *Node) tryKeys() (r trial.Result, err error) {
	if err := bpffs.Check(n.bpffs); err != nil {
		return r, err
	}
	if len(n.trials) > 0 {
		if r, err = trial.Strongest(n.trials); err == nil {
			return r, nil
		}
	}
	if n.trialErr == nil {
		r, n.trialErr = n.runTrials()
	}
	return r, n.trialErr
}

// runTrials tries the classifier's keys, and returns the result for the strongest that passes. The caller
// holds n.mu.
func (n *Node) runTrials() (r trial.Result, err error) {
	results, err := trial.Run(n.bpffs, n.failpoints, n.keys...)
	if err != nil {
		return r, err
	}
	n.trials = results
	return trial.Strongest(results)
}

// traceARP attaches the program that traces ARP, if its trial has passed. Shares work without the
// program, so a failure is recorded as the result of the trial. The caller holds n.mu.
func (n *Node) traceARP() {
	n.trials = slices.Clone(n.trials) // the caller of NewNode may still use them
	for i, r := range n.trials {
		if r.Key == n.classifier.Key() && r.ARP == nil && n.classifier.ReadsRoutes() {
			n.trials[i].ARP = n.classifier.TraceARP()
		}
	}
}
