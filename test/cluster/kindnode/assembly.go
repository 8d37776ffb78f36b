// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package kindnode

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/cluster/build"
	"github.com/dra-shared/dra-driver-shared/test/cluster/image"
)

// assemblyVersion is part of the cache key. Change it when this file changes what the
// image contains.
const assemblyVersion = "4"

// assembly makes the root file system of a node in a directory.
type assembly struct {
	ctx  context.Context
	root string // the directory, which assemble creates
	base string // contains rootfs.tar
	kind string // the module of kind
	bin  build.Dirs
}

// assemble makes the root file system and writes it to a tar archive.
func (a *assembly) assemble(archive string) error {
	if err := os.Mkdir(a.root, 0o755); err != nil {
		return err
	}
	if err := a.command("tar", "-C", a.root, "-xf", filepath.Join(a.base, "rootfs.tar")); err != nil {
		return err
	}
	for _, step := range []func() error{
		a.removeUnwantedUnits, a.copyFiles, a.copyBinaries, a.configure, a.importImages,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return a.command("tar", "--numeric-owner", "-C", a.root, "-cf", archive, ".")
}

// removeUnwantedUnits removes systemd units, as kind's Dockerfile does. systemd then starts only the units that kind
// enables.
func (a *assembly) removeUnwantedUnits() error {
	for _, pattern := range []string{
		"lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service",
		"lib/systemd/system/multi-user.target.wants/*",
		"etc/systemd/system/*.wants/*",
		"lib/systemd/system/local-fs.target.wants/*",
		"lib/systemd/system/sockets.target.wants/*udev*",
		"lib/systemd/system/sockets.target.wants/*initctl*",
		"lib/systemd/system/basic.target.wants/*",
	} {
		matches, err := filepath.Glob(filepath.Join(a.root, pattern))
		if err != nil {
			return err
		}
		for _, m := range matches {
			if err := os.Remove(m); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyFiles copies the files of kind's base image, and those that this package embeds.
func (a *assembly) copyFiles() error {
	// Not cp -a: the files of a module are read-only.
	source := filepath.Join(a.kind, "images/base/files") + "/."
	if err := a.command("cp", "-r", "--no-preserve=mode", source, a.root); err != nil {
		return err
	}
	for name, destination := range map[string]string{
		"pod-network.sh":       "/kind/bin/pod-network.sh",
		"pod-network.service":  "/etc/systemd/system/pod-network.service",
		"default-cni.yaml":     "/kind/manifests/default-cni.yaml",
		"default-storage.yaml": "/kind/manifests/default-storage.yaml",
	} {
		content, err := fs.ReadFile(files, "files/"+name)
		if err != nil {
			return err
		}
		if err := a.write(destination, content, 0o644); err != nil {
			return err
		}
	}
	for _, dir := range []string{"kind/bin", "usr/local/bin"} {
		scripts, err := filepath.Glob(filepath.Join(a.root, dir, "*"))
		if err != nil {
			return err
		}
		for _, script := range scripts {
			if err := os.Chmod(script, 0o755); err != nil {
				return err
			}
		}
	}
	return a.write("/kind/version", []byte(build.KubernetesVersion), 0o644)
}

func (a *assembly) copyBinaries() error {
	for source, destination := range map[string]string{
		a.bin.Node + "/containerd":              "/usr/local/bin/containerd",
		a.bin.Node + "/containerd-shim-runc-v2": "/usr/local/bin/containerd-shim-runc-v2",
		a.bin.Node + "/ctr":                     "/usr/local/bin/ctr",
		a.bin.Node + "/runc":                    "/usr/local/sbin/runc",
		a.bin.Kube + "/kube":                    "/usr/bin/kube",
	} {
		if err := a.command("cp", source, a.root+destination); err != nil {
			return err
		}
	}
	for _, name := range []string{"kubelet", "kubeadm", "kubectl"} {
		if err := os.Symlink("kube", a.root+"/usr/bin/"+name); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(a.root+"/opt/cni/bin", 0o755); err != nil {
		return err
	}
	return a.command("cp", "-r", a.bin.Node+"/cni/.", a.root+"/opt/cni/bin")
}

func (a *assembly) configure() error {
	if err := os.MkdirAll(a.root+"/etc/kubernetes/manifests", 0o755); err != nil {
		return err
	}
	journald, err := os.ReadFile(a.root + "/etc/systemd/journald.conf")
	if err != nil {
		return err
	}
	spec, err := a.containerSpec()
	if err != nil {
		return err
	}
	err = errors.Join(
		a.write("/etc/systemd/journald.conf", append(journald, "ReadKMsg=no\n"...), 0o644),
		a.write("/etc/containerd/cri-base.json", spec, 0o644),
		a.write("/etc/machine-id", nil, 0o644),
		removeIfExists(a.root+"/sbin/init"),
		os.Symlink("/lib/systemd/systemd", a.root+"/sbin/init"),
	)
	if err != nil {
		return err
	}
	units := []string{"kubelet.service", "containerd.service", "undo-mount-hacks.service", "pod-network.service"}
	return errors.Join(
		a.command("chroot", append([]string{a.root, "systemctl", "--quiet", "enable"}, units...)...),
		a.command("chroot", a.root, "systemctl", "--quiet", "mask", "systemd-binfmt.service"),
	)
}

// containerSpec returns the file that kind's containerd starts every container from.
func (a *assembly) containerSpec() ([]byte, error) {
	raw, err := exec.CommandContext(a.ctx, a.bin.Node+"/ctr", "oci", "spec").Output()
	if err != nil {
		return nil, fmt.Errorf("ctr oci spec: %w", err)
	}
	var spec map[string]any
	if err := json.Unmarshal(raw, &spec); err != nil {
		return nil, err
	}
	spec["hooks"] = map[string]any{
		"createContainer": []any{map[string]any{"path": "/kind/bin/mount-product-files.sh"}},
	}
	if process, ok := spec["process"].(map[string]any); ok {
		delete(process, "rlimits")
	}
	return json.Marshal(spec)
}

// sandboxImage matches the name of the image of pods' sandboxes in kind's containerd
// configuration.
var sandboxImage = regexp.MustCompile(`sandbox_image = "([^"]+)"`)

// importImages puts the images of the control plane into the content store of the
// node's containerd, as `kind build node-image` does.
func (a *assembly) importImages() error {
	names, err := exec.CommandContext(a.ctx, a.bin.Kube+"/kube", "kubeadm", "config", "images", "list",
		"--kubernetes-version", build.KubernetesVersion).Output()
	if err != nil {
		return fmt.Errorf("kubeadm config images list: %w", err)
	}
	var kube []string
	for tag := range strings.FieldsSeq(string(names)) {
		if !strings.Contains(tag, "/coredns") && !strings.Contains(tag, "/pause:") {
			kube = append(kube, tag)
		}
	}
	if len(kube) == 0 {
		return fmt.Errorf("kubeadm config images list: no image of the control plane in %q", names)
	}
	config, err := os.ReadFile(a.root + "/etc/containerd/config.toml")
	if err != nil {
		return err
	}
	sandbox := sandboxImage.FindSubmatch(config)
	if sandbox == nil {
		return errors.New("kind's containerd configuration names no sandbox_image")
	}
	binaries, err := a.kubeFiles()
	if err != nil {
		return err
	}
	temporary, err := os.MkdirTemp("", "kind-node-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temporary)
	pause := []image.File{{Source: a.bin.Pause + "/pause", Destination: "/pause"}}
	err = errors.Join(
		image.WriteFiles(binaries, kube[0], runtime.GOARCH, temporary+"/kube.tar", kube[1:]...),
		image.WriteFiles(pause, string(sandbox[1]), runtime.GOARCH, temporary+"/pause.tar"),
	)
	if err != nil {
		return err
	}
	return a.withContainerd(temporary, func(ctr func(args ...string) error) error {
		return errors.Join(
			ctr("images", "import", "--all-platforms", "--no-unpack", temporary+"/kube.tar"),
			ctr("images", "import", "--all-platforms", "--no-unpack", temporary+"/pause.tar"),
		)
	})
}

// kubeFiles returns the files of the image of the control plane. kube-proxy runs nft,
// which is Debian's with its libraries.
func (a *assembly) kubeFiles() ([]image.File, error) {
	const kube = "/bin/kube"
	list := []image.File{
		{Source: a.bin.Kube + "/kube", Destination: kube},
		{Source: a.root + "/usr/sbin/nft", Destination: "/bin/nft"},
	}
	for _, name := range []string{ // as kubeadm's manifests name them; /bin is in the PATH
		"/bin/etcd", "/bin/kube-apiserver", "/bin/kube-controller-manager", "/bin/kube-scheduler",
		"/usr/local/bin/kube-proxy",
	} {
		list = append(list, image.File{Destination: name, Link: kube})
	}
	libraries, err := exec.CommandContext(a.ctx, "chroot", a.root, "ldd", "/usr/sbin/nft").Output()
	if err != nil {
		return nil, fmt.Errorf("list the libraries of nft: %w", err)
	}
	for word := range strings.FieldsSeq(string(libraries)) {
		if !filepath.IsAbs(word) {
			continue
		}
		source, err := exec.CommandContext(a.ctx, "chroot", a.root, "realpath", word).Output()
		if err != nil {
			return nil, fmt.Errorf("find library %s of nft: %w", word, err)
		}
		list = append(list, image.File{Source: a.root + strings.TrimSpace(string(source)), Destination: word})
	}
	return list, nil
}

// withContainerd runs a containerd that stores into the node's file system while do
// calls ctr.
func (a *assembly) withContainerd(state string, do func(ctr func(args ...string) error) error) error {
	socket := state + "/containerd.sock"
	config := state + "/config.toml"
	// Without the plugins for pods, containerd does not depend on the machine.
	err := os.WriteFile(config, []byte("version = 3\ndisabled_plugins = "+
		`["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", `+
		`"io.containerd.nri.v1.nri"]`+"\n"), 0o644)
	if err != nil {
		return err
	}
	var log bytes.Buffer
	containerd := exec.CommandContext(a.ctx, a.bin.Node+"/containerd", "--config", config,
		"--root", a.root+"/var/lib/containerd", "--state", state+"/state", "--address", socket)
	containerd.Stderr = &log
	containerd.Cancel = func() error { return containerd.Process.Signal(os.Interrupt) }
	containerd.WaitDelay = 10 * time.Second
	if err := containerd.Start(); err != nil {
		return err
	}
	ctr := func(args ...string) error {
		all := append([]string{"--address", socket, "--namespace=k8s.io"}, args...)
		return a.command(a.bin.Node+"/ctr", all...)
	}
	if err = awaitSocket(a.ctx, socket); err == nil {
		err = do(ctr)
	}
	if stopErr := containerd.Process.Signal(os.Interrupt); stopErr != nil {
		err = errors.Join(err, stopErr)
	}
	if waitErr := containerd.Wait(); waitErr != nil {
		err = errors.Join(err, fmt.Errorf("containerd: %w: %s", waitErr, lastLines(log.Bytes())))
	}
	return err
}

// awaitSocket returns when a process accepts connections on a Unix socket.
func awaitSocket(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for containerd: %w", err)
		case <-tick.C:
		}
	}
}

func (a *assembly) command(name string, args ...string) error {
	if out, err := exec.CommandContext(a.ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", filepath.Base(name), strings.Join(args, " "), err, lastLines(out))
	}
	return nil
}

func (a *assembly) write(path string, content []byte, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(a.root+path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(a.root+path, content, mode)
}

func removeIfExists(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
