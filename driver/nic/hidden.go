// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver"
)

// inspectInterval is the mean interval between searches for links that pods hide. The kernel does not send events for
// them, so this bounds how long a pod can receive other pods' frames undetected. The intervals are random: otherwise
// a pod could hide its link from each inspection.
const inspectInterval = 500 * time.Millisecond

// hiddenLinks holds the results of looking for hidden links: links on NICs in network namespaces that pods created
// and the node does not see.
type hiddenLinks struct {
	changed chan struct{} // has an element if warnings have begun or ended

	mu   sync.Mutex
	nics map[string]nicInspection // by the name of the NIC
}

// nicInspection holds the findings of the inspections of a NIC.
type nicInspection struct {
	// addresses describes the addresses of hidden links, kept until the NIC is no longer guarded; "" if
	// there were none.
	addresses string
	guarded   bool
	failure   string // the error of the last inspection; "" if it succeeded
}

func newHiddenLinks() *hiddenLinks {
	return &hiddenLinks{changed: make(chan struct{}, 1), nics: map[string]nicInspection{}}
}

// inspectRegularly looks for hidden links until ctx ends.
func (k *Kind) inspectRegularly(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(inspectInterval/2 + rand.N(inspectInterval)): //nolint:gosec // the seed is random
			k.inspect(ctx)
		}
	}
}

// inspect looks for links that pods hide on NICs with checked frames.
func (k *Kind) inspect(ctx context.Context) {
	h, present := k.hidden, map[string]bool{}
	for _, d := range k.sharedDevices() {
		if d.network.Identity == config.IdentityOff {
			continue
		}
		present[d.nic.Name] = true
		unknown, guarded, err := k.node.Inspect(d.nic.Index)
		if h.setFailure(d.nic.Name, err) {
			klog.FromContext(ctx).Error(err, "Failed to look for hidden links", "interface", d.nic.Name)
		}
		if err != nil {
			continue
		}
		addresses := ""
		if len(unknown) > 0 {
			addresses = describeAddresses(unknown)
		}
		if h.update(d.nic.Name, addresses, guarded) {
			klog.FromContext(ctx).Info("NIC accepts addresses that no visible link has; "+
				"its pods see random source MAC addresses", "interface", d.nic.Name, "addresses", addresses)
		}
	}
	h.keep(present)
}

// maxNamedAddresses limits the addresses in an event, because the API server refuses long ones.
const maxNamedAddresses = 5

// describeAddresses returns the first addresses, and how many more there are.
func describeAddresses(addresses []net.HardwareAddr) string {
	more := len(addresses) - maxNamedAddresses
	if more <= 0 {
		return fmt.Sprint(addresses)
	}
	return fmt.Sprintf("%s and %d more", fmt.Sprint(addresses[:maxNamedAddresses]), more)
}

// setFailure records the error of an inspection, and reports whether it is new, so that a lasting error is logged
// once.
func (h *hiddenLinks) setFailure(nic string, err error) (isNew bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.nics[nic]
	last := n.failure
	n.failure = ""
	if err != nil {
		n.failure = err.Error()
	}
	h.nics[nic] = n
	return err != nil && n.failure != last
}

// update sets the result for a NIC, and reports whether hidden links were found that were not known.
// A pod that changes the address of such a link in a loop causes one report while the NIC is guarded.
func (h *hiddenLinks) update(nic, addresses string, guarded bool) (isNew bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.nics[nic]
	warned := n.addresses != ""
	n.guarded = guarded
	switch {
	case !warned:
		n.addresses = addresses
	case !guarded:
		n.addresses = ""
	}
	h.nics[nic] = n
	if warned == (n.addresses != "") {
		return false
	}
	signal(h.changed)
	return addresses != ""
}

// keep removes the results of all NICs except present ones, which have their frames checked.
func (h *hiddenLinks) keep(present map[string]bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.nics, func(nic string, _ nicInspection) bool { return !present[nic] })
}

// isGuarded reports whether a NIC is guarded.
func (h *hiddenLinks) isGuarded(nic string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.nics[nic].guarded
}

// hiddenWarnings returns the warnings about hidden links.
func (k *Kind) hiddenWarnings() (warnings []driver.Warning) {
	k.hidden.mu.Lock()
	defer k.hidden.mu.Unlock()
	for _, nic := range slices.Sorted(maps.Keys(k.hidden.nics)) {
		addresses := k.hidden.nics[nic].addresses
		if addresses == "" {
			continue
		}
		warnings = append(warnings, driver.Warning{
			Device: nic, Reason: v1alpha1.EventReasonLinksHidden,
			Message: fmt.Sprintf("pods use the MAC addresses %s on %s, and the node sees no link that has them. A pod may have "+
				"hidden a link in a network namespace that it created, to receive frames of other pods, or a program with "+
				"CAP_NET_RAW may have added addresses to the link of its pod. Until the addresses are removed, all pods of %s "+
				"see random source MAC addresses. Find the pods of the NIC that have CAP_NET_ADMIN in a user namespace, or "+
				"CAP_NET_RAW.",
				addresses, nic, nic),
			EndReason: v1alpha1.EventReasonLinksVisible, EndMessage: "no hidden links remain on " + nic,
		})
	}
	return warnings
}
