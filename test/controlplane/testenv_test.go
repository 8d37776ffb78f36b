// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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
	"github.com/dra-shared/dra-driver-shared/test/eventually"
	"github.com/dra-shared/dra-driver-shared/test/simnode"
)

const (
	driverName = "dra-shared.dev"
	system     = "dra-shared-system" // namespace of the chart
	// webhookService is the Service of the webhooks.
	webhookService = "dra-shared-controller"
	// controlPlaneAddress is the address that the API server calls the webhook at.
	controlPlaneAddress = "192.168.77.254"
	// timeout is for conditions that the control plane meets in seconds.
	timeout = time.Minute
)

// testEnv is a control plane with simulated nodes and the chart. Each test runs
// the controller in the test process.
type testEnv struct {
	cluster *clusterclient.Cluster
	config  *rest.Config
	kube    kubernetes.Interface
	client  client.Client
	native  bool // native mode
	used    usedRights

	mu      sync.Mutex
	started map[string]time.Time // pods, by namespace/name
}

var sharedTestEnv = sync.OnceValues(newTestEnv)

// requireTestEnv returns the environment that all tests share, and skips the
// test if no control plane runs.
func requireTestEnv(t *testing.T) *testEnv {
	t.Helper()
	if os.Getenv(envInside) == "" {
		t.Skip("needs a control plane: run `make test-controlplane`")
	}
	e, err := sharedTestEnv()
	if err != nil {
		t.Fatalf("set up the control plane: %v", err)
	}
	return e
}

func newTestEnv() (*testEnv, error) {
	ctx := context.Background()
	c, err := clusterclient.New(os.Getenv(envInside))
	if err != nil {
		return nil, err
	}
	e := &testEnv{cluster: c, started: map[string]time.Time{}}
	e.config, err = clientcmd.BuildConfigFromFlags("", filepath.Join(c.Dir, "kubeconfig"))
	if err != nil {
		return nil, err
	}
	e.config.QPS = -1 // no client-side rate limit
	if e.kube, err = kubernetes.NewForConfig(e.config); err != nil {
		return nil, err
	}
	scheme, err := controlplane.Scheme()
	if err != nil {
		return nil, err
	}
	if e.client, err = client.New(e.config, client.Options{Scheme: scheme}); err != nil {
		return nil, err
	}
	detected, err := mode.Detect(ctx, e.kube, "default")
	if err != nil {
		return nil, err
	}
	e.native = detected == mode.Native
	fmt.Println("mode:", detected) // matrix.sh reads this line
	nodes := &simnode.Nodes{Client: e.kube, Address: controlPlaneAddress, Native: e.native, Started: e.recordStart}
	if err := nodes.Start(ctx, 24); err != nil {
		return nil, err
	}
	return e, e.install(ctx)
}

// install installs or upgrades the chart with the values that all tests share, and others.
func (e *testEnv) install(ctx context.Context, values ...string) error {
	return e.cluster.Install(ctx, append([]string{
		"controller.reservedFor[0].apiGroup=batch", "controller.reservedFor[0].resource=jobs",
		"controller.reservedFor[1].apiGroup=apps", "controller.reservedFor[1].resource=statefulsets",
		"controller.jobClaims=true", "controller.replicaClaims=true",
		"controller.kueue.enabled=true", "controller.kueue.deviceClasses[0]=nic." + driverName,
	}, values...)...)
}

func (e *testEnv) recordStart(p *corev1.Pod) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.started[p.Namespace+"/"+p.Name] = time.Now()
}

// groupsOnFabric exceeds the number of claims of any test, even one claim for
// each of 10,000 pods.
const groupsOnFabric = 20000

// driverConfig has one fabric, which connects all simulated nodes.
func driverConfig() *config.DriverConfig {
	fabric := config.Fabric{Name: "sim", NodeSelector: map[string]string{"simulated": "true"}, Groups: groupsOnFabric}
	return &config.DriverConfig{Fabrics: []config.Fabric{fabric}}
}

