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
	"github.com/dra-shared/dra-driver-shared/driver"
)

// The kubelet runs liveness probes only after the startup probe. A plugin whose socket
// is removed before it is ready must count as started, or the kubelet never restarts it.
func TestProbes(t *testing.T) {
	p := newPlugin(t)
	p.eventually(func() error { return p.healthy(driver.Liveness) })
	for _, service := range []string{driver.Startup, driver.Readiness} {
		if p.healthy(service) == nil {
			t.Errorf("%q before the kubelet has registered the plugin", service)
		}
	}
	p.register()
	p.eventually(func() error { return p.healthy(driver.Startup) })
	if err := p.healthy(driver.Readiness); err != nil {
		t.Error(err)
	}
	if err := os.RemoveAll(attach.SocketDir(p.options.RunDir)); err != nil {
		t.Fatal(err)
	}
	if err := p.healthy(driver.Startup); err != nil {
		t.Error(err)
	}
	for _, service := range []string{driver.Readiness, driver.Liveness} {
		if p.healthy(service) == nil {
			t.Errorf("%q, and no hook reaches the plugin", service)
		}
	}
}

func (p *plugin) healthy(service string) error {
	return driver.CheckHealth(p.t.Context(), p.options.RunDir, p.options.Instance, service)
}

// register is what the kubelet does when it has found the plugin's socket.
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
