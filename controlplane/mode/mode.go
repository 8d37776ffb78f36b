// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package mode selects the component that reserves claims for PodGroups:
// Kubernetes if the cluster supports it (Native), otherwise the controller
// (Bridge).
package mode

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// Mode is the mode of the control plane.
type Mode string

const (
	// Auto stands for the mode that Detect returns.
	Auto Mode = "auto"
	// Bridge makes the controller generate claims for PodGroups and reserve them, for
	// each pod and for the PodGroup.
	Bridge Mode = "bridge"
	// Native makes the controller translate its PodGroups to those of Kubernetes,
	// whose scheduler, resource claim controller, and kubelet do the rest (KEP-5729).
	Native Mode = "native"
)

// ErrChanged is wrapped by the error with which a Watcher stops the process.
var ErrChanged = errors.New("the cluster's mode changed; restarting")

// Parse returns the mode of that name.
func Parse(name string) (Mode, error) {
	switch m := Mode(name); m {
	case Auto, Bridge, Native:
		return m, nil
	}
	return "", fmt.Errorf("mode %q: must be auto, bridge, or native", name)
}

// NewClient returns a client for Detect and a Watcher that opens a connection for each request. A client that
// keeps its connection asks the same API server, of several, as long as that server runs.
func NewClient(config *rest.Config) (kubernetes.Interface, error) {
	tls, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: tls, TLSHandshakeTimeout: detectTimeout, DisableKeepAlives: true,
	}
	if config.Proxy != nil {
		transport.Proxy = config.Proxy
	}
	if config.Dial != nil {
		transport.DialContext = config.Dial
	}
	wrapped, err := rest.HTTPWrappersForConfig(config, transport)
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfigAndClient(config, &http.Client{Transport: wrapped})
}

// Detect returns Native if the API server keeps the claims of one of Kubernetes'
// own PodGroups, and Bridge otherwise. It is not enough that the type exists: a separate feature
// gate decides whether the API server keeps the field for claims. Detect creates a PodGroup as a
// dry run, in a namespace that must exist.
//
// The scheduler, the controllers, and the kubelets have feature gates of their
// own, which Detect cannot see. If they differ from the API server's, the user
// must set the mode.
func Detect(ctx context.Context, cluster kubernetes.Interface, namespace string) (Mode, error) {
	basic := schedulingapi.PodGroupSchedulingPolicy{Basic: &schedulingapi.BasicSchedulingPolicy{}}
	probe := &schedulingapi.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "dra-shared-probe-"},
		Spec: schedulingapi.PodGroupSpec{
			SchedulingPolicy: basic,
			ResourceClaims:   []schedulingapi.PodGroupResourceClaim{{Name: "probe", ResourceClaimName: ptr.To("probe")}},
		},
	}
	dryRun := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	ctx, cancel := context.WithTimeout(ctx, detectTimeout)
	defer cancel()
	created, err := cluster.SchedulingV1beta1().PodGroups(namespace).Create(ctx, probe, dryRun)
	switch {
	case apierrors.IsNotFound(err):
		return Bridge, nil
	case err != nil:
		return "", fmt.Errorf("detect whether the cluster supports PodGroups with claims: %w", err)
	case len(created.Spec.ResourceClaims) == 0:
		return Bridge, nil
	}
	return Native, nil
}

// Versions returns the versions in which the API server has PodGroups of Kubernetes, in the order in which it
// prefers them. Detect knows only one of them.
func Versions(server discovery.DiscoveryInterface) (versions []string, err error) {
	groups, err := server.ServerGroups()
	if err != nil {
		return nil, fmt.Errorf("find the versions of %s: %w", schedulingapi.GroupName, err)
	}
	for _, group := range groups.Groups {
		if group.Name != schedulingapi.GroupName {
			continue
		}
		for _, version := range group.Versions {
			resources, err := server.ServerResourcesForGroupVersion(version.GroupVersion)
			if err != nil {
				return nil, fmt.Errorf("find the resources of %s: %w", version.GroupVersion, err)
			}
			if slices.ContainsFunc(resources.APIResources, func(r metav1.APIResource) bool { return r.Name == "podgroups" }) {
				versions = append(versions, version.Version)
			}
		}
	}
	return versions, nil
}

// detectPeriod is the period of a Watcher. No event reports a change of feature
// gates; they change when an API server restarts.
const detectPeriod = 5 * time.Second

// modeChangeThreshold is the number of successive results with another mode after which a Watcher
// concludes that the mode has changed. While API servers are upgraded one after the other, the
// answers of old and new ones alternate, because each answer comes over a new connection (see
// NewClient).
const modeChangeThreshold = 3

// detectTimeout limits the time that Detect waits for an API server that accepts
// connections and does not answer.
const detectTimeout = 10 * time.Second

// Watcher is a manager.Runnable that fails when the cluster's mode changes. All
// components of a process run in one mode; after the restart they adopt the
// objects that the other mode left.
type Watcher struct {
	Cluster   kubernetes.Interface
	Namespace string
	// Mode is the mode in which the process runs.
	Mode Mode
}

// NeedLeaderElection implements manager.LeaderElectionRunnable: admission, which
// every replica serves, depends on the mode too.
func (*Watcher) NeedLeaderElection() bool { return false }

// Start detects the mode every detectPeriod until it changes or ctx ends. It
// implements manager.Runnable.
func (w *Watcher) Start(ctx context.Context) error {
	ticker := time.NewTicker(detectPeriod)
	defer ticker.Stop()
	return w.watch(ctx, ticker.C)
}

// watch detects the mode at each tick. It returns nil when ctx ends, and an error
// that wraps ErrChanged when modeChangeThreshold results in a row show another mode.
func (w *Watcher) watch(ctx context.Context, ticks <-chan time.Time) error {
	differing := 0
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticks:
		}
		detected, err := Detect(ctx, w.Cluster, w.Namespace)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Mode detection failed; keeping the current mode", "mode", w.Mode)
			continue
		}
		if detected == w.Mode {
			differing = 0
			continue
		}
		differing++
		klog.FromContext(ctx).Info("Detected another mode", "mode", w.Mode, "detected", detected,
			"differingResults", differing, "threshold", modeChangeThreshold)
		if differing == modeChangeThreshold {
			return fmt.Errorf("%w: the mode is %s, was %s", ErrChanged, detected, w.Mode)
		}
	}
}
