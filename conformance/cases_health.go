// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthalpha "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
)

// defaultHealthTimeout is the kubelet's timeout for a device that states none.
const defaultHealthTimeout = 30 * time.Second

// watchHealth opens a stream of the driver's health.
func (s *suite) watchHealth(ctx context.Context) health.DRAResourceHealth_NodeWatchResourcesClient {
	stream, err := s.main().health.NodeWatchResources(ctx, &health.NodeWatchResourcesRequest{})
	s.must(err, "NodeWatchResources")
	return stream
}

// next returns the next message of a stream.
func (s *suite) next(stream health.DRAResourceHealth_NodeWatchResourcesClient) []*health.DeviceHealth {
	message, err := stream.Recv()
	s.must(err, "NodeWatchResources")
	return message.GetDevices()
}

// firstHealth returns the first message of a stream, which ends with cancel.
func (s *suite) firstHealth(ctx context.Context) (devices []*health.DeviceHealth) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return s.next(s.watchHealth(ctx))
}

func healthKey(d *health.DeviceHealth) string {
	return deviceKey(d.GetDevice().GetPoolName(), d.GetDevice().GetDeviceName(), "")
}

func caseHealthFirst(ctx context.Context, s *suite) {
	devices := s.devices(ctx)
	s.prepared(ctx) // a device that is in use counts too
	reported := map[string]bool{}
	for _, d := range s.firstHealth(ctx) {
		reported[healthKey(d)] = true
	}
	for _, d := range devices {
		// HEALTH-06 reports wrong names; here the number counts.
		if !d.anyNode && len(reported) < len(devices)-others(devices) {
			s.fatal("the first message has %d devices, without %s; the driver publishes %d",
				len(reported), deviceKey(d.pool, d.Name, ""), len(devices))
		}
	}
}

// others returns the number of devices that are not specific to one node.
func others(devices []device) (n int) {
	for _, d := range devices {
		if d.anyNode {
			n++
		}
	}
	return n
}

func caseHealthRepeats(ctx context.Context, s *suite) {
	s.restart = true
	stream := s.watchHealth(ctx)
	timeout := defaultHealthTimeout
	for _, d := range s.next(stream) {
		if t := time.Duration(d.HealthCheckTimeoutSeconds) * time.Second; t > 0 {
			timeout = min(timeout, t)
		}
	}
	received := make(chan error, 1)
	go func() {
		_, err := stream.Recv()
		received <- err
	}()
	select {
	case err := <-received:
		s.must(err, "NodeWatchResources")
	case <-time.After(timeout):
		s.fatal("no message in %v, after which the kubelet takes the health as unknown", timeout)
	}
}

func caseHealthChange(ctx context.Context, s *suite) {
	hooks := s.config.Hooks
	if len(hooks.RemoveDevice) == 0 {
		s.skip("needs a change of the node: set hooks.removeDevice")
	}
	s.restart = true
	name := s.devices(ctx)[0].Name
	stream := s.watchHealth(ctx)
	s.next(stream)
	_, err := s.hook(ctx, hooks.RemoveDevice, name)
	s.must(err, "remove device %s", name)
	s.awaitHealth(stream, name, false, "removed")
	if len(hooks.RestoreDevice) > 0 {
		_, err := s.hook(context.WithoutCancel(ctx), hooks.RestoreDevice, name)
		s.must(err, "restore device %s", name)
		s.awaitHealth(stream, name, true, "restored")
	}
}

// awaitHealth ends the case unless the driver soon reports a device as healthy, or as no longer healthy.
func (s *suite) awaitHealth(
	stream health.DRAResourceHealth_NodeWatchResourcesClient, name string, want bool, what string,
) {
	const limit = 10 * time.Second
	changed := make(chan error, 1)
	go func() {
		for {
			message, err := stream.Recv()
			if err != nil {
				changed <- err
				return
			}
			healthy := false
			for _, d := range message.GetDevices() {
				healthy = healthy || d.GetDevice().GetDeviceName() == name && d.Health == health.HealthStatus_HEALTHY
			}
			if healthy == want {
				changed <- nil
				return
			}
		}
	}()
	select {
	case err := <-changed:
		s.must(err, "NodeWatchResources")
	case <-time.After(limit):
		s.fatal("%v after device %s was %s, the driver still reports its former health", limit, name, what)
	}
}

