// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"
)

// Config describes the driver under test. Exactly one of Command, Serve, and Kubelet is
// set, or none with Kubeconfig. With Command or Serve, the suite starts the driver with a separate API
// server, in separate directories. With Kubelet, it tests a driver that runs on this node, with
// the API server of Kubeconfig.
type Config struct {
	// Driver is the name of the driver. Required.
	Driver string `json:"driver"`
	// Features are the features that the driver declares. Cases of other features are skipped.
	Features []string `json:"features,omitempty"`
	// Profiles are the profiles by kind of device that the driver declares: DRA-NET for
	// network interfaces, DRA-ACCEL for accelerators. Every driver is tested for the other profiles.
	Profiles []string `json:"profiles,omitempty"`
	// Pods describes pods for the cases of DRA-NET and DRA-ACCEL that need some. The suite does not start pods without it.
	// It needs Kubelet.
	Pods Pods `json:"pods,omitempty"`
	// Command starts the driver. $KUBECONFIG, $NODE_NAME, $POD_UID, $DRIVER_NAME,
	// $KUBELET_DIR, $PLUGIN_DIR, $REGISTRY_DIR, $CDI_DIR, and $STATE_DIR are replaced in
	// its arguments, and are set in its environment. $KUBELET_DIR contains the other
	// directories except CDI_DIR and STATE_DIR.
	Command []string `json:"command,omitempty"`
	// Mounts maps fixed directories that the driver uses to directories of the suite, as
	// in {"/var/lib/kubelet": "$KUBELET_DIR"}. The command then runs in a separate mount
	// namespace, which needs root and the program unshare.
	Mounts map[string]string `json:"mounts,omitempty"`
	// Serve runs the driver in this process until the context ends. Cases that kill the
	// driver are skipped.
	Serve func(context.Context, Env) error `json:"-"`
	// Kubelet is the data directory of this node's kubelet, such as /var/lib/kubelet. The driver runs on this node. The
	// suite finds it by its registration socket, as the kubelet does.
	Kubelet string `json:"kubelet,omitempty"`
	// Kubeconfig is the path of a kubeconfig file for Kubelet; empty for the service account of the pod. It must permit
	// listing ResourceSlices and writing ResourceClaims, their status, and the allocations in it (see job.yaml). Without
	// Kubelet, Command, and Serve, the suite tests what the driver publishes in this cluster, from any machine.
	Kubeconfig string `json:"kubeconfig,omitempty"`
	// Node is the name of the node. Required with Kubelet.
	Node string `json:"node,omitempty"`
	// Namespace is the namespace of the claims: default if empty.
	Namespace string `json:"namespace,omitempty"`
	// CDIDir is the directory that the driver writes CDI specs to, with Kubelet: /var/run/cdi if empty.
	CDIDir string `json:"cdiDir,omitempty"`
	// Device is the device that claims get first. Others follow if a case needs them.
	Device string `json:"device,omitempty"`
	// Devices are the names of the devices that claims may get, as patterns of path.Match; all if empty. It is for nodes
	// where other workloads use some of the devices.
	Devices []string `json:"devices,omitempty"`
	// Parameters are valid opaque parameters of the driver, as JSON. The second differs
	// from the first in effect, and one of the others has more than 9 KiB. Cases of opaque
	// parameters are skipped without them.
	Parameters []string `json:"parameters,omitempty"`
	// Shares are the amounts of the smallest shares of capacities without a request policy, by capacity name. Without it,
	// a share of such a capacity gets all of it.
	Shares map[string]resource.Quantity `json:"shares,omitempty"`
	// AnswersNoDevices declares that the response to prepare does not list devices, because the driver does not use CDI to
	// give them to containers.
	AnswersNoDevices bool `json:"answersNoDevices,omitempty"`
	// RBAC are files with the driver's ClusterRoles, as YAML.
	RBAC []string `json:"rbac,omitempty"`
	// Hooks change the node.
	Hooks Hooks `json:"hooks,omitempty"`
	// TwoNodes permits or forbids running the driver on two or three nodes at the same time,
	// which saves up to two minutes. If it is nil, the suite uses several nodes unless Hooks.Setup
	// changes this machine, or Serve runs a driver that does not declare RollingUpdate.
	TwoNodes *bool `json:"twoNodes,omitempty"`
	// Skip maps requirements that do not apply to the reason, which is reported.
	Skip map[string]string `json:"skip,omitempty"`
	// Only limits the run to these requirements, or groups such as PREP.
	Only []string `json:"only,omitempty"`
	// Quiet is how long the suite checks that a driver writes nothing: 5s if zero.
	Quiet Duration `json:"quiet,omitempty"`
	// Cycles is the number of prepare and unprepare calls in tests of leaks, or fewer if the
	// driver is slow: 50 if zero.
	Cycles int `json:"cycles,omitempty"`
	// StartTimeout is how long the driver may take to register and publish: 30s if zero.
	StartTimeout Duration `json:"startTimeout,omitempty"`
	// Report is the path that Test writes the ConformanceReport to; empty for none.
	Report string `json:"-"`
	// Implementation identifies the driver in the report.
	Implementation Implementation `json:"implementation,omitempty"`

	// Limits of a call, as in the kubelet, and of a case; shorter in the suite's own tests.
	callTimeout, caseTimeout time.Duration
}

