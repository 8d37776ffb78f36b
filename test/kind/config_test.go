// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package kind

import (
	"os"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/dra-shared/dra-driver-shared/test/kind/engine"
)

const userConfig = "kind: Cluster\nnodes: [{role: control-plane}, {role: worker}]\n"

func TestAdapt(t *testing.T) {
	usual := engine.Facts{Cgroup2: true, OOMScore: true}
	for name, test := range map[string]struct {
		facts   engine.Facts
		standIn bool
		reasons int
		want    []string
		without []string
	}{
		"a usual machine": {facts: usual, without: []string{"Patches", "networking", "extraMounts"}},
		"a node image of this project": {
			facts: usual, standIn: true, reasons: 1,
			want:    []string{"kubeProxyMode: nftables", "kind: ClusterConfiguration\n  dns: {disabled: true}"},
			without: []string{"failCgroupV1", "extraMounts"},
		},
		"cgroup v1": {
			facts: engine.Facts{OOMScore: true}, reasons: 1,
			want: []string{"kind: KubeletConfiguration\n  failCgroupV1: false"}, without: []string{"oomScoreAdj"},
		},
		"no CAP_SYS_RESOURCE": {
			facts: engine.Facts{Cgroup2: true}, reasons: 1,
			want: []string{
				"kind: KubeletConfiguration\n  oomScoreAdj: 0", "kind: KubeProxyConfiguration\n  oomScoreAdj: 0",
				"restrict_oom_score_adj = true",
				"containerPath: /etc/systemd/system/containerd.service.d/no-oom-score.conf\n    hostPath: /dir/drop-in",
			},
			without: []string{"failCgroupV1"},
		},
		"all of them": {standIn: true, reasons: 3, want: []string{"failCgroupV1", "nftables", "oomScoreAdj"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, reasons, err := adapt([]byte(userConfig), test.facts, test.standIn, "/dir/drop-in")
			if err != nil {
				t.Fatal(err)
			}
			if len(reasons) != test.reasons {
				t.Errorf("got %d reasons, want %d: %q", len(reasons), test.reasons, reasons)
			}
			for _, want := range test.want {
				if !strings.Contains(string(got), want) {
					t.Errorf("the configuration does not contain %q:\n%s", want, got)
				}
			}
			for _, unwanted := range test.without {
				if strings.Contains(string(got), unwanted) {
					t.Errorf("the configuration contains %q:\n%s", unwanted, got)
				}
			}
			var parsed struct {
				Nodes []struct{ ExtraMounts []any }
			}
			if err := yaml.Unmarshal(got, &parsed); err != nil {
				t.Fatal(err)
			}
			for i, n := range parsed.Nodes {
				if want := !test.facts.OOMScore; (len(n.ExtraMounts) > 0) != want {
					t.Errorf("node %d: got mounts %v, want any: %t", i, n.ExtraMounts, want)
				}
			}
		})
	}
}

func TestAdapt_keepsUserConfig(t *testing.T) {
	const config = "kubeadmConfigPatches: [mine]\n" +
		"networking: {podSubnet: 10.1.0.0/16}\n" +
		"nodes: [{extraMounts: [{hostPath: /mine}]}]\n"
	got, _, err := adapt([]byte(config), engine.Facts{}, true, "/dir/drop-in")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"- mine\n", "podSubnet: 10.1.0.0/16", "hostPath: /mine\n"} {
		if !strings.Contains(string(got), want) {
			t.Errorf("the configuration does not contain %q:\n%s", want, got)
		}
	}
}

// The names in the files that users copy are those that this package uses.
func TestConfigs_nameCluster(t *testing.T) {
	for _, file := range []string{"one-node.yaml", "two-nodes.yaml"} {
		raw, err := os.ReadFile("../../demo/kind/" + file)
		if err != nil {
			t.Fatal(err)
		}
		if want := "\nname: " + clusterName + "\n"; !strings.Contains(string(raw), want) {
			t.Errorf("%s does not contain %q", file, want)
		}
	}
}
