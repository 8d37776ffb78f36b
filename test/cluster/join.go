// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/dra-shared/dra-driver-shared/test/cluster/build"
)

// The directories for a joining machine's files, and for the binaries of Kubernetes, containerd, and the CNI plugins.
const (
	joinedConfig   = "/etc/node"
	joinedBinaries = "/opt/node"
)

// joinedLines are lines of containerdConfig for a machine that joins. containerd ignores the value if the
// kernel does not run SELinux.
const joinedLines = "  enable_selinux = true\n"

// join writes to out the files of a node that runs on another machine, with its
// own kernel, systemd, and cgroup v2: its certificate, the configurations of
// containerd and the kubelet, and its name and address. The machine keeps them in
// joinedConfig.
func (c *cluster) join(name, out string) error {
	index := strings.Index("123456789", strings.TrimPrefix(name, "n"))
	if len(name) != 2 || name[0] != 'n' || index < 0 {
		return fmt.Errorf("--name %q: must be n1, n2, ..., or n9", name)
	}
	if out == "" {
		return errors.New("--out: is required")
	}
	ca, err := loadAuthority(c.path("pki"))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(out, "cni-conf"), 0o755); err != nil {
		return err
	}
	node := &authority{dir: out, cert: ca.cert, key: ca.key}
	if err := node.issueNode(index); err != nil {
		return err
	}
	authorities, err := os.ReadFile(c.path("pki", "ca.crt"))
	if err != nil {
		return err
	}
	kubelet := kubeletConfig(joinedConfig, name, criRuntimes[build.Containerd].socket, index)
	kubelet["cgroupDriver"] = "systemd"
	kubelet["seccompDefault"] = true // as on Talos; the driver's plugin has the runtime's profile, too, then
	containerd := fmt.Sprintf(containerdConfig,
		joinedBinaries, joinedConfig+"/cni-conf", joinedBinaries+"/runc", joinedLines, true)
	files := map[string]string{
		"ca.crt":                    string(authorities),
		"name":                      name,
		"address":                   nodeIP(index),
		"gateway":                   gatewayIP,
		"cni-conf/10-pods.conflist": fmt.Sprintf(cniConfig, podCIDR(index)),
		"containerd.toml":           containerd,
	}
	for file, text := range files {
		err = errors.Join(err, os.WriteFile(filepath.Join(out, file), []byte(text), 0o644))
	}
	return errors.Join(err,
		writeJSON(filepath.Join(out, "kubelet.json"), kubelet),
		(&authority{dir: joinedConfig}).kubeconfig(filepath.Join(out, "kubeconfig"), name, nodeServerURL),
	)
}