// mayUse reports whether claims may get a device.
func (c Config) mayUse(device string) bool {
	return len(c.Devices) == 0 || slices.ContainsFunc(c.Devices, func(pattern string) bool {
		matches, err := path.Match(pattern, device)
		return err == nil && matches // complete has checked the patterns
	})
}

// needsOnlyAPI reports whether the suite can access only the objects that the driver publishes in a cluster.
func (c Config) needsOnlyAPI() bool {
	return c.Kubeconfig != "" && c.Kubelet == "" && len(c.Command) == 0 && c.Serve == nil
}

// isLive reports whether the driver runs in a cluster.
func (c Config) isLive() bool { return c.Kubelet != "" || c.needsOnlyAPI() }

// runsOnTwoNodes reports whether the driver can run on two nodes of the suite.
func (c Config) runsOnTwoNodes() bool {
	switch {
	case c.isLive():
		return false
	case c.TwoNodes != nil:
		return *c.TwoNodes
	}
	return len(c.Hooks.Setup) == 0 && (c.Serve == nil || slices.Contains(c.Features, "RollingUpdate"))
}

// declares reports whether the driver is tested for a requirement.
func (c Config) declares(q Requirement) bool {
	if q.Feature != "" {
		return slices.Contains(c.Features, q.Feature)
	}
	return !slices.Contains(kinds(), q.Profile) || slices.Contains(c.Profiles, q.Profile)
}

// Pods describes the pods that the suite starts on the node, through the scheduler.
type Pods struct {
	// Image is an image with the program /bin/dra-conformance, such as the suite's image. The node must be able to pull
	// it, or have it.
	Image string `json:"image,omitempty"`
	// Claims are the specs of the claims of the pods: each pod of a case gets a claim with the
	// next one, and after the last with the first again. One spec is enough if two claims
	// with it can be allocated at the same time.
	Claims []resourceapi.ResourceClaimSpec `json:"claims,omitempty"`
	// Configured is a claim with its effect in the pod, for NET-07.
	Configured *Configured `json:"configured,omitempty"`
	// Impossible is the spec of a claim that can be allocated, but with an interface that the driver cannot attach, such
	// as an interface with a route through a gateway that it does not reach. NET-02 is skipped without it.
	Impossible *resourceapi.ResourceClaimSpec `json:"impossible,omitempty"`
	// Timeout is how long a pod may take to run or end: 60s if zero.
	Timeout Duration `json:"timeout,omitempty"`
}

// Configured is the spec of a claim and what a pod with this claim must have. Fields that are
// empty are not compared.
type Configured struct {
	Claim resourceapi.ResourceClaimSpec `json:"claim"`
	// Interface is the name of the interface in the pod.
	Interface string `json:"interface"`
	MTU       int    `json:"mtu,omitempty"`
	// Addresses are all addresses of the interface except link-local ones, in CIDR form.
	Addresses []string `json:"addresses,omitempty"`
	// Routes are routes through the interface, as 10.1.0.0/16 or as 10.1.0.0/16 via 10.0.0.1.
	// The interface may have more.
	Routes []string `json:"routes,omitempty"`
}

