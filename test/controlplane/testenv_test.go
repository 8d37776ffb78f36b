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
	"github.com/dra-shared/dra-driver-shared/test/simnode"
)

const (
	driver = "dra-shared.dev"
	system = "dra-shared-system"
	// inside is the control plane's own address, where its API server calls the
	// webhook.
	inside = "192.168.77.254"
)

// testEnv is a control plane with simulated nodes and the chart installed; the
// controller is this process's to run.
type testEnv struct {
	bed     *clusterclient.Cluster
	config  *rest.Config
	cluster kubernetes.Interface
	client  client.Client
	nodes   *simnode.Nodes
	native  bool
	asked   asked // by the controller

	mu      sync.Mutex
	started map[string]time.Time // pods, by namespace and name
}

var sharedTestEnv = sync.OnceValues(newTestEnv)

func requireTestEnv(t *testing.T) *testEnv {
	t.Helper()
	if os.Getenv(envInside) == "" {
		t.Skip("needs a control plane: run `make test-controlplane`")
	}
	e, err := sharedTestEnv()
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func newTestEnv() (*testEnv, error) {
	ctx := context.Background()
	b, err := clusterclient.New(os.Getenv(envInside))
	if err != nil {
		return nil, err
	}
	e := &testEnv{bed: b, started: map[string]time.Time{}}
	if e.config, err = clientcmd.BuildConfigFromFlags("", filepath.Join(b.Dir, "kubeconfig")); err != nil {
		return nil, err
	}
	e.config.QPS = -1
	if e.cluster, err = kubernetes.NewForConfig(e.config); err != nil {
		return nil, err
	}
	scheme, err := controlplane.Scheme()
	if err != nil {
		return nil, err
	}
	if e.client, err = client.New(e.config, client.Options{Scheme: scheme}); err != nil {
		return nil, err
	}
	found, err := mode.Detect(ctx, e.cluster, "default")
	if err != nil {
		return nil, err
	}
	e.native = found == mode.Native
	fmt.Println("mode:", found)
	e.nodes = &simnode.Nodes{Client: e.cluster, Address: inside, Native: e.native, Started: func(p *corev1.Pod) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.started[p.Namespace+"/"+p.Name] = time.Now()
	}}
	if err := e.nodes.Start(ctx, 24); err != nil {
		return nil, err
	}
	return e, b.Install(ctx, "controller.reservedFor[0].apiGroup=batch", "controller.reservedFor[0].resource=jobs")
}

// fabricName is of a fabric that all simulated nodes are on.
const fabricName = "sim"

// groupsOnFabric are more than any test has claims, also one for each of 10,000 pods.
const groupsOnFabric = 20000

func driverConfig() *config.DriverConfig {
	return &config.DriverConfig{Fabrics: []config.Fabric{{Name: fabricName, NodeSelector: map[string]string{"simulated": "true"}, Groups: groupsOnFabric}}}
}

// asController is the identity that the chart gives the controller, and no more.
func (e *testEnv) asController() *rest.Config {
	c := rest.CopyConfig(e.config)
	c.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + system + ":dra-shared-controller",
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + system, "system:authenticated"}}
	c.Wrap(e.asked.wrap)
	return c
}

// controller runs the controller until the returned function is called. newClient
// makes what it writes with; nil: nothing special.
func (e *testEnv) controller(t *testing.T, newClient client.NewClientFunc) (stop func()) {
	t.Helper()
	return e.controllerOf(t, driverConfig(), newClient)
}

func (e *testEnv) controllerOf(t *testing.T, c *config.DriverConfig, newClient client.NewClientFunc) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.Background()))
	m, err := controlplane.New(ctx, e.asController(), controlplane.Options{
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
	e.eventually(ctx, t, "the webhook answers", func() error { return m.GetWebhookServer().StartedChecker()(nil) })
	return stop
}

// namespace makes one, which goes with the test.
func (e *testEnv) namespace(t *testing.T, name string) string {
	t.Helper()
	ctx := context.Background()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: name + "-"}}
	if err := e.client.Create(ctx, ns); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.client.Delete(ctx, ns) })
	return ns.Name
}

func (e *testEnv) eventually(ctx context.Context, t *testing.T, what string, check func() error) {
	t.Helper()
	e.within(ctx, t, time.Minute, what, check)
}

func (e *testEnv) within(ctx context.Context, t *testing.T, limit time.Duration, what string, check func() error) {
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
func (e *testEnv) group(ctx context.Context, namespace, name string, more ...scheduling.PodGroupResourceClaim) (*scheduling.PodGroup, error) {
	template := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "fabric"},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: fabricSpec()}}
	if err := client.IgnoreAlreadyExists(e.client.Create(ctx, template)); err != nil {
		return nil, err
	}
	pg := &scheduling.PodGroup{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: scheduling.PodGroupSpec{SchedulingPolicy: scheduling.SchedulingPolicy{Basic: &scheduling.BasicSchedulingPolicy{}},
			ResourceClaims: append([]scheduling.PodGroupResourceClaim{{Name: "fabric", ResourceClaimTemplateName: ptr.To("fabric")}}, more...)}}
	return pg, client.IgnoreAlreadyExists(e.client.Create(ctx, pg))
}

func (e *testEnv) pod(namespace, group string, i int) *corev1.Pod {
	template := "fabric"
	grace := int64(1) // with none, a kubelet would not be asked
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("%s-%05d", group, i), Annotations: map[string]string{scheduling.GroupAnnotation: group}},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			ResourceClaims:                []corev1.PodResourceClaim{{Name: "fabric", ResourceClaimTemplateName: &template}},
			Containers:                    []corev1.Container{{Name: "work", Image: "none"}},
		}}
}

func (e *testEnv) running(ctx context.Context, namespace string) (running, all int, err error) {
	var pods corev1.PodList
	if err := e.client.List(ctx, &pods, client.InNamespace(namespace)); err != nil {
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
func (e *testEnv) claims(ctx context.Context, namespace string) ([]resourceapi.ResourceClaim, error) {
	var list resourceapi.ResourceClaimList
	err := e.client.List(ctx, &list, client.InNamespace(namespace))
	return list.Items, err
}
