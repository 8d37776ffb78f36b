// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package controlplane assembles the controller: it publishes fabrics, writes the
// status of their shares, generates and reserves the claims of PodGroups, Jobs, and replicas,
// reserves claims for other objects, maintains AddressPools, publishes the addresses of pods as
// endpoints, and serves the admission webhooks.
package controlplane

import (
	"context"
	"crypto/tls"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	webhookadmission "sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/addresspools"
	"github.com/dra-shared/dra-driver-shared/controlplane/admission"
	"github.com/dra-shared/dra-driver-shared/controlplane/certs"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/endpoints"
	"github.com/dra-shared/dra-driver-shared/controlplane/fabrics"
	"github.com/dra-shared/dra-driver-shared/controlplane/fabricstatus"
	"github.com/dra-shared/dra-driver-shared/controlplane/metrics"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/controlplane/podgroups"
	"github.com/dra-shared/dra-driver-shared/controlplane/reservedfor"
	"github.com/dra-shared/dra-driver-shared/controlplane/trim"
	"github.com/dra-shared/dra-driver-shared/controlplane/workload"
)

// Options configure the controller.
type Options struct {
	DriverName string
	Config     *config.DriverConfig
	// Namespace is the controller's own: it has the lease of leader election and the
	// Secret of the webhook's certificate authority.
	Namespace string
	// Mode is the mode to run in. New replaces Auto with the mode that it detects.
	Mode mode.Mode
	// SlicesOwner is the name of the ClusterRole that owns the ResourceSlices of
	// fabrics; see fabrics.Publisher.
	SlicesOwner string

	// HealthAddress and MetricsAddress are the host:port that Run serves on; "0" disables the server, and so does an empty
	// MetricsAddress.
	HealthAddress, MetricsAddress string
	Webhook                       Webhook

	// AddressQuarantine is the time from the deletion of a Node to the return of its
	// addresses; see addresspools.Reconciler.
	AddressQuarantine time.Duration
	// JobClaims enables claims for Jobs, by the annotation scheduling.dra-shared.dev/job-claims.
	JobClaims bool
	// ReplicaClaims enables claims for the replicas of StatefulSets and LeaderWorkerSets, by the annotation
	// scheduling.dra-shared.dev/replica-claims.
	ReplicaClaims bool
	// Kueue denies workloads of pods with shared claims if Kueue would charge the claims wrongly or never admit the pods.
	Kueue bool
	// KueueDeviceClasses are the DeviceClasses that Kueue charges; see admission.Queues.
	KueueDeviceClasses []string
	// EndpointSlices enables the EndpointSlices of Services that name a network.
	EndpointSlices bool
	// NetworkStatus enables the pod annotation that Multus lists networks in.
	NetworkStatus bool

	// Client replaces the constructor of the client that reconcilers write with.
	// Tests use it.
	Client client.NewClientFunc
}

// Webhook configures the admission webhook server.
type Webhook struct {
	// Port is the port to listen on; 0 disables the server.
	Port int
	// Service is the name of the Service that the API server calls the webhook through. It is in the controller's
	// namespace.
	Service string
	// Directory contains tls.crt and tls.key if another component, such as
	// cert-manager, issues the certificate. If it is empty, the controller issues
	// its own.
	Directory string
	// Secret is the name of the Secret that stores the controller's certificate
	// authority. It is unused if Directory is set.
	Secret string
	// Configuration is the name of both the mutating and the validating webhook
	// configuration.
	Configuration string
	// PodIP is the IP address that other replicas reach the server at. If it is empty, they do not ask this replica; see
	// admission.LeadingReplica.
	PodIP string
}

// Scheme returns a scheme with all types that the controller reads and writes.
func Scheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		clientscheme.AddToScheme, scheduling.AddToScheme, network.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	return scheme, nil
}

