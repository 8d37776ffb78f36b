package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/test/cluster/build"
)

// readyTimeout bounds a start with warm binaries; it takes about 6 s.
const readyTimeout = 2 * time.Minute

// bed is one cluster: its directory and what is derived from it.
type bed struct {
	dir string // absolute
	id  string // names the bed's cgroups; a function of dir, so that a later process finds what a crashed one left
}

// options is what `up` hands to the processes below it, as DIR/options.json.
type options struct {
	Nodes      int
	Gates      string
	Kubernetes string
	Images     []string
	Bin        build.Dirs
}

func newBed(dir string) (*bed, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	for _, hidden := range []string{"/run", "/var/run", "/var/log", "/var/lib"} {
		if abs == hidden || strings.HasPrefix(abs, hidden+"/") {
			return nil, fmt.Errorf("--dir %s: the nodes mount their own %s; choose a directory elsewhere", abs, hidden)
		}
	}
	return &bed{dir: abs, id: fmt.Sprintf("dra-shared-%x", sha256.Sum256([]byte(abs)))[:19]}, nil
}

func (b *bed) path(elem ...string) string { return filepath.Join(append([]string{b.dir}, elem...)...) }

func (b *bed) options() (o options, err error) {
	raw, err := os.ReadFile(b.path("options.json"))
	if err != nil {
		return o, err
	}
	return o, json.Unmarshal(raw, &o)
}

// up builds what is missing, starts the bed and returns when every node is
// Ready. If it is interrupted or dies before that, the guard ends the bed:
// it holds the other end of a pipe.
func (b *bed) up(ctx context.Context, o options, source string) error {
	if o.Nodes < 0 || o.Nodes > 2 {
		return fmt.Errorf("--nodes %d: must be 0, 1 or 2", o.Nodes)
	}
	if _, ok := featureGates[o.Gates]; !ok {
		return fmt.Errorf("--gates %q: must be default, all, capacity or no-capacity", o.Gates)
	}
	if o.Kubernetes != build.KubernetesVersion && o.Nodes > 0 {
		return fmt.Errorf("--kubernetes %s: nodes are of %s only: say --nodes 0", o.Kubernetes, build.KubernetesVersion)
	}
	if err := checkMachine(); err != nil {
		return err
	}
	bin, err := build.Binaries(ctx, source, o.Kubernetes, os.Stdout)
	if err != nil {
		return err
	}
	o.Bin = bin
	if err := os.MkdirAll(b.path("logs"), 0o755); err != nil {
		return err
	}
	if lock, err := b.tryLock(); err != nil {
		return err
	} else if lock == nil {
		return fmt.Errorf("a cluster is already running in %s: `cluster down --dir %s` ends it", b.dir, b.dir)
	} else if err := errors.Join(b.removeRemains(), lock.Close()); err != nil {
		return err
	}
	raw, err := json.Marshal(o)
	if err != nil {
		return err
	}
	if err := errors.Join(os.MkdirAll(b.path("logs"), 0o755), os.WriteFile(b.path("options.json"), raw, 0o644)); err != nil {
		return err
	}
	return b.startGuard(ctx)
}

// checkMachine names what a cluster needs and this machine lacks.
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

func (b *bed) startGuard(ctx context.Context) error {
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
	log, err := os.Create(b.path("logs", "guard.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	guard := exec.Command(selfPath(), "guard", "--dir", b.dir)
	guard.Stdout, guard.Stderr = log, log
	guard.ExtraFiles = []*os.File{statusW, lifeR}
	guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := guard.Start(); err != nil {
		return err
	}
	statusW.Close()
	lifeR.Close()
	abort := func(reason error) error {
		lifeW.Close() // the guard reads end-of-file and ends the bed
		_ = guard.Wait()
		return fmt.Errorf("%w\nlogs are in %s", reason, b.path("logs"))
	}
	lines := make(chan string)
	go func() {
		defer close(lines)
		for scan := bufio.NewScanner(statusR); scan.Scan(); {
			lines <- scan.Text()
		}
	}()
	timeout := time.NewTimer(readyTimeout)
	defer timeout.Stop()
	for {
		select {
		case <-ctx.Done():
			return abort(errors.New("interrupted: the cluster is gone"))
		case <-timeout.C:
			return abort(fmt.Errorf("not ready after %s", readyTimeout))
		case line, ok := <-lines:
			switch {
			case !ok:
				return abort(errors.New("the cluster ended while it started"))
			case strings.HasPrefix(line, statusFailed):
				return abort(errors.New(strings.TrimPrefix(line, statusFailed)))
			case line == statusReady:
				if _, err := lifeW.Write([]byte("k")); err != nil {
					return err
				}
				fmt.Printf("cluster: ready in %.1f s: %s\n", time.Since(start).Seconds(), b.path("kubectl"))
				return nil
			default:
				fmt.Printf("cluster: %5.1f s  %s\n", time.Since(start).Seconds(), line)
			}
		}
	}
}

// The lines a bed writes to its status pipe while it starts.
const (
	statusReady  = "ready"
	statusFailed = "failed: "
)

// guard runs the bed and cleans up behind it, whatever ends it.
func (b *bed) guard() error {
	// Pdeathsig is sent when the *thread* that forked ends.
	lockThread()
	lock, err := b.tryLock()
	if err != nil {
		return err
	}
	if lock == nil {
		return fmt.Errorf("lock %s: held by another guard", b.dir)
	}
	if err := os.WriteFile(b.path("guard.pid"), []byte(strconv.Itoa(os.Getpid())), 0o644); err != nil {
		return err
	}
	status, lifeline := os.NewFile(3, "status"), os.NewFile(4, "lifeline")
	bed := exec.Command(selfPath(), "init", "--dir", b.dir)
	bed.Stdout, bed.Stderr = os.Stdout, os.Stderr
	bed.ExtraFiles = []*os.File{status}
	bed.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID,
		Pdeathsig:  unix.SIGKILL,
	}
	if err := bed.Start(); err != nil {
		return err
	}
	status.Close()
	if err := os.WriteFile(b.path("init.pid"), []byte(strconv.Itoa(bed.Process.Pid)), 0o644); err != nil {
		return errors.Join(err, bed.Process.Kill())
	}
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
		ended = bed.Wait()
	}()
	select {
	case <-end:
		err = bed.Process.Kill() // process 1 of its PID namespace: the kernel ends every other
		<-gone
	case <-gone:
		err = ended
	}
	return errors.Join(err, b.removeRemains())
}

