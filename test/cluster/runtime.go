// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/test/cluster/build"
	"github.com/dra-shared/dra-driver-shared/test/cluster/image"
)

// criRuntime is a container runtime that a node can run: a daemon that serves the
// kubelet's Container Runtime Interface.
type criRuntime struct {
	// name of the daemon and of its directory in the node's data.
	name string
	// socket that the daemon serves the interface on.
	socket string
	// state is the directory that the daemon stores images and containers in.
	state string
	// configure writes the daemon's configuration and returns its arguments.
	configure func(n runtimeNode) (argv []string, err error)
	// importer returns the command that imports an image archive.
	importer func(ctx context.Context, bin build.Dirs, archive string) (*exec.Cmd, error)
}

// runtimeNode holds the parameters of a runtime's configuration.
type runtimeNode struct {
	bin  build.Dirs
	data string // directory of the node's files
	oci  string // path of the OCI runtime
}

const pauseImage = "registry.local/pause:1"

// criRuntimes are the values of --runtime.
var criRuntimes = map[string]criRuntime{
	build.Containerd:    containerdRuntime(containerdConfig, "--local"),
	build.Containerd1_7: containerdRuntime(containerd1_7Config),
	build.CRIO:          crio,
	build.CRIOv1_34:     crio,
}

var crio = criRuntime{
	name: "crio", socket: "/run/crio/crio.sock", state: "/var/lib/containers",
	configure: configureCRIO, importer: importWithSkopeo,
}

// ociRuntimes are the values of --oci-runtime.
var ociRuntimes = []string{"runc", "crun"}

func containerdRuntime(config string, importFlags ...string) criRuntime {
	return criRuntime{
		name: "containerd", socket: "/run/containerd/containerd.sock", state: "/var/lib/containerd",
		configure: func(n runtimeNode) ([]string, error) {
			file := filepath.Join(n.data, "containerd.toml")
			text := fmt.Sprintf(config, n.bin.Node, n.data+"/cni-conf", n.oci, withoutPrivileges, false)
			return []string{n.bin.Runtime + "/containerd", "--config", file}, os.WriteFile(file, []byte(text), 0o644)
		},
		importer: func(ctx context.Context, bin build.Dirs, archive string) (*exec.Cmd, error) {
			args := append([]string{"-n", "k8s.io", "images", "import"}, importFlags...)
			return exec.CommandContext(ctx, bin.Runtime+"/ctr", append(args, archive)...), nil
		},
	}
}

// withoutPrivileges are lines of containerdConfig for a node without CAP_SYS_RESOURCE and AppArmor.
const withoutPrivileges = "  restrict_oom_score_adj = true\n  disable_apparmor = true\n"

// containerdConfig is a format string. Its arguments are the directories of the binaries and of the CNI configuration,
// the path of the OCI runtime, more lines for the runtime's section, and whether systemd manages the cgroups.
const containerdConfig = `version = 4
disabled_plugins = ["io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs"]
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "` + pauseImage + `"
[plugins.'io.containerd.cri.v1.runtime']
%[4]s  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["%[1]s/cni"]
    conf_dir = "%[2]s"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = "%[3]s"
      SystemdCgroup = %[5]t
`

// containerd1_7Config takes the same values. It enables CDI, which is off by default in containerd 1.7.
const containerd1_7Config = `version = 2
disabled_plugins = ["io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.devmapper"]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "` + pauseImage + `"
%[4]s  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "%[1]s/cni"
    conf_dir = "%[2]s"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "%[3]s"
        SystemdCgroup = %[5]t
`

const crioConfig = `[crio]
root = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
storage_driver = "overlay"
version_file = "/run/crio/version"
clean_shutdown_file = ""
[crio.api]
listen = "/run/crio/crio.sock"
[crio.runtime]
cgroup_manager = "cgroupfs"
pinns_path = "%[1]s/pinns"
apparmor_profile = "unconfined"
hooks_dir = []
default_runtime = "oci"
[crio.runtime.runtimes.oci]
runtime_path = "%[4]s"
runtime_root = "/run/oci"
monitor_path = "%[5]s"
monitor_cgroup = "pod"
[crio.image]
pause_image = "` + pauseImage + `"
pause_command = "/pause"
signature_policy = "%[3]s/policy.json"
[crio.network]
network_dir = "%[3]s/cni-conf"
plugin_dirs = ["%[2]s/cni"]
`

func configureCRIO(n runtimeNode) ([]string, error) {
	conmon, err := program("conmon")
	if err != nil {
		return nil, err
	}
	file := filepath.Join(n.data, "crio.conf")
	config := fmt.Sprintf(crioConfig, n.bin.Runtime, n.bin.Node, n.data, n.oci, conmon)
	return []string{n.bin.Runtime + "/crio", "--config", file, "--config-dir", ""}, errors.Join(
		os.WriteFile(file, []byte(config), 0o644),
		os.WriteFile(filepath.Join(n.data, "policy.json"),
			[]byte(`{"default": [{"type": "insecureAcceptAnything"}]}`), 0o644),
	)
}

