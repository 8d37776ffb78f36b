// Package sim stands in for nodes where thousands of pods must run and no
// container has to: Node objects that stay Ready, and kubelets that hold a pod to
// what the real one does before it starts it (is its claim allocated, and reserved
// for it?), say that it runs, and let it go when it is deleted.
package simnode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
)

// Nodes that are simulated.
type Nodes struct {
	Client kubernetes.Interface
	// Address of every pod: where what pods are to serve is really served.
	Address string
	// Native tells that kubelets accept a reservation for the pod's PodGroup.
	Native bool
	// Started is called, at once, for each pod that starts.
	Started func(*corev1.Pod)

	claims cache.Indexer
	pods   cache.Indexer
	runs   sync.Map // UIDs of pods that were said to run: the cache learns it later
}

const (
	podsPerNode  = 500
	heartbeat    = 10 * time.Second
	workers      = 32
	notYet       = 50 * time.Millisecond // until a kubelet looks again at a pod that it may not start
	leaseSeconds = 40
)

// Start makes the nodes and runs their kubelets until ctx ends.
func (n *Nodes) Start(ctx context.Context, count int) error {
	for i := range count {
		if err := n.add(ctx, fmt.Sprintf("sim-%03d", i)); err != nil {
			return err
		}
	}
	go n.beat(ctx, count)
	bound := informers.NewSharedInformerFactoryWithOptions(n.Client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermNotEqualSelector("spec.nodeName", "").String()
	}))
	all := informers.NewSharedInformerFactory(n.Client, 0)
	claims := all.Resource().V1().ResourceClaims().Informer()
	pods := bound.Core().V1().Pods().Informer()
	n.claims, n.pods = claims.GetIndexer(), pods.GetIndexer()
	queue := workqueue.NewTypedDelayingQueue[string]()
	enqueue := func(o any) {
		if key, err := cache.MetaNamespaceKeyFunc(o); err == nil {
			queue.Add(key)
		}
	}
	if _, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: enqueue, UpdateFunc: func(_, o any) { enqueue(o) }}); err != nil {
		return err
	}
	bound.Start(ctx.Done())
	all.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), pods.HasSynced, claims.HasSynced) {
		return errors.New("the caches of pods and claims do not come")
	}
	go func() {
		<-ctx.Done()
		queue.ShutDown()
	}()
	for range workers {
		go n.work(ctx, queue)
	}
	return nil
}

func (n *Nodes) add(ctx context.Context, name string) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "simulated": "true"}}}
	if _, err := n.Client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	room := corev1.ResourceList{corev1.ResourcePods: *resource.NewQuantity(podsPerNode, resource.DecimalSI), corev1.ResourceCPU: resource.MustParse("1000"), corev1.ResourceMemory: resource.MustParse("1Ti")}
	status, err := json.Marshal(map[string]any{"status": corev1.NodeStatus{Capacity: room, Allocatable: room,
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Simulated", LastHeartbeatTime: metav1.Now()}}}})
	if err != nil {
		return err
	}
	_, err = n.Client.CoreV1().Nodes().Patch(ctx, name, types.StrategicMergePatchType, status, metav1.PatchOptions{}, "status")
	return err
}

// beat keeps the nodes Ready.
func (n *Nodes) beat(ctx context.Context, count int) {
	leases := n.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	for {
		for i := range count {
			name := fmt.Sprintf("sim-%03d", i)
			lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name},
				Spec: coordinationv1.LeaseSpec{HolderIdentity: &name, LeaseDurationSeconds: ptr.To[int32](leaseSeconds), RenewTime: ptr.To(metav1.NowMicro())}}
			if there, err := leases.Get(ctx, name, metav1.GetOptions{}); err == nil {
				there.Spec = lease.Spec
				_, _ = leases.Update(ctx, there, metav1.UpdateOptions{}) // the next beat is soon
			} else {
				_, _ = leases.Create(ctx, lease, metav1.CreateOptions{})
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (n *Nodes) work(ctx context.Context, queue workqueue.TypedDelayingInterface[string]) {
	for {
		key, ended := queue.Get()
		if ended {
			return
		}
		if again := n.sync(ctx, key); again {
			queue.AddAfter(key, notYet)
		}
		queue.Done(key)
	}
}

// sync does for a pod what its kubelet would, and tells whether to look again.
func (n *Nodes) sync(ctx context.Context, key string) (again bool) {
	o, there, err := n.pods.GetByKey(key)
	if err != nil || !there {
		return false
	}
	pod, ok := o.(*corev1.Pod)
	if !ok || !isSimulated(pod.Spec.NodeName) {
		return false
	}
	if pod.DeletionTimestamp != nil {
		n.end(ctx, pod)
		err := n.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0), Preconditions: &metav1.Preconditions{UID: &pod.UID}})
		return err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && ctx.Err() == nil
	}
	if pod.Status.Phase != corev1.PodPending {
		return false
	}
	if err := n.MayStart(pod); err != nil {
		return true
	}
	if _, already := n.runs.LoadOrStore(pod.UID, true); already {
		return false
	}
	_, err = n.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, fmt.Appendf(nil, running, pod.UID, n.Address, n.Address, metav1.Now().UTC().Format(time.RFC3339)), metav1.PatchOptions{}, "status")
	if err != nil {
		n.runs.Delete(pod.UID)
		return !apierrors.IsNotFound(err) && ctx.Err() == nil
	}
	if n.Started != nil {
		n.Started(pod)
	}
	return false
}

