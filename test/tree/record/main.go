// Command record prints this machine's tree: see package tree.
package main

import (
	"fmt"
	"os"

	"github.com/dra-shared/dra-driver-shared/test/tree"
)

func main() {
	if err := tree.Record("/", os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "record:", err)
		os.Exit(1)
	}
}
