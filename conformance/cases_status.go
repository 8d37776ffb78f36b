// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/conformance/internal/probe"
)

// read returns the current claim, even if the context has ended: the caller reports what it
// waited for.
func (s *suite) read(ctx context.Context, c *claim) *resourceapi.ResourceClaim {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.config.callTimeout)
	defer cancel()
	now, err := s.client.ResourceV1().ResourceClaims(c.Namespace).Get(ctx, c.Name, metav1.GetOptions{})
	s.must(err, "get claim %s", c.Name)
	return now
}

// own returns the entries of the driver in the status of a claim.
func (s *suite) own(c *resourceapi.ResourceClaim) []resourceapi.AllocatedDeviceStatus {
	return slices.DeleteFunc(slices.Clone(c.Status.Devices), func(d resourceapi.AllocatedDeviceStatus) bool {
		return d.Driver != s.config.Driver
	})
}

// reported waits until the driver has written a status for a prepared claim.
func (s *suite) reported(ctx context.Context, c *claim) *resourceapi.ResourceClaim {
	ctx, cancel := context.WithTimeout(ctx, s.config.StartTimeout.Duration)
	defer cancel()
	var now *resourceapi.ResourceClaim
	err := poll(ctx, func() error {
		if now = s.read(ctx, c); len(s.own(now)) == 0 {
			return errors.New("the claim has no status of the driver")
		}
		return nil
	})
	s.must(err, "after prepare of claim %s", c.Name)
	return now
}

func caseStatusKeys(ctx context.Context, s *suite) {
	r := s.pick(ctx)
	for _, d := range s.devices(ctx) {
		if d.shared() {
			r = s.take(d)
		}
	}
	results := []resourceapi.DeviceRequestAllocationResult{r}
	if s.free(ctx) {
		results = append(results, resultFor(s.pick(ctx), "second"))
	}
	c, _ := s.prepared(ctx, results...)
	allocated := map[string]bool{}
	for _, r := range results {
		allocated[deviceKey(r.Pool, r.Device, string(ptr.Deref(r.ShareID, "")))] = true
	}
	s.reported(ctx, c)
	limited, cancel := context.WithTimeout(ctx, s.config.Quiet.Duration)
	defer cancel()
	s.must(poll(limited, func() error {
		seen := map[string]bool{}
		for _, d := range s.own(s.read(ctx, c)) {
			key := deviceKey(d.Pool, d.Device, ptr.Deref(d.ShareID, ""))
			if !allocated[key] || seen[key] {
				s.fatal("the status has an entry for %s: the claim has %v, each once", key, allocated)
			}
			seen[key] = true
		}
		if len(seen) < len(allocated) {
			return fmt.Errorf("the status has entries only for %v, and the claim has %v", slices.Sorted(maps.Keys(seen)),
				slices.Sorted(maps.Keys(allocated)))
		}
		return nil
	}), "after prepare of a claim with %d devices", len(results))
}

func caseStatusOthers(ctx context.Context, s *suite) {
	r := s.pick(ctx)
	c := s.allocated(ctx, r, ofOther())
	c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: otherDriver, Pool: "other-pool",
		Device: "other-device"}}
	updated, err := s.client.ResourceV1().ResourceClaims(c.Namespace).UpdateStatus(ctx, c.ResourceClaim,
		metav1.UpdateOptions{})
	s.must(err, "write the status of another driver")
	c.ResourceClaim = updated
	s.prepare(ctx, c)
	check := func(now *resourceapi.ResourceClaim, when string) {
		if !slices.ContainsFunc(now.Status.Devices,
			func(d resourceapi.AllocatedDeviceStatus) bool { return d.Driver == otherDriver }) {
			s.fatal("after %s, the entry of another driver is gone from the status", when)
		}
		if !equality.Semantic.DeepEqual(now.Status.Allocation, c.Status.Allocation) ||
			!equality.Semantic.DeepEqual(now.Status.ReservedFor, c.Status.ReservedFor) {
			s.fatal("after %s, the allocation or the consumers of the claim differ, which belong to the scheduler", when)
		}
	}
	check(s.reported(ctx, c), "prepare")
	s.unprepare(ctx, c)
	check(s.read(ctx, c), "unprepare")
}