// controllerConfig returns a client configuration with the identity, and so the
// rights, that the chart gives the controller.
func (e *testEnv) controllerConfig() *rest.Config {
	c := rest.CopyConfig(e.config)
	c.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + system + ":dra-shared-controller",
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:" + system, "system:authenticated"},
	}
	c.Wrap(e.used.wrap)
	return c
}

// startController starts the controller, which runs until the test ends or stop is called. newClient, if not nil,
// creates the client that the controller writes with.
func (e *testEnv) startController(t *testing.T, newClient client.NewClientFunc) (stop func()) {
	t.Helper()
	return e.startControllerWith(t, driverConfig(), newClient)
}

func (e *testEnv) startControllerWith(
	t *testing.T, c *config.DriverConfig, newClient client.NewClientFunc,
) (stop func()) {
	t.Helper()
	stop, err := e.runController(t, c, newClient)
	if err != nil {
		t.Fatalf("start the controller: %v", err)
	}
	return stop
}

// controllerOptions returns the options of the controller, as the chart sets them.
func controllerOptions(c *config.DriverConfig) controlplane.Options {
	return controlplane.Options{
		DriverName: driverName, Config: c, Namespace: system, Mode: mode.Auto, SlicesOwner: "dra-shared-controller",
		JobClaims: true, ReplicaClaims: true, Kueue: true, KueueDeviceClasses: []string{"nic." + driverName},
		Webhook: controlplane.Webhook{
			Port: 9443, Service: webhookService, Secret: "dra-shared-controller-ca",
			Configuration: "dra-shared-controller",
		},
	}
}

// runController is startControllerWith for goroutines other than the test's.
func (e *testEnv) runController(
	t *testing.T, c *config.DriverConfig, newClient client.NewClientFunc,
) (stop func(), err error) {
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.Background()))
	options := controllerOptions(c)
	options.Client = newClient
	manager, err := controlplane.New(ctx, e.controllerConfig(), options)
	if err != nil {
		cancel()
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- manager.Start(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the controller ended: %v", err)
		}
	})
	t.Cleanup(stop)
	select {
	case <-manager.Elected():
	case err := <-ended:
		ended <- nil // for stop
		return nil, fmt.Errorf("it ended before it was elected: %w", err)
	}
	err = eventually.Poll(ctx, timeout, func() error { return manager.GetWebhookServer().StartedChecker()(nil) })
	if err != nil {
		return nil, fmt.Errorf("its webhook server does not start: %w", err)
	}
	return stop, nil
}

// createNamespace creates a namespace with a generated name, which is deleted
// when the test ends.
func (e *testEnv) createNamespace(t *testing.T, prefix string) string {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: prefix + "-"}}
	e.create(t, ns)
	t.Cleanup(func() { _ = e.client.Delete(context.Background(), ns) }) // the cluster is removed anyway
	return ns.Name
}

// create creates objects.
func (e *testEnv) create(t *testing.T, objects ...client.Object) {
	t.Helper()
	for _, o := range objects {
		var err error
		// The API server learns a moment after the start of a controller which certificate its webhooks have.
		_ = eventually.Poll(context.Background(), timeout, func() error {
			if err = e.client.Create(context.Background(), o); apierrors.IsInternalError(err) {
				return err
			}
			return nil
		})
		if err != nil {
			t.Fatalf("create %T %s/%s: %v", o, o.GetNamespace(), o.GetName(), err)
		}
	}
}

// delete deletes objects, without waiting for their finalizers.
func (e *testEnv) delete(t *testing.T, objects ...client.Object) {
	t.Helper()
	background := client.PropagationPolicy(metav1.DeletePropagationBackground)
	for _, o := range objects {
		if err := e.client.Delete(context.Background(), o, background); err != nil {
			t.Fatalf("delete %T %s/%s: %v", o, o.GetNamespace(), o.GetName(), err)
		}
	}
}

