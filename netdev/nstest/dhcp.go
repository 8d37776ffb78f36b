// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// DHCPServer is ISC's dhcpd in a namespace.
type DHCPServer struct {
	t       testing.TB
	ns      *Namespace
	file    string // its configuration
	args    []string
	command *exec.Cmd
	log     *dhcpLog
}

// dhcpLog is the output of the server.
type dhcpLog struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *dhcpLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// RunDHCPServer runs a DHCP server on the link "wire" of a namespace until the test ends. It skips
// the test if the server is not installed; make prerequisites installs it.
func RunDHCPServer(t testing.TB, ns *Namespace, config string) *DHCPServer {
	t.Helper()
	program, err := exec.LookPath("dhcpd")
	if err != nil {
		program = "/usr/sbin/dhcpd"
	}
	if _, err := os.Stat(program); errors.Is(err, os.ErrNotExist) {
		t.Skip("dhcpd is not installed: install the Debian package isc-dhcp-server")
	}
	dir := t.TempDir()
	file, leases := filepath.Join(dir, "dhcpd.conf"), filepath.Join(dir, "leases")
	for path, content := range map[string]string{file: config, leases: ""} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := &DHCPServer{t: t, ns: ns, log: &dhcpLog{}, file: file, args: []string{
		program, "-4", "-f", "-d", "--no-pid", "-cf", file, "-lf", leases, "wire",
	}}
	s.Start()
	t.Cleanup(func() {
		s.Stop()
		if t.Failed() {
			t.Logf("dhcpd:\n%s", s.Log())
		}
	})
	return s
}

// Start starts a server that was stopped, with the leases that it has recorded.
func (s *DHCPServer) Start() {
	s.t.Helper()
	ready := strings.Count(s.Log(), "Server starting service")
	s.command = exec.Command(s.args[0], s.args[1:]...)
	s.command.Stdout, s.command.Stderr = s.log, s.log
	s.command.SysProcAttr = &syscall.SysProcAttr{}
	s.ns.Do(s.command.Start)
	eventually.Eventually(s.t, 20*time.Second, "dhcpd serves", func() error {
		if strings.Count(s.Log(), "Server starting service") == ready {
			return errors.New(s.Log())
		}
		return nil
	})
}

// Configure replaces the configuration of a server that was stopped.
func (s *DHCPServer) Configure(config string) {
	s.t.Helper()
	if err := os.WriteFile(s.file, []byte(config), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// Stop stops the server. It may be called twice.
func (s *DHCPServer) Stop() {
	if s.command == nil {
		return
	}
	_ = s.command.Process.Kill()
	_ = s.command.Wait()
	s.command = nil
}

// Log returns the output of the server.
func (s *DHCPServer) Log() string {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	return s.log.text.String()
}

// AwaitLog waits until the server has printed a text, and fails the test otherwise.
func (s *DHCPServer) AwaitLog(text string) {
	s.t.Helper()
	eventually.Eventually(s.t, 20*time.Second, "dhcpd prints "+text, func() error {
		if !strings.Contains(s.Log(), text) {
			return errors.New(s.Log())
		}
		return nil
	})
}