// end says that a pod has ended, as a kubelet does before it lets go of it.
func (n *Nodes) end(ctx context.Context, pod *corev1.Pod) {
	if pod.Status.Phase != corev1.PodRunning {
		return
	}
	// Whoever deletes the pod at once was faster.
	_, _ = n.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, fmt.Appendf(nil, ended, pod.UID), metav1.PatchOptions{}, "status")
}

const ended = `{"metadata":{"uid":"%s"},"status":{"phase":"Succeeded"}}`

const running = `{"metadata":{"uid":"%s"},"status":{"phase":"Running","podIP":"%s","podIPs":[{"ip":"%s"}],"startTime":"%s",
"conditions":[{"type":"Ready","status":"True"},{"type":"ContainersReady","status":"True"}]}}`

func isSimulated(node string) bool { return len(node) > 4 && node[:4] == "sim-" }

// MayStart says why a kubelet would not start a pod: as k8s.io/kubernetes,
// pkg/kubelet/cm/dra, PrepareResources.
func (n *Nodes) MayStart(pod *corev1.Pod) error {
	for _, c := range pod.Spec.ResourceClaims {
		name := ptr.Deref(c.ResourceClaimName, "")
		for _, s := range pod.Status.ResourceClaimStatuses {
			if s.Name == c.Name {
				name = ptr.Deref(s.ResourceClaimName, "")
			}
		}
		o, there, err := n.claims.GetByKey(pod.Namespace + "/" + name)
		if err != nil || !there {
			return fmt.Errorf("claim %q is not there", name)
		}
		claim, ok := o.(*resourceapi.ResourceClaim)
		if !ok || claim.Status.Allocation == nil || !n.reserved(claim, pod) {
			return fmt.Errorf("claim %s is not reserved for pod %s", name, pod.Name)
		}
	}
	return nil
}

func (n *Nodes) reserved(claim *resourceapi.ResourceClaim, pod *corev1.Pod) bool {
	for _, r := range claim.Status.ReservedFor {
		if r.UID == pod.UID {
			return true
		}
		if g := pod.Spec.SchedulingGroup; n.Native && g != nil && r.Resource == "podgroups" && r.APIGroup == "scheduling.k8s.io" && r.Name == ptr.Deref(g.PodGroupName, "") {
			return true
		}
	}
	return false
}

// Many does something for each of a number, some at a time, and returns what went
// wrong.
func Many(count int, do func(i int) error) error {
	var (
		all  sync.WaitGroup
		mu   sync.Mutex
		errs error
	)
	next := make(chan int)
	for range workers {
		all.Go(func() {
			for i := range next {
				if err := do(i); err != nil {
					mu.Lock()
					errs = errors.Join(errs, err)
					mu.Unlock()
				}
			}
		})
	}
	for i := range count {
		next <- i
	}
	close(next)
	all.Wait()
	return errs
}
