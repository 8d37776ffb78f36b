// Command helm is Helm, built from its own Go module, so that tests and demo
// install the chart as users do without a binary from elsewhere.
//
// It has a module of its own because its dependencies are no business of the
// driver's, nor of the test cluster's.
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
