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
)

// However a cluster ends, nothing of it is left: processes, cgroups, mounts.
func TestAClusterLeavesNothing(t *testing.T) {
	if os.Getenv("E2E") == "" {
		t.Skip("starts clusters: run `make e2e`")
	}
	for _, tc := range []struct {
		name string
		end  func(t *testing.T, b *clusterclient.Cluster, up *exec.Cmd, lines *bufio.Scanner)
	}{
		{"by down", func(t *testing.T, _ *clusterclient.Cluster, up *exec.Cmd, lines *bufio.Scanner) {
			until(t, lines, "ready in")
			_ = up.Wait()
		}},
		{"interrupted while it starts", func(t *testing.T, _ *clusterclient.Cluster, up *exec.Cmd, lines *bufio.Scanner) {
			until(t, lines, "started containerd")
			signal(t, up.Process.Pid, syscall.SIGINT)
			_ = up.Wait()
		}},
		{"killed while it starts", func(t *testing.T, _ *clusterclient.Cluster, up *exec.Cmd, lines *bufio.Scanner) {
			until(t, lines, "started containerd")
			signal(t, up.Process.Pid, syscall.SIGKILL)
			_ = up.Wait()
		}},
		{"its guard killed", func(t *testing.T, b *clusterclient.Cluster, up *exec.Cmd, lines *bufio.Scanner) {
			until(t, lines, "ready in")
			_ = up.Wait()
			raw, err := os.ReadFile(filepath.Join(b.Dir, "guard.pid"))
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
			b, err := clusterclient.New(".cluster-leaves-nothing")
			if err != nil {
				t.Fatal(err)
			}
			mounts := mountCount(t)
			up := exec.Command(filepath.Join(b.Root, "bin/cluster"), "up", "--dir", b.Dir)
			up.Dir = b.Root
			stdout, err := up.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := up.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := b.Down(t.Context()); err != nil && t.Context().Err() == nil {
					t.Error(err)
				}
			})
			tc.end(t, b, up, bufio.NewScanner(stdout))
			if err := clusterclient.Eventually(t.Context(), 20*time.Second, func() error { return b.Down(t.Context()) }); err != nil {
				t.Fatal(err)
			}
			err = clusterclient.Eventually(t.Context(), 20*time.Second, func() error { return left(b) })
			if err != nil {
				t.Error(err)
			}
			if now := mountCount(t); now != mounts {
				t.Errorf("%d mounts before, %d after", mounts, now)
			}
		})
	}
}

func until(t *testing.T, lines *bufio.Scanner, text string) {
	t.Helper()
	for lines.Scan() {
		if strings.Contains(lines.Text(), text) {
			return
		}
	}
	t.Fatalf("the cluster never said %q", text)
}

func signal(t *testing.T, pid int, s syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, s); err != nil {
		t.Fatal(err)
	}
}

// left says what there is of a bed: its directory is in the command line of
// each of its processes, or they were started by one for which that is so.
func left(b *clusterclient.Cluster) error {
	if _, err := os.Stat(b.Dir); err == nil {
		return fmt.Errorf("%s is left", b.Dir)
	}
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, p := range processes {
		raw, err := os.ReadFile(p)
		if err == nil && bytes.Contains(raw, []byte(b.Dir)) {
			return fmt.Errorf("%s is left: %s", filepath.Dir(p), bytes.ReplaceAll(raw, []byte{0}, []byte(" ")))
		}
	}
	id, err := exec.Command(filepath.Join(b.Root, "bin/cluster"), "id", "--dir", b.Dir).Output()
	if err != nil {
		return err
	}
	for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		cgroups, err := filepath.Glob(pattern + strings.TrimSpace(string(id)) + "*")
		if err != nil {
			return err
		}
		if len(cgroups) > 0 {
			return fmt.Errorf("cgroups are left: %v", cgroups)
		}
	}
	return nil
}

func mountCount(t *testing.T) int {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(raw, []byte("\n"))
}
