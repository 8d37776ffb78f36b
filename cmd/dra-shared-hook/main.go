// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command dra-shared-hook is run by the container runtime before a container that
// uses a share starts, because a CDI spec names it as a createRuntime hook. It
// succeeds once the node plugin has attached the share to the pod; otherwise the
// container does not start, and the text on standard error appears in the pod's
// events.
//
// With the command limit-memory, it limits the container's cgroup instead: see package dmem.
//
// With the command open-namespaces, it runs in a container in the plugin's pod, and opens sockets in pods' network
// namespaces for the plugin: see attach.Opener.
//
// Except with open-namespaces, it runs on the node, not in a container, whenever such a container starts. It is
// static and links only what it needs.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/dra-shared/dra-driver-shared/accel/dmem"
	"github.com/dra-shared/dra-driver-shared/attach"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == dmem.Command {
		limitMemory(os.Args[2:])
		return
	}
	if len(os.Args) > 1 && os.Args[1] == attach.OpenerCommand {
		openNamespaces(os.Args[2:])
		return
	}
	var h attach.Hook
	flag.StringVar(&h.RunDir, "run-dir", "/run/dra-shared", "directory of the plugin's sockets and attachment records")
	flag.StringVar(&h.ClaimUID, "claim", "", "UID of the ResourceClaim")
	flag.StringVar(&h.Share, "share", "", "name of the share's CDI device")
	flag.DurationVar(&h.Wait, "wait", attach.DefaultWait, "how long to wait for a plugin that is not running")
	flag.BoolVar(&h.AnnounceIPv6, attach.AnnounceIPv6Flag, true,
		"whether the links of the pod announce IPv6 addresses when they come up")
	try := flag.Bool(attach.TryFlag, false, "exit immediately; the plugin uses it to check that the hook can run")
	flag.Parse()
	if *try {
		return
	}
	if err := h.Run(context.Background(), os.Stdin); err != nil {
		fmt.Fprintf(os.Stderr, "dra-shared: attach %s: %v\n", h.Share, err)
		os.Exit(1)
	}
}

func openNamespaces(args []string) {
	var o attach.Opener
	flags := flag.NewFlagSet(attach.OpenerCommand, flag.ExitOnError)
	flags.StringVar(&o.Socket, "socket", "", "path of the unix socket for the plugin")
	flags.StringVar(&o.Namespaces, "namespaces", "/var/run/netns", "directory of the network namespaces of pods")
	flags.StringVar(&o.RunDir, "run-dir", "/run/dra-shared", "directory of the plugin's attachment records")
	_ = flags.Parse(args) // exits on an error (flag.ExitOnError)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := o.Serve(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "dra-shared: open namespaces: %v\n", err)
		os.Exit(1) //nolint:gocritic // the context ends with the process
	}
}

func limitMemory(args []string) {
	l := dmem.Limiter{Proc: "/proc", Cgroups: "/sys/fs/cgroup"}
	flags := flag.NewFlagSet(dmem.Command, flag.ExitOnError)
	flags.StringVar(&l.Region, "region", "", "the device's memory, as the kernel names it")
	flags.Uint64Var(&l.Bytes, "bytes", 0, "the additional bytes of memory that the container may use")
	_ = flags.Parse(args) // exits on an error (flag.ExitOnError)
	if err := l.Run(os.Stdin); err != nil {
		fmt.Fprintf(os.Stderr, "dra-shared: %v\n", err)
		os.Exit(1)
	}
}