// New builds the controller's manager. It calls the API server to detect the mode
// if o.Mode is mode.Auto, to learn the server's version, and to look up the
// resources of the types that the controller watches. It may be called again if it
// fails.
func New(ctx context.Context, restConfig *rest.Config, o Options) (manager.Manager, error) {
	cluster, err := kubernetes.NewForConfig(restConfig)
	if err != nil {
		return nil, err
	}
	selected, err := selectMode(ctx, restConfig, o)
	if err != nil {
		return nil, err
	}
	o.Mode = selected.mode
	rotator := newRotator(cluster, o)
	peers := newPeerAuth(o, rotator)
	leading, err := newLeadingReplica(restConfig, o, peers)
	if err != nil {
		return nil, err
	}
	m, err := newManager(restConfig, o, rotator, leading)
	if err != nil {
		return nil, err
	}
	if err := addRunnables(m, selected, rotator); err != nil {
		return nil, err
	}
	if o.Webhook.Port != 0 {
		if err := addWebhooks(ctx, m, o, leading, peers); err != nil {
			return nil, err
		}
	}
	if err := addControllers(ctx, m, cluster, o); err != nil {
		return nil, err
	}
	selected.log(m.GetLogger())
	return m, nil
}

// selectedMode is the mode that the controller runs in.
type selectedMode struct {
	mode mode.Mode
	// versions are the API server's versions of Kubernetes' PodGroups.
	versions []string
	// watcher notices that the cluster's mode changes; nil if the mode is configured.
	watcher *mode.Watcher
}

// selectMode returns the configured mode or, if that is mode.Auto, the mode of the cluster.
func selectMode(ctx context.Context, restConfig *rest.Config, o Options) (selected selectedMode, err error) {
	detector, err := mode.NewClient(restConfig)
	if err != nil {
		return selected, err
	}
	selected.mode = o.Mode
	if o.Mode == mode.Auto {
		if selected.mode, err = mode.Detect(ctx, detector, o.Namespace); err != nil {
			return selected, err
		}
		selected.watcher = &mode.Watcher{Cluster: detector, Namespace: o.Namespace, Mode: selected.mode}
	}
	selected.versions, err = mode.Versions(detector.Discovery())
	return selected, err
}

func (s selectedMode) log(logger klog.Logger) {
	detected := s.watcher != nil
	logger.Info("Selected mode", "mode", s.mode, "detected", detected, "podGroupVersions", s.versions)
	if detected && s.mode == mode.Bridge && len(s.versions) > 0 {
		logger.Info("Kubernetes cannot reserve claims of PodGroups in this version or with these feature gates; "+
			"using bridge mode", "podGroupVersions", s.versions)
	}
}

// addRunnables registers the metrics, the watcher of the mode, and the rotator of certificates, which may be nil.
func addRunnables(m manager.Manager, selected selectedMode, rotator *certs.Rotator) error {
	runnables := []manager.Runnable{&metrics.Collector{
		Client: m.GetClient(), Mode: selected.mode, PodGroupVersions: selected.versions, Clock: clock.RealClock{},
		Registry: ctrlmetrics.Registry,
	}}
	if selected.watcher != nil {
		runnables = append(runnables, selected.watcher)
	}
	if rotator != nil {
		runnables = append(runnables, rotator)
	}
	for _, r := range runnables {
		if err := m.Add(r); err != nil {
			return err
		}
	}
	return nil
}

// newRotator returns the rotator of the webhook's certificates, or nil if the
// controller does not issue them.
func newRotator(cluster kubernetes.Interface, o Options) *certs.Rotator {
	if o.Webhook.Port == 0 || o.Webhook.Directory != "" {
		return nil
	}
	return certs.NewRotator(cluster, certs.Options{
		Namespace:      o.Namespace,
		Secret:         o.Webhook.Secret,
		DNSNames:       []string{o.webhookName()},
		Configurations: []string{o.Webhook.Configuration},
	}, clock.RealClock{})
}

// webhookName is the DNS name that the API server calls the webhooks by.
func (o Options) webhookName() string {
	return fmt.Sprintf("%s.%s.svc", o.Webhook.Service, o.Namespace)
}

