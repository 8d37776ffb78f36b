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
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
)

// Health services (grpc.health.v1) of a plugin. During a rolling update the old
// plugin must not end before the new one can do its work, so each answers for
// itself, on a socket of its own: ports of the node they would have in common.
const (
	// Startup: the kubelet has registered the plugin. Until then it is not asked
	// whether it lives, so no more than that belongs here.
	Startup = "started"
	// Readiness: and it can attach.
	Readiness = ""
	// Liveness: hooks reach the plugin.
	Liveness = "live"
)

func healthDir(runDir string) string { return filepath.Join(runDir, "health") }

func healthSocket(runDir, instance string) string {
	return filepath.Join(healthDir(runDir), instance+".sock")
}

// CheckHealth asks the plugin instance on this node about a service. It is for
// another process, a probe.
func CheckHealth(ctx context.Context, runDir, instance, service string) error {
	conn, err := grpc.NewClient("unix://"+healthSocket(runDir, instance), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	answer, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: service})
	if err != nil {
		return fmt.Errorf("plugin %s: %w", instance, err)
	}
	if answer.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		return fmt.Errorf("plugin %s: %s", instance, answer.Status)
	}
	return nil
}

// health answers what is so at the moment of asking.
type health struct {
	grpc_health_v1.UnimplementedHealthServer
	driver     *Driver
	registered atomic.Bool
}

// Check implements grpc_health_v1.HealthServer.
func (h *health) Check(ctx context.Context, r *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	var err error
	switch r.Service {
	case Startup:
		err = h.started()
	case Liveness:
		err = h.servesHooks()
	case Readiness:
		err = h.ready()
	default:
		return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVICE_UNKNOWN}, nil
	}
	if err != nil { // with words: the kubelet shows them in the pod's events
		klog.FromContext(ctx).Info("Not healthy", "service", r.Service, "reason", err.Error())
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}, nil
}

// servesHooks tells why hooks cannot reach the plugin: somebody may have removed
// its socket. A plugin that starts again makes a new one.
func (h *health) servesHooks() error {
	if err := attach.Ping(h.driver.options.RunDir, h.driver.options.Instance); err != nil {
		return fmt.Errorf("hooks are not served: %w", err)
	}
	return nil
}

func (h *health) started() error {
	if !h.registered.Load() {
		return errors.New("the kubelet has not registered the plugin")
	}
	return nil
}

// ready tells why a pod could not be given its share now; nil if it could.
func (h *health) ready() error {
	if err := errors.Join(h.started(), h.servesHooks()); err != nil {
		return err
	}
	for _, k := range h.driver.options.Kinds {
		if err := k.Ready(); err != nil {
			return fmt.Errorf("%s: %w", k.Name(), err)
		}
	}
	return nil
}

// serveHealth answers until ctx ends.
func (d *Driver) serveHealth(ctx context.Context, h *health) error {
	path := healthSocket(d.options.RunDir, d.options.Instance)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err // left by a killed process of this pod
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("serve health: %w", err)
	}
	server := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(server, h)
	stop := context.AfterFunc(ctx, server.Stop)
	defer stop()
	return server.Serve(listener)
}

// askRegistered is how often the helper is asked whether the kubelet has
// registered the plugin: it tells nobody by itself.
const askRegistered = 50 * time.Millisecond

// awaitRegistration notes it.
func (h *health) awaitRegistration(ctx context.Context, helper *kubeletplugin.Helper) {
	tick := time.NewTicker(askRegistered)
	defer tick.Stop()
	for {
		if s := helper.RegistrationStatus(); s != nil && s.PluginRegistered {
			h.registered.Store(true)
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