// deletePods deletes all pods of a namespace.
func (e *testEnv) deletePods(t *testing.T, ns string) {
	t.Helper()
	err := untilCompleted(func() error {
		return e.client.DeleteAllOf(context.Background(), &corev1.Pod{}, client.InNamespace(ns))
	})
	if err != nil {
		t.Fatalf("delete the pods of namespace %s: %v", ns, err)
	}
}

// untilCompleted repeats a request, up to five times, that the API server could not complete because the machine is
// busy: its own timeout or a webhook's timeout expired. The controllers of workloads do the same. A retried request
// must not fail because the first had an effect.
func untilCompleted(request func() error) (err error) {
	for range 5 {
		err = request()
		if !apierrors.IsInternalError(err) && !apierrors.IsTimeout(err) {
			return err
		}
	}
	return err
}

// createPod creates a pod as the controllers of workloads do.
func (e *testEnv) createPod(ctx context.Context, pod *corev1.Pod) error {
	return untilCompleted(func() error { return client.IgnoreAlreadyExists(e.client.Create(ctx, pod.DeepCopy())) })
}

// fabricSpec returns a claim spec that requests a fabric.
func fabricSpec() resourceapi.ResourceClaimSpec {
	request := resourceapi.DeviceRequest{
		Name: "fabric", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "fabric." + driverName},
	}
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{request}}}
}

func fabricClaim(namespace, name string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: fabricSpec()}
}

// createGroup creates a PodGroup with a claim to a fabric and the additional claims, unless it exists.
func (e *testEnv) createGroup(
	ctx context.Context, namespace, name string, more ...scheduling.PodGroupResourceClaim,
) (*scheduling.PodGroup, error) {
	template := &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "fabric"},
		Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: fabricSpec()},
	}
	if err := client.IgnoreAlreadyExists(e.client.Create(ctx, template)); err != nil {
		return nil, err
	}
	fabric := scheduling.PodGroupResourceClaim{Name: "fabric", ResourceClaimTemplateName: ptr.To("fabric")}
	pg := &scheduling.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: scheduling.PodGroupSpec{
			SchedulingPolicy: scheduling.SchedulingPolicy{Basic: &scheduling.BasicSchedulingPolicy{}},
			ResourceClaims:   append([]scheduling.PodGroupResourceClaim{fabric}, more...),
		},
	}
	return pg, client.IgnoreAlreadyExists(e.client.Create(ctx, pg))
}

// mustCreateGroup is createGroup for tests that cannot continue without the group.
func (e *testEnv) mustCreateGroup(
	t *testing.T, namespace, name string, more ...scheduling.PodGroupResourceClaim,
) *scheduling.PodGroup {
	t.Helper()
	pg, err := e.createGroup(t.Context(), namespace, name, more...)
	if err != nil {
		t.Fatalf("create PodGroup %s/%s: %v", namespace, name, err)
	}
	return pg
}

func objectMeta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name}
}

// newPod returns pod i of a PodGroup, with the group's claim to a fabric.
func newPod(namespace, group string, i int) *corev1.Pod {
	fabric := corev1.PodResourceClaim{Name: "fabric", ResourceClaimTemplateName: ptr.To("fabric")}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: fmt.Sprintf("%s-%05d", group, i),
			Annotations: map[string]string{scheduling.GroupAnnotation: group},
		},
		Spec: corev1.PodSpec{
			// Without a grace period, the API server removes a pod without its kubelet.
			TerminationGracePeriodSeconds: ptr.To[int64](1),
			ResourceClaims:                []corev1.PodResourceClaim{fabric},
			Containers:                    []corev1.Container{{Name: "work", Image: "none"}},
		},
	}
}

// newPodWithClaim returns a pod without a PodGroup that uses a claim by name.
func newPodWithClaim(namespace, prefix string, i int, claim string) *corev1.Pod {
	pod := newPod(namespace, prefix, i)
	pod.Annotations = nil
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "fabric", ResourceClaimName: &claim}}
	return pod
}

