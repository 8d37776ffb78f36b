// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/conformance/internal/probe"
)

// probePort is the port of the suite's pods.
const probePort = "47110"

// checkCharacteristics returns an error if users cannot distinguish a device from others.
func checkCharacteristics(_ string, all []resourceapi.ResourceSlice) error {
	return eachDevice(all, func(d resourceapi.Device) error {
		if len(d.Attributes)+len(d.Capacity) == 0 {
			return errors.New("it has no attribute and no capacity that a request could select it by")
		}
		return nil
	})
}

// ordinary returns the view of a container of a pod without claims.
func (s *suite) ordinary(ctx context.Context) probe.View {
	return s.view(ctx, s.startPod(ctx, podOptions{}), firstContainer)
}

// interfaceNames returns the names of interfaces.
func interfaceNames(interfaces []probe.Interface) (all []string) {
	for _, i := range interfaces {
		all = append(all, i.Name)
	}
	return all
}

// added returns the interfaces of a view that are not in another.
func added(v, ordinary probe.View) (extra []probe.Interface) {
	known := interfaceNames(ordinary.Interfaces)
	return slices.DeleteFunc(slices.Clone(v.Interfaces),
		func(i probe.Interface) bool { return slices.Contains(known, i.Name) })
}

func caseInterfacePresent(ctx context.Context, s *suite) {
	s.canRunPods()
	ordinary := s.ordinary(ctx)
	v := s.view(ctx, s.startPod(ctx, podOptions{claims: []int{0}}), firstContainer)
	if len(added(v, ordinary)) == 0 {
		s.fatal("the first container of a pod with a claim has only the interfaces %v, like a pod without claims",
			interfaceNames(v.Interfaces))
	}
}

func caseTwoInterfaces(ctx context.Context, s *suite) {
	s.canRunPods()
	ordinary := s.ordinary(ctx)
	v := s.view(ctx, s.startPod(ctx, podOptions{claims: []int{0, 1}}), firstContainer)
	if extra := added(v, ordinary); len(extra) < 2 {
		s.fatal("a pod with two claims has %d more interfaces than one without: %v", len(extra), interfaceNames(extra))
	}
}

func caseInterfaceReturned(ctx context.Context, s *suite) {
	s.canRunPods()
	before := s.nodeView(ctx)
	first := s.usedAndReturned(ctx, before)
	// State that the driver needs on the node for its first pod may remain; state that each
	// pod leaves behind may not.
	second := s.usedAndReturned(ctx, before)
	if extra := added(second, first); len(extra) > 0 {
		s.fatal("a second pod left interfaces on the node: %v", interfaceNames(extra))
	}
}

// caseInterfaceRecovered deletes a pod by force while the driver does not run.
func caseInterfaceRecovered(ctx context.Context, s *suite) {
	s.canRunPods()
	if len(s.config.Hooks.PID) == 0 {
		s.skip("the suite cannot kill the driver: set hooks.pid")
	}
	before := s.nodeView(ctx)
	first := s.usedAndReturned(ctx, before)
	p := s.startPod(ctx, podOptions{claims: []int{0}, command: serveOn()})
	s.view(ctx, p, firstContainer)
	s.running(ctx, p)
	pid, err := s.livePID(ctx)
	s.must(err, "find the driver")
	s.restart = true
	s.must(syscall.Kill(pid, syscall.SIGKILL), "kill process %d", pid)
	s.must(s.deletePods(ctx, *metav1.NewDeleteOptions(0)), "delete the pod by force")
	s.waitForRestart(ctx)
	limit, cancel := context.WithTimeout(ctx, s.config.Pods.Timeout.Duration)
	defer cancel()
	s.must(poll(limit, func() error {
		after := s.nodeView(ctx)
		if extra := added(after, first); len(extra) > 0 {
			return fmt.Errorf("the node still has the interfaces %v", interfaceNames(extra))
		}
		return returned(before, after)
	}), "%v after a pod was deleted by force and the driver was killed", s.config.Pods.Timeout)
}

func caseNotAttached(ctx context.Context, s *suite) {
	s.canRunPods()
	if s.config.Pods.Impossible == nil {
		s.skip("needs a claim that the driver cannot attach: set pods.impossible")
	}
	p := s.startPod(ctx, podOptions{specs: []resourceapi.ResourceClaimSpec{*s.config.Pods.Impossible}})
	s.waitForPod(ctx, p, "the scheduler found no node", func(now *corev1.Pod) bool { return now.Spec.NodeName != "" })
	ctx, cancel := context.WithTimeout(ctx, s.config.Pods.Timeout.Duration/2)
	defer cancel()
	_ = pollEvery(ctx, podInterval, func() error {
		now, err := s.client.CoreV1().Pods(p.Namespace).Get(context.WithoutCancel(ctx), p.Name, metav1.GetOptions{})
		s.must(err, "get pod %s", p.Name)
		// A container that the runtime could not start ends too, with an exit code other than 0.
		first := containerStatus(now, firstContainer).State
		if first.Running != nil || first.Terminated != nil && first.Terminated.ExitCode == 0 {
			s.fatal("the first container of a pod with the claim of pods.impossible has started")
		}
		return errors.New("it has not started yet")
	})
}

