// Command dra-shared-controller is the part of the driver that is no node's:
// admission, claims for groups of pods, and the devices that span nodes.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/dra-shared/dra-driver-shared/api"
	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

type flags struct {
	controlplane.Options
	mode, configFile, kubeconfig string
	logging                      *logsapi.LoggingConfiguration
}

func main() {
	command := newCommand()
	command.SetContext(ctrl.SetupSignalHandler())
	os.Exit(cli.Run(command))
}

func newCommand() *cobra.Command {
	f := flags{logging: logsapi.NewLoggingConfiguration()}
	c := &cobra.Command{
		Use:   "dra-shared-controller",
		Short: "The control plane of the DRA driver for shared devices",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := logsapi.ValidateAndApply(f.logging, nil); err != nil {
				return err
			}
			return f.run(c.Context())
		},
	}
	p := c.Flags()
	p.StringVar(&f.DriverName, "driver-name", api.DriverName, "name of the driver")
	p.StringVar(&f.configFile, "config", "/etc/dra-shared/config.yaml", "the DriverConfig")
	p.StringVar(&f.kubeconfig, "kubeconfig", "", "kubeconfig; default: the pod's service account")
	p.StringVar(&f.Namespace, "namespace", os.Getenv("POD_NAMESPACE"), "where the lease of the leader, and the webhook's certificates, are")
	p.StringVar(&f.mode, "mode", string(mode.Auto), "who makes claims serve PodGroups: native (Kubernetes), bridge (this) or auto (Kubernetes, if its API server does)")
	p.StringVar(&f.SlicesOwner, "slices-owner", "", "the ClusterRole with which the fabrics' ResourceSlices go; default: they stay")
	p.StringVar(&f.HealthAddress, "health-address", ":8081", "host:port to serve /healthz and /readyz on")
	p.StringVar(&f.MetricsAddress, "metrics-address", "0", "host:port to serve Prometheus metrics on, at /metrics; 0: not at all")
	p.IntVar(&f.Webhook.Port, "webhook-port", 9443, "port to serve admission on; 0: not at all")
	p.StringVar(&f.Webhook.Service, "webhook-service", "dra-shared-controller", "the Service by which the API server calls the webhook")
	p.StringVar(&f.Webhook.Configuration, "webhook-configuration", "dra-shared-controller", "name of the MutatingWebhookConfiguration and of the ValidatingWebhookConfiguration that are to trust the webhook")
	p.StringVar(&f.Webhook.Secret, "webhook-secret", "dra-shared-controller-ca", "Secret with the webhook's certificate authority, which is made and rotated")
	p.StringVar(&f.Webhook.Directory, "webhook-certificates", "", "directory with tls.crt and tls.key, where cert-manager or somebody else makes them; default: see --webhook-secret")
	logsapi.AddFlags(f.logging, p)
	logs.InitLogs()
	return c
}

func (f flags) run(ctx context.Context) error {
	if f.Namespace == "" {
		return errors.New("--namespace is needed; does the pod set POD_NAMESPACE?")
	}
	var err error
	if f.Mode, err = mode.Parse(f.mode); err != nil {
		return fmt.Errorf("--mode: %w", err)
	}
	raw, err := os.ReadFile(f.configFile)
	if err != nil {
		return fmt.Errorf("read --config: %w", err)
	}
	if f.Config, err = config.Load(raw); err != nil {
		return fmt.Errorf("%s: %w", f.configFile, err)
	}
	rest, err := clientcmd.BuildConfigFromFlags("", f.kubeconfig)
	if err != nil {
		return err
	}
	rest.QPS = -1 // the API server has priorities and fairness of its own
	ctrl.SetLogger(klog.Background())
	manager, err := controlplane.New(ctx, rest, f.Options)
	if err != nil {
		return err
	}
	return manager.Start(ctx)
}
