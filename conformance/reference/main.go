// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"context"
	"os/signal"
	"syscall"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// Main runs an instance that the variables of conformance.Config.Command describe, until
// SIGTERM. FAULT is the fault, and NO_HEALTH turns the reporting of health off.
func Main(getenv func(string) string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	rest, err := clientcmd.BuildConfigFromFlags("", getenv("KUBECONFIG"))
	if err != nil {
		return err
	}
	rest.QPS = -1 // the API server is a fake
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return err
	}
	return New(Options{
		Name: getenv("DRIVER_NAME"), Node: getenv("NODE_NAME"), PodUID: getenv("POD_UID"), Client: client,
		PluginDir: getenv("PLUGIN_DIR"), RegistryDir: getenv("REGISTRY_DIR"), CDIDir: getenv("CDI_DIR"),
		StateDir: getenv("STATE_DIR"), Fault: getenv("FAULT"), NoHealth: getenv("NO_HEALTH") != "",
	}).Run(ctx)
}