// Hooks are commands that run with the environment of Config.Command. A nil hook does
// not exist; cases that need it are skipped.
type Hooks struct {
	// Setup prepares devices before the driver starts for the first time.
	Setup []string `json:"setup,omitempty"`
	// Teardown undoes Setup.
	Teardown []string `json:"teardown,omitempty"`
	// RemoveDevice removes the device $DEVICE from the node; RestoreDevice restores it.
	RemoveDevice  []string `json:"removeDevice,omitempty"`
	RestoreDevice []string `json:"restoreDevice,omitempty"`
	// Interfaces prints the interfaces that the pod of the claim $CLAIM_UID ($CLAIM in
	// $NAMESPACE) has, as ip -json address does. The claim is prepared.
	Interfaces []string `json:"interfaces,omitempty"`
	// Effect prints the driver's configuration for the prepared claim $CLAIM_UID ($CLAIM in $NAMESPACE). It is for drivers
	// that show the parameters and the capacity in state files, not in CDI edits.
	Effect []string `json:"effect,omitempty"`
	// PID prints the process ID of the driver of Config.Kubelet. The suite kills it, and
	// expects that something starts the driver again.
	PID []string `json:"pid,omitempty"`
}

// Env is the environment of an instance of the driver.
type Env struct {
	// Driver and Node are names. PodUID differs between instances.
	Driver, Node, PodUID string
	// Kubeconfig is the path of a file, and REST has its content.
	Kubeconfig string
	REST       *rest.Config
	// Directories. KubeletDir is the kubelet's data directory; PluginDir and RegistryDir
	// are in it. StateDir is empty at first and for use by the driver.
	KubeletDir, PluginDir, RegistryDir, CDIDir, StateDir string
}

// variables returns the environment of the driver's process.
func (e Env) variables() map[string]string {
	return map[string]string{
		"DRIVER_NAME": e.Driver, "NODE_NAME": e.Node, "POD_UID": e.PodUID, "KUBECONFIG": e.Kubeconfig,
		"KUBELET_DIR": e.KubeletDir, "PLUGIN_DIR": e.PluginDir, "REGISTRY_DIR": e.RegistryDir,
		"CDI_DIR": e.CDIDir, "STATE_DIR": e.StateDir,
	}
}

// local returns the path that a path in the mounts of Config.Mounts has outside of them.
func (e Env) local(mounts map[string]string, name string) string {
	for target, source := range mounts {
		if rest, ok := strings.CutPrefix(name, strings.TrimSuffix(target, "/")+"/"); ok {
			return filepath.Join(e.expand([]string{source})[0], rest)
		}
	}
	return name
}

// expand replaces the variables in the arguments of a command.
func (e Env) expand(args []string) (expanded []string) {
	variables := e.variables()
	for _, a := range args {
		expanded = append(expanded, os.Expand(a, func(name string) string {
			if v, ok := variables[name]; ok {
				return v
			}
			return os.Getenv(name)
		}))
	}
	return expanded
}

// Duration is a time.Duration in the form of time.ParseDuration.
type Duration struct{ time.Duration }

// UnmarshalJSON implements json.Unmarshaler.
func (d *Duration) UnmarshalJSON(raw []byte) (err error) {
	d.Duration, err = time.ParseDuration(strings.Trim(string(raw), `"`))
	return err
}

// MarshalJSON implements json.Marshaler.
func (d Duration) MarshalJSON() ([]byte, error) { return []byte(`"` + d.String() + `"`), nil }

// LoadConfig reads a Config from YAML.
func LoadConfig(raw []byte) (c Config, err error) {
	err = yaml.UnmarshalStrict(raw, &c)
	return c, err
}

// complete validates the configuration and sets defaults. The error names each wrong field.
func (c Config) complete() (Config, error) {
	all, err := Requirements()
	if err != nil {
		return c, err
	}
	return c.withDefaults(), c.validate(all)
}

