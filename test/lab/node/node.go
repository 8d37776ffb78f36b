// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
	"github.com/dra-shared/dra-driver-shared/test/lab/guest"
	"github.com/dra-shared/dra-driver-shared/test/lab/kernel"
	"github.com/dra-shared/dra-driver-shared/test/lab/vminit"
)

// AgentPort is the TCP port of the agent in a node.
const AgentPort = "7077"

// Config describes a node.
type Config struct {
	Cluster *clusterclient.Cluster
	// Name is the name of the node, n1 to n9. The cluster must not have another node of that name.
	Name string
	// Kernel is the kernel, and Modules the directory lib/modules for the guest.
	Kernel  kernel.Kernel
	Modules string
	// Append are additional arguments for the kernel. With security=selinux, the node has an SELinux policy, which
	// enforcing=1 enforces.
	Append []string
	// Cache is the directory of the root disks.
	Cache string
	// Images are image archives that the node has.
	Images []string
	// Programs are files of this machine that the node has under the same path.
	Programs []string
	// CPUs is the number of virtual processors, MemoryMiB the size of the memory.
	CPUs, MemoryMiB int
}

// rootModules are the modules that the kernel needs to mount the root disk.
var rootModules = []string{"virtio_pci", "virtio_blk", "ext4"}

// readyTimeout limits the time from the start of a guest until its node is Ready,
// which is 25 to 40 s on two idle processors.
const readyTimeout = 4 * time.Minute

