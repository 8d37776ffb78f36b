// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command helm is Helm, built from source. Tests and demos use it to install the chart as users do, without a prebuilt
// binary.
//
// It is a separate module, so the driver and the test cluster do not depend on Helm's dependencies.
package main

import (
	"fmt"
	"os"

	helm "helm.sh/helm/v4/pkg/cmd"
)

func main() {
	command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err != nil {
		fmt.Fprintln(os.Stderr, "helm:", err)
		os.Exit(1)
	}
	if err := command.Execute(); err != nil {
		os.Exit(1)
	}
}