func caseNewSandbox(ctx context.Context, s *suite) {
	s.canRunPods()
	ordinary := s.ordinary(ctx)
	p := s.startPod(ctx, podOptions{claims: []int{0}, command: serveOn(), restart: true})
	before := s.running(ctx, p)
	pid, err := probe.SandboxProcess("/proc", string(p.UID))
	if err != nil {
		s.skip("needs the pause process of the pod: run the command on the node, with a container runtime that starts "+
			"one: %v", err)
	}
	s.must(syscall.Kill(pid, syscall.SIGKILL), "kill the pause process %d", pid)
	s.waitForPod(ctx, p, "no new sandbox has its containers", func(now *corev1.Pod) bool {
		another := func(name string) bool {
			return containerStatus(now, name).ContainerID != containerStatus(before, name).ContainerID
		}
		return another(firstContainer) && another(mainContainer) && containerStatus(now, mainContainer).State.Running != nil
	})
	if v := s.view(ctx, p, firstContainer); len(added(v, ordinary)) == 0 {
		s.fatal("in a new sandbox, the pod has only the interfaces %v, like a pod without claims",
			interfaceNames(v.Interfaces))
	}
}

func caseInterfaceConfigured(ctx context.Context, s *suite) {
	s.canRunPods()
	want := s.config.Pods.Configured
	if want == nil {
		s.skip("needs a claim with a configuration, and its effect in the pod: set pods.configured")
	}
	p := s.startPod(ctx, podOptions{specs: []resourceapi.ResourceClaimSpec{want.Claim},
		command: []string{"routes", want.Interface}})
	v := s.view(ctx, p, firstContainer)
	routes := strings.Split(s.containerEnds(ctx, p, mainContainer), "\n")
	s.must(want.applied(v.Interfaces, routes), "a pod with the claim of pods.configured")
}

// applied returns an error that describes how the interfaces and the routes of a pod differ from
// the configured ones, or nil.
func (c *Configured) applied(interfaces []probe.Interface, routes []string) error {
	i := slices.IndexFunc(interfaces, func(p probe.Interface) bool { return p.Name == c.Interface })
	if i < 0 {
		return fmt.Errorf("it has the interfaces %v, and not %s", interfaceNames(interfaces), c.Interface)
	}
	in := interfaces[i]
	if c.MTU != 0 && in.MTU != c.MTU {
		return fmt.Errorf("interface %s has the MTU %d, want %d", in.Name, in.MTU, c.MTU)
	}
	got, want := in.Global(), slices.Sorted(slices.Values(c.Addresses))
	if c.Addresses != nil && !slices.Equal(got, want) {
		return fmt.Errorf("interface %s has the addresses %v, want %v", in.Name, got, want)
	}
	for _, r := range c.Routes {
		if !slices.Contains(routes, r) {
			return fmt.Errorf("interface %s has the routes %q, without %q", in.Name, routes, r)
		}
	}
	return nil
}

// nodeView returns the view of the node's network namespace.
func (s *suite) nodeView(ctx context.Context) probe.View {
	v := s.view(ctx, s.startPod(ctx, podOptions{hostNetwork: true}), firstContainer)
	s.endPods(ctx)
	return v
}

// usedAndReturned runs a pod with a claim, and waits until the node has all interfaces of the view
// before again, unchanged. It returns the view of the node.
func (s *suite) usedAndReturned(ctx context.Context, before probe.View) (after probe.View) {
	s.view(ctx, s.startPod(ctx, podOptions{claims: []int{0}}), firstContainer)
	s.endPods(ctx)
	var err error
	for range 2 { // the interface may return shortly after the pod has ended
		after = s.nodeView(ctx)
		if err = returned(before, after); err == nil {
			return after
		}
	}
	s.must(err, "after the end of a pod")
	return after
}

// expectRoomReturned returns an error if an interface that the node had before is missing or has changed.
func returned(before, after probe.View) error {
	for _, b := range before.Interfaces {
		i := slices.IndexFunc(after.Interfaces, func(a probe.Interface) bool { return a.Name == b.Name })
		if i < 0 {
			return fmt.Errorf("the node has no interface %s any more", b.Name)
		}
		if was, is := state(b), state(after.Interfaces[i]); was != is {
			return fmt.Errorf("interface %s of the node was %s, and is %s", b.Name, was, is)
		}
	}
	return nil
}

