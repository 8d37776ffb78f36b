// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command dra-shared-plugin is the node daemon: it publishes the node's shared
// devices, prepares claims for the kubelet, and attaches shares to pods.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/events"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/accel"
	"github.com/dra-shared/dra-driver-shared/api"
	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/accelerator"
	"github.com/dra-shared/dra-driver-shared/driver/fabric"
	"github.com/dra-shared/dra-driver-shared/driver/nic"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint/httpfailpoint"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

type flags struct {
	driver.Options
	configFile, kubeconfig, kubeletDir, hookSource, hookDir, bpffs string
	sysfs, procfs, devfs, cgroupfs                                 string
	metricsAddress                                                 string
	pprof                                                          bool
	logging                                                        *logsapi.LoggingConfiguration
}

func main() {
	os.Exit(cli.Run(newCommand()))
}

func newCommand() *cobra.Command {
	f := flags{logging: logsapi.NewLoggingConfiguration()}
	c := &cobra.Command{
		Use:   "dra-shared-plugin",
		Short: "The node daemon of the DRA driver for shared devices",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := logsapi.ValidateAndApply(f.logging, nil); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return f.run(ctx)
		},
	}
	p := c.Flags()
	p.StringVar(&f.DriverName, "driver-name", api.DriverName, "name of the driver")
	p.StringVar(&f.NodeName, "node-name", os.Getenv("NODE_NAME"), "name of this node")
	p.StringVar(
		&f.Instance,
		"pod-uid",
		os.Getenv("POD_UID"),
		"UID of this plugin's pod, which distinguishes the two plugins of a rolling update",
	)
	p.StringVar(&f.configFile, "config", "/etc/dra-shared/config.yaml", "path of the DriverConfig")
	p.StringVar(&f.kubeconfig, "kubeconfig", "", "path of a kubeconfig; default: the pod's service account")
	p.StringVar(
		&f.kubeletDir,
		"kubelet-dir",
		"/var/lib/kubelet",
		"the kubelet's data directory, the same inside and outside of the container",
	)
	p.StringVar(&f.CDIDir, "cdi-dir", "/var/run/cdi", "directory for CDI specs")
	p.StringVar(
		&f.RunDir,
		"run-dir",
		"/run/dra-shared",
		"directory on a tmpfs of the node, the same inside and outside of the container",
	)
	p.StringVar(&f.hookSource, "hook", "/bin/dra-shared-hook", "path of the hook to install")
	p.StringVar(
		&f.hookDir,
		"hook-dir",
		"",
		"directory on the node for the hook, the same inside and outside of the container; default: below the plugin's "+
			"directory",
	)
	p.StringVar(&f.sysfs, "sysfs", "/sys", "mount point of the node's sysfs")
	p.StringVar(&f.procfs, "procfs", "/proc", "mount point of the node's procfs")
	p.StringVar(&f.devfs, "devfs", "/dev", "mount point of the node's /dev")
	p.StringVar(&f.cgroupfs, "cgroupfs", "/sys/fs/cgroup", "mount point of the node's cgroup file system")
	p.StringVar(&f.bpffs, "bpffs", "/sys/fs/bpf", "mount point of a BPF file system of the node")
	p.StringVar(
		&f.metricsAddress,
		"metrics-address",
		"",
		"host:port on which to serve Prometheus metrics at /metrics; default: none",
	)
	p.BoolVar(&f.pprof, "pprof", false, "also serve Go's profiles at /debug/pprof, to every client that reaches the port")
	p.DurationVar(
		&f.OrphanGrace,
		"orphan-grace",
		time.Minute,
		"time for which an object must have been an orphan before the plugin removes it",
	)
	logsapi.AddFlags(f.logging, p)
	logs.InitLogs()
	c.AddCommand(append(newProbeCommands(), newUninstallCheckCommand())...)
	return c
}

// newProbeCommands returns the commands that the container's probes run.
func newProbeCommands() (commands []*cobra.Command) {
	for name, service := range map[string]string{"started": driver.Startup, "ready": driver.Readiness,
		"alive": driver.Liveness} {
		var runDir string
		c := &cobra.Command{
			Use:   name,
			Short: "Succeed if the plugin of this pod is " + name,
			Args:  cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				ctx, cancel := context.WithTimeout(cmd.Context(), probeTimeout)
				defer cancel()
				return driver.CheckHealth(ctx, runDir, os.Getenv("POD_UID"), service)
			},
		}
		c.Flags().StringVar(&runDir, "run-dir", "/run/dra-shared", "the plugin's run directory")
		commands = append(commands, c)
	}
	return commands
}

const probeTimeout = 5 * time.Second

func (f flags) run(ctx context.Context) error {
	if f.NodeName == "" || f.Instance == "" {
		return fmt.Errorf(
			"--node-name %q, --pod-uid %q: both are required: does the pod set NODE_NAME and POD_UID?",
			f.NodeName,
			f.Instance,
		)
	}
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("node", f.NodeName))
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
	// The API server limits clients by priority and fairness. The default of
	// client-go, 5 requests per second, would delay the status by seconds.
	rest.QPS, rest.Burst = 50, 100
	f.Failpoints = newFailpoints(f.RunDir)
	rest.Wrap(httpfailpoint.Transport(f.Failpoints))
	if f.Client, err = kubernetes.NewForConfig(rest); err != nil {
		return err
	}
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: f.Client.EventsV1()})
	if err := broadcaster.StartRecordingToSinkWithContext(ctx); err != nil {
		return err
	}
	defer broadcaster.Shutdown()
	f.Events = broadcaster.NewRecorder(scheme.Scheme, f.DriverName+"/plugin")
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	f.Metrics = registry
	f.PluginDir = filepath.Join(f.kubeletDir, "plugins", f.DriverName)
	f.RegistryDir = filepath.Join(f.kubeletDir, "plugins_registry")
	if f.hookDir == "" {
		f.hookDir = filepath.Join(f.PluginDir, "hook")
	}
	if f.Hook, err = attach.Install(f.hookSource, f.hookDir, f.Failpoints); err != nil {
		return err
	}
	node, err := netdev.NewNode(netdev.Options{BPFFS: f.bpffs, Failpoints: f.Failpoints})
	if err != nil {
		return err
	}
	defer node.Close()
	// docs/dev/device-kinds.md explains how to add a device kind.
	f.Kinds = []driver.Kind{
		nic.New(node, netdev.NewInventory(f.sysfs), c),
		accelerator.New(accel.HostAt(f.sysfs, f.procfs, f.devfs, f.cgroupfs), c, f.NodeName),
		fabric.New(c, f.NodeName),
	}
	f.RollingUpdate = true
	d, err := driver.New(f.Options)
	if err != nil {
		return err
	}
	wait, err := d.Start(ctx)
	if err != nil {
		return err
	}
	if f.metricsAddress != "" {
		if err := f.serveMetrics(ctx, registry); err != nil {
			return err
		}
	}
	return wait()
}
