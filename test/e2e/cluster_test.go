// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// TestCluster_removesEverything checks that a test cluster does not leave processes, cgroups, or mounts, however it
// ends.
func TestCluster_removesEverything(t *testing.T) {
	if os.Getenv("E2E") == "" {
		t.Skip("starts clusters: run `make e2e`")
	}
	for _, tc := range []struct {
		name string
		end  func(t *testing.T, c *clusterclient.Cluster, up *exec.Cmd, lines *bufio.Scanner)
	}{
		{"down", func(t *testing.T, _ *clusterclient.Cluster, up *exec.Cmd, lines *bufio.Scanner) {
			awaitLine(t, lines, "ready in")
			_ = up.Wait()
		}},
		{"interrupted during start", func(t *testing.T, _ *clusterclient.Cluster, up *exec.Cmd, lines *bufio.Scanner) {
			awaitLine(t, lines, "started containerd")
			signal(t, up.Process.Pid, syscall.SIGINT)
			_ = up.Wait()
		}},
		{"killed during start", func(t *testing.T, _ *clusterclient.Cluster, up *exec.Cmd, lines *bufio.Scanner) {
			awaitLine(t, lines, "started containerd")
			signal(t, up.Process.Pid, syscall.SIGKILL)
			_ = up.Wait()
		}},
		{"guard killed", func(t *testing.T, c *clusterclient.Cluster, up *exec.Cmd, lines *bufio.Scanner) {
			awaitLine(t, lines, "ready in")
			_ = up.Wait()
			raw, err := os.ReadFile(filepath.Join(c.Dir, "guard.pid"))
			if err != nil {
				t.Fatal(err)
			}
			pid, err := strconv.Atoi(string(raw))
			if err != nil {
				t.Fatal(err)
			}
			signal(t, pid, syscall.SIGKILL)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := clusterclient.New(".cluster-leaves-nothing")
			if err != nil {
				t.Fatal(err)
			}
			mounts := mountCount(t)
			up := exec.Command(filepath.Join(c.Root, "bin/cluster"), "up", "--dir", c.Dir)
			up.Dir = c.Root
			stdout, err := up.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := up.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := c.Down(t.Context()); err != nil && t.Context().Err() == nil {
					t.Error(err)
				}
			})
			tc.end(t, c, up, bufio.NewScanner(stdout))
			eventually.Eventually(t, 20*time.Second, "`cluster down` succeeds", func() error { return c.Down(t.Context()) })
			if now := mountCount(t); now != mounts {
				t.Errorf("mounts of this machine: got %d after the cluster ended, want %d as before it started", now, mounts)
			}
			eventually.Eventually(t, 20*time.Second, "nothing of the cluster remains", func() error { return findRemains(c) })
		})
	}
}

func awaitLine(t *testing.T, lines *bufio.Scanner, text string) {
	t.Helper()
	for lines.Scan() {
		if strings.Contains(lines.Text(), text) {
			return
		}
	}
	t.Fatalf("output of `cluster up`: ended without a line that contains %q", text)
}

func signal(t *testing.T, pid int, s syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, s); err != nil {
		t.Fatal(err)
	}
}

// findRemains returns an error that names a directory, process, or cgroup of the
// cluster. It finds processes by the cluster's directory in their command lines;
// their children have it as well or end with them.
func findRemains(c *clusterclient.Cluster) error {
	if _, err := os.Stat(c.Dir); err == nil {
		return fmt.Errorf("directory %s still exists", c.Dir)
	}
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, p := range processes {
		raw, err := os.ReadFile(p)
		if err == nil && bytes.Contains(raw, []byte(c.Dir)) {
			command := bytes.ReplaceAll(raw, []byte{0}, []byte(" "))
			return fmt.Errorf("process %s still runs: %s", filepath.Dir(p), command)
		}
	}
	id, err := exec.Command(filepath.Join(c.Root, "bin/cluster"), "id", "--dir", c.Dir).Output()
	if err != nil {
		return err
	}
	for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		cgroups, err := filepath.Glob(pattern + strings.TrimSpace(string(id)) + "*")
		if err != nil {
			return err
		}
		if len(cgroups) > 0 {
			return fmt.Errorf("cgroups still exist: %v", cgroups)
		}
	}
	return nil
}

// mountCount returns the number of mounts in this mount namespace.
func mountCount(t *testing.T) int {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(raw, []byte("\n"))
}
