// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"context"
	"errors"
	"log"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthalpha "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	beta "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

func (d *Driver) endpoint() string { return filepath.Join(d.PluginDir, "dra-"+d.PodUID+".sock") }

func (d *Driver) registrationSocket() string {
	name := d.Name + "-" + d.PodUID[:8] + "-reg.sock"
	switch {
	case d.fault("REG-01"):
		name = "." + name
	case d.fault("REG-10"):
		const limit = 107
		name = strings.Repeat("x", max(0, limit-len(d.RegistryDir)-1-len(name))) + name
	}
	return filepath.Join(d.RegistryDir, name)
}

// listen removes a stale socket and opens a new one.
func (d *Driver) listen(path string) (net.Listener, error) {
	if !d.fault("REG-06") {
		_ = os.Remove(path) // it does not exist at a first start
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(!d.fault("REG-12"))
	return l, nil
}

// serve opens the sockets, and returns the function that closes them.
func (d *Driver) serve() (stop func(), err error) {
	if d.fault("UPG-04") {
		d.removeSockets()
	}
	plugin := grpc.NewServer()
	dra.RegisterDRAPluginServer(plugin, server{Driver: d})
	if !d.fault("REG-03/beta") {
		beta.RegisterDRAPluginServer(plugin, beta.V1ServerWrapper{DRAPluginServer: server{Driver: d}})
	}
	if !d.NoHealth || d.fault("HEALTH-07") {
		health.RegisterDRAResourceHealthServer(plugin, healthServer{Driver: d})
		healthalpha.RegisterDRAResourceHealthServer(plugin, health.V1ServerWrapper{Server: healthServer{Driver: d}})
	}
	register := grpc.NewServer()
	registration.RegisterRegistrationServer(register, registrar{Driver: d})
	open := func(s *grpc.Server, path string) error {
		l, err := d.listen(path)
		if err != nil {
			return err
		}
		go func() {
			if err := s.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				log.Printf("Failed to serve %s: %v", path, err)
			}
		}()
		return nil
	}
	if d.fault("REG-05") {
		time.AfterFunc(slow, func() { _ = open(plugin, d.endpoint()) })
	} else if err := open(plugin, d.endpoint()); err != nil {
		return nil, err
	}
	if err := open(register, d.registrationSocket()); err != nil {
		return nil, err
	}
	return func() {
		register.Stop()
		plugin.Stop()
		if d.fault("UPG-03") {
			d.removeSockets()
		}
		if d.fault("REG-12/foreign") {
			d.removeForeignSockets()
		}
	}, nil
}

// removeForeignSockets removes the registration sockets of other drivers.
func (d *Driver) removeForeignSockets() {
	paths, _ := filepath.Glob(filepath.Join(d.RegistryDir, "*.sock")) // the pattern is valid
	for _, path := range paths {
		if !strings.HasPrefix(filepath.Base(path), d.Name) {
			_ = os.Remove(path)
		}
	}
}

// removeSockets removes the registration sockets of all instances.
func (d *Driver) removeSockets() {
	paths, _ := filepath.Glob(filepath.Join(d.RegistryDir, "*.sock")) // the pattern is valid
	for _, path := range paths {
		_ = os.Remove(path)
	}
}

// server implements dra.DRAPluginServer.
type server struct {
	*Driver
	dra.UnsafeDRAPluginServer
}

// registrar implements registration.RegistrationServer.
type registrar struct {
	*Driver
	registration.UnsafeRegistrationServer
}

// GetInfo implements registration.RegistrationServer.
func (r registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	info := &registration.PluginInfo{
		Type: registration.DRAPlugin, Name: r.Name, Endpoint: r.endpoint(),
		SupportedVersions: []string{dra.DRAPluginService, beta.DRAPluginService},
	}
	if !r.NoHealth {
		info.SupportedVersions = append(info.SupportedVersions, health.DRAResourceHealthService)
	}
	r.mu.Lock()
	r.infos++
	infos := r.infos
	r.mu.Unlock()
	marker := filepath.Join(r.StateDir, "registered")
	_, err := os.Stat(marker)
	switch {
	case r.fault("REG-02"):
		info.Type = "ResourcePlugin"
	case r.fault("REG-03"):
		info.SupportedVersions = []string{"1.0.0"}
	case r.fault("REG-07") && infos > 1:
		return nil, errors.New("the driver is registered")
	case r.fault("REG-08") && err == nil && infos == 1:
		slices.Reverse(info.SupportedVersions)
	}
	return info, os.WriteFile(marker, nil, 0o600)
}

