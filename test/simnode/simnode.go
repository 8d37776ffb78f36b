// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package simnode simulates nodes for tests that need thousands of pods but no
// containers. It creates Node objects, keeps them Ready, and does what each
// node's kubelet does for a pod: it checks that the pod's claims are allocated
// and reserved for the pod, sets the pod's phase to Running, and removes the
// pod after its deletion.
package simnode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
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

// Nodes is a set of simulated nodes. Set the exported fields before Start.
type Nodes struct {
	Client kubernetes.Interface
	// Address is the IP address that every pod reports. A test that answers
	// requests to pods serves at this address.
	Address string
	// Native makes the kubelets accept a reservation for a pod's PodGroup of
	// Kubernetes (scheduling.k8s.io) in place of one for the pod.
	Native bool
	// Started, if not nil, is called for each pod as soon as its phase is Running.
	Started func(*corev1.Pod)

	claims cache.Indexer
	pods   cache.Indexer
	// started has the UIDs of pods that were set to phase Running. The pod cache shows the phase only after a delay.
	started sync.Map
}

const (
	namePrefix   = "sim-"
	podsPerNode  = 500
	heartbeat    = 10 * time.Second
	leaseSeconds = 40
	workers      = 32
	retryDelay   = 50 * time.Millisecond
)

func nodeName(i int) string { return fmt.Sprintf("%s%03d", namePrefix, i) }

func isSimulated(node string) bool { return strings.HasPrefix(node, namePrefix) }

// Start creates count nodes and simulates their kubelets until ctx ends. It
// returns when the kubelets' caches are filled.
func (n *Nodes) Start(ctx context.Context, count int) error {
	for i := range count {
		if err := n.addNode(ctx, nodeName(i)); err != nil {
			return err
		}
	}
	go n.renewLeases(ctx, count)
	onlyBound := func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermNotEqualSelector("spec.nodeName", "").String()
	}
	bound := informers.NewSharedInformerFactoryWithOptions(n.Client, 0, informers.WithTweakListOptions(onlyBound))
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
	handler := cache.ResourceEventHandlerFuncs{AddFunc: enqueue, UpdateFunc: func(_, o any) { enqueue(o) }}
	if _, err := pods.AddEventHandler(handler); err != nil {
		return err
	}
	bound.Start(ctx.Done())
	all.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), pods.HasSynced, claims.HasSynced) {
		return fmt.Errorf("fill the simulated kubelets' caches of pods and claims: %w", context.Cause(ctx))
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

// addNode creates a node, or takes over one that exists, and makes it Ready.
func (n *Nodes) addNode(ctx context.Context, name string) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
		"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "simulated": "true",
	}}}
	nodes := n.Client.CoreV1().Nodes()
	if _, err := nodes.Create(ctx, node, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	resources := corev1.ResourceList{
		corev1.ResourcePods:   *resource.NewQuantity(podsPerNode, resource.DecimalSI),
		corev1.ResourceCPU:    resource.MustParse("1000"),
		corev1.ResourceMemory: resource.MustParse("1Ti"),
	}
	ready := corev1.NodeCondition{
		Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Simulated", LastHeartbeatTime: metav1.Now(),
	}
	status, err := json.Marshal(map[string]any{"status": corev1.NodeStatus{
		Capacity: resources, Allocatable: resources, Conditions: []corev1.NodeCondition{ready},
	}})
	if err != nil {
		return err
	}
	_, err = nodes.Patch(ctx, name, types.StrategicMergePatchType, status, metav1.PatchOptions{}, "status")
	return err
}

// renewLeases renews the nodes' leases until ctx ends, and the nodes stay Ready. It ignores errors: a lease outlasts
// several heartbeats.
func (n *Nodes) renewLeases(ctx context.Context, count int) {
	leases := n.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	for {
		for i := range count {
			name := nodeName(i)
			spec := coordinationv1.LeaseSpec{
				HolderIdentity: &name, LeaseDurationSeconds: ptr.To[int32](leaseSeconds), RenewTime: ptr.To(metav1.NowMicro()),
			}
			if lease, err := leases.Get(ctx, name, metav1.GetOptions{}); err == nil {
				lease.Spec = spec
				_, _ = leases.Update(ctx, lease, metav1.UpdateOptions{})
			} else {
				lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}
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
		key, shutdown := queue.Get()
		if shutdown {
			return
		}
		if requeue := n.sync(ctx, key); requeue {
			queue.AddAfter(key, retryDelay)
		}
		queue.Done(key)
	}
}

// sync does for a pod what its node's kubelet does, and reports whether to
// requeue the pod.
func (n *Nodes) sync(ctx context.Context, key string) (requeue bool) {
	o, exists, err := n.pods.GetByKey(key)
	if err != nil || !exists {
		return false
	}
	pod, ok := o.(*corev1.Pod)
	if !ok || !isSimulated(pod.Spec.NodeName) {
		return false
	}
	switch {
	case pod.DeletionTimestamp != nil:
		return n.removePod(ctx, pod)
	case pod.Status.Phase == corev1.PodPending:
		return n.startPod(ctx, pod)
	default:
		return false
	}
}

// removePod removes a pod that is being deleted, and reports whether to requeue it.
func (n *Nodes) removePod(ctx context.Context, pod *corev1.Pod) (requeue bool) {
	n.setTerminal(ctx, pod)
	err := n.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: ptr.To[int64](0), Preconditions: &metav1.Preconditions{UID: &pod.UID},
	})
	return err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && ctx.Err() == nil
}

