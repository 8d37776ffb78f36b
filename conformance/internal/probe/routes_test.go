// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// number returns an IPv4 address as /proc/net/route has it on this machine.
func number(address string) string {
	b := netip.MustParseAddr(address).As4()
	return fmt.Sprintf("%08X", binary.NativeEndian.Uint32(b[:]))
}

func TestRoutes(t *testing.T) {
	const none = "00000000000000000000000000000000"
	line := func(device, destination, gateway, mask string) string {
		return strings.Join([]string{device, number(destination), number(gateway), "0003", "0", "0", "0", number(mask),
			"0", "0", "0"}, "\t") + "\n"
	}
	four := "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n" +
		line("eth0", "0.0.0.0", "192.0.2.1", "0.0.0.0") +
		line("net1", "10.0.0.0", "0.0.0.0", "255.255.255.0") +
		line("net1", "10.1.0.0", "10.0.0.1", "255.255.0.0")
	six := "fd000000000000000000000000000000 40 " + none + " 00 " + none + " 00000100 00000001 00000000 00000001 net1\n" +
		"fd010000000000000000000000000000 30 " + none + " 00 fd000000000000000000000000000001 " +
		"00000400 00000001 00000000 00000003 net1\n" +
		"fe800000000000000000000000000000 40 " + none + " 00 " + none + " 00000100 00000001 00000000 00000001 net1\n" +
		"ff000000000000000000000000000000 08 " + none + " 00 " + none + " 00000100 00000001 00000000 00000001 net1\n"
	for _, test := range []struct {
		name      string
		four, six string // contents of the files; empty for none
		want      []string
		err       string
	}{
		{"both families", four, six, []string{"10.0.0.0/24", "10.1.0.0/16 via 10.0.0.1", "fd00::/64",
			"fd01::/48 via fd00::1"}, ""},
		{"no IPv6", four, "", []string{"10.0.0.0/24", "10.1.0.0/16 via 10.0.0.1"}, ""},
		{"too few fields", "net1\t0\n", "", nil, "route: line"},
		{"no number", "", "zz 40 " + none + " 00 " + none + " 0 0 0 0 net1\n", nil, "ipv6_route: line"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, content := range map[string]string{"route": test.four, "ipv6_route": test.six} {
				if content == "" {
					continue
				}
				if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			got, err := routes(dir, "net1")
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Fatalf("got %v and error %v, want error %q", got, err, test.err)
				}
				return
			}
			if err != nil || !slices.Equal(got, test.want) {
				t.Errorf("got %q and error %v, want %q", got, err, test.want)
			}
		})
	}
}

func TestSandboxProcess(t *testing.T) {
	const uid = "7daad109-0b46-49c2-8ed5-eb97c6012e2b"
	systemd := "0::/kubepods.slice/kubepods-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice/cri-containerd-1.scope\n"
	type process struct{ comm, cgroup string }
	for _, test := range []struct {
		name string
		all  map[string]process
		want int
	}{
		{"cgroupfs", map[string]process{"7": {"pause", "0::/kubepods/besteffort/pod" + uid + "/1\n"}}, 7},
		{"systemd", map[string]process{"8": {"pause", systemd}, "9": {"sh", systemd}}, 8},
		{"another pod", map[string]process{"9": {"pause", "0::/kubepods/pod1/1\n"}}, 0},
		{"another process", map[string]process{"9": {"sh", systemd}}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			proc := t.TempDir()
			for pid, p := range test.all {
				for name, content := range map[string]string{"comm": p.comm + "\n", "cgroup": p.cgroup} {
					path := filepath.Join(proc, pid, name)
					if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
						t.Fatal(err)
					}
					if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			got, err := SandboxProcess(proc, uid)
			if got != test.want || (err == nil) != (test.want != 0) {
				t.Errorf("got process %d and error %v, want %d", got, err, test.want)
			}
		})
	}
}
