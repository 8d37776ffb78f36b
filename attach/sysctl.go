// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// sysctlDir is the directory of kernel parameters. Files below it belong to the opening thread's network namespace.
const sysctlDir = "/proc/sys"

// setSysctls sets the kernel parameters of a link in this thread's namespace. The pod may have
// renamed the link.
func (l Link) setSysctls() error {
	if len(l.Sysctls) == 0 {
		return nil
	}
	link, err := net.InterfaceByIndex(l.Index)
	if err != nil {
		return fmt.Errorf("find link %s (index %d) to set its sysctls: %w: has a program in the pod deleted it?",
			l.Name, l.Index, err)
	}
	for _, name := range slices.Sorted(maps.Keys(l.Sysctls)) {
		path, err := sysctlPath(name, link.Name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(l.Sysctls[name]), 0); err != nil {
			return fmt.Errorf("sysctls[%s]: %q: %w: does the kernel have the parameter, and is the value valid?",
				name, l.Sysctls[name], err)
		}
	}
	return nil
}

// sysctlPath returns the file of a kernel parameter such as net.ipv4.conf.IFNAME.arp_ignore. A link's name may have
// dots, so it replaces IFNAME last.
func sysctlPath(name, link string) (string, error) {
	parts := strings.Split(name, ".")
	i := slices.Index(parts, "IFNAME")
	if i < 0 || parts[0] != "net" || strings.Contains(name, "/") || slices.Contains(parts, "") {
		return "", fmt.Errorf("sysctls[%s]: is not a parameter of a link: use a name such as "+
			"net.ipv4.conf.IFNAME.arp_ignore", name)
	}
	parts[i] = link
	return filepath.Join(append([]string{sysctlDir}, parts...)...), nil
}
