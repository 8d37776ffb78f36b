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

// Errors for runtimes with pods that would not see their links.
var (
	errOwnNetworkStack = errors.New("the pod's runtime is gVisor, whose network stack has only the links that exist " +
		"when the pod starts: choose another runtimeClassName for the pod, or set network = \"host\" in the runsc_config " +
		"of its handler")
	errVirtualMachine = errors.New("the pod's runtime is Kata Containers, which runs the pod in a virtual machine with " +
		"the links that exist when the machine starts: choose another runtimeClassName for the pod")
)

// checkNetworkStack refuses a container that does not use the node kernel's network stack.
//
// gVisor starts its own network stack with the pod's sandbox, and takes over the links that exist at that time. runsc
// runs hooks later, when it creates the container, so the share would be attached to a namespace that the container
// does not use. The sandbox process's arguments are its configuration (runsc/sandbox in gvisor.dev/gvisor).
//
// Kata Containers runs hooks on the node with the ID of a shim thread instead of a container process
// (src/runtime/pkg/katautils/hook.go in kata-containers).
func checkNetworkStack(proc string, pid int) error {
	raw, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "cmdline"))
	if err != nil {
		return fmt.Errorf("read the arguments of the container's process: %w", err)
	}
	args := strings.Split(string(raw), "\x00")
	switch program := filepath.Base(args[0]); {
	case program == "runsc-sandbox" && !slices.Contains(args, "--network=host"):
		return errOwnNetworkStack
	case strings.HasPrefix(program, "containerd-shim-kata"):
		return errVirtualMachine
	default:
		return nil
	}
}