func newManager(
	restConfig *rest.Config, o Options, rotator *certs.Rotator, lock resourcelock.Interface,
) (manager.Manager, error) {
	scheme, err := Scheme()
	if err != nil {
		return nil, err
	}
	caches, err := cacheOptions(o.DriverName)
	if err != nil {
		return nil, err
	}
	server := webhook.Options{
		Port: o.Webhook.Port, CertDir: o.Webhook.Directory, TLSOpts: []func(*tls.Config){requestCertificates},
	}
	if rotator != nil {
		server.TLSOpts = append(server.TLSOpts, func(t *tls.Config) { t.GetCertificate = rotator.GetCertificate })
	}
	return ctrl.NewManager(restConfig, ctrl.Options{
		Scheme: scheme, Cache: caches, NewClient: o.Client,
		// Controller names are metric labels. Tests run two managers with the same names
		// in one process.
		Controller:     ctrlconfig.Controller{SkipNameValidation: ptr.To(true)},
		LeaderElection: true, LeaderElectionResourceLockInterface: lock,
		LeaderElectionReleaseOnCancel: true, // the process ends when the manager does
		HealthProbeBindAddress:        "0",  // Run serves health and metrics
		Metrics:                       metricsserver.Options{BindAddress: "0"},
		WebhookServer:                 webhook.NewServer(server),
	})
}