// NotifyRegistrationStatus implements registration.RegistrationServer.
func (r registrar) NotifyRegistrationStatus(
	_ context.Context, s *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	if !s.PluginRegistered {
		log.Printf("Failed to register: %s", s.Error)
	}
	return &registration.RegistrationStatusResponse{}, nil
}

// healthServer implements health.DRAResourceHealthServer.
type healthServer struct {
	*Driver
	health.UnsafeDRAResourceHealthServer
}

// NodeWatchResources implements health.DRAResourceHealthServer.
func (h healthServer) NodeWatchResources(
	_ *health.NodeWatchResourcesRequest, stream health.DRAResourceHealth_NodeWatchResourcesServer,
) error {
	ctx := stream.Context()
	ended := make(chan struct{})
	h.mu.Lock()
	h.streams++
	if h.fault("HEALTH-04/others") {
		h.watchers = append(h.watchers, ended)
	}
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.streams--
		if ctx.Err() != nil { // the client ended it
			for _, w := range h.watchers {
				close(w)
			}
			h.watchers = nil
		}
	}()
	switch {
	case h.fault("HEALTH-07"):
		<-ctx.Done()
		return nil
	case h.fault("HEALTH-04") && !h.alone(ctx):
		return status.Error(codes.ResourceExhausted, "another stream is open")
	}
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for first := true; ; first = false {
		if first || !h.fault("HEALTH-02") {
			if err := stream.Send(&health.NodeWatchResourcesResponse{Devices: h.health(first)}); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ended:
			return nil
		case <-ticker.C:
		}
	}
}

// alone waits until no other stream is open, and reports whether it is so after a while: the
// server learns of the end of a stream later than its client.
func (h healthServer) alone(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, slow)
	defer cancel()
	for {
		h.mu.Lock()
		streams := h.streams
		h.mu.Unlock()
		if streams == 1 {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(time.Millisecond):
		}
	}
}

// inUse reports whether a claim has a device.
func (d *Driver) inUse(device string) bool {
	return slices.ContainsFunc(d.records(), func(r *record) bool {
		return slices.ContainsFunc(r.Devices, func(p prepared) bool { return p.Device == device })
	})
}

func (h healthServer) health(first bool) (all []*health.DeviceHealth) {
	h.mu.Lock()
	h.sent++
	sent := h.sent
	h.mu.Unlock()
	for _, x := range h.all() {
		if h.fault("HEALTH-01/used") && h.inUse(x.Name) {
			continue
		}
		d := &health.DeviceHealth{
			Device: &health.DeviceIdentifier{PoolName: h.pool(), DeviceName: x.Name}, Health: health.HealthStatus_HEALTHY,
			LastUpdatedTime: time.Now().Unix(), HealthCheckTimeoutSeconds: 1,
		}
		gone := h.removed(x.Name)
		if h.fault("HEALTH-03/back") {
			gone = h.wasRemoved(x.Name)
		}
		if gone && !h.fault("HEALTH-03") {
			d.Health, d.Message = health.HealthStatus_UNHEALTHY, "the device was removed"
		}
		switch {
		case h.fault("HEALTH-05/time"):
			d.LastUpdatedTime -= int64(10 * sent)
		case h.fault("HEALTH-05"):
			d.Message = strings.Repeat("x", 2000)
		case h.fault("HEALTH-06"):
			all = append(all, &health.DeviceHealth{
				Device: &health.DeviceIdentifier{PoolName: h.pool(), DeviceName: "x-" + x.Name}, Health: d.Health,
				LastUpdatedTime: d.LastUpdatedTime, HealthCheckTimeoutSeconds: 1,
			})
		}
		all = append(all, d)
	}
	if h.fault("HEALTH-01") && first {
		return all[:1]
	}
	return all
}
