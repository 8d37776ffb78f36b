// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package addresspool_test

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"go4.org/netipx"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/device/addresspool"
)

func pool(change func(*network.AddressPoolSpec)) *network.AddressPool {
	p := &network.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: "office"},
		Spec:       network.AddressPoolSpec{Network: "storage", Subnet: "10.20.0.0/24"},
	}
	if change != nil {
		change(&p.Spec)
	}
	return p
}

func TestParse_addresses(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*network.AddressPoolSpec)
		want   string // the ranges
	}{
		"whole IPv4 subnet": {nil, "10.20.0.1-10.20.0.254"},
		"gateway":           {func(s *network.AddressPoolSpec) { s.Gateway = "10.20.0.1" }, "10.20.0.2-10.20.0.254"},
		"ranges and exclusions": {func(s *network.AddressPoolSpec) {
			s.Ranges, s.Exclude = []string{"10.20.0.16/28", "10.20.0.40-10.20.0.41", "10.20.0.99"}, []string{"10.20.0.20"}
		}, "10.20.0.16-10.20.0.19 10.20.0.21-10.20.0.31 10.20.0.40-10.20.0.41 10.20.0.99-10.20.0.99"},
		"point to point": {func(s *network.AddressPoolSpec) { s.Subnet = "10.20.0.0/31" }, "10.20.0.0-10.20.0.1"},
		"large IPv4":     {func(s *network.AddressPoolSpec) { s.Subnet = "10.20.0.0/16" }, "10.20.0.1-10.20.255.254"},
		"part of a large subnet": {func(s *network.AddressPoolSpec) {
			s.Ranges, s.Subnet = []string{"10.20.16.0/20"}, "10.20.0.0/16"
		}, "10.20.16.0-10.20.31.255"},
		"IPv6": {func(s *network.AddressPoolSpec) {
			s.Subnet = "fd00:20::/64"
		}, "fd00:20::1-fd00:20::ffff:ffff:ffff:ffff"},
		"reserved nameserver": {func(s *network.AddressPoolSpec) {
			s.Reserved, s.Nameservers = []string{"10.20.0.2"}, []string{"10.20.0.2", "192.0.2.53"}
		}, "10.20.0.1-10.20.0.254"},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := addresspool.Parse(pool(tc.change))
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(addresspool.FormatRanges(p.Addresses), " "); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
}

// takeAll takes blocks of a pool until no address is free, and returns their sizes.
func takeAll(t *testing.T, p *addresspool.Pool) (sizes []int64) {
	t.Helper()
	random := rand.New(rand.NewPCG(1, 1))
	var assigned netipx.IPSetBuilder
	for {
		taken, _ := assigned.Clone().IPSet()
		block := addresspool.ChooseBlock(p, taken, random.Uint32())
		if block == nil {
			break
		}
		if taken.Overlaps(block) {
			t.Fatalf("block %v overlaps %v", block.Ranges(), taken.Ranges())
		}
		sizes = append(sizes, addresspool.Count(block).Int64())
		assigned.AddSet(block)
	}
	if all, _ := assigned.IPSet(); !all.Equal(p.Addresses) {
		t.Errorf("assigned %v of %v", all.Ranges(), p.Addresses.Ranges())
	}
	return sizes
}

// By default, a node with 50 pods takes at most 0.05 blocks per pod from a pool of 1,000 addresses or
// more, and the first nodes leave addresses of a small pool for many others.
func TestChooseBlock_default(t *testing.T) {
	for subnet, tc := range map[string]struct {
		first int64 // at most; a block has no network and no broadcast address
		nodes int   // that can take a block
	}{
		"10.20.0.0/30":  {1, 2},
		"10.20.0.0/28":  {1, 14},
		"10.20.0.0/24":  {8, 75},
		"10.20.0.0/22":  {32, 100},
		"10.20.0.0/20":  {64, 150},
		"fd00:20::/112": {64, 1000},
	} {
		t.Run(subnet, func(t *testing.T) {
			p, err := addresspool.Parse(pool(func(s *network.AddressPoolSpec) { s.Subnet = subnet }))
			if err != nil {
				t.Fatal(err)
			}
			sizes := takeAll(t, p)
			if len(sizes) < tc.nodes {
				t.Errorf("%d nodes can take a block, want %d", len(sizes), tc.nodes)
			}
			if largest := slices.Max(sizes); largest != tc.first {
				t.Errorf("the largest block has %d addresses, want %d", largest, tc.first)
			}
		})
	}
}

