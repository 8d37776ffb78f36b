// Command dra-shared-controller is the part of the driver that is no node's: it
// publishes the devices that span nodes.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/dra-shared/dra-driver-shared/api"
	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/fabrics"
)

type flags struct {
	driverName, configFile, kubeconfig, namespace, slicesOwner string
	healthAddress, metricsAddress                              string
	logging                                                    *logsapi.LoggingConfiguration
}

func main() {
	os.Exit(cli.Run(newCommand()))
}

func newCommand() *cobra.Command {
	f := flags{logging: logsapi.NewLoggingConfiguration()}
	c := &cobra.Command{
		Use:   "dra-shared-controller",
		Short: "The control plane of the DRA driver for shared devices",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := logsapi.ValidateAndApply(f.logging, nil); err != nil {
				return err
			}
			return f.run()
		},
	}
	p := c.Flags()
	p.StringVar(&f.driverName, "driver-name", api.DriverName, "name of the driver")
	p.StringVar(&f.configFile, "config", "/etc/dra-shared/config.yaml", "the DriverConfig")
	p.StringVar(&f.kubeconfig, "kubeconfig", "", "kubeconfig; default: the pod's service account")
	p.StringVar(&f.namespace, "namespace", os.Getenv("POD_NAMESPACE"), "where the lease of the leader is")
	p.StringVar(&f.slicesOwner, "slices-owner", "", "the ClusterRole with which the fabrics' ResourceSlices go; default: they stay")
	p.StringVar(&f.healthAddress, "health-address", ":8081", "host:port to serve /healthz and /readyz on")
	p.StringVar(&f.metricsAddress, "metrics-address", "0", "host:port to serve Prometheus metrics on, at /metrics; 0: not at all")
	logsapi.AddFlags(f.logging, p)
	logs.InitLogs()
	return c
}

func (f flags) run() error {
	if f.namespace == "" {
		return errors.New("--namespace is needed; does the pod set POD_NAMESPACE?")
	}
	raw, err := os.ReadFile(f.configFile)
	if err != nil {
		return fmt.Errorf("read --config: %w", err)
	}
	c, err := config.Load(raw)
	if err != nil {
		return fmt.Errorf("%s: %w", f.configFile, err)
	}
	rest, err := clientcmd.BuildConfigFromFlags("", f.kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return err
	}
	ctrl.SetLogger(klog.Background())
	manager, err := ctrl.NewManager(rest, ctrl.Options{
		LeaderElection: true, LeaderElectionID: f.driverName, LeaderElectionNamespace: f.namespace,
		LeaderElectionReleaseOnCancel: true, // the process ends when the manager does
		HealthProbeBindAddress:        f.healthAddress,
		Metrics:                       metricsserver.Options{BindAddress: f.metricsAddress},
	})
	if err != nil {
		return err
	}
	for _, add := range []func(string, healthz.Checker) error{manager.AddHealthzCheck, manager.AddReadyzCheck} {
		if err := add("ping", healthz.Ping); err != nil {
			return err
		}
	}
	publisher := &fabrics.Publisher{Client: client, DriverName: f.driverName, Config: c, Owner: f.slicesOwner}
	if err := manager.Add(publisher); err != nil {
		return err
	}
	return manager.Start(ctrl.SetupSignalHandler())
}