func caseHealthCancel(ctx context.Context, s *suite) {
	for range 3 {
		first, cancelFirst := context.WithCancel(ctx)
		second, cancelSecond := context.WithTimeout(ctx, 5*time.Second)
		a, b := s.watchHealth(first), s.watchHealth(second)
		s.next(a)
		s.next(b)
		cancelFirst()
		if _, err := a.Recv(); status.Code(err) != codes.Canceled {
			// A message may have been under way.
			_, err = a.Recv()
			if status.Code(err) != codes.Canceled {
				s.fatal("a canceled stream ends with %v", err)
			}
		}
		s.remainsOpen(b)
		cancelSecond()
	}
	s.firstHealth(ctx)
}

// remainsOpen ends the case if the driver ends a stream within a short time.
func (s *suite) remainsOpen(stream health.DRAResourceHealth_NodeWatchResourcesClient) {
	ended := make(chan error, 1)
	go func() {
		_, err := stream.Recv()
		ended <- err
	}()
	select {
	case err := <-ended:
		if err != nil {
			s.fatal("the end of one stream ended another one: %v", err)
		}
	case <-time.After(interrupted):
	}
}

// caseHealthValues looks at the first messages of a stream, and at the first one of another.
func caseHealthValues(ctx context.Context, s *suite) {
	const messages = 3
	first, cancel := context.WithTimeout(ctx, defaultHealthTimeout+5*time.Second)
	defer cancel()
	last := map[string]int64{}
	check := func(devices []*health.DeviceHealth) {
		now := time.Now().Add(time.Minute).Unix()
		for _, d := range devices {
			key := healthKey(d)
			if health.HealthStatus_name[int32(d.Health)] == "" || len(d.Message) > 1024 || d.LastUpdatedTime > now {
				s.fatal("device %s has the health %v, a message of %d characters (the limit is 1024), and the time %d",
					key, d.Health, len(d.Message), d.LastUpdatedTime)
			}
			if d.LastUpdatedTime < last[key] {
				s.fatal("the time of device %s goes back by %d s to %d", key, last[key]-d.LastUpdatedTime, d.LastUpdatedTime)
			}
			last[key] = d.LastUpdatedTime
		}
	}
	stream := s.watchHealth(first)
	check(s.next(stream))
	for range messages - 1 {
		message, err := stream.Recv()
		if status.Code(err) == codes.DeadlineExceeded {
			break // HEALTH-02 reports a driver that does not repeat
		}
		s.must(err, "NodeWatchResources")
		check(message.GetDevices())
	}
	cancel()
	check(s.firstHealth(ctx))
}

func caseHealthNames(ctx context.Context, s *suite) {
	known := map[string]bool{}
	s.devices(ctx) // waits until they are published
	for _, slice := range s.slices(ctx) {
		for _, d := range slice.Spec.Devices {
			known[deviceKey(slice.Spec.Pool.Name, d.Name, "")] = true
		}
	}
	for _, d := range s.firstHealth(ctx) {
		if !known[healthKey(d)] {
			s.fatal("the driver reports the health of %s, which it does not publish", healthKey(d))
		}
	}
}

func caseHealthUnimplemented(ctx context.Context, s *suite) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	stream := s.watchHealth(ctx)
	if _, err := stream.Recv(); status.Code(err) != codes.Unimplemented {
		s.fatal("the driver does not declare the feature Health: NodeWatchResources must end with Unimplemented at once, "+
			"and ends with %v",
			errors.Join(err))
	}
}

func caseHealthVersions(ctx context.Context, s *suite) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	s.firstHealth(ctx)
	client := healthalpha.NewDRAResourceHealthClient(s.main().conn)
	stream, err := client.NodeWatchResources(ctx, &healthalpha.NodeWatchResourcesRequest{})
	s.must(err, "v1alpha1.DRAResourceHealth")
	_, err = stream.Recv()
	s.must(err, "v1alpha1.DRAResourceHealth")
}