func TestPool_IsShort(t *testing.T) {
	for name, tc := range map[string]struct {
		subnet    string
		blockSize int32
		limit     int64 // the number of free addresses at which the pool is not short
	}{
		"few addresses":    {"10.20.0.0/28", 0, 1},
		"small pool":       {"10.20.0.0/24", 0, 15},
		"large pool":       {"10.20.0.0/16", 0, 16},
		"IPv6":             {"fd00:20::/64", 0, 16},
		"given block size": {"10.20.0.0/16", 64, 64},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := addresspool.Parse(pool(func(s *network.AddressPoolSpec) {
				s.Subnet = tc.subnet
				if tc.blockSize != 0 {
					s.BlockSize = &tc.blockSize
				}
			}))
			if err != nil {
				t.Fatal(err)
			}
			if !p.IsShort(big.NewInt(tc.limit-1)) || p.IsShort(big.NewInt(tc.limit)) {
				t.Errorf("short with %d free addresses: %t, with %d: %t, want true and false",
					tc.limit-1, p.IsShort(big.NewInt(tc.limit-1)), tc.limit, p.IsShort(big.NewInt(tc.limit)))
			}
		})
	}
}

func TestParse_invalid(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*network.AddressPoolSpec)
		want   string
	}{
		"subnet": {func(s *network.AddressPoolSpec) {
			s.Subnet = "10.20.0.5/24"
		}, `spec.subnet: Invalid value: "10.20.0.5/24"`},
		"multicast": {func(s *network.AddressPoolSpec) {
			s.Subnet = "224.0.0.0/8"
		}, `spec.subnet: Invalid value: "224.0.0.0/8": must not be a multicast`},
		"loopback":           {func(s *network.AddressPoolSpec) { s.Subnet = "127.0.0.0/8" }, "spec.subnet"},
		"IPv4 link-local":    {func(s *network.AddressPoolSpec) { s.Subnet = "169.254.0.0/16" }, "spec.subnet"},
		"IPv6 link-local":    {func(s *network.AddressPoolSpec) { s.Subnet = "fe80::/64" }, "spec.subnet"},
		"all IPv4 addresses": {func(s *network.AddressPoolSpec) { s.Subnet = "0.0.0.0/0" }, "spec.subnet"},
		"range outside": {func(s *network.AddressPoolSpec) { s.Ranges = []string{"10.21.0.0/28"} },
			`spec.ranges[0]: Invalid value: "10.21.0.0/28": must be a network, an address, or FIRST-LAST in subnet ` +
				"10.20.0.0/24"},
		"reversed range": {func(s *network.AddressPoolSpec) { s.Ranges = []string{"10.20.0.9-10.20.0.5"} }, "spec.ranges[0]"},
		"exclude":        {func(s *network.AddressPoolSpec) { s.Exclude = []string{"gateway"} }, "spec.exclude[0]"},
		"nothing left":   {func(s *network.AddressPoolSpec) { s.Exclude = []string{"10.20.0.0/24"} }, "leaves no address"},
		"gateway":        {func(s *network.AddressPoolSpec) { s.Gateway = "10.21.0.1" }, "spec.gateway"},
		"reserved":       {func(s *network.AddressPoolSpec) { s.Reserved = []string{"10.20.0.0"} }, "spec.reserved[0]"},
		"nameserver":     {func(s *network.AddressPoolSpec) { s.Nameservers = []string{"dns"} }, "spec.nameservers[0]"},
		"assigned nameserver": {func(s *network.AddressPoolSpec) { s.Nameservers = []string{"fd00::2", "10.20.0.2"} },
			`spec.nameservers[1]: Invalid value: "10.20.0.2": the pool may assign the address to a pod`},
		"route family": {func(s *network.AddressPoolSpec) { s.Routes = []string{"fd00::/64"} }, "spec.routes[0]"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := addresspool.Parse(pool(tc.change)); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got error %v, want %s", err, tc.want)
			}
		})
	}
}

