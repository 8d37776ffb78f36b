// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package probe_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/internal/probe"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// serve serves checks until the test ends. Only the check "ready" succeeds.
func serve(t *testing.T) (runDir string) {
	t.Helper()
	// Paths of sockets have at most 107 characters, and t.TempDir() is longer.
	runDir, err := os.MkdirTemp("", "probe")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(runDir) })
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() {
		served <- probe.Serve(ctx, runDir, "uid", func(check string) error {
			if check != probe.Ready {
				return fmt.Errorf("%s: no\nfor two reasons", check)
			}
			return nil
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	// The file exists shortly before the socket accepts connections.
	eventually.Eventually(t, 10*time.Second, "the socket accepts connections", func() error {
		conn, err := net.Dial("unix", probe.Socket(runDir, "uid"))
		if err != nil {
			return err
		}
		return conn.Close()
	})
	return runDir
}

func TestAsk(t *testing.T) {
	runDir := serve(t)
	if err := probe.Ask(runDir, "uid", probe.Ready); err != nil {
		t.Error(err)
	}
	if err := probe.Ask(runDir, "uid", probe.Alive); err == nil || err.Error() != "alive: no\nfor two reasons" {
		t.Errorf("got %v, want the server's reason", err)
	}
	if err := probe.Ask(runDir, "other", probe.Ready); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no plugin: got %v, want a missing socket", err)
	}
}

func TestServe_peerWithoutRequest(t *testing.T) {
	runDir := serve(t)
	for _, request := range []string{"", strings.Repeat("x", 1<<17)} {
		conn, err := net.Dial("unix", probe.Socket(runDir, "uid"))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write([]byte(request))
		_ = conn.Close()
	}
	if err := probe.Ask(runDir, "uid", probe.Ready); err != nil {
		t.Error(err)
	}
}

func TestServe_socketOfKilledProcess(t *testing.T) {
	runDir, err := os.MkdirTemp("", "probe")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(runDir) })
	if err := os.Mkdir(probe.Dir(runDir), 0o700); err != nil {
		t.Fatal(err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: probe.Socket(runDir, "uid"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	_ = listener.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := probe.Serve(ctx, runDir, "uid", nil); err != nil {
		t.Error(err)
	}
}
