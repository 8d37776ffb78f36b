// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"context"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
)

// hiddenLinks are the links on NICs that pods have created in namespaces of their own.
type hiddenLinks struct {
	inspected time.Time
	logged    map[string]string // the addresses of the links, by NIC
}

// inspectInterval is the shortest time between two inspections, which list the addresses of
// all links of a NIC. Without events, the driver refreshes every 30 s.
const inspectInterval = 10 * time.Second

// inspect looks for links that pods hide on NICs with identity Enforce, and logs those that it
// finds. The kernel sends no event for them. The caller holds k.mu.
func (k *Kind) inspect(ctx context.Context, devices map[string]*device, now time.Time) {
	if now.Sub(k.hidden.inspected) < inspectInterval {
		return
	}
	k.hidden.inspected = now
	found := map[string]string{}
	for _, d := range devices {
		if !d.isShared() || d.network.Identity != config.IdentityEnforce {
			continue
		}
		logger := klog.FromContext(ctx).WithValues("interface", d.nic.Name)
		addresses, err := k.node.Inspect(d.nic.Index)
		if err != nil {
			logger.Error(err, "Failed to look for links that pods hide")
			continue
		}
		if len(addresses) == 0 {
			continue
		}
		found[d.nic.Name] = fmt.Sprint(addresses)
		if found[d.nic.Name] != k.hidden.logged[d.nic.Name] {
			logger.Info("Pods hide links on a NIC, so source MAC addresses are hidden from all pods",
				"addresses", found[d.nic.Name])
		}
	}
	k.hidden.logged = found
}
