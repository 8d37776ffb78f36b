// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command dra-shared-probe is run by the kubelet for the probes of the plugin's container. It succeeds if the
// plugin's check does; otherwise, the reason is on standard error and in the plugin pod's events.
//
// It is a separate program because the plugin binary is large, and the kubelet starts a probe every few seconds.
package main

import (
	"flag"
	"os"

	"github.com/dra-shared/dra-driver-shared/internal/probe"
)

func main() {
	flags := flag.NewFlagSet("dra-shared-probe", flag.ExitOnError)
	runDir := flags.String("run-dir", "/run/dra-shared", "the plugin's run directory")
	instance := flags.String("pod-uid", os.Getenv("POD_UID"), "UID of the plugin's pod")
	check := flags.String("check", probe.Ready, "what to check: "+probe.Started+", "+probe.Ready+", or "+probe.Alive)
	_ = flags.Parse(os.Args[1:]) // exits on an error (flag.ExitOnError)
	if err := probe.Ask(*runDir, *instance, *check); err != nil {
		_, _ = os.Stderr.WriteString("plugin " + *instance + ": " + err.Error() + "\n")
		os.Exit(1)
	}
}
