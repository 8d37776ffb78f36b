// Package controlplane puts the parts of the controller together: who publishes
// fabrics and reports on them, who makes claims for groups and holds them, who
// holds claims for other objects, and the admission that goes before all of it.
package controlplane

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	ours "github.com/dra-shared/dra-driver-shared/controlplane/admission"
	"github.com/dra-shared/dra-driver-shared/controlplane/certs"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/fabrics"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/controlplane/podgroups"
	"github.com/dra-shared/dra-driver-shared/controlplane/report"
	"github.com/dra-shared/dra-driver-shared/controlplane/reservedfor"
)

// Options of the controller.
type Options struct {
	DriverName string
	Config     *config.DriverConfig
	// Namespace of the controller itself: of its lease, and of its certificates.
	Namespace string
	Mode      mode.Mode
	// SlicesOwner is the ClusterRole with which the fabrics' slices go.
	SlicesOwner string

	HealthAddress, MetricsAddress string
	Webhook                       Webhook

	// Client makes the client that reconcilers write with; for tests.
	Client client.NewClientFunc
}

// Webhook is how admission is served.
type Webhook struct {
	// Port; 0: admission is not served.
	Port int
	// Service that the API server calls, in the controller's namespace.
	Service string
	// Directory with tls.crt and tls.key, where somebody else makes them.
	Directory string
	// Secret of the certificate authority, where nobody else does.
	Secret string
	// Configuration is the name of both webhook configurations.
	Configuration string
}

// Scheme of all that the controller reads and writes.
func Scheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientscheme.AddToScheme, scheduling.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	return scheme, nil
}

// New builds the controller's manager.
func New(ctx context.Context, config *rest.Config, o Options) (manager.Manager, error) {
	scheme, err := Scheme()
	if err != nil {
		return nil, err
	}
	cluster, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	watched := o.Mode == mode.Auto
	if watched {
		if o.Mode, err = mode.Detect(ctx, cluster, o.Namespace); err != nil {
			return nil, err
		}
	}
	certificates := &certificates{}
	m, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: scheme, Cache: caches(), NewClient: o.Client,
		// A name is a metric's label: two managers in one process, as tests have them, may share it.
		Controller:     ctrlconfig.Controller{SkipNameValidation: ptr.To(true)},
		LeaderElection: true, LeaderElectionID: o.DriverName, LeaderElectionNamespace: o.Namespace,
		LeaderElectionReleaseOnCancel: true, // the process ends when the manager does
		HealthProbeBindAddress:        o.HealthAddress,
		Metrics:                       metricsserver.Options{BindAddress: o.MetricsAddress},
		WebhookServer:                 webhook.NewServer(webhook.Options{Port: o.Webhook.Port, CertDir: o.Webhook.Directory, TLSOpts: []func(*tls.Config){certificates.use}}),
	})
	if err != nil {
		return nil, err
	}
	m.GetLogger().Info("Mode", "mode", o.Mode, "detected", watched)
	if watched {
		if err := m.Add(&mode.Watcher{Cluster: cluster, Namespace: o.Namespace, Mode: o.Mode}); err != nil {
			return nil, err
		}
	}
	if o.Webhook.Port != 0 {
		if o.Webhook.Directory == "" {
			if certificates.options, err = certs.Add(m, cluster, config, certs.Options{Namespace: o.Namespace, Secret: o.Webhook.Secret,
				DNSNames: []string{fmt.Sprintf("%s.%s.svc", o.Webhook.Service, o.Namespace)}, Configurations: []string{o.Webhook.Configuration}}); err != nil {
				return nil, err
			}
		}
		if err := admit(ctx, m, o); err != nil {
			return nil, err
		}
	}
	return m, addControllers(ctx, m, cluster, o)
}

// certificates of the webhook server come from something that is made after it.
type certificates struct {
	options func(*tls.Config)
}

func (c *certificates) use(t *tls.Config) {
	if c.options != nil {
		c.options(t)
	}
}

