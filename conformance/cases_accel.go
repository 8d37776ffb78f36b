// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dra-shared/dra-driver-shared/conformance/internal/probe"
)

// defaultDevices are the device nodes that the OCI runtime specification gives to every
// container ("Default Devices" in config-linux.md).
var defaultDevices = []string{ //nolint:gochecknoglobals // constant
	"/dev/console", "/dev/full", "/dev/null", "/dev/ptmx", "/dev/random", "/dev/tty", "/dev/urandom", "/dev/zero",
}

// gain holds the devices, mounts, and variables of a container that a container of a pod without
// claims does not have.
type gain struct {
	devices     []probe.Node
	mounts, env []string
}

func (g gain) empty() bool { return len(g.devices)+len(g.mounts)+len(g.env) == 0 }

// gained returns what a view has in addition to an ordinary one.
func gained(v, ordinary probe.View) (g gain) {
	for _, d := range v.Devices {
		if !slices.Contains(ordinary.Devices, d) {
			g.devices = append(g.devices, d)
		}
	}
	g.mounts, g.env = without(v.Mounts, ordinary.Mounts), without(v.Env, ordinary.Env)
	g.env = slices.DeleteFunc(g.env, func(e string) bool { return strings.HasPrefix(e, "HOSTNAME=") })
	return g
}

// without returns the elements of a list that are not in another.
func without[T comparable](list, other []T) []T {
	return slices.DeleteFunc(slices.Clone(list), func(e T) bool { return slices.Contains(other, e) })
}

// and returns the intersection of two gains.
func (g gain) and(other gain) gain {
	return gain{
		devices: without(g.devices, without(g.devices, other.devices)),
		mounts:  without(g.mounts, without(g.mounts, other.mounts)),
		env:     without(g.env, without(g.env, other.env)),
	}
}

// withClaim starts a pod with a claim, and returns it with the gain of its first container.
// It ends the case if there is none.
func (s *suite) withClaim(ctx context.Context, ordinary probe.View, claim int) (*corev1.Pod, gain) {
	p := s.startPod(ctx, podOptions{claims: []int{claim}, command: serveOn()})
	g := gained(s.view(ctx, p, firstContainer), ordinary)
	if g.empty() {
		s.fatal("a container that references a claim has the same device nodes, mounts, and variables as a container of " +
			"a pod without claims")
	}
	return p, g
}

func caseAccelerator(ctx context.Context, s *suite) {
	s.canRunPods()
	s.withClaim(ctx, s.ordinary(ctx), 0)
}

func caseAcceleratorOthers(ctx context.Context, s *suite) {
	s.canRunPods()
	ordinary := s.ordinary(ctx)
	for _, d := range ordinary.Devices {
		if !slices.Contains(defaultDevices, d.Path) {
			s.fatal("a container of a pod without claims has the device node %s (%s)", d.Path, d.Number)
		}
	}
	_, g := s.withClaim(ctx, ordinary, 0)
	if len(g.devices) == 0 {
		return // there is no device node to use
	}
	command := []string{"open"}
	for _, d := range g.devices {
		command = append(command, d.Number)
	}
	s.containerEnds(ctx, s.startPod(ctx, podOptions{command: command}), mainContainer)
}

func caseAcceleratorSamePod(ctx context.Context, s *suite) {
	s.canRunPods()
	ordinary := s.ordinary(ctx)
	p, g := s.withClaim(ctx, ordinary, 0)
	if both := g.and(gained(s.view(ctx, p, secondContainer), ordinary)); !both.empty() {
		s.fatal("a container that references no claim has what the claim gives to another container of the pod: %+v", both)
	}
}

func caseAcceleratorApart(ctx context.Context, s *suite) {
	s.canRunPods()
	ordinary := s.ordinary(ctx)
	first, a := s.withClaim(ctx, ordinary, 0)
	second, b := s.withClaim(ctx, ordinary, 1)
	one, two := s.claimsOf(ctx, first)[0].Status.Allocation, s.claimsOf(ctx, second)[0].Status.Allocation
	if one == nil || two == nil {
		s.fatal("the pods run, and their claims are not allocated")
	}
	for _, r := range one.Devices.Results {
		for _, other := range two.Devices.Results {
			if deviceKey(r.Pool, r.Device, "") == deviceKey(other.Pool, other.Device, "") {
				s.skip("the claims of two pods got the same device %s: set two pods.claims for different devices", r.Device)
			}
		}
	}
	// Device nodes that all accelerators use may be the same.
	if len(a.devices) > 0 && len(without(a.devices, b.devices)) == 0 ||
		len(b.devices) > 0 && len(without(b.devices, a.devices)) == 0 {
		s.fatal("two pods with different devices have the device nodes %v and %v: one contains the other", a.devices,
			b.devices)
	}
	if same := a.and(b); len(same.env)+len(same.mounts)+len(same.devices) == len(a.env)+len(a.mounts)+len(a.devices) {
		s.fatal("two pods with different devices have the same: %+v", a)
	}
}
