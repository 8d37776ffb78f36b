// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package addresspool

import (
	"fmt"
	"math/big"
	"math/bits"
	"net/netip"
	"strconv"
	"strings"

	"go4.org/netipx"
)

const (
	// blockFraction determines the default block size: a node takes this fraction of the free addresses. Blocks become
	// smaller as the pool fills, so that the first nodes do not take all addresses in a small pool.
	blockFraction = 16
	// maxDefaultBlock limits the default block size.
	maxDefaultBlock = 64
	// maxShortage limits the number of free addresses below which a pool without BlockSize is short.
	maxShortage = 16
)

// blockSize returns the size of a pool's next block, given its number of free addresses.
func (p *Pool) blockSize(free *big.Int) int {
	if p.BlockSize != 0 {
		return p.BlockSize
	}
	size := fraction(free, maxDefaultBlock)
	return 1 << (bits.Len(uint(size)) - 1)
}

// IsShort reports whether nodes must return unused addresses because too few of the pool's addresses are unassigned
// (not in any block): fewer than BlockSize or, if that is 0, fewer than a sixteenth of the pool, 16 at most.
func (p *Pool) IsShort(unassigned *big.Int) bool {
	limit := p.BlockSize
	if limit == 0 {
		limit = fraction(Count(p.Addresses), maxShortage)
	}
	return unassigned.Cmp(big.NewInt(int64(limit))) < 0
}

// fraction returns the blockFraction of a number of addresses, at least 1 and at most limit.
func fraction(addresses *big.Int, limit int) int {
	part := new(big.Int).Div(addresses, big.NewInt(blockFraction))
	if !part.IsInt64() {
		return limit
	}
	return int(max(1, min(part.Int64(), int64(limit))))
}

// BlockName returns the name of the AddressBlock that starts with an address.
func BlockName(networkName string, first netip.Addr) string {
	return fmt.Sprintf("%s-%s-%x", networkName, family(first), first.AsSlice())
}

// Difference returns the addresses of a that are not in b.
func Difference(a, b *netipx.IPSet) *netipx.IPSet {
	var set netipx.IPSetBuilder
	set.AddSet(a)
	set.RemoveSet(b)
	result, _ := set.IPSet() // fails only if an invalid range was added
	return result
}

// Union returns the addresses of both sets.
func Union(a, b *netipx.IPSet) *netipx.IPSet {
	var set netipx.IPSetBuilder
	set.AddSet(a)
	set.AddSet(b)
	result, _ := set.IPSet() // fails only if an invalid range was added
	return result
}

// SetOf returns a set of valid addresses.
func SetOf(addresses ...netip.Addr) *netipx.IPSet {
	var set netipx.IPSetBuilder
	for _, a := range addresses {
		set.Add(a)
	}
	result, _ := set.IPSet() // fails only if an address is invalid
	return result
}

// ChooseBlock returns the addresses for a new block for any pod: the pool's addresses in an aligned block, all of
// them free. The block is as large as [Pool.BlockSize] describes, or else the largest smaller one. It does not
// contain reserved addresses. The search starts at the fraction start/2^32 of the free addresses, so that nodes that
// choose at the same time choose different blocks. It returns nil if the pool does not have a free address.
func ChooseBlock(pool *Pool, assigned *netipx.IPSet, start uint32) *netipx.IPSet {
	all := Difference(pool.Addresses, pool.Reserved)
	free := Difference(all, assigned)
	return choose(all, free, pool.blockSize(Count(free)), start)
}

// ChooseAddress returns a single address, as [ChooseBlock] does.
func ChooseAddress(pool *Pool, assigned *netipx.IPSet, start uint32) *netipx.IPSet {
	all := Difference(pool.Addresses, pool.Reserved)
	return choose(all, Difference(all, assigned), 1, start)
}

func choose(all, free *netipx.IPSet, size int, start uint32) *netipx.IPSet {
	for ; size >= 1; size /= 2 {
		if block := chooseAligned(all, free, size, start); block != nil {
			return block
		}
	}
	return nil
}

// chooseAligned returns the addresses of the set all in an aligned block of the size if they are all free, or nil.
func chooseAligned(all, free *netipx.IPSet, size int, start uint32) *netipx.IPSet {
	ranges := free.Ranges()
	if len(ranges) == 0 {
		return nil
	}
	prefixBits := ranges[0].From().BitLen() - bits.Len(uint(size)) + 1
	first := int(uint64(start) * uint64(len(ranges)) >> 32)
	for i := range ranges {
		r := ranges[(first+i)%len(ranges)]
		if block := alignedIn(all, free, r, prefixBits, start); block != nil {
			return block
		}
	}
	return nil
}

// maxTries limits how many blocks alignedIn looks at in one range.
const maxTries = 64

// alignedIn returns the addresses of the set all in an aligned block that overlaps the range if they are all free, or
// nil. It looks at blocks starting from the fraction start/2^32 of the range, and then from the range's start.
func alignedIn(all, free *netipx.IPSet, r netipx.IPRange, prefixBits int, start uint32) *netipx.IPSet {
	for _, a := range []netip.Addr{pointIn(r, start), r.From()} {
		for range maxTries {
			if !r.Contains(a) {
				break
			}
			prefix := netip.PrefixFrom(a, prefixBits).Masked()
			if block := intersection(all, prefix); containsAll(free, block) {
				return block
			}
			a = netipx.PrefixLastIP(prefix).Next()
		}
	}
	return nil
}

func intersection(set *netipx.IPSet, prefix netip.Prefix) *netipx.IPSet {
	var wanted, within netipx.IPSetBuilder
	within.AddPrefix(prefix)
	other, _ := within.IPSet() // fails only if an invalid range was added
	wanted.AddSet(set)
	wanted.Intersect(other)
	result, _ := wanted.IPSet()
	return result
}

func containsAll(set, part *netipx.IPSet) bool {
	for _, r := range part.Ranges() {
		if !set.ContainsRange(r) {
			return false
		}
	}
	return true
}

// pointIn returns the address at the fraction start/2^32 of a range.
func pointIn(r netipx.IPRange, start uint32) netip.Addr {
	first, last := new(big.Int).SetBytes(r.From().AsSlice()), new(big.Int).SetBytes(r.To().AsSlice())
	offset := last.Sub(last, first)
	offset.Mul(offset, big.NewInt(int64(start))).Rsh(offset, 32)
	raw := make([]byte, r.From().BitLen()/8)
	address, _ := netip.AddrFromSlice(first.Add(first, offset).FillBytes(raw))
	return address
}

// StatefulSetOf returns the name of the StatefulSet that a pod belongs to if a StatefulSet created it: these pods are
// named <StatefulSet>-<ordinal>. isPod is false for other names.
func StatefulSetOf(pod string) (name string, isPod bool) {
	i := strings.LastIndexByte(pod, '-')
	if i <= 0 {
		return "", false
	}
	ordinal, err := strconv.ParseUint(pod[i+1:], 10, 31)
	return pod[:i], err == nil && strconv.FormatUint(ordinal, 10) == pod[i+1:]
}