// addWebhooks registers the admission handlers.
func addWebhooks(
	ctx context.Context, m manager.Manager, o Options, leading *admission.LeadingReplica, peers peerAuth,
) error {
	shards := admission.NewShards(clock.RealClock{})
	shards.LeadingReplica = leading
	informer, err := m.GetCache().GetInformer(ctx, &corev1.Pod{}, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	if err := shards.Watch(informer); err != nil {
		return err
	}
	handlers := map[string]webhookadmission.Handler{
		"/pods": &admission.Pods{
			Client: m.GetClient(), APIReader: m.GetAPIReader(), Mapper: m.GetRESTMapper(), Mode: o.Mode,
			Driver: o.DriverName, Shards: shards, JobClaims: o.JobClaims, ReplicaClaims: o.ReplicaClaims, Kueue: o.Kueue,
		},
		"/templates":    &admission.Templates{APIReader: m.GetAPIReader(), Mapper: m.GetRESTMapper()},
		"/parameters":   &admission.Parameters{Driver: o.DriverName},
		"/podgroups":    &admission.PodGroups{Mode: o.Mode},
		"/holds":        &admission.Holds{APIReader: m.GetAPIReader()},
		"/addresspools": &admission.AddressPools{},
	}
	if o.JobClaims || o.ReplicaClaims {
		handlers["/jobs"] = &admission.ListedClaims{Client: m.GetClient(), APIReader: m.GetAPIReader(), Driver: o.DriverName}
	}
	if o.Kueue {
		handlers["/queues"] = &admission.Queues{APIReader: m.GetAPIReader(), DeviceClasses: o.KueueDeviceClasses}
	}
	denials, err := admission.NewDenials(ctrlmetrics.Registry)
	if err != nil {
		return err
	}
	m.GetWebhookServer().Register(admission.ShardsPath, peers.requireReplica(shards))
	for path, handler := range handlers {
		m.GetWebhookServer().Register(path, &webhook.Admission{Handler: denials.Count(handler)})
	}
	return nil
}

// reconciler is a reconciler that registers itself with a manager.
type reconciler interface {
	SetupWithManager(context.Context, ctrl.Manager) error
}

// addControllers registers the publisher of fabrics and the reconcilers.
func addControllers(ctx context.Context, m manager.Manager, cluster kubernetes.Interface, o Options) error {
	publisher := &fabrics.Publisher{Client: cluster, DriverName: o.DriverName, Config: o.Config, Owner: o.SlicesOwner}
	if err := m.Add(publisher); err != nil {
		return err
	}
	leavesStaleEntries, err := claims.ClusterLeavesStaleEntries(cluster.Discovery())
	if err != nil {
		return err
	}
	recorder := truncatingRecorder{m.GetEventRecorder(o.DriverName)}
	publishers, err := endpointReconcilers(m, recorder, o)
	if err != nil {
		return err
	}
	reconcilers := slices.Concat(claimReconcilers(m, cluster, recorder, leavesStaleEntries, o), publishers, []reconciler{
		&addresspools.Reconciler{
			Client: m.GetClient(), Driver: o.DriverName, Clock: clock.RealClock{}, Quarantine: o.AddressQuarantine,
		},
		&fabricstatus.Reconciler{
			Client: m.GetClient(), Cluster: cluster, Driver: o.DriverName, Clock: clock.RealClock{},
		},
	})
	for _, r := range reconcilers {
		if err := r.SetupWithManager(ctx, m); err != nil {
			return err
		}
	}
	return nil
}

// claimReconcilers returns the reconcilers of claims that PodGroups, Jobs, and replicas own, and
// of claims that other objects hold.
func claimReconcilers(
	m manager.Manager, cluster kubernetes.Interface, recorder events.EventRecorder, leavesStaleEntries bool, o Options,
) []reconciler {
	newOwnerReconciler := func(in mode.Mode) podgroups.Reconciler {
		return podgroups.Reconciler{
			Client: m.GetClient(), APIReader: m.GetAPIReader(), Mode: in, Driver: o.DriverName, Events: recorder,
			ClusterLeavesStaleEntries: leavesStaleEntries,
		}
	}
	newLookup := func() *workload.Lookup {
		return &workload.Lookup{APIReader: m.GetAPIReader(), Mapper: m.GetRESTMapper(), Cache: m.GetCache()}
	}
	podGroupReconciler := newOwnerReconciler(o.Mode)
	podGroupReconciler.Lookup, podGroupReconciler.Unused = newLookup(), workload.NewTimer(clock.RealClock{})
	reconcilers := []reconciler{
		&podGroupReconciler,
		&reservedfor.Reconciler{
			Client: m.GetClient(), APIReader: m.GetAPIReader(), Cluster: cluster, Driver: o.DriverName, Events: recorder,
			Lookup: newLookup(), Unused: workload.NewTimer(clock.RealClock{}),
			ClusterLeavesStaleEntries: leavesStaleEntries,
		},
	}
	if o.JobClaims {
		reconcilers = append(reconcilers, &podgroups.JobReconciler{Reconciler: newOwnerReconciler(mode.Bridge)})
	}
	if o.ReplicaClaims {
		reconcilers = append(reconcilers, &podgroups.ReplicaReconciler{Reconciler: newOwnerReconciler(mode.Bridge)})
	}
	return reconcilers
}

// endpointReconcilers returns the reconcilers that publish the addresses of pods on networks, if
// they are enabled.
func endpointReconcilers(m manager.Manager, recorder events.EventRecorder, o Options) ([]reconciler, error) {
	if !o.EndpointSlices && !o.NetworkStatus {
		return nil, nil
	}
	pods, err := podCache(m)
	if err != nil {
		return nil, err
	}
	writes, err := endpoints.NewWrites(ctrlmetrics.Registry)
	if err != nil {
		return nil, err
	}
	var reconcilers []reconciler
	if o.EndpointSlices {
		reconcilers = append(reconcilers, &endpoints.Reconciler{
			Client: m.GetClient(), Pods: pods, PodCache: pods, Driver: o.DriverName, Networks: o.Config.NetworkNames(),
			Events: recorder, Clock: clock.RealClock{}, Writes: writes,
		})
	}
	if o.NetworkStatus {
		reconcilers = append(reconcilers, &endpoints.StatusReconciler{
			Client: m.GetClient(), Pods: pods, PodCache: pods, Driver: o.DriverName, Writes: writes,
		})
	}
	return reconcilers, nil
}

// podCache adds a cache of all pods to the manager. The manager's own cache has only the pods of PodGroups.
func podCache(m manager.Manager) (cache.Cache, error) {
	pods, err := cache.New(m.GetConfig(), cache.Options{
		HTTPClient: m.GetHTTPClient(), Scheme: m.GetScheme(), Mapper: m.GetRESTMapper(),
		ByObject: map[client.Object]cache.ByObject{&corev1.Pod{}: {Transform: trim.PodWithLinks}},
	})
	if err != nil {
		return nil, err
	}
	return pods, m.Add(pods)
}
