// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
)

// Pools that serve one zone each can all be default pools.
func TestPools_nodeSelector(t *testing.T) {
	inZone := func(zone string) func(*network.AddressPoolSpec) {
		return func(s *network.AddressPoolSpec) {
			s.Default, s.NodeSelector = true, map[string]string{"zone": zone}
			s.Ranges = []string{fmt.Sprintf("10.20.%d.0/24", zone[0])}
		}
	}
	api := newFakeAPI(addressPool("pool-a", inZone("a")), addressPool("pool-b", inZone("b")))
	for zone, want := range map[string]string{"a": "[pool-a]", "b": "[pool-b]", "c": "[]"} {
		node := newNode(t, api, "n"+zone)
		node.zone = zone
		a := node.plugin(t.Context(), "p"+zone, time.Second)
		if got, err := a.Defaults(t.Context(), "storage", "default"); err != nil || fmt.Sprint(got) != want {
			t.Errorf("default pools in zone %s: got %v and error %v, want %s", zone, got, err, want)
		}
		err := a.Check(t.Context(), "storage", "default", []string{"pool-a"})
		wantErr := `addressPools[0]: Invalid value: "pool-a": AddressPool pool-a serves nodes with the labels zone=a, ` +
			"which node n" + zone + " does not have: choose another pool, or label the node"
		if got := fmt.Sprint(err); zone == "a" && err != nil || zone != "a" && got != wantErr {
			t.Errorf("use of pool-a in zone %s: got error %v, want %q only outside of zone a", zone, err, wantErr)
		}
	}
}

// Pools that serve some namespaces can be default pools next to one that serves all, and apply before it. Of several
// pools, the oldest applies.
func TestPools_defaultsOfNamespaces(t *testing.T) {
	pool := func(name string, age time.Duration, namespaces ...string) network.AddressPool {
		p := addressPool(name, func(s *network.AddressPoolSpec) { s.Default, s.Namespaces = true, namespaces })
		p.CreationTimestamp = metav1.NewTime(time.Now().Add(-age))
		return p
	}
	api := newFakeAPI(pool("all", 4*time.Hour), pool("all-younger", time.Hour), pool("team-a", 2*time.Hour, "a"),
		pool("team-b", 3*time.Hour, "b", "c"), pool("team-c", 2*time.Hour, "c"))
	a := newNode(t, api, "n1").plugin(t.Context(), "p1", time.Second)
	for namespace, want := range map[string]string{"a": "[team-a]", "b": "[team-b]", "c": "[team-b]", "d": "[all]"} {
		if got, err := a.Defaults(t.Context(), "storage", namespace); err != nil || fmt.Sprint(got) != want {
			t.Errorf("default pools of namespace %s: got %v and error %v, want %s", namespace, got, err, want)
		}
	}
	want := `addressPools[0]: Invalid value: "team-b": AddressPool team-b does not serve namespace a: ` +
		"spec.namespaces has [b c]: use another pool, or add the namespace to the pool"
	if err := a.Check(t.Context(), "storage", "a", []string{"team-b"}); err == nil || err.Error() != want {
		t.Errorf("claim of namespace a that names team-b: got error %v, want %s", err, want)
	}
	if err := a.Check(t.Context(), "storage", "b", []string{"team-b"}); err != nil {
		t.Errorf("claim of namespace b that names team-b: got error %v, want none", err)
	}
}

// Without the address, the pod would start and reach no host.
func TestPools_defaultsNamesInvalidPool(t *testing.T) {
	pool := func(name string, change func(*network.AddressPoolSpec)) network.AddressPool {
		return addressPool(name, func(s *network.AddressPoolSpec) {
			s.Default, s.Ranges = true, []string{"10.99.0.0/24"} // not in the subnet
			change(s)
		})
	}
	api := newFakeAPI(
		pool("wrong", func(*network.AddressPoolSpec) {}),
		pool("of-a-namespace", func(s *network.AddressPoolSpec) { s.Network, s.Namespaces = "lab", []string{"a"} }),
		pool("no-default", func(s *network.AddressPoolSpec) { s.Network, s.Default = "office", false }),
	)
	a := newNode(t, api, "n1").plugin(t.Context(), "p1", time.Second)
	for _, tc := range []struct{ network, namespace, want string }{
		{"storage", "a", "AddressPool wrong, a default pool of network storage: "},
		{"lab", "a", "AddressPool of-a-namespace, a default pool of network lab: "},
		{"lab", "b", ""}, {"office", "a", ""},
	} {
		got, err := a.Defaults(t.Context(), tc.network, tc.namespace)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tc.want)) {
			t.Errorf("network %s, namespace %s: got pools %v and error %v, want error %q",
				tc.network, tc.namespace, got, err, tc.want)
		}
	}
}
