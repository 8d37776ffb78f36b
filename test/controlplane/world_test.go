package controlplane

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
	"github.com/dra-shared/dra-driver-shared/test/sim"
)

const (
	driver = "dra-shared.dev"
	system = "dra-shared-system"
	// inside is the control plane's own address, where its API server calls the
	// webhook.
	inside = "192.168.77.254"
)

// world is a control plane with simulated nodes and the chart installed; the
// controller is this process's to run.
type world struct {
	bed     *clusterclient.Cluster
	config  *rest.Config
	cluster kubernetes.Interface
	client  client.Client
	nodes   *sim.Nodes
	native  bool
	asked   asked // by the controller

	mu      sync.Mutex
	started map[string]time.Time // pods, by namespace and name
}

var theWorld = sync.OnceValues(newWorld)

func needsWorld(t *testing.T) *world {
	t.Helper()
	if os.Getenv(envInside) == "" {
		t.Skip("needs a control plane: run `make test-controlplane`")
	}
	w, err := theWorld()
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func newWorld() (*world, error) {
	ctx := context.Background()
	b, err := clusterclient.New(os.Getenv(envInside))
	if err != nil {
		return nil, err
	}
	w := &world{bed: b, started: map[string]time.Time{}}
	if w.config, err = clientcmd.BuildConfigFromFlags("", filepath.Join(b.Dir, "kubeconfig")); err != nil {
		return nil, err
	}
	w.config.QPS = -1
	if w.cluster, err = kubernetes.NewForConfig(w.config); err != nil {
		return nil, err
	}
	scheme, err := controlplane.Scheme()
	if err != nil {
		return nil, err
	}
	if w.client, err = client.New(w.config, client.Options{Scheme: scheme}); err != nil {
		return nil, err
	}
	found, err := mode.Detect(ctx, w.cluster, "default")
	if err != nil {
		return nil, err
	}
	w.native = found == mode.Native
	fmt.Println("mode:", found)
	w.nodes = &sim.Nodes{Client: w.cluster, Address: inside, Native: w.native, Started: func(p *corev1.Pod) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.started[p.Namespace+"/"+p.Name] = time.Now()
	}}
	if err := w.nodes.Start(ctx, 24); err != nil {
		return nil, err
	}
	return w, b.Install(ctx, "controller.reservedFor[0].apiGroup=batch", "controller.reservedFor[0].resource=jobs")
}

// fabricName is of a fabric that all simulated nodes are on.
const fabricName = "sim"

// groupsOnFabric are more than any test has claims, also one for each of 10,000 pods.
const groupsOnFabric = 20000

func driverConfig() *config.DriverConfig {
	return &config.DriverConfig{Fabrics: []config.Fabric{{Name: fabricName, NodeSelector: map[string]string{"simulated": "true"}, Groups: groupsOnFabric}}}
}

// asController is the identity that the chart gives the controller, and no more.
func (w *world) asController() *rest.Config {
	c := rest.CopyConfig(w.config)
	c.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + system + ":dra-shared-controller",
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + system, "system:authenticated"}}
	c.Wrap(w.asked.wrap)
	return c
}

// controller runs the controller until the returned function is called. newClient
// makes what it writes with; nil: nothing special.
func (w *world) controller(t *testing.T, newClient client.NewClientFunc) (stop func()) {
	t.Helper()
	return w.controllerOf(t, driverConfig(), newClient)
}

func (w *world) controllerOf(t *testing.T, c *config.DriverConfig, newClient client.NewClientFunc) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.Background()))
	m, err := controlplane.New(ctx, w.asController(), controlplane.Options{
		DriverName: driver, Config: c, Namespace: system, Mode: mode.Auto, SlicesOwner: "dra-shared-controller",
		HealthAddress: "0", MetricsAddress: "0", Client: newClient,
		Webhook: controlplane.Webhook{Port: 9443, Service: "dra-shared-controller", Secret: "dra-shared-controller-ca", Configuration: "dra-shared-controller"},
	})
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- m.Start(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the controller ended: %v", err)
		}
	})
	t.Cleanup(stop)
	select {
	case <-m.Elected():
	case err := <-ended:
		t.Fatalf("the controller does not start: %v", err)
	}
	w.eventually(ctx, t, "the webhook answers", func() error { return m.GetWebhookServer().StartedChecker()(nil) })
	return stop
}

// namespace makes one, which goes with the test.
func (w *world) namespace(t *testing.T, name string) string {
	t.Helper()
	ctx := context.Background()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: name + "-"}}
	if err := w.client.Create(ctx, ns); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.client.Delete(ctx, ns) })
	return ns.Name
}

func (w *world) eventually(ctx context.Context, t *testing.T, what string, check func() error) {
	t.Helper()
	w.within(ctx, t, time.Minute, what, check)
}

func (w *world) within(ctx context.Context, t *testing.T, limit time.Duration, what string, check func() error) {
	t.Helper()
	if err := clusterclient.Eventually(ctx, limit, check); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// fabricSpec asks for a fabric.
func fabricSpec() resourceapi.ResourceClaimSpec {
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
		{Name: "fabric", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "fabric." + driver}}}}}
}

func fabricClaim(namespace, name string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: fabricSpec()}
}

// group makes a PodGroup with a claim of a fabric, and further ones.
func (w *world) group(ctx context.Context, namespace, name string, more ...scheduling.PodGroupResourceClaim) (*scheduling.PodGroup, error) {
	template := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "fabric"},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: fabricSpec()}}
	if err := client.IgnoreAlreadyExists(w.client.Create(ctx, template)); err != nil {
		return nil, err
	}
	pg := &scheduling.PodGroup{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: scheduling.PodGroupSpec{SchedulingPolicy: scheduling.SchedulingPolicy{Basic: &scheduling.BasicSchedulingPolicy{}},
			ResourceClaims: append([]scheduling.PodGroupResourceClaim{{Name: "fabric", ResourceClaimTemplateName: ptr.To("fabric")}}, more...)}}
	return pg, client.IgnoreAlreadyExists(w.client.Create(ctx, pg))
}

func (w *world) pod(namespace, group string, i int) *corev1.Pod {
	template := "fabric"
	grace := int64(1) // with none, a kubelet would not be asked
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("%s-%05d", group, i), Annotations: map[string]string{scheduling.GroupAnnotation: group}},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			ResourceClaims:                []corev1.PodResourceClaim{{Name: "fabric", ResourceClaimTemplateName: &template}},
			Containers:                    []corev1.Container{{Name: "work", Image: "none"}},
		}}
}

func (w *world) running(ctx context.Context, namespace string) (running, all int, err error) {
	var pods corev1.PodList
	if err := w.client.List(ctx, &pods, client.InNamespace(namespace)); err != nil {
		return 0, 0, err
	}
	for i := range pods.Items {
		if pods.Items[i].Status.Phase == corev1.PodRunning && pods.Items[i].DeletionTimestamp == nil {
			running++
		}
	}
	return running, len(pods.Items), nil
}

// claims of a namespace.
func (w *world) claims(ctx context.Context, namespace string) ([]resourceapi.ResourceClaim, error) {
	var list resourceapi.ResourceClaimList
	err := w.client.List(ctx, &list, client.InNamespace(namespace))
	return list.Items, err
}
