// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/classify/trial"
)

// check is the result of a trial on the node's kernel, under the name that users see.
type check struct {
	name   string
	passed bool
}

// attributesOfKernelChecks maps the names of checks to the attributes of NICs that report their results.
// AttributeSenderKey reports the results of the key checks.
var attributesOfKernelChecks = map[string]resourceapi.QualifiedName{
	v1alpha1.KernelCheckForwardedByRoute: v1alpha1.AttributeForwardedByRoute,
	v1alpha1.KernelCheckARPSender:        v1alpha1.AttributeARPSender,
	v1alpha1.KernelCheckSenderLists:      v1alpha1.AttributeSenderLists,
	v1alpha1.KernelCheckTCX:              v1alpha1.AttributeTCX,
}

// checks converts the results of trials to checks: one for each key, which reports whether the key works on this
// node, and others for the key in use, such as whether it also recognizes forwarded frames and works with TCX.
func checks(results []trial.Result, key classify.Key) (checks []check) {
	for _, r := range results {
		checks = append(checks, check{string(r.Key), r.Err == nil})
	}
	for _, r := range results {
		if r.Key == key {
			checks = append(checks,
				check{v1alpha1.KernelCheckForwardedByRoute, r.Routes == nil},
				check{v1alpha1.KernelCheckARPSender, r.ARP == nil},
				check{v1alpha1.KernelCheckSenderLists, r.Lists == nil},
				check{v1alpha1.KernelCheckTCX, r.AttachPoint == classify.AttachTCX})
		}
	}
	return checks
}

// passedKernelChecks lists the names of the checks that passed.
func passedKernelChecks(checks []check) string {
	var names []string
	for _, c := range checks {
		if c.passed {
			names = append(names, c.name)
		}
	}
	return strings.Join(names, ", ")
}

// logTrials logs the results of the trials once. It requires k.mu.
func (k *Kind) logTrials(ctx context.Context) {
	results := k.node.Trials()
	if k.loggedTrials || len(results) == 0 {
		return
	}
	k.loggedTrials = true
	logger := klog.FromContext(ctx)
	for _, r := range results {
		if r.Err != nil {
			logger.Info("Sender identification method failed", "senderKey", r.Key, "err", r.Err)
		}
	}
	key := k.node.ClassifierKey()
	for _, r := range results {
		if r.Key != key {
			continue
		}
		if r.Routes != nil {
			logger.Info("Kernel does not expose routes; identifying forwarded frames by address", "err", r.Routes)
		}
		if r.ARP != nil {
			logger.Info("Kernel does not expose the sender of ARP; pods with CAP_NET_ADMIN can forge ARP", "err", r.ARP)
		}
		if r.Lists != nil {
			logger.Info("Kernel does not expose sender lists of macvlans; hidden links are blocked only after detection",
				"err", r.Lists)
		}
		if r.TCX != nil {
			logger.Info("TCX is unavailable; TCX programs of other owners run first", "err", r.TCX)
		}
		logger.Info("Selected the key that identifies senders", "senderKey", key, "attachPoint", r.AttachPoint)
	}
}

// cookieMessage describes the risk if the node identifies senders by MAC address alone,
// why identification by the cookie of the network namespace failed, and what to do.
func cookieMessage(results []trial.Result) string {
	message := "this node identifies senders by address only: a pod with CAP_NET_RAW can send as another pod and exceed " +
		"its grant"
	var last trial.Result
	for _, r := range results {
		if r.Key.HasCookie() && r.Err != nil {
			last = r
		}
	}
	if last.Err != nil {
		// Joined errors are on separate lines.
		cause := strings.ReplaceAll(withRemedy(last.Err).Error(), "\n", "; ")
		message += fmt.Sprintf("; identifying them by %s failed: %s", last.Key, cause)
	}
	return message
}
