// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// routes returns the routes of the main tables through an interface, as DESTINATION or as
// DESTINATION via GATEWAY, from the directory /proc/net. Link-local and multicast destinations
// are left out.
func routes(dir, name string) (all []string, err error) {
	for _, family := range []struct {
		file  string
		parse func([]string) (string, netip.Prefix, netip.Addr, error)
	}{{"route", route4}, {"ipv6_route", route6}} {
		raw, err := os.ReadFile(filepath.Join(dir, family.file))
		if errors.Is(err, fs.ErrNotExist) { // the kernel does not have IPv6
			continue
		}
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(raw)) {
			if strings.HasPrefix(line, "Iface") {
				continue
			}
			device, destination, gateway, err := family.parse(strings.Fields(line))
			if err != nil {
				return nil, fmt.Errorf("%s: line %q: %w", family.file, line, err)
			}
			to := destination.Addr()
			if device != name || to.IsLinkLocalUnicast() || to.IsMulticast() {
				continue
			}
			text := destination.String()
			if !gateway.IsUnspecified() {
				text += " via " + gateway.String()
			}
			all = append(all, text)
		}
	}
	return all, nil
}

// errFields reports a line with too few fields.
var errFields = errors.New("it has too few fields")

// route4 parses a line of /proc/net/route, which has numbers in the order of the machine.
func route4(fields []string) (device string, to netip.Prefix, gateway netip.Addr, err error) {
	if len(fields) < 8 {
		return "", to, gateway, errFields
	}
	var numbers [3]netip.Addr
	for i, field := range []int{1, 2, 7} { // destination, gateway, mask
		n, err := strconv.ParseUint(fields[field], 16, 32)
		if err != nil {
			return "", to, gateway, err
		}
		var b [4]byte
		binary.NativeEndian.PutUint32(b[:], uint32(n))
		numbers[i] = netip.AddrFrom4(b)
	}
	mask := numbers[2].As4()
	length := bits.OnesCount32(binary.BigEndian.Uint32(mask[:]))
	return fields[0], netip.PrefixFrom(numbers[0], length), numbers[1], nil
}

// route6 parses a line of /proc/net/ipv6_route.
func route6(fields []string) (device string, to netip.Prefix, gateway netip.Addr, err error) {
	if len(fields) < 10 {
		return "", to, gateway, errFields
	}
	var numbers [2]netip.Addr
	for i, field := range []int{0, 4} { // destination, gateway
		raw, err := hex.DecodeString(fields[field])
		if err != nil {
			return "", to, gateway, err
		}
		var ok bool
		if numbers[i], ok = netip.AddrFromSlice(raw); !ok {
			return "", to, gateway, fmt.Errorf("%q is not an address", fields[field])
		}
	}
	length, err := strconv.ParseUint(fields[1], 16, 8)
	return fields[9], netip.PrefixFrom(numbers[0], int(length)), numbers[1], err
}
