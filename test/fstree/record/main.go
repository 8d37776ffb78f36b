// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command record prints the device tree of this machine in the format of package fstree.
package main

import (
	"fmt"
	"os"

	"github.com/dra-shared/dra-driver-shared/test/fstree"
)

func main() {
	if err := fstree.Record("/", os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "record:", err)
		os.Exit(1)
	}
}