func caseStatusReady(ctx context.Context, s *suite) {
	c, _ := s.prepared(ctx)
	s.reported(ctx, c)
	ctx, cancel := context.WithTimeout(ctx, s.config.Quiet.Duration)
	defer cancel()
	err := poll(ctx, func() error {
		for _, d := range s.own(s.read(ctx, c)) {
			switch ready := meta.FindStatusCondition(d.Conditions, "Ready"); {
			case ready == nil:
				return fmt.Errorf("device %s has no condition Ready", d.Device)
			case ready.Status != metav1.ConditionTrue:
				return fmt.Errorf("the condition Ready of device %s is %s: %s: %s", d.Device, ready.Status, ready.Reason,
					ready.Message)
			}
		}
		return nil
	})
	s.must(err, "after prepare")
}

func caseStatusLimits(ctx context.Context, s *suite) {
	c, _ := s.prepared(ctx)
	for _, d := range s.own(s.reported(ctx, c)) {
		if n := len(d.Conditions); n > resourceapi.AllocatedDeviceStatusMaxConditions {
			s.fatal("device %s has %d conditions; the limit is %d", d.Device, n, resourceapi.AllocatedDeviceStatusMaxConditions)
		}
		if d.Data != nil && len(d.Data.Raw) > resourceapi.AllocatedDeviceStatusDataMaxLength {
			s.fatal("device %s has data of %d bytes; the limit is %d", d.Device, len(d.Data.Raw),
				resourceapi.AllocatedDeviceStatusDataMaxLength)
		}
		s.checkNetworkData(d)
	}
}

func (s *suite) checkNetworkData(d resourceapi.AllocatedDeviceStatus) {
	n := d.NetworkData
	if n == nil {
		return
	}
	if len(n.IPs) > resourceapi.NetworkDeviceDataMaxIPs ||
		len(n.InterfaceName) > resourceapi.NetworkDeviceDataInterfaceNameMaxLength ||
		len(n.HardwareAddress) > resourceapi.NetworkDeviceDataHardwareAddressMaxLength {
		s.fatal("device %s: the network data is longer than the limits: %v", d.Device, n)
	}
	for _, ip := range n.IPs {
		if _, err := netip.ParsePrefix(ip); err != nil {
			s.fatal("device %s: the address %q has no CIDR form: %v", d.Device, ip, err)
		}
	}
}

// networkData returns the entries of the driver that have network data. It skips the case
// if none has.
func (s *suite) networkData(ctx context.Context, c *claim) []resourceapi.AllocatedDeviceStatus {
	entries := s.withNetworkData(s.reported(ctx, c))
	if len(entries) == 0 {
		s.skip("the driver reports no network data after prepare")
	}
	return entries
}

// claimVariables returns the command that sets the variables of hooks for claims.
func (s *suite) claimVariables(c *claim) []string {
	return []string{"env", "CLAIM_UID=" + string(c.UID), "CLAIM=" + c.Name, "NAMESPACE=" + c.Namespace}
}

// withNetworkData returns the entries of the driver that have network data.
func (s *suite) withNetworkData(c *resourceapi.ResourceClaim) []resourceapi.AllocatedDeviceStatus {
	return slices.DeleteFunc(s.own(c), func(d resourceapi.AllocatedDeviceStatus) bool { return d.NetworkData == nil })
}

