// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command kube is one static multi-call binary with all components of Kubernetes: etcd,
// kube-apiserver, kube-scheduler, kube-controller-manager, kubelet, and kubectl. For
// the node image of kind, it also contains kubeadm and kube-proxy.
//
// The components have 90 % of their code in common, so building one binary instead of eight keeps a cold build of the
// test cluster short. The first argument, or the name that the binary is called by, selects the component.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubeadm "k8s.io/kubernetes/cmd/kubeadm/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	component := filepath.Base(os.Args[0])
	if component == "kube" {
		if len(os.Args) < 2 {
			fail("usage: kube COMPONENT [flags]; COMPONENT is etcd, kubeadm, kubectl, kubelet, " +
				"kube-apiserver, kube-controller-manager, kube-proxy, or kube-scheduler")
		}
		component = os.Args[1]
		os.Args = os.Args[1:]
	}
	switch component {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kubeadm":
		if err := kubeadm.Run(); err != nil {
			fail(err.Error())
		}
	case "kubectl":
		if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
			fail(err.Error())
		}
	default:
		newCommand, ok := map[string]func() *cobra.Command{
			"kube-apiserver":          apiserver.NewAPIServerCommand,
			"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
			"kube-controller-manager": controllermanager.NewControllerManagerCommand,
			"kube-proxy":              func() *cobra.Command { return proxy.NewProxyCommand() },
			"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
		}[component]
		if !ok {
			fail(fmt.Sprintf("unknown component %q", component))
		}
		os.Exit(cli.Run(newCommand()))
	}
}

func fail(message string) {
	fmt.Fprintln(os.Stderr, message)
	os.Exit(1)
}
