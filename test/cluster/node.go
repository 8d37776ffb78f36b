// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func nodeName(index int) string { return fmt.Sprintf("n%d", index+1) }
func nodeIP(index int) string   { return fmt.Sprintf("192.168.77.%d", index+1) }
func podCIDR(index int) string  { return fmt.Sprintf("10.77.%d.0/24", index+1) }

// nodeStarted is what a node writes to its pipe when its daemons run. Any other
// text is an error message.
const nodeStarted = "started"

const containerdSocket = "/run/containerd/containerd.sock"

// node runs a node inside its network and mount namespaces until the cluster
// ends. The node has its own /run, /var/lib/kubelet, and so on, so that ordinary
// DaemonSet manifests work.
func (c *cluster) node(ctx context.Context, name string) error {
	ready := os.NewFile(3, "ready")
	syscall.CloseOnExec(3)
	if _, err := io.ReadAll(os.Stdin); err != nil { // end-of-file: the sandbox has connected the links
		return err
	}
	if err := c.startNodeDaemons(ctx, name); err != nil {
		_, _ = io.WriteString(ready, err.Error())
		return err
	}
	_, _ = io.WriteString(ready, nodeStarted)
	ready.Close()
	<-ctx.Done()
	return nil
}

func (c *cluster) startNodeDaemons(ctx context.Context, name string) error {
	o, err := c.options()
	if err != nil {
		return err
	}
	index := int(name[1] - '1')
	data := c.path(name)
	if err := nodeMounts(data); err != nil {
		return err
	}
	if err := nodeLinks(index); err != nil {
		return err
	}
	cgroup, err := makeNodeCgroup(c.id + "-" + name)
	if err != nil {
		return err
	}
	path := "PATH=" + o.Bin.Node + ":" + os.Getenv("PATH")
	config, err := writeContainerdConfig(data, index, o)
	if err != nil {
		return err
	}
	containerd := daemon{name: "containerd", log: c.path("logs", "containerd-"+name+".log"),
		argv: []string{o.Bin.Node + "/containerd", "--config", config}, env: []string{path}}
	if err := containerd.start(ctx); err != nil {
		return err
	}
	if err := await(ctx, "containerd", func() error {
		conn, err := net.Dial("unix", containerdSocket)
		if err == nil {
			err = conn.Close()
		}
		return err
	}); err != nil {
		return err
	}
	if err := importImages(ctx, o); err != nil {
		return err
	}
	kubeletConfig, err := c.writeKubeletConfig(data, name, index, cgroup)
	if err != nil {
		return err
	}
	kubelet := daemon{
		name: "kubelet", log: c.path("logs", "kubelet-"+name+".log"), env: []string{path}, extraArgs: c.gateFlags,
		argv: []string{
			o.Bin.Kube + "/kube", "kubelet", "--config=" + kubeletConfig,
			"--kubeconfig=" + c.path("pki", name+".kubeconfig"),
			"--hostname-override=" + name, "--node-ip=" + nodeIP(index), "--cert-dir=/var/lib/kubelet/pki", "--v=2",
		},
	}
	return kubelet.start(ctx)
}

func nodeMounts(data string) error {
	if err := privateMounts(); err != nil {
		return err
	}
	if err := mountSys(); err != nil {
		return err
	}
	if err := mountDev(); err != nil {
		return err
	}
	if err := mount("bpf", "/sys/fs/bpf", "bpf", 0, "mode=700"); err != nil {
		return err
	}
	if err := mountFresh("/run", "/var/log", "/var/lib"); err != nil {
		return err
	}
	for _, dir := range []string{"/run/netns", "/run/cdi", "/run/lock", "/run/proc", "/var/lib/cni"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	// The kernel lets a pod with its own user namespace mount procfs only if the
	// mount namespace has a fully visible one; here sysctl files hide parts of /proc.
	if err := mount("proc", "/run/proc", "proc", 0, ""); err != nil {
		return err
	}
	for _, name := range []string{"kubelet", "containerd"} {
		if err := os.MkdirAll(filepath.Join(data, name), 0o755); err != nil {
			return err
		}
		if err := os.MkdirAll("/var/lib/"+name, 0o755); err != nil {
			return err
		}
		if err := mount(filepath.Join(data, name), "/var/lib/"+name, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	// Pods mount these directories with propagation.
	return errors.Join(
		mount("", "/run", "", unix.MS_REC|unix.MS_SHARED, ""),
		mount("", "/var/lib/kubelet", "", unix.MS_REC|unix.MS_SHARED, ""),
		mount("", "/sys/fs/bpf", "", unix.MS_REC|unix.MS_SHARED, ""),
	)
}

func nodeLinks(index int) error {
	err := errors.Join(bringUp("lo"), bringUp("node0", nodeIP(index)+"/24"), bringUp("nic0"), bringUp("nic1"))
	if err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644); err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gatewayIP)})
}