// importWithSkopeo imports an archive into the storage of CRI-O, which cannot import
// archives itself.
func importWithSkopeo(ctx context.Context, _ build.Dirs, archive string) (*exec.Cmd, error) {
	skopeo, err := program("skopeo")
	if err != nil {
		return nil, err
	}
	tag, err := image.Tag(archive)
	if err != nil {
		return nil, err
	}
	return exec.CommandContext(ctx, skopeo, "--insecure-policy", "copy", "--quiet", "docker-archive:"+archive,
		"containers-storage:[overlay@/var/lib/containers/storage+/run/containers/storage]"+tag), nil
}

// program returns the path of a program of a Debian package of the same name.
func program(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%s is missing: apt-get install -y %s", name, name)
	}
	return path, nil
}

// ociRuntime returns the path of an OCI runtime. For CRI-O and for crun, it is the path
// of a script in dir. The script removes settings that this machine or the runtime
// denies from a container's configuration (see adaptBundle), and then runs the OCI
// runtime.
func ociRuntime(o options, dir string) (string, error) {
	runc := o.Bin.Node + "/runc"
	if o.OCIRuntime == "runc" && criRuntimes[o.Runtime].name != crio.name {
		return runc, nil
	}
	oci := runc
	if o.OCIRuntime == "crun" {
		var err error
		if oci, err = program("crun"); err != nil {
			return "", err
		}
	}
	path := filepath.Join(dir, o.OCIRuntime)
	script := fmt.Sprintf("#!/bin/sh\nexec %s oci %s \"$@\"\n", selfPath(), oci)
	return path, os.WriteFile(path, []byte(script), 0o755)
}

// execOCIRuntime replaces this process by the OCI runtime argv. If argv creates a
// container, it adapts the container's configuration to this machine first.
func execOCIRuntime(argv []string) error {
	if i := slices.Index(argv, "--bundle"); i >= 0 && i+1 < len(argv) && slices.Contains(argv, "create") {
		if err := adaptBundle(filepath.Join(argv[i+1], "config.json")); err != nil {
			return err
		}
	}
	return unix.Exec(argv[0], argv, os.Environ())
}

// adaptBundle changes the config.json of a container. Where this machine denies them, it removes a negative OOM score,
// which needs CAP_SYS_RESOURCE, and limits of huge pages: CRI-O requests both for each container and does not have an
// option to turn them off. It lowers the version of the OCI specification and removes an unlimited number of processes,
// because Debian 12's crun refuses later versions and negative limits.
func adaptBundle(file string) error {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var config map[string]any
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber() // a float64 cannot hold all limits of memory
	if err := decoder.Decode(&config); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	config["ociVersion"] = "1.0.2"
	process, _ := config["process"].(map[string]any)
	score, _ := process["oomScoreAdj"].(json.Number)
	if strings.HasPrefix(score.String(), "-") && !canLowerOOMScore() {
		delete(process, "oomScoreAdj")
	}
	linux, _ := config["linux"].(map[string]any)
	resources, _ := linux["resources"].(map[string]any)
	if !hasHugetlb() {
		delete(resources, "hugepageLimits")
	}
	pids, _ := resources["pids"].(map[string]any)
	if limit, _ := pids["limit"].(json.Number); strings.HasPrefix(limit.String(), "-") {
		delete(resources, "pids")
	}
	if raw, err = json.Marshal(config); err != nil {
		return err
	}
	return os.WriteFile(file, raw, 0o600)
}

func canLowerOOMScore() bool {
	return exec.Command("sh", "-c", "echo -998 >/proc/self/oom_score_adj").Run() == nil
}

// hasHugetlb reports whether the controller hugetlb is mounted. If the kernel supports
// the controller but no hierarchy has it, CRI-O assumes that it can set limits.
func hasHugetlb() bool {
	const root = "/sys/fs/cgroup"
	if _, err := os.Stat(filepath.Join(root, "hugetlb")); err == nil {
		return true
	}
	controllers, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	return err == nil && slices.Contains(strings.Fields(string(controllers)), "hugetlb")
}

// importImages imports the pause image and the archives of the options.
func importImages(ctx context.Context, r criRuntime, o options) error {
	archives := append([]string{filepath.Join(o.Bin.Pause, "pause.tar")}, o.Images...)
	errs := make([]error, len(archives))
	var wait sync.WaitGroup
	for i, archive := range archives {
		wait.Go(func() { errs[i] = importImage(ctx, r, o.Bin, archive) })
	}
	wait.Wait()
	return errors.Join(errs...)
}

func importImage(ctx context.Context, r criRuntime, bin build.Dirs, archive string) error {
	cmd, err := r.importer(ctx, bin, archive)
	if err != nil {
		return err
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("import %s: %w: %s", archive, err, strings.TrimSpace(string(out)))
	}
	return nil
}
