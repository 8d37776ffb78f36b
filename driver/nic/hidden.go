// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	params "github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver"
)

// inspectInterval is the interval at which the plugin looks for links that pods hide. The kernel
// sends no event for them, so this bounds how long a pod can receive frames of others before it is
// detected.
const inspectInterval = 500 * time.Millisecond

// hiddenLinks are the links on NICs that pods have created in network namespaces of their own.
type hiddenLinks struct {
	changed chan struct{} // has an element if warnings have begun or ended

	mu sync.Mutex
	// addresses are those of hidden links, by the name of the NIC, from when they were found until
	// the NIC is not guarded any more.
	addresses map[string]string
	guarded   map[string]bool   // the names of the guarded NICs
	failed    map[string]string // the error that was logged last, by the name of the NIC
}

func newHiddenLinks() *hiddenLinks {
	return &hiddenLinks{
		changed: make(chan struct{}, 1), addresses: map[string]string{}, guarded: map[string]bool{},
		failed: map[string]string{},
	}
}

// inspectRegularly looks for hidden links until ctx ends.
func (k *Kind) inspectRegularly(ctx context.Context) {
	tick := time.NewTicker(inspectInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			k.inspect(ctx)
		}
	}
}

// inspect looks for links that pods hide on NICs with identity Enforce.
func (k *Kind) inspect(ctx context.Context) {
	h, present := k.hidden, map[string]bool{}
	for _, d := range k.present() {
		if d.network.Identity != config.IdentityEnforce {
			continue
		}
		present[d.nic.Name] = true
		unknown, guarded, err := k.node.Inspect(d.nic.Index)
		if h.fails(d.nic.Name, err) {
			klog.FromContext(ctx).Error(err, "Failed to look for links that pods hide", "interface", d.nic.Name)
		}
		if err != nil {
			continue
		}
		addresses := ""
		if len(unknown) > 0 {
			addresses = fmt.Sprint(unknown)
		}
		if h.update(d.nic.Name, addresses, guarded) {
			klog.FromContext(ctx).Info("Pods hide links on a NIC, so source MAC addresses are hidden from all pods",
				"interface", d.nic.Name, "addresses", addresses)
		}
	}
	h.keep(present)
}

// fails records the result of an inspection, and reports whether it is an error that was not logged.
func (h *hiddenLinks) fails(nic string, err error) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		delete(h.failed, nic)
		return false
	}
	logged := h.failed[nic] == err.Error()
	h.failed[nic] = err.Error()
	return !logged
}

// update sets the result for a NIC, and reports whether hidden links were found that were not known.
// A pod that changes the address of such a link in a loop causes one report while the NIC is guarded.
func (h *hiddenLinks) update(nic, addresses string, guarded bool) (isNew bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if guarded {
		h.guarded[nic] = true
	} else {
		delete(h.guarded, nic)
	}
	_, known := h.addresses[nic]
	switch {
	case addresses != "" && !known:
		h.addresses[nic] = addresses
	case known && !guarded:
		delete(h.addresses, nic)
	default:
		return false
	}
	signal(h.changed)
	return addresses != ""
}

// keep forgets NICs that are not present any more, or whose frames are not checked any more.
func (h *hiddenLinks) keep(present map[string]bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.addresses, func(nic, _ string) bool { return !present[nic] })
	maps.DeleteFunc(h.guarded, func(nic string, _ bool) bool { return !present[nic] })
	maps.DeleteFunc(h.failed, func(nic, _ string) bool { return !present[nic] })
}

// isGuarded reports whether the senders of frames are hidden from the pods of a NIC.
func (h *hiddenLinks) isGuarded(nic string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.guarded[nic]
}

// Warnings implements driver.WarningReporter.
func (k *Kind) Warnings() (warnings []driver.Warning) {
	k.hidden.mu.Lock()
	defer k.hidden.mu.Unlock()
	for _, nic := range slices.Sorted(maps.Keys(k.hidden.addresses)) {
		warnings = append(warnings, driver.Warning{
			Device: nic, Reason: params.EventReasonLinksHidden,
			Message: fmt.Sprintf("pods hide links with the MAC addresses %s on %s in network namespaces of their own, "+
				"with which they could receive the frames of others: all pods of %s see random source MAC addresses until "+
				"the links are gone: which pods of the NIC have CAP_NET_ADMIN in a user namespace?",
				k.hidden.addresses[nic], nic, nic),
			EndReason: params.EventReasonLinksVisible, EndMessage: "pods hide no links on " + nic + " any more",
		})
	}
	return warnings
}
