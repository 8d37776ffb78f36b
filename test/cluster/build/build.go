// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package build builds the binaries of a test cluster from Go modules and caches them outside the work tree. The next
// start then takes seconds. The key of a cache entry is a hash of the build's inputs.
package build

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/cluster/image"
)

// Dirs are the directories that hold the binaries.
type Dirs struct {
	Kube    string // kube, the multi-call binary, for the control plane
	Kubectl string // kubectl of KubernetesVersion
	Kubelet string // kube of the version that nodes run
	Node    string // containerd, its shim, ctr, runc; CNI plugins in cni/
	Runtime string // the container runtime; the same directory as Node for Containerd
	Pause   string // pause.tar, the image that holds a pod's namespaces
}

// Container runtimes.
const (
	Containerd    = "containerd"
	Containerd1_7 = "containerd-1.7"
	CRIO          = "cri-o"
	CRIOv1_34     = "cri-o-1.34" // the oldest release with a module that can be built
)

// KubernetesVersion is the default version of Kubernetes.
const KubernetesVersion = "v1.37.1"

// Versions holds the versions of a cluster's components.
type Versions struct {
	Kubernetes string // the control plane; empty means KubernetesVersion
	Kubelet    string // empty means the version of the control plane
	Runtime    string // the container runtime; empty means Containerd
}

// Modules of the programs that a node runs. Each is built with its own go.mod.
// They are static and independent of the machine's packages.
const (
	containerd = "github.com/containerd/containerd/v2/cmd/%s@v2.4.2"
	runc       = "github.com/opencontainers/runc@v1.5.2"
	cniPlugins = "github.com/containernetworking/plugins/plugins/%s@v1.9.1"

	containerd1_7Version = "v1.7.35"
	crioVersion          = "v1.36.3"
	crio1_34Version      = "v1.34.0"
)

// step is one run of the go command.
type step struct {
	name string   // the result of the step, for messages
	args []string // arguments of go, without the packages
	pkgs []string // packages, which are the last arguments
	env  []string
	dir  string
}

// component is a set of files that is built and cached as a unit.
type component struct {
	name   string
	inputs []string // files with contents that are part of the cache key
	before func(ctx context.Context, out string) error
	steps  func(out string) []step
	finish func(out string) error
}

// Binaries builds the binaries that the cache lacks and returns where they are. It
// writes the current step, the number of finished steps, and the elapsed time to progress.
// source is the directory of the module test/cluster.
func Binaries(ctx context.Context, source string, v Versions, progress io.Writer) (Dirs, error) {
	var dirs Dirs
	cache, err := cacheDir()
	if err != nil {
		return dirs, err
	}
	version := cmp.Or(v.Kubernetes, KubernetesVersion)
	runtimes := map[string]component{
		Containerd: node(), Containerd1_7: containerd1_7(),
		CRIO: crio(CRIO, crioVersion), CRIOv1_34: crio(CRIOv1_34, crio1_34Version),
	}
	for _, c := range []struct {
		component
		dir *string
	}{
		{kube(source, version), &dirs.Kube}, {kubectl(source), &dirs.Kubectl},
		{kube(source, cmp.Or(v.Kubelet, version)), &dirs.Kubelet},
		{node(), &dirs.Node}, {runtimes[cmp.Or(v.Runtime, Containerd)], &dirs.Runtime}, {pause(source), &dirs.Pause},
	} {
		if *c.dir, err = c.build(ctx, cache, progress); err != nil {
			return dirs, err
		}
	}
	return dirs, nil
}

// linkerFlags returns the flags of the linker that set a version of Kubernetes.
func linkerFlags(version string) string {
	minor := strings.Split(version, ".")[1]
	const base = "k8s.io/component-base/version."
	return "-s -w -X " + base + "gitVersion=" + version +
		" -X " + base + "gitMajor=1 -X " + base + "gitMinor=" + minor +
		" -X " + base + "gitTreeState=clean -X k8s.io/client-go/pkg/version.gitVersion=" + version
}

