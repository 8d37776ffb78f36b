// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/dra-shared/dra-driver-shared/conformance/fakeapi"
)

// session is a node with the running driver. Cases share it until one of them fails.
type session struct {
	config Config
	env    Env // of instances; PodUID belongs to the last one
	client kubernetes.Interface
	server *fakeapi.Server // nil with Config.Kubelet
	dir    string
	log    lockedBuffer
	api    apiLog

	setUp  []string // files of the setup hook
	static []string // CDI devices that no claim owns

	settled bool // a case has waited until the driver published
	// publishLimit is how long the driver may take to publish devices. silent reports whether it did not publish any.
	publishLimit time.Duration
	silent       bool

	instances []*instance
}

// instance is a process of the driver, or stands in for one.
type instance struct {
	kubelet
	env  Env
	kill func(syscall.Signal) error
	done chan struct{} // closed when the driver has ended
	err  error         // of the driver; valid when done is closed
	// asked reports whether the suite asked the driver to end, or gave it a reason to end.
	asked bool
	pid   int // of the process; 0 if it is unknown
	// registered are the calls of the registration. Reports list them for cases without calls.
	registered []string
}

// newSession creates a node without starting the driver.
func newSession(c Config) (*session, error) {
	s := &session{config: c, publishLimit: c.StartTimeout.Duration}
	s.env = Env{Driver: c.Driver, Node: c.Node, CDIDir: c.CDIDir, Kubeconfig: c.Kubeconfig}
	if c.isLive() {
		rest, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
		if err != nil {
			return nil, err
		}
		rest.QPS, rest.Burst = 50, 100
		rest.UserAgent = userAgent
		rest.ContentType, rest.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON // readable in reports
		rest.Wrap(s.api.wrap)
		if c.Kubelet != "" {
			s.env.KubeletDir, s.env.RegistryDir = c.Kubelet, filepath.Join(c.Kubelet, "plugins_registry")
		}
		s.client, err = kubernetes.NewForConfig(rest)
		return s, err
	}
	var err error
	// Paths of sockets have at most 107 characters, so the directory must not be longer than /var/lib/kubelet.
	for s.dir == "" {
		dir := filepath.Join(os.TempDir(), "dr"+rand.String(4))
		switch err := os.Mkdir(dir, 0o755); {
		case err == nil:
			s.dir = dir
		case !errors.Is(err, os.ErrExist):
			return nil, err
		}
	}
	s.server, err = fakeapi.New(node(c.Node), node(otherNode))
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(s.dir))
	}
	s.server.Observe(s.api.served)
	s.env.REST = s.server.Config()
	own := s.server.Config()
	own.UserAgent = userAgent
	own.Wrap(s.api.wrap)
	if s.client, err = kubernetes.NewForConfig(own); err == nil {
		s.env, err = s.directories(s.env, "k")
	}
	if err == nil && len(c.Hooks.Setup) > 0 {
		_, err = s.hook(context.Background(), c.Hooks.Setup, "")
		s.setUp = s.files()
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func node(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}}}
}

// files returns the files in the directories that the driver writes to.
func (s *session) files() (paths []string) {
	for _, dir := range []string{s.env.PluginDir, s.env.CDIDir, s.env.StateDir} {
		if dir == "" {
			continue
		}
		_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() { // it may have been removed meanwhile
				paths = append(paths, path)
			}
			return nil
		})
	}
	return paths
}

// directories creates the directories of a node.
func (s *session) directories(e Env, name string) (Env, error) {
	e.KubeletDir = filepath.Join(s.dir, name)
	e.PluginDir = filepath.Join(e.KubeletDir, "plugins", e.Driver)
	e.RegistryDir = filepath.Join(e.KubeletDir, "plugins_registry")
	e.CDIDir, e.StateDir = filepath.Join(e.KubeletDir, "cdi"), filepath.Join(e.KubeletDir, "state")
	e.Kubeconfig = filepath.Join(s.dir, "kubeconfig")
	for _, d := range []string{e.PluginDir, e.RegistryDir, e.CDIDir, e.StateDir} {
		if err := os.MkdirAll(d, 0o750); err != nil {
			return e, err
		}
	}
	return e, os.WriteFile(e.Kubeconfig, []byte(s.server.Kubeconfig()), 0o600)
}

// close ends all instances and removes the node.
func (s *session) close() error {
	var errs []error
	for _, i := range s.instances {
		errs = append(errs, i.disconnect())
		if i.kill != nil {
			_ = i.kill(syscall.SIGKILL) // it may have ended
			<-i.done
		}
	}
	if s.server == nil {
		return errors.Join(errs...)
	}
	if len(s.config.Hooks.Teardown) > 0 {
		_, err := s.hook(context.Background(), s.config.Hooks.Teardown, "")
		errs = append(errs, err)
	}
	s.server.Close()
	return errors.Join(append(errs, os.RemoveAll(s.dir))...)
}

