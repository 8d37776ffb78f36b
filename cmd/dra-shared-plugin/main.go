// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command dra-shared-plugin is the node plugin: it publishes the node's shared
// devices, prepares claims for the kubelet, and attaches shares to pods.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
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
	"github.com/dra-shared/dra-driver-shared/attach/install"
	"github.com/dra-shared/dra-driver-shared/driver"
	"github.com/dra-shared/dra-driver-shared/driver/accelerator"
	"github.com/dra-shared/dra-driver-shared/driver/fabric"
	"github.com/dra-shared/dra-driver-shared/driver/lock"
	"github.com/dra-shared/dra-driver-shared/driver/nic"
	"github.com/dra-shared/dra-driver-shared/driver/nic/ipam"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint/httpfailpoint"
	"github.com/dra-shared/dra-driver-shared/internal/restconfig"
	"github.com/dra-shared/dra-driver-shared/netdev"
)

type flags struct {
	driver.Options
	configFile, kubeconfig, kubeletDir, hookSource, hookDir, nodeMounts, bpffs string
	sysfs, procfs, devfs, cgroupfs                                             string
	metricsAddress, opener                                                     string
	pprof                                                                      bool
	logging                                                                    *logsapi.LoggingConfiguration
}

// gcPercent is the default of GOGC. With it, the garbage collector runs more often than Go's default:
// with 1,000 shares, this saves 4 MiB of memory.
const gcPercent = 40

func main() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	os.Exit(cli.Run(newCommand()))
}

func newCommand() *cobra.Command {
	f := flags{logging: logsapi.NewLoggingConfiguration()}
	c := &cobra.Command{
		Use:   "dra-shared-plugin",
		Short: "Run the node plugin of the DRA driver for shared devices",
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
	f.add(c.Flags())
	f.addNodePaths(c.Flags())
	logsapi.AddFlags(f.logging, c.Flags())
	logs.InitLogs()
	c.AddCommand(newUninstallCheckCommand(), newMountBPFFSCommand())
	return c
}

// add defines all flags except those of addNodePaths.
func (f *flags) add(p *pflag.FlagSet) {
	p.StringVar(&f.DriverName, "driver-name", api.DriverName, "name of the driver")
	p.StringVar(&f.NodeName, "node-name", os.Getenv("NODE_NAME"), "name of this node")
	p.StringVar(&f.Instance, "pod-uid", os.Getenv("POD_UID"),
		"UID of this plugin's pod, which distinguishes the two plugins of a rolling update")
	p.StringVar(&f.configFile, "config", "/etc/dra-shared/config.yaml", "path of the DriverConfig file")
	p.StringVar(&f.kubeconfig, "kubeconfig", "", "path of a kubeconfig file; default: the pod's service account")
	p.StringVar(&f.hookSource, "hook", "/bin/dra-shared-hook", "path of the hook to install")
	p.StringVar(&f.metricsAddress, "metrics-address", "",
		"host:port to serve Prometheus metrics on, at /metrics; if empty, metrics are disabled")
	p.StringVar(&f.opener, "namespace-opener", "",
		"path of the unix socket of a process that opens sockets in the network namespaces of pods, to renew leases of "+
			"DHCP servers (dra-shared-hook open-namespaces); if empty, claims cannot lease addresses")
	p.BoolVar(&f.pprof, "pprof", false, "also serve Go's profiles at /debug/pprof, without authentication")
	p.DurationVar(&f.OrphanGrace, "orphan-grace", time.Minute,
		"grace period after which the plugin removes an orphaned object")
}

// addNodePaths defines the flags for directories of the node.
func (f *flags) addNodePaths(p *pflag.FlagSet) {
	p.StringVar(&f.kubeletDir, "kubelet-dir", "/var/lib/kubelet",
		"the kubelet's data directory, the same inside and outside of the container")
	p.StringVar(&f.CDIDir, "cdi-dir", "/var/run/cdi", "directory for CDI specs")
	p.StringVar(&f.RunDir, "run-dir", "/run/dra-shared",
		"directory on a tmpfs of the node, the same inside and outside of the container")
	p.StringVar(&f.hookDir, "hook-dir", "",
		"directory on the node for the hook, the same inside and outside of the container; default: below the plugin's "+
			"directory")
	p.StringVar(&f.nodeMounts, "node-mounts", "",
		"file with the mounts of the node, its /proc/1/mountinfo; if empty, the plugin does not detect that the hook's "+
			"directory is mounted noexec")
	p.StringVar(&f.sysfs, "sysfs", "/sys", "mount point of the node's sysfs")
	p.StringVar(&f.procfs, "procfs", "/proc", "mount point of the node's procfs")
	p.StringVar(&f.devfs, "devfs", "/dev", "mount point of the node's /dev")
	p.StringVar(&f.cgroupfs, "cgroupfs", "/sys/fs/cgroup", "mount point of the node's cgroup file system")
	p.StringVar(&f.bpffs, "bpffs", "/sys/fs/bpf", "mount point of a BPF file system of the node")
}

func (f *flags) run(ctx context.Context) error {
	if f.NodeName == "" || f.Instance == "" {
		return fmt.Errorf("--node-name %q, --pod-uid %q: both are required: does the pod set NODE_NAME and POD_UID?",
			f.NodeName, f.Instance)
	}
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("node", f.NodeName))
	c, err := f.loadConfig()
	if err != nil {
		return err
	}
	f.Failpoints = newFailpoints(f.RunDir)
	restConfig, err := f.restConfig()
	if err != nil {
		return err
	}
	stopEvents, err := f.completeOptions(ctx, restConfig)
	if err != nil {
		return err
	}
	defer stopEvents()
	node, err := f.newNode(ctx, c)
	if err != nil {
		return err
	}
	defer node.Close()
	if f.Kinds, err = f.newKinds(node, restConfig, c); err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	f.Metrics = registry
	d, err := driver.New(f.Options)
	if err != nil {
		return err
	}
	wait, err := d.Start(ctx)
	if err != nil {
		return err
	}
	defer f.startMetrics(ctx, registry, d)()
	return wait()
}

