// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/test/cluster/build"
)

// readyTimeout limits how long a start with cached binaries may take; it
// usually takes 6 s.
const readyTimeout = 2 * time.Minute

// cluster is one test cluster, identified by its directory.
type cluster struct {
	dir string // absolute
	// id is the prefix of the names of the cluster's cgroups. It is derived from dir, so a later process finds the cgroups
	// of a cluster that crashed.
	id string
}

// options are the options of `up`. Its child processes read them from
// DIR/options.json.
type options struct {
	Nodes int
	Gates string
	build.Versions
	OCIRuntime string // an element of ociRuntimes
	Images     []string
	Bin        build.Dirs
}

func newCluster(dir string) (*cluster, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	for _, hidden := range []string{"/run", "/var/run", "/var/log", "/var/lib"} {
		if abs == hidden || strings.HasPrefix(abs, hidden+"/") {
			return nil, fmt.Errorf("--dir %s: the nodes mount their own %s; choose a directory elsewhere", abs, hidden)
		}
	}
	id := fmt.Sprintf("dra-shared-%x", sha256.Sum256([]byte(abs)))[:19]
	return &cluster{dir: abs, id: id}, nil
}

func (c *cluster) path(elem ...string) string {
	return filepath.Join(append([]string{c.dir}, elem...)...)
}

func (c *cluster) options() (o options, err error) {
	raw, err := os.ReadFile(c.path("options.json"))
	if err != nil {
		return o, err
	}
	return o, json.Unmarshal(raw, &o)
}

// up builds missing binaries, starts the cluster, and returns when every node is
// Ready. If this process is interrupted or dies before that, the guard ends the
// cluster: it holds the other end of a pipe and reads end-of-file.
func (c *cluster) up(ctx context.Context, o options, source string) error {
	if o.Nodes < 0 || o.Nodes > 2 {
		return fmt.Errorf("--nodes %d: must be 0, 1, or 2", o.Nodes)
	}
	if _, ok := featureGates[o.Gates]; !ok {
		return fmt.Errorf("--gates %q: must be %s", o.Gates, gateNames())
	}
	for flag, version := range map[string]string{"--kubernetes": o.Kubernetes, "--kubelet": o.Kubelet} {
		if _, err := minor(version); err != nil {
			return fmt.Errorf("%s: %w", flag, err)
		}
	}
	if _, ok := criRuntimes[o.Runtime]; !ok {
		return fmt.Errorf("--runtime %q: must be one of %s",
			o.Runtime, strings.Join(slices.Sorted(maps.Keys(criRuntimes)), ", "))
	}
	if !slices.Contains(ociRuntimes, o.OCIRuntime) {
		return fmt.Errorf("--oci-runtime %q: must be one of %s", o.OCIRuntime, strings.Join(ociRuntimes, ", "))
	}
	if err := checkMachine(); err != nil {
		return err
	}
	bin, err := build.Binaries(ctx, source, o.Versions, os.Stdout)
	if err != nil {
		return err
	}
	o.Bin = bin
	if err := os.MkdirAll(c.path("logs"), 0o755); err != nil {
		return err
	}
	lock, err := c.tryLock()
	if err != nil {
		return err
	}
	if lock == nil {
		return fmt.Errorf("a cluster is already running in %s: `cluster down --dir %s` ends it", c.dir, c.dir)
	}
	if err := errors.Join(c.removeRemains(), lock.Close()); err != nil {
		return err
	}
	raw, err := json.Marshal(o)
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.path("options.json"), raw, 0o644); err != nil {
		return err
	}
	return c.startGuard(ctx)
}

// minor returns the minor number of a version of Kubernetes, such as 36 of v1.36.3. An
// empty version is build.KubernetesVersion.
func minor(version string) (int, error) {
	var number, patch int
	version = cmp.Or(version, build.KubernetesVersion)
	if _, err := fmt.Sscanf(version, "v1.%d.%d", &number, &patch); err != nil {
		return 0, fmt.Errorf("version %q: must have the form %s", version, build.KubernetesVersion)
	}
	return number, nil
}

// checkMachine returns an error that names a missing prerequisite and its remedy.
func checkMachine() error {
	if os.Geteuid() != 0 {
		return errors.New("a kubelet needs root: run as root")
	}
	for tool, pkg := range map[string]string{"nsenter": "util-linux", "ip": "iproute2"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%s is missing: apt-get install -y %s", tool, pkg)
		}
	}
	return nil
}

