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
	"strings"
	"time"

	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// Mode is the mode of the control plane.
type Mode string

const (
	// Auto stands for the mode that Detect returns.
	Auto Mode = "auto"
	// Bridge makes the controller generate claims for PodGroups and reserve them, for
	// each pod and for the PodGroup.
	Bridge Mode = "bridge"
	// Native makes the controller translate its PodGroups to Kubernetes' own. Kubernetes' scheduler, resource claim
	// controller, and kubelet do the rest (KEP-5729).
	Native Mode = "native"
)

// ErrDenied is wrapped by the error of Detect if the cluster's admission refused the PodGroup.
var ErrDenied = errors.New("an admission policy or webhook of the cluster denied the PodGroup of the dry run: " +
	"permit it, or set the mode (chart value controller.mode)")

// ErrChanged is wrapped by the error that a Watcher stops the process with.
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
func NewClient(restConfig *rest.Config) (kubernetes.Interface, error) {
	tls, err := rest.TLSConfigFor(restConfig)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: tls, TLSHandshakeTimeout: detectTimeout, DisableKeepAlives: true,
	}
	if restConfig.Proxy != nil {
		transport.Proxy = restConfig.Proxy
	}
	if restConfig.Dial != nil {
		transport.DialContext = restConfig.Dial
	}
	wrapped, err := rest.HTTPWrappersForConfig(restConfig, transport)
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfigAndClient(restConfig, &http.Client{Transport: wrapped})
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
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "dra-shared-probe-", Labels: probeLabels},
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
	case isDenial(err):
		return "", fmt.Errorf("detect whether the cluster supports PodGroups with claims: %w: %w", err, ErrDenied)
	case err != nil:
		return "", fmt.Errorf("detect whether the cluster supports PodGroups with claims: %w", err)
	case len(created.Spec.ResourceClaims) == 0:
		return Bridge, nil
	}
	return Native, nil
}

// probeLabels are the labels of the PodGroup of the dry run, because policies of a cluster may require labels.
var probeLabels = map[string]string{
	"app.kubernetes.io/name":       "dra-driver-shared",
	"app.kubernetes.io/managed-by": v1alpha1.ManagedByController,
}

// isDenial reports whether a policy or a webhook denied a request. The API server's messages differ from the message
// for a missing right; its status codes do not, because a policy or a webhook chooses its own.
func isDenial(err error) bool {
	return apierrors.ReasonForError(err) != metav1.StatusReasonUnknown &&
		(strings.Contains(err.Error(), "denied the request") || strings.Contains(err.Error(), "denied request"))
}

// isServed reports whether the API server has the PodGroups that Detect creates.
func isServed(ctx context.Context, server discovery.DiscoveryInterfaceWithContext) (bool, error) {
	version := schedulingapi.SchemeGroupVersion.String()
	resources, err := server.ServerResourcesForGroupVersionWithContext(ctx, version)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("find the resources of %s: %w", version, err)
	}
	return slices.ContainsFunc(resources.APIResources, isPodGroups), nil
}

func isPodGroups(r metav1.APIResource) bool { return r.Name == "podgroups" }

// Versions returns the API server's versions of Kubernetes' PodGroups, in its order of preference. Detect knows only
// one of them.
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
			if slices.ContainsFunc(resources.APIResources, isPodGroups) {
				versions = append(versions, version.Version)
			}
		}
	}
	return versions, nil
}

// detectPeriod is the period of a Watcher. No event reports a change of feature
// gates; they change when an API server restarts.
const detectPeriod = 5 * time.Second

// dryRunTicks is how many results of a Watcher follow from one dry run while discovery does not change: one minute.
// The audit log has each dry run, as any write, and admission of the cluster may refuse it.
const dryRunTicks = int(time.Minute / detectPeriod)

// modeChangeThreshold is the number of successive results with another mode that make a Watcher conclude that the mode
// has changed. While API servers are upgraded one after the other, the answers of old and new ones alternate, because
// each answer comes over a new connection (see NewClient).
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
	// Mode is the mode that the process runs in.
	Mode Mode

	// The last result of a dry run, and how many more ticks it is used for.
	last      Mode
	remaining int
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
		detected, err := w.detect(ctx, differing > 0)
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

// detect returns the mode at a tick. It learns from discovery whether the type exists, and by a dry run whether the API
// server keeps its claims: if the type is new, each dryRunTicks ticks, and to confirm another mode. After a denial, it
// returns the mode of the process until the next dry run.
func (w *Watcher) detect(ctx context.Context, confirm bool) (Mode, error) {
	ctx, cancel := context.WithTimeout(ctx, detectTimeout)
	defer cancel()
	served, err := isServed(ctx, w.Cluster.Discovery())
	if err != nil {
		return "", err
	}
	if !served {
		w.remaining = 0
		return Bridge, nil
	}
	if w.remaining > 0 && !confirm {
		w.remaining--
		return w.last, nil
	}
	w.last, err = Detect(ctx, w.Cluster, w.Namespace)
	w.remaining = dryRunTicks - 1
	switch {
	case errors.Is(err, ErrDenied):
		w.last = w.Mode
	case err != nil:
		w.remaining = 0
	}
	return w.last, err
}
