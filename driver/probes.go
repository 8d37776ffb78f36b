// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
)

// Health services (grpc.health.v1) of a plugin, for the probes of its container.
// During a rolling update the old plugin must not stop before the new one is
// ready. Therefore each plugin answers on a unix socket of its own: both would
// share the ports of the node.
const (
	// Startup reports whether the kubelet has registered the plugin. The kubelet
	// runs no liveness probe before, so this must not require more.
	Startup = "started"
	// Readiness reports whether the plugin can prepare and attach shares.
	Readiness = ""
	// Liveness reports whether hooks reach the plugin.
	Liveness = "live"
)

func healthDir(runDir string) string { return filepath.Join(runDir, "health") }

func healthSocket(runDir, instance string) string {
	return filepath.Join(healthDir(runDir), instance+".sock")
}

// CheckHealth asks a plugin instance on this node for the health of a service.
// A probe calls it from another process.
func CheckHealth(ctx context.Context, runDir, instance, service string) error {
	conn, err := grpc.NewClient(
		"unix://"+healthSocket(runDir, instance),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
	)
	if err != nil {
		return err
	}
	defer conn.Close()
	response, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: service})
	if err != nil {
		return fmt.Errorf("plugin %s: %w", instance, err)
	}
	if response.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		return fmt.Errorf("plugin %s: %s", instance, response.Status)
	}
	return nil
}

// probes answers health checks. It determines each answer when it is asked.
type probes struct {
	grpc_health_v1.UnimplementedHealthServer
	driver     *Driver
	registered atomic.Bool
}

// Check implements grpc_health_v1.HealthServer.
func (p *probes) Check(
	ctx context.Context,
	r *grpc_health_v1.HealthCheckRequest,
) (*grpc_health_v1.HealthCheckResponse, error) {
	var err error
	switch r.Service {
	case Startup:
		err = p.started()
	case Liveness:
		err = p.live()
	case Readiness:
		err = p.ready()
	default:
		return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVICE_UNKNOWN}, nil
	}
	if err != nil { // as an error, because the kubelet shows its text in the pod's events
		klog.FromContext(ctx).Info("Health check failed", "service", r.Service, "reason", err.Error())
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}, nil
}

// live returns an error if hooks cannot reach the plugin, because its socket was
// removed. Restarting the plugin creates a new one.
func (p *probes) live() error {
	if err := attach.Ping(p.driver.options.RunDir, p.driver.options.Instance); err != nil {
		return fmt.Errorf("hooks cannot reach the plugin: %w", err)
	}
	return nil
}

func (p *probes) started() error {
	if !p.registered.Load() {
		return errors.New("the kubelet has not registered the plugin")
	}
	return nil
}

// ready returns the reason why the plugin cannot give a pod its share now.
func (p *probes) ready() error {
	if err := errors.Join(p.started(), p.live()); err != nil {
		return err
	}
	for _, k := range p.driver.options.Kinds {
		checker, ok := k.(ReadinessChecker)
		if !ok {
			continue
		}
		if err := checker.Ready(); err != nil {
			return fmt.Errorf("%s: %w", k.Name(), err)
		}
	}
	return nil
}

// serve answers health checks until ctx ends.
func (p *probes) serve(ctx context.Context) error {
	path := healthSocket(p.driver.options.RunDir, p.driver.options.Instance)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	// A killed process of this pod may have left the socket.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("serve health checks: %w", err)
	}
	server := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(server, p)
	stop := context.AfterFunc(ctx, server.Stop)
	defer stop()
	return server.Serve(listener)
}

// registrationInterval is the interval at which the plugin asks the helper for
// its registration status, for which the helper has no event.
const registrationInterval = 50 * time.Millisecond

// awaitRegistration waits until the kubelet has registered the plugin.
func (p *probes) awaitRegistration(ctx context.Context) {
	tick := time.NewTicker(registrationInterval)
	defer tick.Stop()
	for {
		if s := p.driver.helper.RegistrationStatus(); s != nil && s.PluginRegistered {
			p.registered.Store(true)
			klog.FromContext(ctx).Info("Registered with the kubelet")
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
