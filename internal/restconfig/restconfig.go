// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package restconfig loads the configuration for API server clients.
package restconfig

import (
	"fmt"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Load reads a kubeconfig file. Without a path, it uses the pod's service account, as clientcmd.BuildConfigFromFlags
// does, but without its warning in the log.
func Load(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("--kubeconfig: %w", err)
		}
		return c, nil
	}
	c, err := rest.InClusterConfig()
	if err != nil {
		return nil, fmt.Errorf("use the service account of the pod: %w: outside a pod, set --kubeconfig", err)
	}
	return c, nil
}