func TestBlockName_isDNSLabelPerNetworkAndFamily(t *testing.T) {
	for first, want := range map[string]string{
		"10.20.0.16":  "storage-4-0a140010",
		"fd00:20::40": "storage-6-fd000020000000000000000000000040",
	} {
		if got := addresspool.BlockName("storage", netip.MustParseAddr(first)); got != want {
			t.Errorf("block that starts with %s: got %s, want %s", first, got, want)
		}
	}
}

func TestChooseBlock_skipsReservedAddresses(t *testing.T) {
	p, err := addresspool.Parse(pool(func(s *network.AddressPoolSpec) {
		s.Ranges, s.Reserved = []string{"10.20.0.16/29"}, []string{"10.20.0.18", "10.20.0.23"}
		s.BlockSize = ptr.To(int32(8))
	}))
	if err != nil {
		t.Fatal(err)
	}
	block := addresspool.ChooseBlock(p, &netipx.IPSet{}, 0)
	got := strings.Join(addresspool.FormatRanges(block), " ")
	if want := "10.20.0.16-10.20.0.17 10.20.0.19-10.20.0.22"; got != want {
		t.Errorf("got the block %s, want %s", got, want)
	}
}

// Blocks that are chosen one after the other never overlap, and use up the pool.
func TestChooseBlock_usesEachAddressOnce(t *testing.T) {
	for _, subnet := range []string{"10.20.0.0/24", "10.20.0.0/28", "10.20.0.0/31", "fd00::/120"} {
		for _, size := range []int32{1, 4, 16, 64} {
			t.Run(fmt.Sprintf("%s/%d", subnet, size), func(t *testing.T) {
				p, err := addresspool.Parse(pool(func(s *network.AddressPoolSpec) { s.Subnet, s.BlockSize = subnet, &size }))
				if err != nil {
					t.Fatal(err)
				}
				if largest := slices.Max(takeAll(t, p)); largest > int64(size) {
					t.Errorf("a block has %d addresses, want at most %d", largest, size)
				}
			})
		}
	}
}

func TestParseRanges_invalid(t *testing.T) {
	for text, want := range map[string]string{
		"10.20.0.9-10.20.0.5":   "10.20.0.5-10.20.0.9",
		"10.20.0.9-fd00::1":     "10.20.0.9-10.20.0.9 fd00::1-fd00::1",
		"10.20.0.9-10.20.0.256": "10.20.0.9-10.20.0.9",
		"-10.20.0.9":            "10.20.0.9-10.20.0.9",
		"all":                   "",
		"":                      "",
	} {
		set, invalid := addresspool.ParseRanges([]string{"10.20.1.0-10.20.1.3", text})
		got := strings.Join(addresspool.FormatRanges(addresspool.Difference(set, rangeOf("10.20.1.0/30"))), " ")
		if got != want || len(invalid) != 1 || invalid[0] != text {
			t.Errorf("%q: got %q, invalid %q, want %q, and the entry as invalid", text, got, invalid, want)
		}
		if !set.Contains(netip.MustParseAddr("10.20.1.2")) {
			t.Errorf("%q: the set lacks the addresses of the other entry", text)
		}
	}
}

func rangeOf(text string) *netipx.IPSet {
	set, _ := addresspool.ParseRanges([]string{text})
	return set
}

func FuzzParseRanges(f *testing.F) {
	f.Add("10.20.0.0/24")
	f.Add("10.20.0.5-10.20.0.9")
	f.Add("fd00::1")
	f.Fuzz(func(t *testing.T, text string) {
		set, _ := addresspool.ParseRanges([]string{text})
		again, invalid := addresspool.ParseRanges(addresspool.FormatRanges(set))
		if len(invalid) > 0 || !again.Equal(set) {
			t.Errorf("%q: got %v after formatting, want %v; invalid: %q", text, again.Ranges(), set.Ranges(), invalid)
		}
	})
}