// makeNodeCgroup creates the parent cgroup of a node's pods in every hierarchy
// (cgroup v1) or in the unified one (v2), and returns its name for the kubelet.
func makeNodeCgroup(name string) (string, error) {
	const root = "/sys/fs/cgroup"
	if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err == nil {
		// A child cgroup can use only the controllers that its parent enables.
		err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+cpu +cpuset +memory +pids"), 0o644)
		return "/" + name, errors.Join(err, os.MkdirAll(filepath.Join(root, name), 0o755))
	}
	for _, hierarchy := range []string{
		"cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd",
	} {
		if _, err := os.Stat(filepath.Join(root, hierarchy)); errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err := os.MkdirAll(filepath.Join(root, hierarchy, name), 0o755); err != nil {
			return "", err
		}
	}
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} { // a new cpuset of cgroup v1 is empty
		value, err := os.ReadFile(filepath.Join(root, "cpuset", file))
		if err != nil {
			return "", err
		}
		if err := os.WriteFile(filepath.Join(root, "cpuset", name, file), value, 0o644); err != nil {
			return "", err
		}
	}
	return "/" + name, nil
}

const containerdConfig = `version = 4
disabled_plugins = ["io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs"]
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "registry.local/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["%[1]s/cni"]
    conf_dir = "%[2]s/cni-conf"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = "%[1]s/runc"
      SystemdCgroup = false
`

const cniConfig = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "cni0",
 "isGateway": true, "ipMasq": false, "hairpinMode": true,
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "%s"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
`

func writeContainerdConfig(data string, index int, o options) (string, error) {
	file := filepath.Join(data, "containerd.toml")
	if err := os.MkdirAll(filepath.Join(data, "cni-conf"), 0o755); err != nil {
		return "", err
	}
	return file, errors.Join(
		os.WriteFile(filepath.Join(data, "cni-conf", "10-pods.conflist"),
			fmt.Appendf(nil, cniConfig, podCIDR(index)), 0o644),
		os.WriteFile(file, fmt.Appendf(nil, containerdConfig, o.Bin.Node, data), 0o644),
	)
}

func importImages(ctx context.Context, o options) error {
	archives := append([]string{filepath.Join(o.Bin.Pause, "pause.tar")}, o.Images...)
	errs := make([]error, len(archives))
	var wait sync.WaitGroup
	for i, archive := range archives {
		wait.Go(func() {
			ctr := exec.CommandContext(ctx, o.Bin.Node+"/ctr", "-n", "k8s.io", "images", "import", "--local", archive)
			if out, err := ctr.CombinedOutput(); err != nil {
				errs[i] = fmt.Errorf("import %s: %w: %s", archive, err, strings.TrimSpace(string(out)))
			}
		})
	}
	wait.Wait()
	return errors.Join(errs...)
}

func (c *cluster) writeKubeletConfig(data, name string, index int, cgroup string) (string, error) {
	pki := func(file string) string { return c.path("pki", file) }
	raw, err := json.MarshalIndent(map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"failCgroupV1": false, "cgroupDriver": "cgroupfs", "cgroupRoot": cgroup,
		"containerRuntimeEndpoint": "unix://" + containerdSocket,
		"address":                  nodeIP(index), "healthzBindAddress": "127.0.0.1",
		"tlsCertFile": pki(name + ".crt"), "tlsPrivateKeyFile": pki(name + ".key"),
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false}, "webhook": map[string]any{"enabled": true},
			"x509": map[string]any{"clientCAFile": pki("ca.crt")},
		},
		"authorization": map[string]any{"mode": "Webhook"},
		// Tests kill containers repeatedly and wait for the restart.
		"crashLoopBackOff": map[string]string{"maxContainerRestartPeriod": "1s"},
		"failSwapOn":       false, "maxOpenFiles": 20000,
		"oomScoreAdj": 0, // a lower value needs CAP_SYS_RESOURCE
		"evictionHard": map[string]string{
			"memory.available": "10Mi", "nodefs.available": "1%", "nodefs.inodesFree": "1%", "imagefs.available": "1%",
		},
		"imageGCHighThresholdPercent": 100,
		"resolvConf":                  "", "clusterDNS": []string{dnsIP}, "makeIPTablesUtilChains": false,
	}, "", "  ")
	if err != nil {
		return "", err
	}
	file := filepath.Join(data, "kubelet.json")
	return file, os.WriteFile(file, raw, 0o644)
}
