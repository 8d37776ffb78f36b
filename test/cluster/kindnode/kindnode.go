// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package kindnode makes a node image of kind from Debian packages and Go modules,
// for machines that cannot pull kindest/node from a registry.
//
// The image contains what kind's own images/base/Dockerfile and `kind build
// node-image` put into theirs, with these differences:
//
//   - etcd, the control plane, kube-proxy, kubelet, kubeadm, and kubectl are one binary
//     (test/cluster/kube), which is also the only file of all images of the control plane;
//   - kube-proxy works only in the mode nftables;
//   - a service of the node takes the place of kindnetd (files/pod-network.sh);
//   - there is no CoreDNS: the configuration of the cluster must disable it.
//
// Debian is bookworm, because systemd 252 still runs on cgroup v1.
package kindnode

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/dra-shared/dra-driver-shared/test/cluster/build"
	"github.com/dra-shared/dra-driver-shared/test/cluster/image"
)

// Kind is the version of kind that the node's files come from.
const Kind = "v0.33.0"

const suite = "bookworm"

// packages are the packages of kind's Dockerfile, except for NFS, iSCSI, and
// fuse-overlayfs.
var packages = []string{
	"systemd", "conntrack", "iptables", "nftables", "iproute2", "ethtool", "util-linux", "mount", "kmod",
	"libseccomp2", "pigz", "bash", "ca-certificates", "curl", "jq", "procps",
}

//go:embed files
var files embed.FS

// Archive is the file that Build makes, for `docker load`, and Tag is the name of the
// image in it.
const (
	Archive = "node.tar"
	Tag     = "kindest/node:dra-shared-local"
)

// config is the configuration of kind's own images.
var config = v1.Config{
	Env:        []string{"container=docker"}, // so that systemd knows that it runs in a container
	StopSignal: "SIGRTMIN+3",                 // systemd exits on it
	Entrypoint: []string{"/usr/local/bin/entrypoint", "/sbin/init"},
}

// Build returns the directory of the cache that contains Archive. It builds what the
// cache lacks, and writes its progress to progress. source is the directory of the
// module test/cluster.
func Build(ctx context.Context, source string, progress io.Writer) (string, error) {
	bin, err := build.Binaries(ctx, source, build.Versions{}, progress)
	if err != nil {
		return "", err
	}
	own, err := digest(files)
	if err != nil {
		return "", err
	}
	base, err := rootFS(ctx, progress)
	if err != nil {
		return "", err
	}
	inputs := []string{Kind, own, assemblyVersion,
		filepath.Base(base), filepath.Base(bin.Kube), filepath.Base(bin.Node), filepath.Base(bin.Pause)}
	return build.Cached("kind-node", inputs, func(dir string) error {
		start := time.Now()
		kind, err := module(ctx, "sigs.k8s.io/kind", Kind)
		if err != nil {
			return err
		}
		root := filepath.Join(dir, "root")
		layer := filepath.Join(dir, "layer.tar")
		a := assembly{ctx: ctx, root: root, base: base, kind: kind, bin: bin}
		if err := a.assemble(layer); err != nil {
			return fmt.Errorf("build the node image of kind: %w", err)
		}
		if err := image.WriteLayer(layer, Tag, runtime.GOARCH, config, filepath.Join(dir, Archive)); err != nil {
			return err
		}
		fmt.Fprintf(progress, "build: node image of kind: done in %.0f s\n", time.Since(start).Seconds())
		return errors.Join(os.Remove(layer), os.RemoveAll(root))
	})
}

// rootFS returns the directory of the cache that contains rootfs.tar, the Debian
// packages of the node.
func rootFS(ctx context.Context, progress io.Writer) (string, error) {
	inputs := append([]string{suite}, packages...)
	return build.Cached("kind-debian", inputs, func(dir string) error {
		if _, err := exec.LookPath("mmdebstrap"); err != nil {
			return errors.New("mmdebstrap is missing: apt-get install -y mmdebstrap")
		}
		start := time.Now()
		fmt.Fprintf(progress, "build: Debian packages of the node image\n")
		args := []string{"--mode=root", "--variant=minbase", "--format=tar", "--quiet",
			"--aptopt=Apt::Install-Recommends \"false\"", "--include=" + strings.Join(packages, ",")}
		for _, unneeded := range []string{"doc", "man", "locale", "info"} {
			args = append(args, "--dpkgopt=path-exclude=/usr/share/"+unneeded+"/*")
		}
		args = append(args, suite, filepath.Join(dir, "rootfs.tar"))
		mirror, err := mirror(ctx)
		if err != nil {
			return err
		}
		if mirror != "" {
			args = append(args, mirror)
		}
		if out, err := exec.CommandContext(ctx, "mmdebstrap", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("install the Debian packages of the node image: %w: %s", err, lastLines(out))
		}
		fmt.Fprintf(progress, "build: Debian packages of the node image: done in %.0f s\n", time.Since(start).Seconds())
		return nil
	})
}

// mirror returns the URI of the Debian mirror that apt uses, or an empty string for
// mmdebstrap's default.
func mirror(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(REPO_URI)",
		"Created-By: Packages", "Origin: Debian", "Codename: "+suite).Output()
	if err != nil {
		return "", fmt.Errorf("ask apt for its mirror: %w", err)
	}
	first, _, _ := strings.Cut(string(out), "\n")
	return first, nil
}

// module returns the directory of a Go module.
func module(ctx context.Context, path, version string) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "mod", "download", "-json", path+"@"+version).Output()
	if err != nil {
		return "", fmt.Errorf("download %s %s: %w: %s", path, version, err, out)
	}
	var m struct{ Dir string }
	if err := json.Unmarshal(out, &m); err != nil {
		return "", err
	}
	return m.Dir, nil
}

// digest returns a hash of the names and contents of all files.
func digest(files fs.FS) (string, error) {
	h := sha256.New()
	err := fs.WalkDir(files, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := fs.ReadFile(files, path)
		fmt.Fprintf(h, "%s %d\n%s", path, len(content), content)
		return err
	})
	return fmt.Sprintf("%x", h.Sum(nil)), err
}

func lastLines(out []byte) string {
	const lines = 20
	all := strings.Split(strings.TrimSpace(string(out)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
