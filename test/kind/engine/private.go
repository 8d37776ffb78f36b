// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

const initCommand = "docker-init"

// maxSocketPath is the length of sun_path, which includes a terminating zero byte.
const maxSocketPath = 108

// start starts a private daemon. All its files are in dir, except for those in its own
// /run; Stop removes everything outside dir.
func start(ctx context.Context, dir, runc string) (*Engine, error) {
	socket := filepath.Join(dir, "docker.sock")
	if len(socket) >= maxSocketPath {
		return nil, fmt.Errorf("%s is too long for a Unix socket: choose a directory with a shorter path", socket)
	}
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	for name, target := range map[string]string{runtimeName: program, runcName: runc} {
		link := filepath.Join(dir, name)
		if err := os.RemoveAll(link); err != nil {
			return nil, err
		}
		if err := os.Symlink(target, link); err != nil {
			return nil, err
		}
	}
	log, err := os.Create(filepath.Join(dir, "dockerd.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	daemon := exec.Command(program, initCommand, dir) // not CommandContext: it outlives this process
	daemon.Stdout, daemon.Stderr = log, log
	daemon.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true, // an interrupt from the terminal does not reach it
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID,
	}
	if err := daemon.Start(); err != nil {
		return nil, fmt.Errorf("start dockerd in separate namespaces: %w", err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = daemon.Wait()
	}()
	e := &Engine{Host: "unix://" + socket, Init: daemon.Process.Pid, CgroupParent: cgroupParent(dir)}
	if e.Started, err = startTime(e.Init); err != nil {
		return nil, errors.Join(err, e.Stop(ctx))
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-ended: // stops waiting for an answer
			cancel()
		case <-ctx.Done():
		}
	}()
	err = eventually.Poll(ctx, 30*time.Second, func() error {
		_, err := e.Docker(ctx, "version", "--format", "{{.Server.Version}}")
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start dockerd: %w\n%s", err, tail(log.Name())), e.Stop(ctx))
	}
	return e, nil
}

// Stop ends a private daemon with all its containers, and removes its cgroups. Its namespaces, and with them its mounts
// and links, end with its processes. Stop does not affect other daemons, and also works after ctx has ended.
func (e *Engine) Stop(ctx context.Context) error {
	if !e.Private() {
		return nil
	}
	// The PID may have been reused by another process.
	if started, err := startTime(e.Init); err == nil && (e.Started == 0 || started == e.Started) {
		if err := unix.Kill(e.Init, unix.SIGKILL); err != nil {
			return fmt.Errorf("end process %d, which runs dockerd: %w", e.Init, err)
		}
	}
	return eventually.Poll(context.WithoutCancel(ctx), 10*time.Second, e.removeCgroups)
}

// removeCgroups removes the cgroups of the daemon's containers from all hierarchies. It
// fails while processes are in them.
func (e *Engine) removeCgroups() error {
	var roots []string
	for _, pattern := range []string{"/sys/fs/cgroup" + e.CgroupParent, "/sys/fs/cgroup/*" + e.CgroupParent} {
		matches, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		roots = append(roots, matches...)
	}
	var failed error
	for _, root := range roots {
		var dirs []string
		err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		failed = errors.Join(failed, err)
		for i := len(dirs) - 1; i >= 0; i-- { // children before parents
			if err := unix.Rmdir(dirs[i]); err != nil && !errors.Is(err, unix.ENOENT) {
				failed = errors.Join(failed, fmt.Errorf("remove cgroup %s: %w", dirs[i], err))
			}
		}
	}
	return failed
}

func cgroupParent(dir string) string {
	return fmt.Sprintf("/dra-shared-kind-%.4x", sha256.Sum256([]byte(dir)))
}

// startTime returns when a process started, which together with its PID identifies it.
func startTime(pid int) (uint64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	const fieldAfterName = 22 - 2 // the name, field 2, may contain spaces
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	if len(fields) < fieldAfterName {
		return 0, fmt.Errorf("/proc/%d/stat: %d fields", pid, len(fields))
	}
	return strconv.ParseUint(fields[fieldAfterName-1], 10, 64)
}

func tail(path string) string {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	const lines = 10
	all := strings.Split(strings.TrimSpace(string(raw)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// runInit is process 1 of the private daemon's namespaces: it makes the mounts, starts
// dockerd, and reaps orphans until dockerd ends.
func runInit(dir string) error {
	if err := prepareNamespaces(dir); err != nil {
		return err
	}
	signal.Ignore(unix.SIGHUP)
	dockerd, err := exec.LookPath("dockerd")
	if err != nil {
		return err
	}
	args := []string{
		"dockerd", "--data-root", filepath.Join(dir, "root"), "--exec-root", "/run/docker", "--pidfile", "/run/docker.pid",
		"--host", "unix://" + filepath.Join(dir, "docker.sock"),
		"--add-runtime", "dra-shared=" + filepath.Join(dir, runtimeName), "--default-runtime", "dra-shared",
		// systemd of this machine is not reachable, because these namespaces have their own /run.
		"--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", cgroupParent(dir),
	}
	child, err := syscall.ForkExec(dockerd, args, &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2}})
	if err != nil {
		return fmt.Errorf("start dockerd: %w", err)
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait for dockerd: %w", err)
		}
		if pid == child {
			return fmt.Errorf("dockerd ended with status %d", status.ExitStatus())
		}
	}
}

// prepareNamespaces mounts /proc, /sys, and /run for the new namespaces, and brings the
// loopback link up.
func prepareNamespaces(dir string) error {
	cgroups := filepath.Join(dir, "cgroups")
	if err := os.MkdirAll(cgroups, 0o755); err != nil {
		return err
	}
	for _, m := range []struct {
		source, target, fstype string
		flags                  uintptr
	}{
		{"", "/", "", unix.MS_REC | unix.MS_PRIVATE},
		{"proc", "/proc", "proc", 0},
		// A new sysfs shows the links of this network namespace, but does not have cgroups.
		{"/sys/fs/cgroup", cgroups, "", unix.MS_BIND | unix.MS_REC},
		{"sysfs", "/sys", "sysfs", 0},
		{cgroups, "/sys/fs/cgroup", "", unix.MS_MOVE},
		{"tmpfs", "/run", "tmpfs", 0},
	} {
		if m.target == "/sys" || m.target == "/run" {
			if err := unmountBelow(m.target); err != nil {
				return err
			}
		}
		if err := unix.Mount(m.source, m.target, m.fstype, m.flags, ""); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.source, m.target, err)
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("link lo: %w", err)
	}
	return netlink.LinkSetUp(lo)
}

// unmountBelow unmounts root and everything that is mounted below it.
func unmountBelow(root string) error {
	f, err := os.Open("/proc/self/mounts")
	if err != nil {
		return err
	}
	defer f.Close()
	var targets []string
	for scan := bufio.NewScanner(f); scan.Scan(); {
		if target := strings.Fields(scan.Text())[1]; target == root || strings.HasPrefix(target, root+"/") {
			targets = append(targets, target)
		}
	}
	sort.Sort(sort.Reverse(sort.StringSlice(targets))) // children before parents
	for _, target := range targets {
		if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", target, err)
		}
	}
	return nil
}