// createRunningPods creates the pods from to to-1 of a group and waits until
// they run.
func (e *testEnv) createRunningPods(t *testing.T, ns, group string, from, to int) {
	t.Helper()
	ctx := t.Context()
	create := func(i int) error { return e.createPod(ctx, newPod(ns, group, from+i)) }
	if err := simnode.Parallel(to-from, create); err != nil {
		t.Fatalf("create pods of group %s: %v", group, err)
	}
	condition := fmt.Sprintf("pods %d to %d of group %s run", from, to-1, group)
	eventually.Eventually(t, timeout, condition, func() error {
		for i := from; i < to; i++ {
			pod := newPod(ns, group, i)
			if err := e.client.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
				return err
			}
			if pod.Status.Phase != corev1.PodRunning {
				return fmt.Errorf("pod %s is %s", pod.Name, pod.Status.Phase)
			}
		}
		return nil
	})
}

// awaitRunning waits until want pods of a namespace run.
func (e *testEnv) awaitRunning(t *testing.T, ns string, want int) {
	t.Helper()
	eventually.Eventually(t, 3*time.Minute, fmt.Sprintf("%d pods run", want), func() error {
		running, _, err := e.countPods(t.Context(), ns)
		if err == nil && running != want {
			err = fmt.Errorf("%d of %d pods run", running, want)
		}
		return err
	})
}

// countPods returns how many pods of a namespace run and are not being deleted,
// and how many exist.
func (e *testEnv) countPods(ctx context.Context, namespace string) (running, all int, err error) {
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

// succeededPatch is the status that a kubelet reports for a pod that has ended.
var succeededPatch = client.RawPatch(types.StrategicMergePatchType, []byte(`{"status":{"phase":"Succeeded"}}`))

// setSucceeded makes a pod terminal, as its kubelet does when its containers have
// ended.
func (e *testEnv) setSucceeded(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	if err := e.client.Status().Patch(t.Context(), pod, succeededPatch); err != nil {
		t.Fatalf("set pod %s to Succeeded: %v", pod.Name, err)
	}
}

// claims returns the claims of a namespace.
func (e *testEnv) claims(ctx context.Context, namespace string) ([]resourceapi.ResourceClaim, error) {
	var list resourceapi.ResourceClaimList
	err := e.client.List(ctx, &list, client.InNamespace(namespace))
	return list.Items, err
}

// awaitDeleted waits until an object no longer exists.
func (e *testEnv) awaitDeleted(t *testing.T, o client.Object) {
	t.Helper()
	condition := fmt.Sprintf("%T %s is deleted", o, o.GetName())
	eventually.Eventually(t, timeout, condition, func() error {
		err := e.client.Get(t.Context(), client.ObjectKeyFromObject(o), o)
		if err == nil {
			return fmt.Errorf("it exists, with finalizers %v", o.GetFinalizers())
		}
		return client.IgnoreNotFound(err)
	})
}

// awaitEmpty waits until a namespace does not have PodGroups, pods, or claims.
func (e *testEnv) awaitEmpty(t *testing.T, ns string) {
	t.Helper()
	ctx := t.Context()
	condition := "namespace " + ns + " has no PodGroups, pods, and claims"
	eventually.Eventually(t, 2*time.Minute, condition, func() error {
		var groups scheduling.PodGroupList
		_, pods, err := e.countPods(ctx, ns)
		claims, claimsErr := e.claims(ctx, ns)
		err = errors.Join(err, claimsErr, e.client.List(ctx, &groups, client.InNamespace(ns)))
		if err != nil || len(groups.Items)+pods+len(claims) == 0 {
			return err
		}
		err = fmt.Errorf("%d PodGroups, %d pods, %d claims", len(groups.Items), pods, len(claims))
		for _, c := range claims {
			err = fmt.Errorf("%w; claim %s is reserved for %v", err, c.Name, c.Status.ReservedFor)
		}
		return err
	})
}
