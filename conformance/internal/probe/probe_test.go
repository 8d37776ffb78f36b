// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestInspect(t *testing.T) {
	t.Setenv("PROBE_TEST", "1")
	v, err := Inspect()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(v.Interfaces, func(i Interface) bool { return i.Name == "lo" }) {
		t.Errorf("interfaces: got %v, want lo", v.Interfaces)
	}
	if want := (Node{"/dev/null", "c:1:3"}); !slices.Contains(v.Devices, want) {
		t.Errorf("devices: got %v, want %v", v.Devices, want)
	}
	if !slices.Contains(v.Env, "PROBE_TEST=1") {
		t.Errorf("env: got %v, want PROBE_TEST=1", v.Env)
	}
}

func TestMounts_omitsMountsOfEveryContainer(t *testing.T) {
	file := filepath.Join(t.TempDir(), "mountinfo")
	lines := "1 0 0:1 / / rw - overlay overlay rw\n2 1 0:2 / /proc rw - proc proc rw\n" +
		"3 1 0:3 / /dev/shm rw - tmpfs shm rw\n4 1 0:4 / /opt/vendor ro - ext4 /dev/sda rw\n"
	if err := os.WriteFile(file, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := mounts(file)
	if err != nil || !slices.Equal(got, []string{"/opt/vendor"}) {
		t.Errorf("got %v and error %v, want /opt/vendor", got, err)
	}
}

// TestDial exchanges data through the loopback interface, which the kernel permits to bind to.
func TestDial(t *testing.T) {
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	var except []string // all but lo
	for _, i := range all {
		if i.Name != "lo" {
			except = append(except, i.Name)
		}
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(free.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	served := make(chan error, 1)
	go func() { served <- serve(ctx, port, except) }()
	got, err := dial(t.Context(), port, []string{"127.0.0.1"}, except)
	if err != nil || !strings.Contains(got, "through lo") {
		t.Errorf("got %q and error %v, want an exchange through lo", got, err)
	}
	stop()
	if err := <-served; err != nil {
		t.Errorf("serve: got error %v after its context ended, want none", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := dial(ctx, port, []string{"127.0.0.1"}, except); err == nil {
		t.Error("without a server: got no error")
	}
}

func TestRefused(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to create device nodes")
	}
	// Every container may use the null device.
	if err := refused([]string{"c:1:3"}); err == nil || !strings.Contains(err.Error(), "can open device c:1:3") {
		t.Errorf("got error %v, want that the device can be opened", err)
	}
	if err := refused([]string{"gpu"}); err == nil || !strings.Contains(err.Error(), `"gpu"`) {
		t.Errorf("got error %v, want one that names the number", err)
	}
}