func kubectl(source string) component {
	dir := filepath.Join(source, "kube")
	main := filepath.Join(dir, "kubectl", "main.go")
	return component{
		name: "kubectl",
		inputs: []string{filepath.Join(dir, "go.mod"), filepath.Join(dir, "go.sum"), main,
			filepath.Join(dir, "kubectl", "untranslated", "untranslated.go")},
		steps: func(out string) []step {
			return []step{{name: "kubectl " + KubernetesVersion, dir: dir, env: []string{"CGO_ENABLED=0"},
				args: []string{"build", "-v", "-buildvcs=false", "-trimpath", "-ldflags", linkerFlags(KubernetesVersion),
					"-o", out + "/kubectl"},
				pkgs: []string{"./kubectl"}}}
		},
	}
}

func kube(source, version string) component {
	dir, stamp := filepath.Join(source, "kube"), linkerFlags(version)
	c := component{
		name:   "kube",
		inputs: []string{filepath.Join(dir, "go.mod"), filepath.Join(dir, "go.sum"), filepath.Join(dir, "main.go")},
		steps: func(out string) []step {
			return []step{{name: "Kubernetes " + version + " and etcd", dir: dir, env: []string{"CGO_ENABLED=0"},
				args: []string{"build", "-v", "-buildvcs=false", "-trimpath", "-ldflags", stamp, "-o", out + "/kube"},
				pkgs: []string{"."}}}
		},
	}
	if version == KubernetesVersion {
		return c
	}
	c.name, c.inputs = "kube-"+version, []string{filepath.Join(dir, "main.go")}
	c.before = func(ctx context.Context, out string) error { return writeModule(ctx, dir, version, out+"/src") }
	c.steps = func(out string) []step {
		return []step{
			{name: "Kubernetes " + version + ": modules", dir: out + "/src", args: []string{"mod", "tidy"}},
			{name: "Kubernetes " + version + " and etcd", dir: out + "/src", env: []string{"CGO_ENABLED=0"},
				args: []string{"build", "-v", "-buildvcs=false", "-trimpath", "-ldflags", stamp, "-o", out + "/kube"},
				pkgs: []string{"."}},
		}
	}
	return c
}

func node() component {
	static := []string{"install", "-v", "-trimpath", "-ldflags", "-s -w"}
	return component{
		name: "node",
		steps: func(out string) []step {
			return []step{
				{
					name: "containerd", args: append(static, "-tags", "no_btrfs no_zfs no_devmapper"),
					env: []string{"CGO_ENABLED=0", "GOBIN=" + out},
					pkgs: []string{
						fmt.Sprintf(containerd, "containerd"), fmt.Sprintf(containerd, "containerd-shim-runc-v2"),
						fmt.Sprintf(containerd, "ctr"),
					},
				},
				// containerd requests a seccomp profile for every pod, so runc must support it.
				{
					name: "runc",
					args: []string{"install", "-v", "-trimpath", "-ldflags", "-s -w -extldflags -static",
						"-tags", "seccomp netgo osusergo"},
					env: []string{"CGO_ENABLED=1", "GOBIN=" + out}, pkgs: []string{runc},
				},
				{name: "CNI plugins", args: static, env: []string{"CGO_ENABLED=0", "GOBIN=" + out + "/cni"},
					pkgs: []string{fmt.Sprintf(cniPlugins, "main/bridge"), fmt.Sprintf(cniPlugins, "main/loopback"),
						fmt.Sprintf(cniPlugins, "main/macvlan"), fmt.Sprintf(cniPlugins, "ipam/host-local")}},
			}
		},
	}
}