// start starts an instance of the driver, as a pod with a new UID or env's UID, and waits until it can be called.
func (s *session) start(ctx context.Context, env Env) (*instance, error) {
	if s.config.Kubelet != "" {
		i := &instance{env: env, kubelet: kubelet{driver: s.config.Driver, timeout: s.config.callTimeout}}
		ctx, cancel := context.WithTimeout(ctx, s.config.StartTimeout.Duration)
		defer cancel()
		if err := pollEvery(ctx, podInterval, func() error { return i.find(ctx, env.RegistryDir) }); err != nil {
			return i, err
		}
		s.env.PluginDir = filepath.Dir(i.endpoint)
		i.env.PluginDir = s.env.PluginDir
		i.registered = i.takeCalls()
		s.instances = append(s.instances, i)
		return i, nil
	}
	i, err := s.launch(env)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, s.config.StartTimeout.Duration)
	defer cancel()
	err = poll(ctx, func() error {
		if i.ended() {
			return permanent{fmt.Errorf("the driver ended: %w", i.err)}
		}
		return i.register(ctx, env.RegistryDir, s.connected())
	})
	if err == nil {
		err = poll(ctx, func() error { return i.call(ctx) })
	}
	if err != nil {
		return i, fmt.Errorf("start the driver: %w; the end of its log:\n%s", err, tail(s.log.String(), 20))
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.registered = slices.Clone(i.calls)
	return i, nil
}

// waitForRestart waits until the driver of a live node can be called: the kubelet takes a while to
// start it again after a case has killed it. The next case reports a driver that cannot.
func (s *session) waitForRestart(ctx context.Context) {
	if s.server != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, restartLimit)
	defer cancel()
	for _, i := range s.instances {
		_ = pollEvery(ctx, podInterval, func() error { return i.call(ctx) })
	}
}

// launch starts an instance of the driver without waiting.
func (s *session) launch(env Env) (i *instance, err error) {
	if env.PodUID == "" {
		env.PodUID = string(uuid.NewUUID())
	}
	i = &instance{env: env, kubelet: kubelet{driver: s.config.Driver, timeout: s.config.callTimeout},
		done: make(chan struct{})}
	i.local = func(name string) string { return env.local(s.config.Mounts, name) }
	if s.config.Serve != nil {
		i.serve(s.config.Serve)
	} else if err := i.exec(s.config, &s.log); err != nil {
		return nil, err
	}
	s.instances = append(s.instances, i)
	return i, nil
}

// connected returns the registration sockets of instances that run.
func (s *session) connected() (paths []string) {
	for _, i := range s.instances {
		if !i.ended() && i.registration != "" {
			paths = append(paths, i.registration)
		}
	}
	return paths
}

func (i *instance) serve(run func(context.Context, Env) error) {
	ctx, cancel := context.WithCancel(context.Background())
	i.kill = func(syscall.Signal) error { cancel(); return nil }
	go func() {
		defer close(i.done)
		defer cancel()
		i.err = run(ctx, i.env)
	}()
}

func (i *instance) exec(c Config, log io.Writer) error {
	args := i.env.expand(c.Command)
	if len(c.Mounts) > 0 {
		script := ""
		for _, target := range slices.Sorted(maps.Keys(c.Mounts)) {
			script += fmt.Sprintf("mkdir -p %q && mount --bind %q %q && ", target,
				i.env.expand([]string{c.Mounts[target]})[0], target)
		}
		args = append([]string{"unshare", "--mount", "--propagation", "private", "sh", "-c", script + `exec "$@"`, "sh"},
			args...)
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = os.Environ()
	for name, value := range i.env.variables() {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.Stdout, cmd.Stderr = log, log
	// A signal reaches all processes of the command, and none survives the suite.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the driver: %w", err)
	}
	i.pid = cmd.Process.Pid
	i.kill = func(signal syscall.Signal) error { return syscall.Kill(-i.pid, signal) }
	go func() {
		defer close(i.done)
		i.err = cmd.Wait()
	}()
	return nil
}

// ended reports whether the driver has ended.
func (i *instance) ended() bool {
	select {
	case <-i.done:
		return true
	default:
		return false
	}
}

// crashed returns an error if the driver has ended, and no case asked it to.
func (i *instance) crashed() error {
	if i.asked || !i.ended() {
		return nil
	}
	if i.err == nil {
		return errCrashed
	}
	return fmt.Errorf("%w: %w", errCrashed, i.err)
}

// awaitEnd waits a short time for the end of a process that does not answer: the client
// learns of the end of a connection before the parent learns of the end of the process.
func (i *instance) awaitEnd(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	select {
	case <-i.done:
	case <-ctx.Done():
	}
}

// stop ends an instance with a signal and waits until it has ended.
func (i *instance) stop(ctx context.Context, signal syscall.Signal) error {
	i.asked = true
	err := errors.Join(i.disconnect(), i.kill(signal))
	if err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	select {
	case <-i.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the driver has not ended after %v: %w", signal, ctx.Err())
	}
}

// hook runs a hook and returns its output.
func (s *session) hook(ctx context.Context, command []string, device string) (string, error) {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = append(os.Environ(), "DEVICE="+device)
	for name, value := range s.env.variables() {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("hook %s: %w: %s", strings.Join(command, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// permanent is an error that makes poll stop trying.
type permanent struct{ error }

// poll calls f until it succeeds or the context ends.
func poll(ctx context.Context, f func() error) error { return pollEvery(ctx, 10*time.Millisecond, f) }

// pollEvery is poll with a time between calls. It returns the last error from before the context
// ended, if there is one: a later error states only that the context has ended.
func pollEvery(ctx context.Context, interval time.Duration, f func() error) (last error) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		err := f()
		if last == nil || ctx.Err() == nil {
			last = err
		}
		var p permanent
		if err == nil || errors.As(err, &p) {
			return err
		}
		select {
		case <-ctx.Done():
			return last
		case <-ticker.C:
		}
	}
}

// lockedBuffer is the log of the driver.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// String returns everything that was written.
func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// tail returns the last lines of a text.
func tail(text string, lines int) string {
	all := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
