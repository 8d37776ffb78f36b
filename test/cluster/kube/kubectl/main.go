// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command kubectl is kubectl alone. The stories of test/e2e run it thousands of times, and kube,
// which contains it too, takes twice the processor time to start.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"

	_ "github.com/dra-shared/dra-driver-shared/test/cluster/kube/kubectl/untranslated"
)

func main() {
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		os.Exit(1)
	}
}