// loadConfig reads and validates the file of --config.
func (f *flags) loadConfig() (*config.DriverConfig, error) {
	raw, err := os.ReadFile(f.configFile)
	if err != nil {
		return nil, fmt.Errorf("read --config: %w", err)
	}
	c, err := config.Load(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.configFile, err)
	}
	return c, nil
}

// restConfig returns the configuration for API server clients.
func (f *flags) restConfig() (*rest.Config, error) {
	c, err := restconfig.Load(f.kubeconfig)
	if err != nil {
		return nil, err
	}
	// The API server limits clients by priority and fairness. client-go's default, 5 requests per second, would delay
	// the status by seconds.
	c.QPS, c.Burst = 50, 100
	c.Wrap(httpfailpoint.Transport(f.Failpoints))
	return c, nil
}

// completeOptions sets the driver options that follow from the flags: clients, directories, and the hook. stop stops
// recording events.
func (f *flags) completeOptions(ctx context.Context, c *rest.Config) (stop func(), err error) {
	f.RollingUpdate = true
	f.PluginDir = filepath.Join(f.kubeletDir, "plugins", f.DriverName)
	f.RegistryDir = filepath.Join(f.kubeletDir, "plugins_registry")
	if f.hookDir == "" {
		f.hookDir = filepath.Join(f.PluginDir, "hook")
	}
	if f.Installation, err = install.New(f.hookSource, f.hookDir, f.nodeMounts, f.Failpoints); err != nil {
		return nil, err
	}
	if f.Client, err = kubernetes.NewForConfig(c); err != nil {
		return nil, err
	}
	if f.Metadata, err = metadata.NewForConfig(c); err != nil {
		return nil, err
	}
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: f.Client.EventsV1()})
	if err := broadcaster.StartRecordingToSinkWithContext(ctx); err != nil {
		return nil, err
	}
	f.Events = broadcaster.NewRecorder(scheme.Scheme, f.DriverName+"/plugin")
	return broadcaster.Shutdown, nil
}

// newNode returns the Node that manages the NICs. The plugin drops CAP_PERFMON when the classifier is loaded, or
// immediately if no network needs the classifier.
func (f *flags) newNode(ctx context.Context, c *config.DriverConfig) (*netdev.Node, error) {
	node, err := netdev.NewNode(netdev.Options{
		BPFFS:      f.bpffs,
		Failpoints: f.Failpoints,
		Loaded:     func() { dropPerfmon(ctx) },
	})
	if err != nil {
		return nil, err
	}
	if !c.ShapesNetworks() {
		dropPerfmon(ctx)
	}
	return node, nil
}

// newKinds builds the device kinds. docs/dev/device-kinds.md explains how to add one.
func (f *flags) newKinds(node *netdev.Node, c *rest.Config, config *config.DriverConfig) ([]driver.Kind, error) {
	pools, err := f.addressPoolOptions(c)
	if err != nil {
		return nil, err
	}
	nics, err := nic.New(nic.Options{
		Node: node, Inventory: netdev.NewInventory(f.sysfs), Config: config,
		StateFile:    filepath.Join(f.RunDir, "nics.json"),
		AddressPools: pools, OpenSockets: f.socketOpener(), Failpoints: f.Failpoints,
	})
	if err != nil {
		return nil, err
	}
	return []driver.Kind{
		nics,
		accelerator.New(accel.HostAt(f.sysfs, f.procfs, f.devfs, f.cgroupfs), config, f.NodeName),
		fabric.New(config, f.NodeName),
	}, nil
}

// socketOpener returns the function that opens sockets in pods, or nil without --namespace-opener.
func (f *flags) socketOpener() func(context.Context, attach.Record) (attach.Sockets, error) {
	if f.opener == "" {
		return nil
	}
	return func(ctx context.Context, r attach.Record) (attach.Sockets, error) {
		return attach.OpenIn(ctx, f.opener, r)
	}
}

// addressPoolOptions returns the options of the allocator for addresses from pools.
func (f *flags) addressPoolOptions(restConfig *rest.Config) (*ipam.Options, error) {
	api, err := ipam.NewAPI(restConfig)
	if err != nil {
		return nil, err
	}
	locks, err := lock.Open(lock.Path(f.RunDir))
	if err != nil {
		return nil, err
	}
	return &ipam.Options{
		Node: f.NodeName, Instance: f.Instance, API: api, Locks: locks, NodeLabels: f.nodeLabels,
		// A plugin from another release that runs at the same time must use the same file.
		LastPluginFile: filepath.Join(f.RunDir, "addresses-holder"), Failpoints: f.Failpoints,
	}, nil
}

// nodeLabels returns the node's labels.
func (f *flags) nodeLabels(ctx context.Context) (map[string]string, error) {
	node, err := f.Client.CoreV1().Nodes().Get(ctx, f.NodeName, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return node.Labels, nil
}
