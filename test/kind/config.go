// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package kind

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/dra-shared/dra-driver-shared/test/kind/engine"
)

// adaptConfig returns the configuration for kind to use: config, a file that users
// write, or a copy in Dir with the additions that this machine needs.
func (c *Cluster) adaptConfig(config string, standIn bool) (string, error) {
	raw, err := os.ReadFile(filepath.Join(c.Root, config))
	if err != nil {
		return "", err
	}
	dropIn := c.path("no-oom-score.conf")
	adapted, reasons, err := adapt(raw, c.state.Engine.Facts, standIn, dropIn)
	if err != nil {
		return "", fmt.Errorf("%s: %w", config, err)
	}
	if len(reasons) == 0 {
		return config, nil
	}
	for _, reason := range reasons {
		c.say("%s", reason)
	}
	err = errors.Join(
		os.WriteFile(dropIn, []byte("[Service]\nOOMScoreAdjust=\n"), 0o644),
		os.WriteFile(c.path("kind.yaml"), adapted, 0o644),
	)
	return c.relative("kind.yaml"), err
}

// adaptation is something that a machine or a node image needs.
type adaptation struct {
	reason string
	// kubeadm are patches of the configurations that kubeadm reads.
	kubeadm []string
	// containerd are patches of the nodes' containerd configuration.
	containerd []string
	// dropIns are services of the nodes that read the drop-in file.
	dropIns []string
	// networking are fields of the cluster's configuration.
	networking map[string]any
}

// adapt adds the requirements of the facts and the node image to a configuration of kind, and
// returns a line about each addition.
func adapt(config []byte, facts engine.Facts, standIn bool, dropIn string) ([]byte, []string, error) {
	var cluster map[string]any
	if err := yaml.Unmarshal(config, &cluster); err != nil {
		return nil, nil, err
	}
	nodes, _ := cluster["nodes"].([]any)
	var reasons []string
	for _, a := range adaptations(facts, standIn) {
		reasons = append(reasons, a.reason)
		appendList(cluster, "kubeadmConfigPatches", a.kubeadm)
		appendList(cluster, "containerdConfigPatches", a.containerd)
		if len(a.networking) > 0 {
			networking, _ := cluster["networking"].(map[string]any)
			if networking == nil {
				networking = map[string]any{}
			}
			maps.Copy(networking, a.networking)
			cluster["networking"] = networking
		}
		for _, n := range nodes {
			node, ok := n.(map[string]any)
			if !ok {
				return nil, nil, fmt.Errorf("nodes: %v is not an object", n)
			}
			mounts, _ := node["extraMounts"].([]any)
			for _, service := range a.dropIns {
				mounts = append(mounts, map[string]any{
					"hostPath": dropIn, "containerPath": "/etc/systemd/system/" + service + ".service.d/no-oom-score.conf",
				})
			}
			if len(mounts) > 0 {
				node["extraMounts"] = mounts
			}
		}
	}
	out, err := yaml.Marshal(cluster)
	return out, reasons, err
}

func adaptations(facts engine.Facts, standIn bool) []adaptation {
	var list []adaptation
	if standIn {
		list = append(list, adaptation{
			reason:     "The node image has no CoreDNS, and kube-proxy works only in the mode nftables: configured both",
			kubeadm:    []string{patch("ClusterConfiguration", "dns: {disabled: true}")},
			networking: map[string]any{"kubeProxyMode": "nftables"},
		})
	}
	if !facts.Cgroup2 {
		list = append(list, adaptation{
			reason:  "This machine has cgroup v1, which the kubelet refuses by default: set failCgroupV1 to false",
			kubeadm: []string{patch("KubeletConfiguration", "failCgroupV1: false")},
		})
	}
	if !facts.OOMScore {
		list = append(list, adaptation{
			reason: "Processes of a node cannot lower their OOM score (CAP_SYS_RESOURCE is missing): " +
				"turned that off for services and containers",
			kubeadm: []string{
				patch("KubeletConfiguration", "oomScoreAdj: 0"),
				patch("KubeProxyConfiguration", "oomScoreAdj: 0"),
			},
			containerd: []string{"[plugins.\"io.containerd.grpc.v1.cri\"]\n  restrict_oom_score_adj = true\n"},
			dropIns:    []string{"containerd", "systemd-journald"},
		})
	}
	return list
}

func patch(kind, fields string) string { return "kind: " + kind + "\n" + fields + "\n" }

func appendList(object map[string]any, field string, elements []string) {
	list, _ := object[field].([]any)
	for _, e := range elements {
		list = append(list, e)
	}
	if len(list) > 0 {
		object[field] = list
	}
}

// kubeletSysctls are the sysctls that a kubelet sets. They apply to the whole machine,
// even if the kubelet runs in a node of kind.
var kubeletSysctls = []string{
	"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
	"kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
}

// readSysctls returns the values of kubeletSysctls on this machine.
func readSysctls() map[string]string {
	values := map[string]string{}
	for _, name := range kubeletSysctls {
		if raw, err := os.ReadFile("/proc/sys/" + name); err == nil {
			values[name] = strings.TrimSpace(string(raw))
		}
	}
	return values
}

// writeSysctls sets the sysctls that have other values.
func writeSysctls(values map[string]string) error {
	now := readSysctls()
	var failed error
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if now[name] != values[name] {
			failed = errors.Join(failed, os.WriteFile("/proc/sys/"+name, []byte(values[name]), 0o644))
		}
	}
	return failed
}
