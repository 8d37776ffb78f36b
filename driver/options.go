// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/events"

	"github.com/dra-shared/dra-driver-shared/attach/install"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
)

// Options configures a Driver. Every field is required unless its comment
// names a default.
type Options struct {
	// DriverName is the name that devices are published under.
	DriverName string
	// NodeName is the name of the node, and of its pool of devices.
	NodeName string
	// Client reads claims, pods, and the Node, and writes ResourceSlices and the status of claims.
	Client kubernetes.Interface
	// Metadata watches the Node, to notice when it was registered again (node.go). Default: the driver does not
	// notice it.
	Metadata metadata.Interface
	// Kinds are the device kinds, with distinct names.
	Kinds []Kind

	// PluginDir is the plugin's directory below the kubelet's; it contains the claim records. Its
	// path is the same inside and outside of the container.
	PluginDir string
	// RegistryDir is the directory where the kubelet discovers plugins.
	RegistryDir string
	// CDIDir is one of the directories that the runtime reads CDI specs from.
	CDIDir string
	// RunDir is a directory on a tmpfs of the node, for sockets and attachment
	// records. Its path is the same inside and outside of the container.
	RunDir string
	// Hook is the path of the installed hook on the node. Default: Installation's path.
	Hook string
	// Installation installs the hook. Default: the hook is at its path already.
	Installation *install.Installation
	// Instance distinguishes plugins that run at the same time: the pod's UID.
	Instance string
	// RollingUpdate allows two plugins to overlap (kubelet 1.33 or newer).
	RollingUpdate bool
	// BootIDFile has different content after each boot. Default: /proc/sys/kernel/random/boot_id.
	BootIDFile string
	// OrphanGrace is how long an object must have been an orphan before garbage collection removes it. Default: one
	// minute.
	OrphanGrace time.Duration
	// Failpoints wraps operations that change state outside the process.
	// Default: none.
	Failpoints failpoint.Injector
	// Events receives the events on pods and on the Node. Default: they are discarded.
	Events events.EventRecorder
	// Metrics is the registry for the driver's metrics. Default: none.
	Metrics prometheus.Registerer
}

// validate returns an error that names each missing required option and each invalid option.
func (o Options) validate() error {
	var errs []error
	for _, required := range []struct {
		option  string
		missing bool
	}{
		{"DriverName", o.DriverName == ""},
		{"NodeName", o.NodeName == ""},
		{"Client", o.Client == nil},
		{"Hook or Installation", o.Hook == "" && o.Installation == nil},
	} {
		if required.missing {
			errs = append(errs, fmt.Errorf("driver option %s is missing", required.option))
		}
	}
	for _, directory := range []struct{ option, path string }{
		{"PluginDir", o.PluginDir}, {"RegistryDir", o.RegistryDir}, {"CDIDir", o.CDIDir}, {"RunDir", o.RunDir},
	} {
		if !filepath.IsAbs(directory.path) {
			errs = append(errs, fmt.Errorf("driver option %s: %q is not an absolute path", directory.option, directory.path))
		}
	}
	names := sets.New[string]()
	for i, kind := range o.Kinds {
		if name := kind.Name(); name == "" || names.Has(name) {
			errs = append(errs, fmt.Errorf("driver option Kinds[%d]: the name %q must be unique and not empty", i, name))
		}
		names.Insert(kind.Name())
	}
	return errors.Join(errs...)
}

func (o *Options) setDefaults() {
	if o.BootIDFile == "" {
		o.BootIDFile = "/proc/sys/kernel/random/boot_id"
	}
	if o.OrphanGrace == 0 {
		o.OrphanGrace = time.Minute
	}
	if o.Installation != nil {
		o.Hook = o.Installation.Path()
	}
	if o.Events == nil {
		o.Events = &events.FakeRecorder{} // discards events
	}
}
