// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/internal/probe"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// The kubelet runs liveness probes only after the startup probe. A plugin whose socket
// is removed before it is ready must count as started, or the kubelet never restarts it.
func TestProbes(t *testing.T) {
	p := newPlugin(t)
	eventually.Eventually(t, timeout, "the plugin is alive", func() error { return p.healthy(probe.Alive) })
	for _, service := range []string{probe.Started, probe.Ready} {
		if p.healthy(service) == nil {
			t.Errorf("%q before the kubelet has registered the plugin", service)
		}
	}
	p.register()
	eventually.Eventually(t, timeout, "the plugin has started", func() error { return p.healthy(probe.Started) })
	if err := p.healthy(probe.Ready); err != nil {
		t.Error(err)
	}
	if err := os.RemoveAll(attach.SocketDir(p.options.RunDir)); err != nil {
		t.Fatal(err)
	}
	if err := p.healthy(probe.Started); err != nil {
		t.Error(err)
	}
	for _, service := range []string{probe.Ready, probe.Alive} {
		if p.healthy(service) == nil {
			t.Errorf("%q, and no hook reaches the plugin", service)
		}
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