// validate returns an error that names each wrong field, with its value and what is expected. all are the requirements.
func (c Config) validate(all []Requirement) error {
	ways := 0
	for _, set := range []bool{len(c.Command) > 0, c.Serve != nil, c.Kubelet != ""} {
		if set {
			ways++
		}
	}
	var problems []error
	problem := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if c.Driver == "" {
		problem("driver is empty: it must be the name of the driver, such as gpu.example.com")
	}
	if ways != 1 && !c.needsOnlyAPI() {
		problem("%d of command, Serve, and kubelet are set: exactly one must be, or none with kubeconfig", ways)
	}
	for i, pattern := range c.Devices {
		if _, err := path.Match(pattern, ""); err != nil {
			problem("devices[%d] is %q: it must be a pattern such as gpu-*", i, pattern)
		}
	}
	if c.Kubelet != "" && c.Node == "" {
		problem("node is empty: with kubelet, it must be the name of this node")
	}
	for _, f := range c.Features {
		if known := features(all); !slices.Contains(known, f) {
			problem("features: %q does not exist: use %s", f, strings.Join(known, ", "))
		}
	}
	for _, p := range c.Profiles {
		if !slices.Contains(kinds(), p) {
			problem("profiles: %q is not the profile of a kind of device: use %s", p, strings.Join(kinds(), ", "))
		}
	}
	if configured := c.Pods.Configured; configured != nil && configured.Interface == "" {
		problem("pods.configured: interface is empty: it must be the name that the configuration gives to the interface")
	}
	if c.Pods.Image != "" && (c.Kubelet == "" || len(c.Pods.Claims) == 0) {
		problem("pods: image %q is set: kubelet %q and the %d pods.claims must be set too", c.Pods.Image, c.Kubelet,
			len(c.Pods.Claims))
	}
	for id, reason := range c.Skip {
		if !slices.ContainsFunc(all, func(r Requirement) bool { return r.ID == id }) || reason == "" {
			problem("skip: %q: %q: it must be the ID of a requirement and a reason", id, reason)
		}
	}
	for _, only := range c.Only {
		if !slices.ContainsFunc(all, func(r Requirement) bool { return r.selected([]string{only}) }) {
			problem("only: %q is neither the ID of a requirement nor a prefix such as PREP", only)
		}
	}
	return errors.Join(problems...)
}

// withDefaults returns the configuration with defaults for fields that are not set.
func (c Config) withDefaults() Config {
	c.Namespace = orDefault(c.Namespace, "default")
	if !c.needsOnlyAPI() { // which tests the devices of all nodes unless it names one
		c.Node = orDefault(c.Node, "conformance-node")
	}
	c.CDIDir = orDefault(c.CDIDir, "/var/run/cdi")
	c.Quiet.Duration = orDefault(c.Quiet.Duration, 5*time.Second)
	c.StartTimeout.Duration = orDefault(c.StartTimeout.Duration, 30*time.Second)
	c.Cycles = orDefault(c.Cycles, 50)
	c.Pods.Timeout.Duration = orDefault(c.Pods.Timeout.Duration, time.Minute)
	c.callTimeout = orDefault(c.callTimeout, kubeletTimeout)
	c.caseTimeout = orDefault(c.caseTimeout, defaultCaseTimeout)
	return c
}

func orDefault[T comparable](value, fallback T) T {
	var zero T
	if value == zero {
		return fallback
	}
	return value
}

// features returns the features of requirements, in their order.
func features(all []Requirement) (names []string) {
	for _, r := range all {
		if r.Feature != "" && !slices.Contains(names, r.Feature) {
			names = append(names, r.Feature)
		}
	}
	return names
}

// kinds returns the profiles of kinds of devices, which a driver declares.
func kinds() []string { return []string{"DRA-NET", "DRA-ACCEL"} }

// selected reports whether only, which is Config.Only, selects the requirement.
func (r Requirement) selected(only []string) bool {
	prefix, _, _ := strings.Cut(r.ID, "-")
	return len(only) == 0 || slices.Contains(only, r.ID) || slices.Contains(only, prefix)
}