// state returns the properties that must not change; the kernel can choose other link-local addresses.
func state(i probe.Interface) string {
	return fmt.Sprintf("up=%t mtu=%d address=%s addresses=%v", i.Up, i.MTU, i.Address, i.Global())
}

func caseInterfaceStatus(ctx context.Context, s *suite) {
	s.canRunPods()
	if !slices.Contains(s.config.Features, "Status") {
		s.skip("the driver does not declare the feature Status")
	}
	p := s.startPod(ctx, podOptions{claims: []int{0}, command: serveOn("lo")})
	v := s.view(ctx, p, firstContainer)
	s.running(ctx, p)
	ctx, cancel := context.WithTimeout(ctx, s.config.StartTimeout.Duration)
	defer cancel()
	s.must(poll(ctx, func() error {
		reported := false
		for _, d := range s.own(s.claimsOf(context.WithoutCancel(ctx), p)[0]) {
			if d.NetworkData == nil {
				continue
			}
			reported = true
			if err := sameNetwork(*d.NetworkData, v.Interfaces); err != nil {
				return fmt.Errorf("device %s: %w", d.Device, err)
			}
		}
		if !reported {
			return errors.New("no entry of the driver has network data")
		}
		return nil
	}), "the status of the claim of a pod that runs")
}

func caseScheduled(ctx context.Context, s *suite) {
	s.canRunPods()
	p := s.startPod(ctx, podOptions{claims: []int{0}, anyNode: true})
	// A driver may publish an interface that another pod had only after the pod was created, and may
	// stop publishing it when it is in the pod.
	var published []resourceapi.ResourceSlice
	now := s.waitForPod(ctx, p, "the pod has no node", func(now *corev1.Pod) bool {
		published = append(published, s.slices(ctx)...)
		return now.Spec.NodeName != ""
	})
	s.view(ctx, p, firstContainer)
	claim := s.claimsOf(ctx, p)[0]
	if claim.Status.Allocation == nil {
		s.fatal("the pod runs on node %s, and its claim is not allocated", now.Spec.NodeName)
	}
	for _, r := range claim.Status.Allocation.Devices.Results {
		if r.Driver != s.config.Driver {
			continue
		}
		if err := offered(published, r, now.Spec.NodeName); err != nil {
			s.fatal("the pod runs on node %s: %v", now.Spec.NodeName, err)
		}
	}
}

// offered returns an error unless a device of an allocation is published for a node. It leaves
// the node selectors of slices to the scheduler.
func offered(all []resourceapi.ResourceSlice, r resourceapi.DeviceRequestAllocationResult, node string) error {
	for _, slice := range all {
		for _, d := range slice.Spec.Devices {
			if slice.Spec.Pool.Name != r.Pool || d.Name != r.Device {
				continue
			}
			if own := ptr.Deref(slice.Spec.NodeName, node); own != node {
				return fmt.Errorf("device %s of pool %s is published for node %s", r.Device, r.Pool, own)
			}
			return nil
		}
	}
	return fmt.Errorf("device %s of pool %s is not published", r.Device, r.Pool)
}

// serveOn returns the command of a container that serves connections on all interfaces but these.
func serveOn(except ...string) []string { return append([]string{"serve", probePort}, except...) }

func caseInterfacesConnected(ctx context.Context, s *suite) {
	s.canRunPods()
	ordinary := s.ordinary(ctx)
	except := interfaceNames(ordinary.Interfaces)
	server := s.startPod(ctx, podOptions{claims: []int{0}, command: serveOn(except...)})
	v := s.view(ctx, server, firstContainer)
	addresses := addressesOf(added(v, ordinary))
	if len(addresses) == 0 {
		s.fatal("the interfaces of a pod with a claim have no address: %v", interfaceNames(added(v, ordinary)))
	}
	s.running(ctx, server)
	client := s.startPod(ctx, podOptions{claims: []int{1},
		command: append([]string{"dial", probePort, strings.Join(addresses, ",")}, except...)})
	s.containerEnds(ctx, client, mainContainer)
}

// addressesOf returns the addresses of interfaces, the global ones first.
func addressesOf(interfaces []probe.Interface) (addresses []string) {
	for _, scope := range []string{"global", "link"} {
		for _, i := range interfaces {
			for _, a := range i.Addresses {
				if a.Scope == scope {
					addresses = append(addresses, a.Local)
				}
			}
		}
	}
	return addresses
}