// startPod sets the phase of a pending pod to Running if a kubelet would start
// the pod, and reports whether to requeue it.
func (n *Nodes) startPod(ctx context.Context, pod *corev1.Pod) (requeue bool) {
	if err := n.checkClaims(pod); err != nil {
		return true
	}
	if _, started := n.started.LoadOrStore(pod.UID, true); started {
		return false
	}
	startTime := metav1.Now().UTC().Format(time.RFC3339)
	patch := fmt.Appendf(nil, runningPatch, pod.UID, n.Address, n.Address, startTime)
	if err := n.patchStatus(ctx, pod, patch); err != nil {
		n.started.Delete(pod.UID)
		return !apierrors.IsNotFound(err) && ctx.Err() == nil
	}
	if n.Started != nil {
		n.Started(pod)
	}
	return false
}

// setTerminal sets the phase of a running pod to Succeeded, as a kubelet does
// before it removes the pod. It ignores errors: a forced deletion may have
// removed the pod already.
func (n *Nodes) setTerminal(ctx context.Context, pod *corev1.Pod) {
	if pod.Status.Phase == corev1.PodRunning {
		_ = n.patchStatus(ctx, pod, fmt.Appendf(nil, succeededPatch, pod.UID))
	}
}

func (n *Nodes) patchStatus(ctx context.Context, pod *corev1.Pod, patch []byte) error {
	pods := n.Client.CoreV1().Pods(pod.Namespace)
	_, err := pods.Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

const (
	succeededPatch = `{"metadata":{"uid":"%s"},"status":{"phase":"Succeeded"}}`
	runningPatch   = `{"metadata":{"uid":"%s"},
"status":{"phase":"Running","podIP":"%s","podIPs":[{"ip":"%s"}],"startTime":"%s",
"conditions":[{"type":"Ready","status":"True"},{"type":"ContainersReady","status":"True"}]}}`
)

// checkClaims returns an error if a kubelet would not start the pod because of
// its claims: each must exist, be allocated, and be reserved for the pod. It
// follows PrepareResources in k8s.io/kubernetes/pkg/kubelet/cm/dra.
func (n *Nodes) checkClaims(pod *corev1.Pod) error {
	for _, c := range pod.Spec.ResourceClaims {
		name := ptr.Deref(c.ResourceClaimName, "")
		for _, s := range pod.Status.ResourceClaimStatuses {
			if s.Name == c.Name {
				name = ptr.Deref(s.ResourceClaimName, "")
			}
		}
		o, exists, err := n.claims.GetByKey(pod.Namespace + "/" + name)
		if err != nil || !exists {
			return fmt.Errorf("claim %q of pod %s/%s does not exist", name, pod.Namespace, pod.Name)
		}
		claim, ok := o.(*resourceapi.ResourceClaim)
		if !ok || claim.Status.Allocation == nil || !n.isReserved(claim, pod) {
			return fmt.Errorf("claim %s is not allocated or not reserved for pod %s/%s", name, pod.Namespace, pod.Name)
		}
	}
	return nil
}

// isReserved reports whether the claim is reserved for the pod or, in native
// mode, for the pod's PodGroup.
func (n *Nodes) isReserved(claim *resourceapi.ResourceClaim, pod *corev1.Pod) bool {
	group := ""
	if g := pod.Spec.SchedulingGroup; n.Native && g != nil {
		group = ptr.Deref(g.PodGroupName, "")
	}
	for _, r := range claim.Status.ReservedFor {
		isGroup := r.Resource == "podgroups" && r.APIGroup == "scheduling.k8s.io"
		if r.UID == pod.UID || isGroup && group != "" && r.Name == group {
			return true
		}
	}
	return false
}

// Parallel calls do for each i from 0 to count-1, up to 32 calls at a time. It
// returns the joined errors.
func Parallel(count int, do func(i int) error) error {
	var (
		wait sync.WaitGroup
		mu   sync.Mutex
		errs error
	)
	next := make(chan int)
	for range workers {
		wait.Go(func() {
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
	wait.Wait()
	return errs
}
