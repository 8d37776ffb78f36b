// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package node makes the disks of a guest that is a node of a test cluster, and
// runs the guest.
//
// A node has two disks. The root disk is Debian with systemd and AppArmor, and the binaries of Kubernetes, containerd,
// and runc; it is the same for all kernels and clusters and is cached. Nodes that run SELinux have another one, with a
// policy and labels. The store disk is containerd's directory with the images unpacked: importing them in an emulated
// guest would take 20 s. The rest comes with the initramfs: the kernel's modules, the programs of the tests, and the
// files that the node joins its cluster with. Guests write to temporary overlays, so the disks do not change.
package node

import (
	"context"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// files are added to Debian's.
//
//go:embed all:files
var files embed.FS

// selinuxFiles are the files of a node that runs SELinux: policy/ makes its policy, and
// root/ is added to its root disk.
//
//go:embed all:selinux
var selinuxFiles embed.FS

// packages are the Debian packages of a node. systemd manages the cgroups of pods,
// and the kubelet and runc talk to it through dbus.
var packages = []string{
	"apparmor", "ca-certificates", "dbus", "ethtool", "iproute2", "iptables", "kmod", "mount", "nftables", "procps",
	"systemd", "systemd-sysv", "udev", "util-linux",
}

// selinuxPackages are additional packages of a node that runs SELinux: Debian's policy, the source of modules that
// Debian does not build, and the tools to build them.
var selinuxPackages = []string{
	"selinux-policy-default", "selinux-policy-dev", "selinux-policy-src", "semodule-utils", "zstd",
}

// masked are the units that a node of a test does not need.
var masked = []string{
	"apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
	"fstrim.timer", "getty@tty1.service", "serial-getty@ttyS0.service", "systemd-networkd-wait-online.service",
	"systemd-timesyncd.service",
}

var enabled = []string{"containerd.service", "kubelet.service", "lab-agent.service", "systemd-networkd.service"}

// Binaries are directories with the binaries of a node; see test/cluster/build.
type Binaries struct{ Kube, Node, Pause string }

// RootDisk returns the root disk from the cache, or makes it. That takes a minute if the cache does not have Debian,
// and some seconds if it does. With selinux, the disk is for a node that runs SELinux, which takes two minutes more.
func RootDisk(ctx context.Context, b Binaries, cache string, selinux bool, progress io.Writer) (string, error) {
	include, embedded := packages, []embed.FS{files}
	if selinux {
		include, embedded = slices.Concat(packages, selinuxPackages), append(embedded, selinuxFiles)
	}
	key := sha256.New()
	fmt.Fprintln(key, filepath.Base(b.Kube), filepath.Base(b.Node), include, masked, enabled)
	for _, e := range embedded {
		if err := hashFiles(key, e); err != nil {
			return "", err
		}
	}
	disk := filepath.Join(cache, fmt.Sprintf("root-%.12x.img", key.Sum(nil)))
	if _, err := os.Stat(disk); err == nil {
		return disk, nil
	}
	debian, err := debianArchive(ctx, cache, include, progress)
	if err != nil {
		return "", err
	}
	fmt.Fprintln(progress, "lab: make the root disk")
	root, err := os.MkdirTemp(cache, "root-new-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(root)
	if err := writeRoot(ctx, root, debian, b); err != nil {
		return "", err
	}
	if selinux {
		if err := installPolicy(ctx, root); err != nil {
			return "", err
		}
	}
	return disk, makeDisk(ctx, disk, root, "root", "4G")
}

// hashFiles writes the names and contents of embedded files to a hash.
func hashFiles(key io.Writer, embedded embed.FS) error {
	return fs.WalkDir(embedded, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		raw, err := embedded.ReadFile(name)
		fmt.Fprintf(key, "%s %x\n", name, raw)
		return err
	})
}

// installPolicy installs the SELinux policy in root and labels the files. The file system of root
// must store extended attributes.
func installPolicy(ctx context.Context, root string) error {
	if err := copyFiles(root, selinuxFiles, "selinux/root"); err != nil {
		return err
	}
	const policy = "/opt/lab/policy"
	if err := copyFiles(root+policy, selinuxFiles, "selinux/policy"); err != nil {
		return err
	}
	// The script mounts /proc in a namespace. The mount ends with the namespace.
	if err := run(ctx, "unshare", "--mount", "chroot", root, "sh", policy+"/install"); err != nil {
		return fmt.Errorf("install the SELinux policy: %w", err)
	}
	return nil
}

// debianArchive returns a tar archive of Debian with packages.
func debianArchive(ctx context.Context, cache string, include []string, progress io.Writer) (string, error) {
	suite, sources, err := debianSources(ctx)
	if err != nil {
		return "", err
	}
	key := sha256.Sum256([]byte(suite + strings.Join(include, " ")))
	archive := filepath.Join(cache, fmt.Sprintf("debian-%x.tar", key[:6]))
	if _, err := os.Stat(archive); err == nil {
		return archive, nil
	}
	fmt.Fprintf(progress, "lab: install Debian %s [1 min]\n", suite)
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	tmp := archive + ".new.tar" // mmdebstrap chooses the format by the name
	defer os.Remove(tmp)
	args := []string{
		"--quiet", "--variant=minbase", "--mode=root", "--include=" + strings.Join(include, ","),
		"--aptopt=Acquire::Retries 3",
		"--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*",
		"--dpkgopt=path-exclude=/usr/share/locale/*",
		"--customize-hook=rm -rf \"$1\"/var/lib/apt/lists/* \"$1\"/var/cache/apt/*",
		suite, tmp,
	}
	if err := run(ctx, "mmdebstrap", append(args, sources...)...); err != nil {
		return "", fmt.Errorf("install Debian: %w", err)
	}
	return archive, os.Rename(tmp, archive)
}

// debianSources returns the release of Debian that this machine's apt is configured for, and its sources without other
// publishers' sources.
func debianSources(ctx context.Context) (suite string, sources []string, err error) {
	list := exec.CommandContext(ctx, "apt-get", "indextargets",
		"--format", "$(ORIGIN)|$(REPO_URI)|$(CODENAME)|$(COMPONENT)", "Created-By: Packages")
	out, err := list.Output()
	if err != nil {
		return "", nil, fmt.Errorf("apt-get indextargets: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		fields := strings.Split(strings.TrimSpace(line), "|")
		if len(fields) != 4 || fields[0] != "Debian" || fields[3] != "main" {
			continue
		}
		sources = append(sources, strings.Join(append([]string{"deb"}, fields[1:]...), " "))
		if base := fields[2]; !strings.Contains(base, "-") {
			suite = base
		}
	}
	if suite == "" {
		return "", nil, errors.New("find the package archive of Debian: apt has no index of one: " +
			"run `apt-get update` on a machine with Debian")
	}
	return suite, sources, nil
}

// writeRoot writes the files of the root disk to root.
func writeRoot(ctx context.Context, root, debian string, b Binaries) error {
	if err := os.Chmod(root, 0o755); err != nil { // it becomes the directory / of the guest
		return err
	}
	if err := run(ctx, "tar", "-C", root, "-xpf", debian); err != nil {
		return err
	}
	if err := copyFiles(root, files, "files"); err != nil {
		return err
	}
	binaries := filepath.Join(root, "opt/node")
	if err := os.MkdirAll(binaries, 0o755); err != nil {
		return err
	}
	if err := run(ctx, "cp", "-a", filepath.Join(b.Kube, "kube"), b.Node+"/.", binaries); err != nil {
		return err
	}
	for _, dir := range []string{"var/lib/containerd", "usr/lib/modules"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}
	if err := run(ctx, "chroot", append([]string{root, "systemctl", "--quiet", "enable"}, enabled...)...); err != nil {
		return err
	}
	if err := run(ctx, "chroot", append([]string{root, "systemctl", "--quiet", "mask"}, masked...)...); err != nil {
		return err
	}
	// systemd generates the machine's ID if its file is empty.
	return os.WriteFile(filepath.Join(root, "etc/machine-id"), nil, 0o644)
}

// copyFiles writes the embedded files in dir below root. Those in opt/lab are programs.
func copyFiles(root string, embedded embed.FS, dir string) error {
	return fs.WalkDir(embedded, dir, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		target := filepath.Join(root, strings.TrimPrefix(name, dir))
		if entry.IsDir() {
			return os.MkdirAll(target, 0o755)
		}
		raw, err := embedded.ReadFile(name)
		if err != nil {
			return err
		}
		mode := fs.FileMode(0o644)
		if strings.HasPrefix(name, dir+"/opt/lab/") {
			mode = 0o755
		}
		return os.WriteFile(target, raw, mode)
	})
}

// makeDisk writes a disk with an ext4 file system that contains the files of root.
// It appears only when it is complete.
func makeDisk(ctx context.Context, disk, root, label, size string) error {
	tmp := disk + ".new"
	defer os.Remove(tmp)
	if err := run(ctx, "truncate", "-s", size, tmp); err != nil {
		return err
	}
	err := run(ctx, "mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard",
		"-L", label, "-d", root, tmp)
	if err != nil {
		return err
	}
	return os.Rename(tmp, disk)
}

// storeDisk makes a disk with containerd's directory. The images of the archives are unpacked in it. Layers are plain
// directories, which every kernel reads.
func storeDisk(ctx context.Context, disk string, b Binaries, archives []string) error {
	work, err := os.MkdirTemp("", "lab-store-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	config := filepath.Join(work, "config.toml")
	socket := filepath.Join(work, "sock")
	if err := os.WriteFile(config, fmt.Appendf(nil, storeConfig, work), 0o644); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	log, err := os.Create(filepath.Join(work, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	containerd := exec.CommandContext(ctx, filepath.Join(b.Node, "containerd"), "--config", config, "--address", socket)
	containerd.Stdout, containerd.Stderr = log, log
	containerd.Cancel = func() error { return containerd.Process.Signal(os.Interrupt) }
	containerd.WaitDelay = 10 * time.Second
	if err := containerd.Start(); err != nil {
		return err
	}
	importErr := importImages(ctx, filepath.Join(b.Node, "ctr"), socket,
		append([]string{filepath.Join(b.Pause, "pause.tar")}, archives...))
	cancel()
	_ = containerd.Wait() // its store is complete when it has ended
	if importErr != nil {
		messages, _ := os.ReadFile(log.Name())
		return fmt.Errorf("%w\nmessages of containerd:\n%s", importErr, messages)
	}
	root := filepath.Join(work, "root")
	if err := os.Chmod(root, 0o711); err != nil {
		return err
	}
	return makeDisk(context.WithoutCancel(ctx), disk, root, "store", "2G")
}

// storeConfig is for a containerd that only unpacks images.
const storeConfig = `version = 4
root = "%[1]s/root"
state = "%[1]s/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime",
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs"]
`

func importImages(ctx context.Context, ctr, socket string, archives []string) error {
	err := eventually.Poll(ctx, 20*time.Second, func() error {
		_, err := os.Stat(socket)
		return err
	})
	if err != nil {
		return fmt.Errorf("wait for containerd: %w", err)
	}
	for _, archive := range archives {
		err := run(ctx, ctr, "--address", socket, "-n", "k8s.io", "images", "import", "--local", archive)
		if err != nil {
			return err
		}
	}
	return nil
}

// run runs a program. The program's output is part of the error.
func run(ctx context.Context, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("%w: test/env/prerequisites.sh lab installs it", err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(string(out)))
	}
	return nil
}
