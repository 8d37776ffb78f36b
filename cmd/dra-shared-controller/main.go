// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command dra-shared-controller runs the cluster-scoped components of the driver:
// the admission webhooks, the claims of PodGroups and other holders, and the
// devices that span nodes.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
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
	"github.com/dra-shared/dra-driver-shared/internal/restconfig"
)

type flags struct {
	controlplane.Options
	mode, configFile, kubeconfig string
	logging                      *logsapi.LoggingConfiguration
}

// gcPercent is the default of GOGC. With it, the garbage collector runs more often than Go's default: the caches are
// large and rarely change, so this saves memory at a low cost.
const gcPercent = 40

func main() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	command := newCommand()
	command.SetContext(ctrl.SetupSignalHandler())
	os.Exit(cli.Run(command))
}

func newCommand() *cobra.Command {
	f := flags{logging: logsapi.NewLoggingConfiguration()}
	c := &cobra.Command{
		Use:   "dra-shared-controller",
		Short: "Run the cluster-scoped components of the DRA driver for shared devices",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := logsapi.ValidateAndApply(f.logging, nil); err != nil {
				return err
			}
			return f.run(c.Context())
		},
	}
	f.addGeneral(c.Flags())
	f.addFeatures(c.Flags())
	f.addWebhook(c.Flags())
	logsapi.AddFlags(f.logging, c.Flags())
	logs.InitLogs()
	return c
}

// addGeneral adds the flags of the whole controller.
func (f *flags) addGeneral(p *pflag.FlagSet) {
	p.StringVar(&f.DriverName, "driver-name", api.DriverName, "name of the driver")
	p.StringVar(&f.configFile, "config", "/etc/dra-shared/config.yaml", "path of the DriverConfig file")
	p.StringVar(&f.kubeconfig, "kubeconfig", "", "path of a kubeconfig file; default: the pod's service account")
	p.StringVar(&f.Namespace, "namespace", os.Getenv("POD_NAMESPACE"),
		"namespace of the leader election Lease and of the Secret with the webhook's certificate authority")
	p.StringVar(&f.mode, "mode", string(mode.Auto),
		"component that reserves claims for PodGroups: native (Kubernetes), bridge (this controller), "+
			"or auto (Kubernetes if its API server supports it)")
	p.StringVar(&f.SlicesOwner, "slices-owner", "",
		"name of the ClusterRole that owns the ResourceSlices of fabrics, so that they are deleted with it; "+
			"if empty, they remain after the controller is removed")
	p.StringVar(&f.HealthAddress, "health-address", ":8081", "host:port to serve /healthz and /readyz on")
	p.StringVar(&f.MetricsAddress, "metrics-address", "",
		"host:port to serve Prometheus metrics on, at /metrics; if empty or 0, metrics are disabled")
}

// addFeatures adds the flags of optional features.
func (f *flags) addFeatures(p *pflag.FlagSet) {
	p.DurationVar(&f.AddressQuarantine, "address-quarantine", 5*time.Minute,
		"time from the loss of a node until its addresses return to their AddressPools")
	p.BoolVar(&f.JobClaims, "job-claims", false,
		"generate claims for Jobs with the annotation scheduling.dra-shared.dev/job-claims on their pod template")
	p.BoolVar(&f.ReplicaClaims, "replica-claims", false,
		"generate claims for the replicas of StatefulSets and LeaderWorkerSets with the annotation "+
			"scheduling.dra-shared.dev/replica-claims on their pod templates")
	p.BoolVar(&f.Kueue, "kueue", false,
		"deny Kueue workloads with shared claims that Kueue would charge wrongly, or with pods that it would never admit")
	p.StringSliceVar(&f.KueueDeviceClasses, "kueue-device-classes", nil,
		"DeviceClasses that Kueue charges by its deviceClassMappings, separated by commas")
	p.BoolVar(&f.EndpointSlices, "endpoint-slices", false,
		"write the EndpointSlices of Services with the annotation network.dra-shared.dev/network")
	p.BoolVar(&f.NetworkStatus, "network-status", false,
		"write the annotation k8s.v1.cni.cncf.io/network-status of pods with shares of NICs")
}

// addWebhook adds the flags of the admission webhooks.
func (f *flags) addWebhook(p *pflag.FlagSet) {
	p.IntVar(&f.Webhook.Port, "webhook-port", 9443, "port to serve admission webhooks on; 0 disables the server")
	p.StringVar(&f.Webhook.Service, "webhook-service", "dra-shared-controller",
		"name of the Service through which the API server calls the webhooks")
	p.StringVar(&f.Webhook.Configuration, "webhook-configuration", "dra-shared-controller",
		"name of the MutatingWebhookConfiguration and the ValidatingWebhookConfiguration; the controller adds its "+
			"certificate authority to both")
	p.StringVar(&f.Webhook.Secret, "webhook-secret", "dra-shared-controller-ca",
		"name of the Secret with the certificate authority, which the controller keeps and rotates")
	p.StringVar(&f.Webhook.Directory, "webhook-certificates", "",
		"directory with tls.crt and tls.key if another component, such as cert-manager, issues them; "+
			"if empty, the controller issues its own")
	p.StringVar(&f.Webhook.PodIP, "pod-ip", os.Getenv("POD_IP"),
		"IP address at which other replicas reach the webhooks, to ask the leading replica which claim has room for a pod; "+
			"if empty, each replica decides for itself")
}

func (f flags) run(ctx context.Context) error {
	if f.Namespace == "" {
		return errors.New("--namespace is required; does the pod set the environment variable POD_NAMESPACE?")
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
	rest, err := restconfig.Load(f.kubeconfig)
	if err != nil {
		return err
	}
	rest.QPS = -1 // the API server limits clients by priority and fairness
	ctrl.SetLogger(klog.Background())
	return controlplane.Run(ctx, rest, f.Options)
}