// startGuard starts the guard, prints the progress that it reports, and returns
// when the nodes are Ready. On failure it ends the cluster first.
func (c *cluster) startGuard(ctx context.Context) error {
	start := time.Now()
	statusR, statusW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer statusR.Close()
	lifeR, lifeW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer lifeW.Close()
	log, err := os.Create(c.path("logs", "guard.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	guard := exec.Command(selfPath(), "guard", "--dir", c.dir)
	guard.Stdout, guard.Stderr = log, log
	guard.ExtraFiles = []*os.File{statusW, lifeR}
	guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := guard.Start(); err != nil {
		return err
	}
	statusW.Close()
	lifeR.Close()
	if err := awaitReady(ctx, statusR, start); err != nil {
		lifeW.Close() // the guard reads end-of-file and ends the cluster
		_ = guard.Wait()
		return fmt.Errorf("%w\nlogs are in %s", err, c.path("logs"))
	}
	if _, err := lifeW.Write([]byte("k")); err != nil {
		return err
	}
	fmt.Printf("cluster: ready in %.1f s: %s\n", time.Since(start).Seconds(), c.path("kubectl"))
	return nil
}

// awaitReady prints the lines of the guard's status until it reports that the nodes are Ready. It
// returns an error if the guard reports a failure or ends, after readyTimeout, and when ctx ends.
func awaitReady(ctx context.Context, status io.Reader, start time.Time) error {
	lines := make(chan string)
	go func() {
		defer close(lines)
		for scan := bufio.NewScanner(status); scan.Scan(); {
			lines <- scan.Text()
		}
	}()
	timeout := time.NewTimer(readyTimeout)
	defer timeout.Stop()
	for {
		select {
		case <-ctx.Done():
			return errors.New("start interrupted: the cluster was removed")
		case <-timeout.C:
			return fmt.Errorf("the nodes are not Ready after %s", readyTimeout)
		case line, ok := <-lines:
			switch {
			case !ok:
				return errors.New("the cluster ended before its nodes were Ready")
			case strings.HasPrefix(line, statusFailed):
				return errors.New(strings.TrimPrefix(line, statusFailed))
			case line == statusReady:
				return nil
			default:
				fmt.Printf("cluster: %5.1f s  %s\n", time.Since(start).Seconds(), line)
			}
		}
	}
}

// Lines that the cluster writes to its status pipe while it starts. Other lines
// are progress messages.
const (
	statusReady  = "ready"
	statusFailed = "failed: "
)

// guard runs the cluster until it receives SIGTERM or the cluster ends on its own. Then
// it removes the resources that the kernel does not remove.
func (c *cluster) guard() error {
	// The kernel sends Pdeathsig when the thread that forked ends, not the process.
	runtime.LockOSThread()
	lock, err := c.tryLock()
	if err != nil {
		return err
	}
	if lock == nil {
		return fmt.Errorf("lock %s: another guard holds it", c.dir)
	}
	if err := os.WriteFile(c.path("guard.pid"), []byte(strconv.Itoa(os.Getpid())), 0o644); err != nil {
		return err
	}
	status, lifeline := os.NewFile(3, "status"), os.NewFile(4, "lifeline")
	child := exec.Command(selfPath(), "init", "--dir", c.dir)
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	child.ExtraFiles = []*os.File{status}
	child.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID,
		Pdeathsig:  unix.SIGKILL,
	}
	if err := child.Start(); err != nil {
		return err
	}
	status.Close()
	if err := os.WriteFile(c.path("init.pid"), []byte(strconv.Itoa(child.Process.Pid)), 0o644); err != nil {
		return errors.Join(err, child.Process.Kill())
	}
	return errors.Join(awaitEnd(child, lifeline), c.removeRemains())
}

// awaitEnd waits until process 1 of the cluster ends, and returns its error. It ends that process when this one
// receives SIGTERM, and when the lifeline ends before a byte was written to it.
func awaitEnd(child *exec.Cmd, lifeline io.Reader) error {
	end := make(chan struct{}, 2)
	go func() {
		kept := false
		for buf := make([]byte, 1); ; kept = true {
			if _, err := lifeline.Read(buf); err != nil {
				break
			}
		}
		if !kept {
			end <- struct{}{}
		}
	}()
	go func() {
		<-terminated()
		end <- struct{}{}
	}()
	var ended error
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		ended = child.Wait()
	}()
	select {
	case <-end:
		// It is process 1 of its PID namespace, so the kernel ends all others.
		err := child.Process.Kill()
		<-gone
		return err
	case <-gone:
		return ended
	}
}

// tryLock locks the cluster's directory. It returns nil, and no error, if a guard
// holds the lock.
func (c *cluster) tryLock() (*os.File, error) {
	f, err := os.OpenFile(c.path("lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, nil
		}
		return nil, err
	}
	return f, nil
}

// down ends the cluster, even if its guard was killed, and removes its
// directory. It succeeds if the cluster does not exist.
func (c *cluster) down() error {
	if _, err := os.Stat(c.dir); errors.Is(err, os.ErrNotExist) {
		return c.removeCgroups()
	}
	lock, err := c.tryLock()
	if err != nil {
		return err
	}
	if lock == nil {
		if err := c.stopGuard(); err != nil {
			return err
		}
	}
	return errors.Join(c.removeRemains(), os.RemoveAll(c.dir))
}

