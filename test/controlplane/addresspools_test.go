// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// The API server refuses changes of pools that would change the addresses and routes of links, and blocks without valid
// ranges. It also refuses the deletion of a pool if its status does not yet show whether nodes have its addresses.
func TestAddressPools_refusedWrites(t *testing.T) {
	e := requireTestEnv(t)
	newPool := func(name, gateway string, more ...string) *network.AddressPool {
		p := &network.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: network.AddressPoolSpec{
			Network: "storage", Subnet: "10.20.0.0/16", Ranges: append([]string{"10.20.1.0/24"}, more...), Gateway: gateway,
		}}
		if err := e.client.Create(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		return p
	}
	// refused waits until the API server refuses a write: it applies the chart's policies some time after
	// they were created.
	refused := func(what, want string, write func() error) {
		t.Helper()
		eventually.Eventually(t, timeout, "the API server refuses "+what, func() error {
			err := write()
			if err == nil {
				return errors.New("it accepts it")
			}
			if !strings.Contains(err.Error(), want) {
				return fmt.Errorf("want the reason %q: %w", want, err)
			}
			return nil
		})
	}
	routed, bare := newPool("routed", "10.20.0.1"), newPool("bare", "")
	mistaken := newPool("mistaken", "", "10.20.12.0/33")
	change := func(p *network.AddressPool, change func(*network.AddressPoolSpec)) func() error {
		return func() error {
			var changed network.AddressPool // the controller may have written the status
			if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(p), &changed); err != nil {
				return err
			}
			change(&changed.Spec)
			return e.client.Update(t.Context(), &changed, client.DryRunAll)
		}
	}
	setGateway := func(to string) func(*network.AddressPoolSpec) {
		return func(s *network.AddressPoolSpec) { s.Gateway = to }
	}
	refused("another gateway", "gateway is immutable", change(routed, setGateway("10.20.1.5")))
	refused("no gateway", "gateway is immutable", change(routed, setGateway("")))
	refused("a gateway that the pool did not have", "gateway is immutable", change(bare, setGateway("10.20.1.5")))
	if err := change(routed, func(s *network.AddressPoolSpec) { s.Routes = []string{"10.30.0.0/16"} })(); err != nil {
		t.Errorf("another route: %v", err)
	}

	block := func(name string, ranges ...string) func() error {
		return func() error {
			return e.client.Create(t.Context(), &network.AddressBlock{
				ObjectMeta: metav1.ObjectMeta{Name: name},
				Spec: network.AddressBlockSpec{
					Network: "storage", Pool: "routed", Node: ownNode, Ranges: ranges,
				},
			}, client.DryRunAll)
		}
	}
	for _, text := range []string{"10.20.1.0/28", "10.20.1.9", "10.20.1.0-x", "10.20.1.0-10.20.1.1-10.20.1.2", "-"} {
		refused("a block with the range "+text, "must be FIRST-LAST", block("invalid", "10.20.1.8-10.20.1.9", text))
	}
	if err := block("valid", "10.20.1.0-10.20.1.3", "fd00::1-fd00::1")(); err != nil {
		t.Errorf("a block with valid ranges: %v", err)
	}

	refused("the deletion of a pool without status", "the controller has not reported yet", func() error {
		return e.client.Delete(t.Context(), bare.DeepCopy(), client.DryRunAll)
	})
	e.startController(t, nil)
	// An entry that no node could use is refused while the controller runs. One from before can be removed.
	setRanges := func(ranges ...string) func(*network.AddressPoolSpec) {
		return func(s *network.AddressPoolSpec) { s.Ranges = ranges }
	}
	refused("a range outside the subnet", `spec.ranges[1]: Invalid value: "10.21.0.0/24"`,
		change(routed, setRanges("10.20.1.0/24", "10.21.0.0/24")))
	refused("a nameserver that a pod may get", `spec.nameservers[0]: Invalid value: "10.20.1.2"`,
		change(routed, func(s *network.AddressPoolSpec) { s.Nameservers = []string{"10.20.1.2"} }))
	refused("the removal of a valid range", "ranges can only be added",
		change(mistaken, setRanges("10.20.2.0/24", "10.20.12.0/33")))
	eventually.Eventually(t, timeout, "an invalid range can be removed", change(mistaken, setRanges("10.20.1.0/24")))
	for _, p := range []*network.AddressPool{routed, bare, mistaken} {
		eventually.Eventually(t, timeout, "the pool can be deleted", func() error {
			return client.IgnoreNotFound(e.client.Delete(t.Context(), p))
		})
	}
}