// tryLock returns nil without an error while a guard holds the bed.
func (b *bed) tryLock() (*os.File, error) {
	f, err := os.OpenFile(b.path("lock"), os.O_CREATE|os.O_RDWR, 0o644)
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

// down ends the bed, also one whose guard was killed, and removes its
// directory. It is no error if there is none.
func (b *bed) down() error {
	if _, err := os.Stat(b.dir); errors.Is(err, os.ErrNotExist) {
		return b.removeCgroups()
	}
	lock, err := b.tryLock()
	if err != nil {
		return err
	}
	if lock == nil {
		if err := b.stopGuard(); err != nil {
			return err
		}
	}
	return errors.Join(b.removeRemains(), os.RemoveAll(b.dir))
}

// stopGuard asks the guard to end and waits for the lock that it holds.
func (b *bed) stopGuard() error {
	raw, err := os.ReadFile(b.path("guard.pid"))
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(string(raw))
	if err != nil {
		return fmt.Errorf("%s: %w", b.path("guard.pid"), err)
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		return fmt.Errorf("end guard %d: %w", pid, err)
	}
	f, err := os.Open(b.path("lock"))
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Flock(int(f.Fd()), unix.LOCK_EX)
}

// removeRemains removes what outlives the bed's processes: cgroups and the
// nodes' data. Namespaces and mounts went with the processes. Logs stay until
// `down`, for whoever asks why a start failed.
func (b *bed) removeRemains() error {
	err := b.removeCgroups()
	entries, _ := os.ReadDir(b.dir)
	for _, e := range entries {
		if e.Name() != "logs" && e.Name() != "lock" {
			err = errors.Join(err, os.RemoveAll(b.path(e.Name())))
		}
	}
	return err
}

// removeCgroups removes the bed's cgroups from every hierarchy. A cgroup is
// busy until its last process is reaped, which the kernel does just after it
// reports the PID namespace gone, hence the retries.
func (b *bed) removeCgroups() error {
	var err error
	for range 50 {
		err = nil
		roots, _ := filepath.Glob("/sys/fs/cgroup/*/" + b.id + "*")
		unified, _ := filepath.Glob("/sys/fs/cgroup/" + b.id + "*")
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

// setGates changes the feature gates of a running bed: its components end, and
// are started again with others.
func (b *bed) setGates(args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	if _, ok := featureGates[args[0]]; !ok {
		return fmt.Errorf("%q: must be default, all, capacity or no-capacity", args[0])
	}
	o, err := b.options()
	if err != nil {
		return fmt.Errorf("no cluster in %s: %w", b.dir, err)
	}
	o.Gates = args[0]
	raw, err := json.Marshal(o)
	if err != nil {
		return err
	}
	if err := os.WriteFile(b.path("options.json"), raw, 0o644); err != nil {
		return err
	}
	pid, err := os.ReadFile(b.path("init.pid"))
	if err != nil {
		return err
	}
	for _, component := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet"} {
		kill := exec.Command("nsenter", "--target", strings.TrimSpace(string(pid)), "--mount", "--pid", "--", "pkill", "-KILL", "-f", "kube "+component+" ")
		if out, err := kill.CombinedOutput(); err != nil && o.Nodes > 0 {
			return fmt.Errorf("end %s: %w: %s", component, err, out)
		}
	}
	return nil
}

// load imports images into every node of a running bed.
func (b *bed) load(ctx context.Context, archives []string) error {
	o, err := b.options()
	if err != nil {
		return fmt.Errorf("no cluster in %s: %w", b.dir, err)
	}
	for i := range o.Nodes {
		for _, archive := range archives {
			abs, err := filepath.Abs(archive)
			if err != nil {
				return err
			}
			importer := exec.CommandContext(ctx, b.path("node"), nodeName(i), o.Bin.Node+"/ctr", "-n", "k8s.io", "images", "import", "--local", abs)
			if out, err := importer.CombinedOutput(); err != nil {
				return fmt.Errorf("import %s into %s: %w\n%s", archive, nodeName(i), err, out)
			}
		}
	}
	return nil
}

// report sends one line to whoever waits in `up`.
func report(status io.Writer, format string, args ...any) {
	// Nobody reads after the start: the error means just that.
	_, _ = fmt.Fprintf(status, format+"\n", args...)
}
