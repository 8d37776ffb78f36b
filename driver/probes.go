// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/internal/probe"
)

// probes answers the probes of the plugin's container. It runs each check when a probe asks for it.
type probes struct {
	options     Options
	kinds       kinds
	hook        *hookInstaller
	helper      *helper
	publication *publication
	takeover    *takeover
	registered  atomic.Bool
}

func (d *Driver) newProbes() *probes {
	return &probes{
		options:     d.options,
		kinds:       d.kinds,
		hook:        d.hook,
		helper:      d.helper,
		publication: &d.publisher.publication,
		takeover:    d.takeover,
	}
}

// check runs a check of package probe.
func (p *probes) check(ctx context.Context, name string) (err error) {
	switch name {
	case probe.Started:
		err = p.started()
	case probe.Alive:
		err = p.live()
	case probe.Ready:
		err = p.ready()
	default:
		err = fmt.Errorf("unknown check %q", name)
	}
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Probe failed", "check", name, "err", err)
	}
	return err
}

// live returns an error if restarting the plugin's container helps: if a removed socket keeps hooks or the kubelet
// from reaching the plugin, or a node directory was removed. A plugin that waits for its predecessor does not have
// sockets.
func (p *probes) live() error {
	if p.takeover.isWaiting() {
		return nil
	}
	if err := p.checkDirectories(); err != nil {
		return err
	}
	if err := attach.Ping(p.options.RunDir, p.options.Instance); err != nil {
		return fmt.Errorf("hooks cannot reach the plugin: %w", err)
	}
	if !p.helper.isStarted() { // it creates its sockets later
		return nil
	}
	for _, socket := range p.helperSockets() {
		if err := pingSocket(socket); err != nil {
			return fmt.Errorf("the kubelet cannot reach the plugin: %w: did another program remove the socket?", err)
		}
	}
	return nil
}

// checkDirectories returns an error if a directory that the plugin writes to was removed on the node. The mount in
// the plugin's container then still points to the removed directory, where files cannot be created, even if the node
// has a new directory of that name. Directories with sockets do not need a check.
func (p *probes) checkDirectories() error {
	o := p.options
	directories := []string{o.CDIDir}
	if o.Installation != nil {
		directories = append(directories, filepath.Dir(o.Hook))
	}
	for _, directory := range directories {
		var stat unix.Stat_t
		if err := unix.Stat(directory, &stat); err == nil && stat.Nlink == 0 {
			return fmt.Errorf("another program removed the directory %s of the node; the plugin restarts to use the new one",
				directory)
		}
	}
	return nil
}

// helperSockets returns the paths of the helper's sockets: for the registration, which the kubelet ends when the
// socket is removed, and for the kubelet's calls. kubeletplugin chooses the names.
func (p *probes) helperSockets() []string {
	o := p.options
	registration := o.DriverName + "-reg.sock"
	if o.RollingUpdate {
		registration = kubeletplugin.RollingUpdateRegistrarSocketFile(o.RegistryDir, o.DriverName, types.UID(o.Instance))
	}
	return []string{filepath.Join(o.RegistryDir, registration), o.kubeletSocket()}
}

// pingTimeout limits the check of one socket: checking all of them must take less time than a probe.
const pingTimeout = time.Second

// pingSocket returns an error if no process accepts connections to a unix socket.
func pingSocket(path string) error {
	conn, err := net.DialTimeout("unix", path, pingTimeout)
	if err != nil {
		return err
	}
	return conn.Close()
}

// started returns an error until the kubelet has registered the plugin. The kubelet
// must not restart a plugin that waits for its predecessor.
func (p *probes) started() error {
	if !p.takeover.isWaiting() && !p.registered.Load() {
		return errors.New("the kubelet has not registered the plugin")
	}
	return nil
}

// ready returns why the plugin cannot currently give a pod its share.
func (p *probes) ready() error {
	if reason := p.takeover.waitReason(); reason != nil {
		return reason
	}
	if err := errors.Join(p.started(), p.live(), p.hook.check()); err != nil {
		return err
	}
	for k, checker := range kindsOf[ReadinessChecker](p.kinds) {
		if err := checker.Ready(); err != nil {
			return fmt.Errorf("%s: %w", k.Name(), err)
		}
	}
	return p.publication.check()
}

// serve answers probes until ctx ends.
func (p *probes) serve(ctx context.Context) error {
	err := probe.Serve(ctx, p.options.RunDir, p.options.Instance, func(name string) error {
		return p.check(ctx, name)
	})
	if err != nil {
		return fmt.Errorf("serve probes: %w", err)
	}
	return nil
}

// observeRegistration is an interceptor of the helper's calls. The kubelet makes a call to report that it has
// registered the plugin. Helper.RegistrationStatus returns the same, but must not be called while the kubelet's call
// arrives (v0.37).
func (p *probes) observeRegistration(
	ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	response, err := handler(ctx, request)
	status, ok := request.(*registerapi.RegistrationStatus)
	if ok && err == nil && status.GetPluginRegistered() && !p.registered.Swap(true) {
		klog.FromContext(ctx).Info("Registered with the kubelet")
	}
	return response, err
}
