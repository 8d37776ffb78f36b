// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// errOwnNetworkStack means that the pod would not see its link.
var errOwnNetworkStack = errors.New("the pod's runtime is gVisor, whose network stack has only the links that exist " +
	"when the pod starts: choose another runtimeClassName for the pod, or set network = \"host\" in the runsc_config " +
	"of its handler")

// checkNetworkStack refuses a container of gVisor unless gVisor uses the network stack of the
// node's kernel. gVisor starts its own with the pod's sandbox, and takes over the links of that
// moment. runsc runs hooks later, when it creates the container, and the share would be attached
// to a namespace that the container does not use.
//
// The arguments of the sandbox's process are its configuration (runsc/sandbox in
// gvisor.dev/gvisor).
func checkNetworkStack(proc string, pid int) error {
	raw, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "cmdline"))
	if err != nil {
		return fmt.Errorf("read the arguments of the container's process: %w", err)
	}
	args := strings.Split(string(raw), "\x00")
	if args[0] == "runsc-sandbox" && !slices.Contains(args, "--network=host") {
		return errOwnNetworkStack
	}
	return nil
}