// containerd1_7 and crio are built in copies of their modules: their go.mod files have
// exclude and replace directives, which the go command applies only to the main module.
func containerd1_7() component {
	const module = "github.com/containerd/containerd"
	stamp := "-s -w -X " + module + "/version.Version=" + containerd1_7Version
	return component{
		name:   Containerd1_7,
		before: copyModule(module + "@" + containerd1_7Version),
		steps: func(out string) []step {
			return []step{{name: "containerd " + containerd1_7Version, dir: out + "/src",
				env: []string{"CGO_ENABLED=0", "GOBIN=" + out},
				args: []string{"install", "-mod=mod", "-v", "-trimpath", "-buildvcs=false", "-ldflags", stamp,
					"-tags", "no_btrfs no_zfs no_devmapper no_aufs"},
				pkgs: []string{"./cmd/containerd", "./cmd/containerd-shim-runc-v2", "./cmd/ctr"}}}
		},
		finish: removeSource,
	}
}

func crio(name, version string) component {
	return component{
		name:   name,
		before: copyModule("github.com/cri-o/cri-o@" + version),
		steps: func(out string) []step {
			return []step{{name: "CRI-O " + version, dir: out + "/src", env: []string{"CGO_ENABLED=1", "GOBIN=" + out},
				args: []string{"install", "-mod=mod", "-v", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w",
					"-tags", "containers_image_openpgp containers_image_ostree_stub exclude_graphdriver_btrfs"},
				pkgs: []string{"./cmd/crio"}}}
		},
		finish: func(out string) error {
			sources, err := filepath.Glob(out + "/src/pinns/src/*.c")
			if err != nil {
				return err
			}
			compile := exec.Command("gcc", append(sources, "-std=c99", "-O2", "-static", "-o", out+"/pinns")...)
			if text, err := compile.CombinedOutput(); err != nil {
				return fmt.Errorf("build pinns, which pins the namespaces of CRI-O's pods: %w\n%s", err, text)
			}
			return removeSource(out)
		},
	}
}

// copyModule returns a function that copies a module (PATH@VERSION) to OUT/src.
func copyModule(module string) func(ctx context.Context, out string) error {
	return func(ctx context.Context, out string) error {
		raw, err := exec.CommandContext(ctx, "go", "mod", "download", "-json", module).Output()
		if err != nil {
			return fmt.Errorf("download %s: %w: %s", module, err, raw)
		}
		var downloaded struct{ Dir string }
		if err := json.Unmarshal(raw, &downloaded); err != nil {
			return err
		}
		return os.CopyFS(out+"/src", os.DirFS(downloaded.Dir))
	}
}

func removeSource(out string) error { return os.RemoveAll(out + "/src") }

func pause(source string) component {
	main := filepath.Join(source, "pause", "main.go")
	return component{
		name:   "pause",
		inputs: []string{main},
		steps: func(out string) []step {
			return []step{{name: "pause", env: []string{"CGO_ENABLED=0"},
				args: []string{"build", "-v", "-trimpath", "-ldflags", "-s -w", "-o", out + "/pause"}, pkgs: []string{main}}}
		},
		finish: func(out string) error {
			files := []image.File{{Source: out + "/pause", Destination: "/pause"}}
			return image.WriteFiles(files, "registry.local/pause:1", runtime.GOARCH, out+"/pause.tar")
		},
	}
}

// build returns the component's cache directory. It builds the component first if
// the directory does not exist.
func (c component) build(ctx context.Context, cache string, progress io.Writer) (string, error) {
	key, err := c.key()
	if err != nil {
		return "", err
	}
	return cached(filepath.Join(cache, c.name+"-"+key), func(out string) error {
		if c.before != nil {
			if err := c.before(ctx, out); err != nil {
				return err
			}
		}
		for _, s := range c.steps(out) {
			if err := s.run(ctx, progress); err != nil {
				return err
			}
		}
		if c.finish != nil {
			return c.finish(out)
		}
		return nil
	})
}

// Cached returns the directory NAME-HASH of the cache. If it does not exist, Cached
// calls fill, which writes the content of the directory. The hash is of inputs, which
// are everything that the content depends on.
func Cached(name string, inputs []string, fill func(dir string) error) (string, error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	key := fmt.Sprintf("%x", sha256.Sum256([]byte(strings.Join(inputs, "\x00"))))[:16]
	return cached(filepath.Join(cache, name+"-"+key), fill)
}

func cacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache directory: %w: set HOME or XDG_CACHE_HOME", err)
	}
	return filepath.Join(cache, "dra-shared"), nil
}