func addControllers(ctx context.Context, m manager.Manager, cluster kubernetes.Interface, o Options) error {
	if err := m.Add(&fabrics.Publisher{Client: cluster, DriverName: o.DriverName, Config: o.Config, Owner: o.SlicesOwner}); err != nil {
		return err
	}
	events := m.GetEventRecorder(o.DriverName)
	stale, err := claims.ClusterLeavesStaleEntries(cluster.Discovery())
	if err != nil {
		return err
	}
	pods := &podgroups.Reconciler{Client: m.GetClient(), APIReader: m.GetAPIReader(), Mode: o.Mode, Driver: o.DriverName, Events: events, ClusterLeavesStaleEntries: stale}
	if err := pods.SetupWithManager(ctx, m); err != nil {
		return err
	}
	reports := &report.Reconciler{Client: m.GetClient(), APIReader: m.GetAPIReader(), Cluster: cluster, Driver: o.DriverName, Clock: clock.RealClock{}}
	if err := reports.SetupWithManager(ctx, m); err != nil {
		return err
	}
	holders := &reservedfor.Reconciler{Client: m.GetClient(), Cluster: cluster, Driver: o.DriverName, APIReader: m.GetAPIReader(), Mapper: m.GetRESTMapper(), Events: events, ClusterLeavesStaleEntries: stale}
	if err := holders.SetupWithManager(ctx, m); err != nil {
		return err
	}
	ready := healthz.Ping
	if o.Webhook.Port != 0 {
		ready = m.GetWebhookServer().StartedChecker()
	}
	if err := m.AddHealthzCheck("ping", healthz.Ping); err != nil {
		return err
	}
	return m.AddReadyzCheck("webhook", ready)
}

// caches keep of pods what matters for their claims, of those in groups only.
func caches() cache.Options {
	inGroups, err := labels.NewRequirement(scheduling.GroupUIDLabel, selection.Exists, nil)
	if err != nil {
		panic(err) // the label is a constant
	}
	return cache.Options{
		DefaultTransform: cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Pod{}: {Label: labels.NewSelector().Add(*inGroups), Transform: slim},
		},
	}
}

// slim drops what nobody here reads of a pod: a group may have thousands.
func slim(o any) (any, error) {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	kept := &corev1.Pod{TypeMeta: pod.TypeMeta,
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
			CreationTimestamp: pod.CreationTimestamp, DeletionTimestamp: pod.DeletionTimestamp, Labels: map[string]string{}, Annotations: map[string]string{}},
		Spec:   corev1.PodSpec{NodeName: pod.Spec.NodeName, ResourceClaims: pod.Spec.ResourceClaims, SchedulingGates: pod.Spec.SchedulingGates},
		Status: corev1.PodStatus{Phase: pod.Status.Phase}}
	kept.Labels[scheduling.GroupUIDLabel] = pod.Labels[scheduling.GroupUIDLabel]
	for _, name := range []string{scheduling.GroupAnnotation, scheduling.AdmittedAnnotation} {
		if value, ok := pod.Annotations[name]; ok {
			kept.Annotations[name] = value
		}
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			kept.Status.Conditions = append(kept.Status.Conditions, c)
		}
	}
	return kept, nil
}

func admit(ctx context.Context, m manager.Manager, o Options) error {
	shards := ours.NewShards(clock.RealClock{})
	informer, err := m.GetCache().GetInformer(ctx, &corev1.Pod{}, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	if err := shards.Watch(informer); err != nil {
		return err
	}
	for path, handler := range map[string]admission.Handler{
		"/pods":       &ours.Pods{Client: m.GetClient(), APIReader: m.GetAPIReader(), Mode: o.Mode, Driver: o.DriverName, Shards: shards},
		"/templates":  &ours.Templates{APIReader: m.GetAPIReader(), Mode: o.Mode},
		"/parameters": &ours.Parameters{Driver: o.DriverName},
	} {
		var h http.Handler = &webhook.Admission{Handler: handler}
		m.GetWebhookServer().Register(path, h)
	}
	return nil
}
