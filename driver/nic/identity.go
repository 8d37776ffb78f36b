// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
)

// identities maps values of Network.Identity to the classifier's.
var identities = map[config.Identity]classify.Identity{
	config.IdentityEnforce: classify.IdentityEnforce, config.IdentityAudit: classify.IdentityAudit,
}

// identityPolicy returns a network's rules for the frames of shares. The configuration is valid.
func identityPolicy(n *config.Network) classify.Policy {
	policy := classify.Policy{
		Identity: identities[n.Identity], Forwarding: n.Allow.Forwarding, Autoconf: n.Allow.RouterAdvertisements,
		ReachesNode: n.Allow.Node,
	}
	for _, vlan := range n.Allow.VLANs {
		policy.VLANs = append(policy.VLANs, uint16(vlan))
	}
	for _, text := range n.Allow.MACs {
		if mac, err := net.ParseMAC(text); err == nil {
			policy.MACs = append(policy.MACs, mac)
		}
	}
	for _, text := range n.Allow.Addresses {
		if p, err := config.ParseAddressOrNetwork(text); err == nil {
			policy.Addresses = append(policy.Addresses, p)
		}
	}
	for _, text := range n.Allow.Subnets {
		if p, err := netip.ParsePrefix(text); err == nil {
			policy.Subnets = append(policy.Subnets, p)
		}
	}
	return policy
}

// holdGateways keeps links without recorded addresses from using gateways' addresses. The gateways are from the
// claims on a NIC, which claimed lists by device, and from its network's pools.
func (k *Kind) holdGateways(ctx context.Context, devices map[string]*device, claimed map[string][]netip.Addr) {
	for name, d := range devices {
		if !d.isShared() {
			continue
		}
		gateways := claimed[name]
		if k.addresses != nil {
			poolGateways, known := k.addresses.Gateways(d.network.Name)
			if !known {
				continue // addresses that an earlier plugin held stay held until the next Refresh
			}
			gateways = append(gateways, poolGateways...)
		}
		if err := k.node.SetGateways(d.nic.Index, gateways); err != nil {
			klog.FromContext(ctx).Error(err, "Failed to keep links from using the addresses of gateways", "device", name)
		}
	}
}

// gatewaysOf returns the gateways of the routes that claims ask for, by device.
func gatewaysOf(shares []record.Share) map[string][]netip.Addr {
	gateways := map[string][]netip.Addr{}
	for _, s := range shares {
		if !bytes.Contains(s.Parameters, []byte(`"gateway"`)) {
			continue // most shares: parsing the parameters of thousands takes milliseconds
		}
		p, err := parametersOf(s)
		if err != nil {
			continue // Restore reports it
		}
		for _, r := range p.Routes {
			if a, err := netip.ParseAddr(r.Gateway); err == nil {
				gateways[s.Device] = append(gateways[s.Device], a)
			}
		}
	}
	return gateways
}

// multicast returns the rate for arriving multicast frames, in bits per second; 0 means the default.
func (d *device) multicast() uint64 {
	if d.network.Multicast == nil {
		return 0
	}
	return min(uint64(d.network.Multicast.Value()), d.line)
}

// identityCondition returns the condition IdentityEnforced.
func (d *device) identityCondition(link netdev.LinkState) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionIdentityEnforced, Status: metav1.ConditionFalse}
	switch {
	case !d.isShared():
		c.Reason, c.Message = d.unhealthyReason()
	case d.network.Enforcement == config.EnforcementNone:
		c.Reason, c.Message = v1alpha1.ReasonEnforcementNone, fmt.Sprintf(
			"network %q has enforcement None: the kernel does not check the source addresses of frames", d.network.Name)
	case d.network.Identity == config.IdentityOff:
		c.Reason, c.Message = v1alpha1.ReasonIdentityOff, fmt.Sprintf(
			"network %q has identity Off: the kernel does not check the source addresses of frames", d.network.Name)
	case link.Unchecked:
		c.Reason, c.Message = v1alpha1.ReasonIdentityUnsupported,
			"the kernel refused to load the program that checks the addresses of frames: does the plugin have CAP_PERFMON "+
				"(chart value plugin.perfmon)?"
	case link.Blocked != "" && d.network.Identity == config.IdentityEnforce && !link.Audited:
		c.Reason, c.Message = v1alpha1.ReasonLinkBlocked, blockedMessage(link)
	case link.Audited:
		c.Reason, c.Message = v1alpha1.ReasonAttachedEarlier,
			"an earlier release attached the link: frames without its addresses are counted and not dropped; recreate the pod "+
				"to have them dropped"
	case d.network.Identity == config.IdentityAudit:
		c.Reason, c.Message = v1alpha1.ReasonIdentityAudited, fmt.Sprintf(
			"network %q has identity Audit: frames without the addresses of the link are counted and not dropped",
			d.network.Name)
	default:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonIdentityEnforced
		c.Message = "the kernel drops frames that do not have the addresses of the link"
	}
	return c
}

func blockedMessage(link netdev.LinkState) string {
	return link.Blocked + ": the link is blocked until that is reverted"
}