func cached(dir string, fill func(dir string) error) (string, error) {
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	cache, name := filepath.Split(dir)
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	// Build in a unique directory and rename it when it is complete. Two concurrent
	// builds waste time, but cannot leave a broken result.
	out, err := os.MkdirTemp(cache, name+"-building-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(out)
	if err := os.Chmod(out, 0o755); err != nil {
		return "", err
	}
	if err := fill(out); err != nil {
		return "", err
	}
	if err := os.Rename(out, dir); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	return dir, nil
}

// key returns a hash of everything that the component is built from.
func (c component) key() (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, runtime.Version(), runtime.GOARCH)
	for _, s := range c.steps("OUT") {
		fmt.Fprintln(h, s.args, s.pkgs, s.env)
	}
	for _, input := range c.inputs {
		content, err := os.ReadFile(input)
		if err != nil {
			return "", fmt.Errorf("%w: run this command in the root directory of the repository, or set --source", err)
		}
		fmt.Fprintf(h, "%s %d\n%s", filepath.Base(input), len(content), content)
	}
	return fmt.Sprintf("%x", h.Sum(nil))[:16], nil
}

// reportInterval is the interval of progress messages during a build.
const reportInterval = 10 * time.Second

// run runs the step and writes its progress. The error of a failed build ends with
// the last 20 lines that the go command wrote.
func (s step) run(ctx context.Context, progress io.Writer) error {
	if s.name == "runc" {
		if err := checkSeccomp(ctx); err != nil {
			return err
		}
	}
	start := time.Now()
	total := s.packages(ctx)
	fmt.Fprintf(progress, "build: %s: %s\n", s.name, total)
	cmd := s.command(ctx, append(s.args, s.pkgs...)...)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	lines := make(chan string)
	go func() {
		defer close(lines)
		for scan := bufio.NewScanner(stderr); scan.Scan(); {
			lines <- scan.Text()
		}
	}()
	tick := time.NewTicker(reportInterval)
	defer tick.Stop()
	compiled, tail := 0, []string(nil)
	for open := true; open; {
		select {
		case line, ok := <-lines:
			open = ok
			// With -v the go command prints each package as it compiles it.
			if !strings.ContainsAny(line, " :") {
				compiled++
			} else if ok && !strings.HasPrefix(line, "go: downloading") {
				tail = append(tail, line)
			}
		case <-tick.C:
			elapsed := time.Since(start).Round(time.Second)
			fmt.Fprintf(progress, "build: %s: %d compiled of %s, %s\n", s.name, compiled, total, elapsed)
		}
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", s.name, err, strings.Join(tail[max(0, len(tail)-20):], "\n"))
	}
	fmt.Fprintf(progress, "build: %s: done in %s\n", s.name, time.Since(start).Round(100*time.Millisecond))
	return nil
}

// packages returns a phrase for the number of packages that the step compiles. The
// number is unknown for packages of another module.
func (s step) packages(ctx context.Context) string {
	if s.dir == "" {
		return "an unknown number of packages"
	}
	out, err := s.command(ctx, append([]string{"list", "-deps"}, s.pkgs...)...).Output()
	if err != nil {
		return "an unknown number of packages"
	}
	return fmt.Sprintf("at most %d packages", strings.Count(string(out), "\n"))
}

func (s step) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = s.dir
	cmd.Env = append(os.Environ(), "GOTOOLCHAIN=local", "GOFLAGS=", "GOWORK=off")
	cmd.Env = append(cmd.Env, s.env...)
	return cmd
}

// checkSeccomp returns an error with the remedy if libseccomp, the only C
// dependency of runc, is not installed. Otherwise the linker would fail after
// minutes of building.
func checkSeccomp(ctx context.Context) error {
	if exec.CommandContext(ctx, "pkg-config", "--static", "--exists", "libseccomp").Run() != nil {
		return errors.New("libseccomp, which runc needs, is missing: apt-get install -y gcc pkg-config libseccomp-dev")
	}
	return nil
}