// Start starts a guest as a node of a running cluster, and returns when the node is
// Ready. The guest ends at the latest when ctx is done. The cluster's script `node`
// runs commands in the guest.
func Start(ctx context.Context, c Config, progress io.Writer) (*guest.Guest, error) {
	binaries, err := clusterBinaries(c.Cluster)
	if err != nil {
		return nil, err
	}
	root, err := RootDisk(ctx, binaries, c.Cache, SELinux(c.Append), progress)
	if err != nil {
		return nil, fmt.Errorf("make the root disk: %w", err)
	}
	dir := filepath.Join(c.Cluster.Dir, "guest-"+c.Name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	store := filepath.Join(dir, "store.img")
	if err := storeDisk(ctx, store, binaries, c.Images); err != nil {
		return nil, fmt.Errorf("make the disk with images: %w", err)
	}
	joined := filepath.Join(dir, "join")
	if err := run(ctx, filepath.Join(c.Cluster.Root, "bin/cluster"), "join", "--dir", c.Cluster.Dir,
		"--name", c.Name, "--out", joined); err != nil {
		return nil, err
	}
	initrd := filepath.Join(dir, "initrd")
	if err := c.writeInitrd(initrd, joined); err != nil {
		return nil, fmt.Errorf("write the initramfs: %w", err)
	}
	if err := c.connect(ctx); err != nil {
		return nil, err
	}
	address, err := os.ReadFile(filepath.Join(joined, "address"))
	if err != nil {
		return nil, err
	}
	if err := c.writeExecScript(string(address)); err != nil {
		return nil, err
	}
	console, err := os.Create(filepath.Join(c.Cluster.Dir, "logs", "console-"+c.Name+".log"))
	if err != nil {
		return nil, err
	}
	start := time.Now()
	g, err := guest.Start(ctx, guest.Config{
		Kernel: c.Kernel.Image(), Initrd: initrd, CPUs: c.CPUs, MemoryMiB: c.MemoryMiB, Console: console,
		Append: append([]string{"apparmor=1", "systemd.show_status=0", "net.ifnames=1", "loglevel=4"}, c.Append...),
		Args:   c.devices(root, store),
		// Overlays of the disks are in TMPDIR.
		Prefix: []string{filepath.Join(c.Cluster.Dir, "network"), "env", "TMPDIR=" + dir},
	})
	if err != nil {
		return nil, err
	}
	if err := c.awaitReady(ctx, g); err != nil {
		g.Stop()
		messages, readErr := os.ReadFile(console.Name())
		return nil, fmt.Errorf("%w%s", errors.Join(err, readErr), guest.Tail(messages))
	}
	fmt.Fprintf(progress, "lab: node %s with Linux %s is Ready in %.0f s\n",
		c.Name, c.Kernel.Release, time.Since(start).Seconds())
	return g, nil
}

// SELinux reports whether arguments make the kernel run SELinux.
func SELinux(arguments []string) bool {
	return slices.Contains(strings.Fields(strings.Join(arguments, " ")), "security=selinux")
}

// clusterBinaries returns the directories of the binaries of a running cluster.
func clusterBinaries(c *clusterclient.Cluster) (Binaries, error) {
	var options struct{ Bin Binaries }
	raw, err := os.ReadFile(filepath.Join(c.Dir, "options.json"))
	if err != nil {
		return options.Bin, fmt.Errorf("read the options of the cluster: %w: is it running?", err)
	}
	return options.Bin, json.Unmarshal(raw, &options)
}

func (c Config) writeInitrd(file, joined string) error {
	job := vminit.Job{RootDisk: "/dev/vda", Modules: rootModules, Labels: SELinux(c.Append)}
	archive, err := vminit.NewArchive(file, job, c.Modules)
	if err != nil {
		return err
	}
	archive.CopyTree(vminit.OverlayDir+"/etc/node", joined)
	self, err := os.Executable()
	if err != nil {
		return err
	}
	archive.CopyFile(vminit.OverlayDir+"/opt/lab/lab", self)
	for _, program := range c.Programs {
		archive.CopyFile(vminit.OverlayDir+program, program)
	}
	network := "[Match]\nName=node0\n[Network]\nAddress=%s/24\nGateway=%s\nIPForward=yes\n"
	values := make([]any, 0, 2)
	for _, name := range []string{"address", "gateway"} {
		raw, err := os.ReadFile(filepath.Join(joined, name))
		if err != nil {
			return err
		}
		values = append(values, string(raw))
	}
	archive.File(vminit.OverlayDir+"/etc/systemd/network/30-node0.network", 0o644, fmt.Appendf(nil, network, values...))
	archive.File(vminit.OverlayDir+"/etc/hostname", 0o644, []byte(c.Name+"\n"))
	return archive.Close()
}

// nics are the links of a node, in the order of the PCI slots from firstSlot. The node names them by slot.
var nics = []struct {
	tap, bridge string
	mtu         int
}{
	{"m-%s", "node0", 1500},
	{"%s-nic0", "switch", 9000},
	{"%s-nic1", "switch", 9000},
}

const firstSlot = 3

// connect creates the taps that QEMU opens in the cluster's network namespace, and
// routes the addresses of the node's pods to the node.
func (c Config) connect(ctx context.Context) error {
	ip := func(args ...string) error {
		return run(ctx, filepath.Join(c.Cluster.Dir, "network"), append([]string{"ip"}, args...)...)
	}
	for _, nic := range nics {
		tap := fmt.Sprintf(nic.tap, c.Name)
		if err := ip("tuntap", "add", tap, "mode", "tap", "vnet_hdr"); err != nil {
			return err
		}
		if err := ip("link", "set", tap, "mtu", fmt.Sprint(nic.mtu), "master", nic.bridge, "up"); err != nil {
			return err
		}
	}
	index := strings.TrimPrefix(c.Name, "n")
	return ip("route", "replace", "10.77."+index+".0/24", "via", "192.168.77."+index, "dev", "node0", "onlink")
}

// devices returns the arguments of QEMU for the node's disks and NICs.
func (c Config) devices(root, store string) []string {
	var args []string
	for i, disk := range []string{root, store} { // /dev/vda, /dev/vdb
		id := fmt.Sprintf("disk%d", i)
		args = append(args, "-drive", "if=none,format=raw,snapshot=on,id="+id+",file="+disk,
			"-device", fmt.Sprintf("virtio-blk-pci,drive=%s,addr=%02x.0", id, firstSlot+len(nics)+i))
	}
	index := strings.TrimPrefix(c.Name, "n")
	for i, nic := range nics {
		id := fmt.Sprintf("nic%d", i)
		args = append(args,
			"-netdev", fmt.Sprintf("tap,id=%s,ifname=%s,script=no,downscript=no,vhost=off", id, fmt.Sprintf(nic.tap, c.Name)),
			"-device", fmt.Sprintf("virtio-net-pci,netdev=%s,addr=%02x.0,mac=52:54:00:77:%02s:%02d,host_mtu=%d,mq=off",
				id, firstSlot+i, index, i+1, nic.mtu))
	}
	return args
}

// writeExecScript writes the script that the cluster's scripts run commands in the guest with.
func (c Config) writeExecScript(address string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	script := fmt.Sprintf("#!/bin/sh\n# %s.exec CMD...: runs CMD in the guest.\nexec %s/network %s exec %s:%s -- \"$@\"\n",
		c.Name, c.Cluster.Dir, self, address, AgentPort)
	return os.WriteFile(filepath.Join(c.Cluster.Dir, c.Name+".exec"), []byte(script), 0o755)
}

// awaitReady waits until the node is Ready, or the guest has ended.
func (c Config) awaitReady(ctx context.Context, g *guest.Guest) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		<-g.Done()
		cancel()
	}()
	err := eventually.Poll(ctx, readyTimeout, func() error {
		out, err := c.Cluster.Kubectl(ctx, "get", "node", c.Name,
			"-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out != "True" {
			err = fmt.Errorf("condition Ready of node %s: got %q, want True", c.Name, out)
		}
		return err
	})
	select {
	case <-g.Done():
		return fmt.Errorf("the guest of node %s ended: %w", c.Name, cmp.Or(g.Wait(), guest.ErrShutDown))
	default:
		return err
	}
}
