// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command dra-conformance tests whether the DRA kubelet plugin of a node meets the
// requirements of Kubernetes. It must run on that node as root. It acts as the
// kubelet and the scheduler: it creates claims, and lets the plugin prepare and
// unprepare them. It starts no pods. It exits with status 1 if a case fails.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/dra-shared/dra-driver-shared/conformance"
)

// caseTimeout limits the duration of one case.
const caseTimeout = time.Minute

func main() {
	var t conformance.Target
	kubeconfig := flag.String("kubeconfig", os.Getenv("KUBECONFIG"), "path of an administrator's kubeconfig file")
	flag.StringVar(&t.Driver, "driver", "", "name of the driver (required)")
	flag.StringVar(&t.Node, "node", "", "name of the node on which this command runs (required)")
	flag.StringVar(&t.Namespace, "namespace", "default", "namespace in which to create claims")
	flag.StringVar(&t.DeviceClass, "device-class", "conformance", "DeviceClass of the claims; it need not exist")
	flag.StringVar(&t.Device, "device", "", "name of the device to use; if empty, the first one without taints")
	flag.StringVar(&t.Socket, "socket", "",
		"path of the plugin's DRA socket, such as /var/lib/kubelet/plugins/DRIVER/dra.sock (required)")
	flag.StringVar(&t.CDIDir, "cdi-dir", "/var/run/cdi",
		"directory to which the plugin writes CDI specs; if empty, cases that read them are skipped")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	failed, err := run(ctx, t, *kubeconfig)
	if err != nil {
		fmt.Fprintln(os.Stderr, "dra-conformance:", err)
	}
	if err != nil || failed > 0 {
		os.Exit(1)
	}
}

// run runs all cases, prints their results, and returns the number of failures.
func run(ctx context.Context, t conformance.Target, kubeconfig string) (failed int, err error) {
	for _, required := range []struct{ flag, value string }{
		{"--driver", t.Driver}, {"--node", t.Node}, {"--socket", t.Socket},
	} {
		if required.value == "" {
			return 0, fmt.Errorf("%s is required", required.flag)
		}
	}
	rest, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return 0, err
	}
	rest.QPS, rest.Burst = 50, 100
	if t.Client, err = kubernetes.NewForConfig(rest); err != nil {
		return 0, err
	}
	passed, skipped := 0, 0
	for _, c := range conformance.Cases() {
		caseCtx, cancel := context.WithTimeout(ctx, caseTimeout)
		err := conformance.Do(caseCtx, t, c)
		cancel()
		switch {
		case err == nil:
			passed++
			fmt.Printf("ok    %s\n", c.Name)
		case errors.Is(err, conformance.ErrSkipped):
			skipped++
			fmt.Printf("skip  %s: %v\n", c.Name, err)
		default:
			failed++
			fmt.Printf("FAIL  %s: %v\n      required by %s\n", c.Name, err, c.Reference)
		}
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	return failed, ctx.Err()
}