// stopGuard sends SIGTERM to the guard and waits until it releases its lock.
func (c *cluster) stopGuard() error {
	raw, err := os.ReadFile(c.path("guard.pid"))
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(string(raw))
	if err != nil {
		return fmt.Errorf("%s: %w", c.path("guard.pid"), err)
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		return fmt.Errorf("send SIGTERM to guard %d: %w", pid, err)
	}
	f, err := os.Open(c.path("lock"))
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Flock(int(f.Fd()), unix.LOCK_EX)
}

// removeRemains removes the resources that outlive the cluster's processes: its cgroups and the nodes' data. The kernel
// removes namespaces and mounts with the processes. The logs stay until `down`: a failed start can then be diagnosed.
func (c *cluster) removeRemains() error {
	err := c.removeCgroups()
	entries, _ := os.ReadDir(c.dir)
	for _, e := range entries {
		if e.Name() != "logs" && e.Name() != "lock" {
			err = errors.Join(err, os.RemoveAll(c.path(e.Name())))
		}
	}
	return err
}

// removeCgroups removes the cluster's cgroups from every hierarchy. It retries
// for a second: a cgroup is busy until the kernel has reaped its last process,
// which happens shortly after the PID namespace ends.
func (c *cluster) removeCgroups() error {
	var err error
	for range 50 {
		err = nil
		roots, _ := filepath.Glob("/sys/fs/cgroup/*/" + c.id + "*")
		unified, _ := filepath.Glob("/sys/fs/cgroup/" + c.id + "*")
		for _, root := range append(roots, unified...) {
			err = errors.Join(err, removeCgroupTree(root))
		}
		if err == nil {
			return nil
		}
		<-time.After(20 * time.Millisecond)
	}
	return fmt.Errorf("remove cgroups: %w", err)
}

func removeCgroupTree(root string) error {
	var dirs []string
	_ = filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil
	})
	for i := len(dirs) - 1; i >= 0; i-- {
		if err := unix.Rmdir(dirs[i]); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("%s: %w", dirs[i], err)
		}
	}
	return nil
}

// setGates changes the feature gates of a running cluster: it kills the
// components, which are then restarted with the new gates.
func (c *cluster) setGates(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	if _, ok := featureGates[args[0]]; !ok {
		return fmt.Errorf("%q: must be %s", args[0], gateNames())
	}
	o, err := c.options()
	if err != nil {
		return fmt.Errorf("no cluster in %s: %w", c.dir, err)
	}
	o.Gates = args[0]
	raw, err := json.Marshal(o)
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.path("options.json"), raw, 0o644); err != nil {
		return err
	}
	for _, component := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet"} {
		if err := c.kill(component); err != nil && o.Nodes > 0 {
			return err
		}
	}
	return nil
}

// gateNames returns the values of --gates.
func gateNames() string { return strings.Join(slices.Sorted(maps.Keys(featureGates)), ", ") }

// kill kills a component in all nodes and in the control plane; see daemon.
func (c *cluster) kill(component string) error {
	pid, err := os.ReadFile(c.path("init.pid"))
	if err != nil {
		return fmt.Errorf("no cluster in %s: %w", c.dir, err)
	}
	kill := exec.Command("nsenter", "--target", strings.TrimSpace(string(pid)), "--mount", "--pid", "--",
		"pkill", "-KILL", "-f", "kube "+component+" ")
	if out, err := kill.CombinedOutput(); err != nil {
		return fmt.Errorf("kill %s: %w: %s", component, err, out)
	}
	return nil
}

// stopMarker returns the path of the file that keeps a component from being
// started.
func (c *cluster) stopMarker(component string) string { return c.path("stopped-" + component) }

// stop kills a component of the control plane, which is not started until start
// is called.
func (c *cluster) stop(component string) error {
	if err := os.WriteFile(c.stopMarker(component), nil, 0o644); err != nil {
		return fmt.Errorf("no cluster in %s: %w", c.dir, err)
	}
	return c.kill(component)
}

// start reverts stop. It does not wait until the component answers. It succeeds if
// the component was not stopped.
func (c *cluster) start(component string) error {
	if err := os.Remove(c.stopMarker(component)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// load imports image archives into every node of a running cluster.
func (c *cluster) load(ctx context.Context, archives []string) error {
	o, err := c.options()
	if err != nil {
		return fmt.Errorf("no cluster in %s: %w", c.dir, err)
	}
	for i := range o.Nodes {
		for _, archive := range archives {
			abs, err := filepath.Abs(archive)
			if err != nil {
				return err
			}
			importer, err := criRuntimes[o.Runtime].importer(ctx, o.Bin, abs)
			if err != nil {
				return err
			}
			onNode := exec.CommandContext(ctx, c.path("node"), append([]string{nodeName(i)}, importer.Args...)...)
			if out, err := onNode.CombinedOutput(); err != nil {
				return fmt.Errorf("import %s into %s: %w\n%s", archive, nodeName(i), err, out)
			}
		}
	}
	return nil
}

// report writes one line to the status pipe, which `up` reads.
func report(status io.Writer, format string, args ...any) {
	// `up` stops reading once the cluster has started, so writing may fail.
	_, _ = fmt.Fprintf(status, format+"\n", args...)
}
