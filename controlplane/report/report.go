// Package report writes the status of what spans nodes. A share of a NIC is on one
// node, whose plugin reads it back and says so; a share of a fabric is on as many
// nodes as its pods, whose plugins would overwrite each other: data of a device's
// status has one writer (KEP-4817). It is this one, and it adds up what the
// kubelets report of the pods: on a node, a prepared share of a fabric is nothing
// beside what its containers find.
package report

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/device/fabricpool"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
)

// FieldManager of what the controller applies; FieldManagerHolders of what it says
// of claims that other objects hold.
const (
	FieldManager        = "dra-shared-controller"
	FieldManagerHolders = "dra-shared-controller-holders"
)

// settle is how long after a write the next one of the same claim waits: hundreds
// of pods that start are one change.
const settle = 2 * time.Second

// Summary is the data of a share that spans nodes.
type Summary struct {
	Version string `json:"version"`
	// Pods that have a node, and of those the ones that run.
	Pods    int `json:"pods"`
	Running int `json:"running"`
	// Nodes that those are on.
	Nodes int `json:"nodes"`
}

const summaryVersion = "v1alpha1"

// Reconciler is the controller that reports.
type Reconciler struct {
	// Client reads from a cache.
	Client client.Client
	// APIReader reads from the API server.
	APIReader client.Reader
	Cluster   kubernetes.Interface
	Driver    string
	Clock     clock.PassiveClock

	written *claimstatus.Log
}

// indexClaim finds pods by the claims that they name.
const indexClaim = "dra-shared.claims"

// SetupWithManager registers the controller.
func (r *Reconciler) SetupWithManager(ctx context.Context, m ctrl.Manager) error {
	r.written = claimstatus.NewLog(r.Clock, 0)
	if err := m.GetFieldIndexer().IndexField(ctx, &corev1.Pod{}, indexClaim, func(o client.Object) []string { return claimsOf(o) }); err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(m).Named("report").
		For(&resourceapi.ResourceClaim{}).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) (requests []reconcile.Request) {
			for _, name := range claimsOf(o) {
				requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{Namespace: o.GetNamespace(), Name: name}})
			}
			return requests
		})).
		Complete(r)
}

func claimsOf(o client.Object) (names []string) {
	if pod, ok := o.(*corev1.Pod); ok {
		for _, c := range pod.Spec.ResourceClaims {
			if c.ResourceClaimName != nil {
				names = append(names, *c.ResourceClaimName)
			}
		}
	}
	return names
}

// Reconcile implements reconcile.Reconciler for the claim of that name.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var claim resourceapi.ResourceClaim
	if err := r.Client.Get(ctx, req.NamespacedName, &claim); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !r.spans(&claim) {
		r.written.Forget(claim.UID)
		return ctrl.Result{}, nil
	}
	if wait := r.remainingDelay(claim.UID); wait > 0 {
		return ctrl.Result{RequeueAfter: wait}, nil
	}
	var pods corev1.PodList
	if err := r.Client.List(ctx, &pods, client.InNamespace(claim.Namespace), client.MatchingFields{indexClaim: claim.Name}, client.UnsafeDisableDeepCopy); err != nil {
		return ctrl.Result{}, err
	}
	alone, err := r.alone(ctx, &claim, pods.Items)
	if err != nil {
		return ctrl.Result{}, err
	}
	summary := summarize(append(slices.Clone(pods.Items), alone...))
	rows, err := rowsOf(&claim, summary, r.Driver)
	if err != nil {
		return ctrl.Result{}, err
	}
	var result ctrl.Result
	if len(alone) > 0 && summary.Running < summary.Pods {
		result.RequeueAfter = askAgain
	}
	digest, err := claimstatus.DigestOf(rows)
	if err != nil || r.written.Has(claim.UID, digest) {
		return result, err
	}
	if err := claimstatus.Apply(ctx, r.Cluster, &claim, FieldManager, rows); err != nil {
		r.written.Forget(claim.UID)
		return result, err
	}
	r.written.Record(claim.UID, digest)
	return result, nil
}

// askAgain is for pods that are in no group: no event tells that one runs.
const askAgain = 5 * time.Second

// alone are the pods that a claim is reserved for and that are in no group, of
// which the cache has none.
func (r *Reconciler) alone(ctx context.Context, claim *resourceapi.ResourceClaim, known []corev1.Pod) (pods []corev1.Pod, err error) {
	for _, c := range claim.Status.ReservedFor {
		if c.APIGroup != "" || c.Resource != "pods" || slices.ContainsFunc(known, func(p corev1.Pod) bool { return p.UID == c.UID }) {
			continue
		}
		var pod corev1.Pod
		err := r.APIReader.Get(ctx, types.NamespacedName{Namespace: claim.Namespace, Name: c.Name}, &pod)
		if client.IgnoreNotFound(err) != nil {
			return nil, err
		}
		if err == nil && pod.UID == c.UID && pod.Labels[scheduling.GroupUIDLabel] == "" {
			pods = append(pods, pod)
		}
	}
	return pods, nil
}

func (r *Reconciler) spans(claim *resourceapi.ResourceClaim) bool {
	return claim.Status.Allocation != nil && slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(d resourceapi.DeviceRequestAllocationResult) bool {
		return d.Driver == r.Driver && fabricpool.Is(d.Pool)
	})
}

// remainingDelay returns how long the next write to a claim must wait.
func (r *Reconciler) remainingDelay(claim types.UID) time.Duration {
	age, ok := r.written.Age(claim)
	if !ok {
		return 0
	}
	return settle - age
}

// summarize counts a claim's pods. It is pure.
func summarize(pods []corev1.Pod) Summary {
	s := Summary{Version: summaryVersion}
	nodes := map[string]bool{}
	for i := range pods {
		p := &pods[i]
		if p.Spec.NodeName == "" || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		s.Pods++
		if p.Status.Phase == corev1.PodRunning {
			s.Running++
			nodes[p.Spec.NodeName] = true
		}
	}
	s.Nodes = len(nodes)
	return s
}

// ConditionReady is the condition of a share that spans nodes, as of others.
const ConditionReady = "Ready"

// rowsOf are the entries for a claim's devices that span nodes. It is pure.
func rowsOf(claim *resourceapi.ResourceClaim, s Summary, driver string) (rows []resourceapi.AllocatedDeviceStatus, err error) {
	data, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	c := metav1.Condition{Type: ConditionReady, Status: metav1.ConditionTrue, Reason: "Prepared",
		Message: fmt.Sprintf("%d of %d pods are running, on %d nodes", s.Running, s.Pods, s.Nodes)}
	if s.Running == 0 {
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, "NotRunning", fmt.Sprintf("none of %d pods is running yet; the events of a pod explain why it does not start", s.Pods)
	}
	for _, d := range claim.Status.Allocation.Devices.Results {
		if d.Driver != driver || !fabricpool.Is(d.Pool) || ptr.Deref(d.AdminAccess, false) {
			continue
		}
		rows = append(rows, claimstatus.NewEntry(d, &runtime.RawExtension{Raw: data}, c))
	}
	return rows, nil
}
