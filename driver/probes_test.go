// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/dra-shared/dra-driver-shared/internal/probe"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// The kubelet runs liveness probes only after the startup probe. A plugin whose socket
// is removed before it is ready must count as started, or the kubelet never restarts it.
func TestProbes(t *testing.T) {
	for name, c := range map[string]struct {
		rolling bool
		socket  string // below the plugin's directory; the socket that is lost
	}{
		"hooks":                            {false, "run/attach.d/1.sock"},
		"registration":                     {false, "registry/" + driverName + "-reg.sock"},
		"calls of the kubelet":             {false, "plugin/dra.sock"},
		"registration, rolling update":     {true, "registry/" + driverName + "-1-reg.sock"},
		"calls of the kubelet, as a surge": {true, "plugin/dra-1.sock"},
	} {
		for how, lose := range map[string]func(*testing.T, string){"removed": remove, "refuses connections": closeSocket} {
			t.Run(name+" "+how, func(t *testing.T) {
				p := newPlugin(t)
				p.stop()
				p.options.RollingUpdate = c.rolling
				p.start()
				p.checkProbes(func() { lose(t, filepath.Join(p.dir, c.socket)) }, c.socket)
			})
		}
	}
}

// checkProbes checks the probes of a plugin that starts, and of one that loses a socket.
func (p *plugin) checkProbes(lose func(), socket string) {
	p.t.Helper()
	eventually.Eventually(p.t, timeout, "the plugin is alive", func() error { return p.healthy(probe.Alive) })
	for _, check := range []string{probe.Started, probe.Ready} {
		if p.healthy(check) == nil {
			p.t.Errorf("%q before the kubelet has registered the plugin", check)
		}
	}
	p.register()
	eventually.Eventually(p.t, timeout, "the plugin has started", func() error { return p.healthy(probe.Started) })
	eventually.Eventually(p.t, timeout, "the plugin is ready", func() error { return p.healthy(probe.Ready) })
	if err := p.healthy(probe.Alive); err != nil {
		p.t.Error(err)
	}
	lose()
	if err := p.healthy(probe.Started); err != nil {
		p.t.Error(err)
	}
	for _, check := range []string{probe.Ready, probe.Alive} {
		if err := wantFailure(p.healthy(check), socket); err != nil {
			p.t.Errorf("%s: %v", check, err)
		}
	}
}

// A container keeps the mount of a directory of the node that was removed, and cannot create files in it.
func TestProbes_removedDirectory(t *testing.T) {
	p := newPlugin(t)
	p.stop()
	onNode := filepath.Join(t.TempDir(), "cdi")
	err := errors.Join(os.Mkdir(onNode, 0o700), unix.Mount(onNode, p.options.CDIDir, "", unix.MS_BIND, ""))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(p.options.CDIDir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	p.start()
	eventually.Eventually(t, timeout, "the plugin is alive", func() error { return p.healthy(probe.Alive) })
	if err := errors.Join(os.RemoveAll(onNode), os.Mkdir(onNode, 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := wantFailure(p.healthy(probe.Alive), p.options.CDIDir); err != nil {
		t.Error(err)
	}
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

// closeSocket replaces a socket by one that does not accept connections, as a killed process leaves it.
func closeSocket(t *testing.T, path string) {
	t.Helper()
	remove(t, path)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
}

func (p *plugin) healthy(check string) error {
	return probe.Ask(p.options.RunDir, p.options.Instance, check)
}

// register does what the kubelet does when it has found the plugin's socket.
func (p *plugin) register() {
	p.t.Helper()
	sockets, err := filepath.Glob(filepath.Join(p.options.RegistryDir, "*.sock"))
	if err == nil && len(sockets) != 1 {
		err = fmt.Errorf("%d sockets for registration", len(sockets))
	}
	if err != nil {
		p.t.Fatal(err)
	}
	conn, err := grpc.NewClient("unix://"+sockets[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		p.t.Fatal(err)
	}
	defer conn.Close()
	if _, err := registerapi.NewRegistrationClient(conn).NotifyRegistrationStatus(p.t.Context(),
		&registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		p.t.Fatal(err)
	}
}