func caseStatusNetwork(ctx context.Context, s *suite) {
	hook := s.config.Hooks.Interfaces
	switch {
	case len(hook) > 0:
	case !slices.Contains(s.config.Profiles, "DRA-NET"):
		s.skip("the driver declares no network interfaces (profile DRA-NET), and hooks.interfaces is not set")
	case s.config.Pods.Image == "":
		s.skip("needs the network of a pod: set hooks.interfaces, or pods on a cluster")
	default:
		caseInterfaceStatus(ctx, s)
		return
	}
	c, _ := s.prepared(ctx)
	entries := s.networkData(ctx, c)
	out, err := s.hook(ctx, slices.Concat(s.claimVariables(c), hook), c.results()[0].Device)
	s.must(err, "list the interfaces of the pod")
	var interfaces []probe.Interface
	s.must(json.Unmarshal([]byte(out), &interfaces), "hook interfaces must print what ip -json address prints")
	for _, d := range entries {
		s.must(sameNetwork(*d.NetworkData, interfaces), "the status of device %s", d.Device)
	}
}

// sameNetwork returns an error that describes how network data differ from the interfaces of the
// pod, or nil. The data may omit link-local addresses, which the kernel adds.
func sameNetwork(n resourceapi.NetworkDeviceData, interfaces []probe.Interface) error {
	i := slices.IndexFunc(interfaces, func(p probe.Interface) bool { return p.Name == n.InterfaceName })
	if i < 0 {
		return fmt.Errorf("the pod has no interface %q", n.InterfaceName)
	}
	in := interfaces[i]
	if n.HardwareAddress != "" && !strings.EqualFold(n.HardwareAddress, in.Address) {
		return fmt.Errorf("interface %s has the hardware address %s, and the status has %s", in.Name, in.Address,
			n.HardwareAddress)
	}
	var local, all []string
	for _, a := range in.Addresses {
		text := fmt.Sprintf("%s/%d", a.Local, a.Length)
		all = append(all, text)
		if a.Scope != "link" {
			local = append(local, text)
		}
	}
	for _, ip := range n.IPs {
		if !slices.Contains(all, ip) {
			return fmt.Errorf("interface %s has the addresses %v, and the status also has %s", in.Name, all, ip)
		}
	}
	for _, ip := range local {
		if !slices.Contains(n.IPs, ip) {
			return fmt.Errorf("interface %s has the address %s, and the status has only %v", in.Name, ip, n.IPs)
		}
	}
	return nil
}

func caseStatusRefused(ctx context.Context, s *suite) {
	s.requireFakeAPI()
	c := s.allocated(ctx)
	s.server.Intercept(func(r *http.Request, _ runtime.Object) error {
		if r.Method != http.MethodGet && strings.Contains(r.URL.Path, "/resourceclaims/") {
			return apierrors.NewInternalError(errors.New("conformance refuses the status"))
		}
		return nil
	})
	_, err := s.main().tryPrepare(ctx, c.proto())
	<-time.After(100 * time.Millisecond) // a driver may write in the background
	s.server.Intercept(nil)
	if err != nil { // the kubelet calls again only after an error
		s.prepare(ctx, c)
	}
	s.reported(ctx, c)
}

func caseStatusRemoved(ctx context.Context, s *suite) {
	c, _ := s.prepared(ctx)
	s.reported(ctx, c)
	s.unprepare(ctx, c)
	ctx, cancel := context.WithTimeout(ctx, s.config.Quiet.Duration)
	defer cancel()
	err := poll(ctx, func() error {
		if left := s.own(s.read(ctx, c)); len(left) > 0 {
			return fmt.Errorf("the claim still has %d entries of the driver", len(left))
		}
		return nil
	})
	s.must(err, "after unprepare")
}

// replaceSpec writes the spec of a claim, which a real API server does not permit.
func (s *suite) replaceSpec(ctx context.Context, c *claim) *claim {
	s.requireFakeAPI()
	updated, err := s.client.ResourceV1().ResourceClaims(c.Namespace).Update(ctx, c.ResourceClaim, metav1.UpdateOptions{})
	s.must(err, "write claim %s", c.Name)
	c.ResourceClaim = updated
	return c
}
