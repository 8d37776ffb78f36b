// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCheckNetworkStack(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want error
	}{
		"a process of runc":           {[]string{"runc", "init"}, nil},
		"a process without arguments": {nil, nil},
		"gVisor":                      {[]string{"runsc-sandbox", "--debug=true", "boot"}, errOwnNetworkStack},
		"Kata Containers": {
			[]string{"/usr/local/bin/containerd-shim-kata-v2", "-namespace", "k8s.io"}, errVirtualMachine,
		},
		"gVisor with the node's stack": {[]string{"runsc-sandbox", "--network=host", "boot"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			proc := t.TempDir()
			if err := os.Mkdir(filepath.Join(proc, "7"), 0o700); err != nil {
				t.Fatal(err)
			}
			raw := strings.Join(append(tc.args, ""), "\x00")
			if err := os.WriteFile(filepath.Join(proc, "7", "cmdline"), []byte(raw), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := checkNetworkStack(proc, 7); !errors.Is(err, tc.want) {
				t.Errorf("process %q: got error %v, want %v", tc.args, err, tc.want)
			}
		})
	}
}
