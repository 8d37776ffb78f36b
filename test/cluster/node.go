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
	"path/filepath"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func nodeName(index int) string { return fmt.Sprintf("n%d", index+1) }
func nodeIP(index int) string   { return fmt.Sprintf("192.168.77.%d", index+1) }
func podCIDR(index int) string  { return fmt.Sprintf("10.77.%d.0/24", index+1) }

// nodeStarted is the message that a node writes to its pipe when its daemons run. Any other
// text is an error message.
const nodeStarted = "started"

// node runs a node inside its network and mount namespaces until the cluster ends. The node has its own /run,
// /var/lib/kubelet, and so on, so ordinary DaemonSet manifests work.
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
	r := criRuntimes[o.Runtime]
	if err := nodeMounts(data, r.state); err != nil {
		return err
	}
	if err := nodeLinks(index); err != nil {
		return err
	}
	cgroup, err := makeNodeCgroup(c.id + "-" + name)
	if err != nil {
		return err
	}
	path := "PATH=" + o.Bin.Runtime + ":" + o.Bin.Node + ":" + os.Getenv("PATH")
	if err := c.startRuntime(ctx, r, o, name, path); err != nil {
		return err
	}
	if err := importImages(ctx, r, o); err != nil {
		return err
	}
	kubeletConfig, err := c.writeKubeletConfig(data, name, index, cgroup, r.socket)
	if err != nil {
		return err
	}
	kubelet := daemon{
		name: "kubelet", log: c.path("logs", "kubelet-"+name+".log"), env: []string{path}, extraArgs: c.kubeletFlags,
		argv: []string{
			o.Bin.Kubelet + "/kube", "kubelet", "--config=" + kubeletConfig,
			"--kubeconfig=" + c.path("pki", name+".kubeconfig"),
			"--hostname-override=" + name, "--node-ip=" + nodeIP(index), "--cert-dir=/var/lib/kubelet/pki", "--v=2",
		},
	}
	return kubelet.start(ctx)
}

// startRuntime starts the container runtime and waits until it listens.
func (c *cluster) startRuntime(ctx context.Context, r criRuntime, o options, name, path string) error {
	data := c.path(name)
	if err := writeCNIConfig(data, int(name[1]-'1')); err != nil {
		return err
	}
	oci, err := ociRuntime(o, data)
	if err != nil {
		return err
	}
	argv, err := r.configure(runtimeNode{bin: o.Bin, data: data, oci: oci})
	if err != nil {
		return err
	}
	d := daemon{name: r.name, log: c.path("logs", r.name+"-"+name+".log"), argv: argv, env: []string{path}}
	if err := d.start(ctx); err != nil {
		return err
	}
	return await(ctx, r.name, func() error {
		conn, err := net.Dial("unix", r.socket)
		if err == nil {
			err = conn.Close()
		}
		return err
	})
}

// nodeMounts makes the node's mounts. The state directories of the runtime and the kubelet are in data.
func nodeMounts(data, runtimeState string) error {
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
	// On a real node, process 1 has the node's mounts. Here, process 1 belongs to the whole cluster.
	if err := mount("/proc/self/mountinfo", "/proc/1/mountinfo", "", unix.MS_BIND, ""); err != nil {
		return err
	}
	// The kernel lets a pod with its own user namespace mount procfs only if the
	// mount namespace has a fully visible one; here sysctl files hide parts of /proc.
	if err := mount("proc", "/run/proc", "proc", 0, ""); err != nil {
		return err
	}
	for _, dir := range []string{"/var/lib/kubelet", runtimeState} {
		source := filepath.Join(data, filepath.Base(dir))
		if err := errors.Join(os.MkdirAll(source, 0o755), os.MkdirAll(dir, 0o755)); err != nil {
			return err
		}
		if err := mount(source, dir, "", unix.MS_BIND, ""); err != nil {
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

const cniConfig = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "cni0",
 "isGateway": true, "ipMasq": false, "hairpinMode": true,
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "%s"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
`

func writeCNIConfig(data string, index int) error {
	dir := filepath.Join(data, "cni-conf")
	return errors.Join(os.MkdirAll(dir, 0o755),
		os.WriteFile(filepath.Join(dir, "10-pods.conflist"), fmt.Appendf(nil, cniConfig, podCIDR(index)), 0o644))
}

func (c *cluster) writeKubeletConfig(data, name string, index int, cgroup, runtimeSocket string) (string, error) {
	config := kubeletConfig(c.path("pki"), name, runtimeSocket, index)
	config["failCgroupV1"], config["cgroupDriver"], config["cgroupRoot"] = false, "cgroupfs", cgroup
	config["oomScoreAdj"] = 0 // a lower value needs CAP_SYS_RESOURCE
	file := filepath.Join(data, "kubelet.json")
	return file, writeJSON(file, config)
}

// kubeletConfig returns the part of a kubelet's configuration that nodes have in common. pki is the directory of the
// certificates, and runtimeSocket the container runtime's socket.
func kubeletConfig(pki, name, runtimeSocket string, index int) map[string]any {
	return map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"containerRuntimeEndpoint": "unix://" + runtimeSocket,
		"address":                  nodeIP(index), "healthzBindAddress": "127.0.0.1",
		"tlsCertFile":       filepath.Join(pki, name+".crt"),
		"tlsPrivateKeyFile": filepath.Join(pki, name+".key"),
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false}, "webhook": map[string]any{"enabled": true},
			"x509": map[string]any{"clientCAFile": filepath.Join(pki, "ca.crt")},
		},
		"authorization": map[string]any{"mode": "Webhook"},
		// Tests kill containers repeatedly and wait for the restart.
		"crashLoopBackOff": map[string]string{"maxContainerRestartPeriod": "1s"},
		"failSwapOn":       false, "maxOpenFiles": 20000,
		"evictionHard": map[string]string{
			"memory.available": "10Mi", "nodefs.available": "1%", "nodefs.inodesFree": "1%", "imagefs.available": "1%",
		},
		"imageGCHighThresholdPercent": 100,
		"resolvConf":                  "", "clusterDNS": []string{dnsIP}, "makeIPTablesUtilChains": false,
	}
}

func writeJSON(file string, value any) error {
	raw, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, raw, 0o644)
}
