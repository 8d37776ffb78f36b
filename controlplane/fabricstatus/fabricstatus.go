// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package fabricstatus writes the status of shares of fabrics.
//
// A share of a NIC or an accelerator is on one node, and that node's plugin writes its status. A share of a fabric is
// on all nodes of its pods. Their plugins would overwrite each other's entries, because the data of a device's status
// has one writer (KEP-4817). The controller is that writer. It counts the pods that use the claim, by the phases that
// their kubelets report.
package fabricstatus

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claimpods"
	"github.com/dra-shared/dra-driver-shared/controlplane/retry"
	"github.com/dra-shared/dra-driver-shared/device/fabricpool"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/claimstatus"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// minWriteInterval is the minimum time between two writes to a claim. With it, the start of hundreds of pods causes few
// writes.
const minWriteInterval = 2 * time.Second

// withoutPodGroup is the label selector of pods that are in no PodGroup.
const withoutPodGroup = "!" + scheduling.GroupUIDLabel

// Reconciler writes the status of claims that have a share of a fabric.
type Reconciler struct {
	// Client reads from a cache that has the pods of PodGroups.
	Client  client.Reader
	Cluster kubernetes.Interface
	Driver  string
	Clock   clock.PassiveClock

	// others watches the pods that are not in a PodGroup.
	others podWatcher

	written *claimstatus.Log
	// uids holds the UIDs of the claims in written by name, to remove the UIDs of deleted claims.
	uids map[types.NamespacedName]types.UID
}

// podWatcher is a claimpods.Watcher.
type podWatcher interface {
	Pods(ctx context.Context, claim types.NamespacedName) ([]*corev1.Pod, error)
	Forget(claim types.NamespacedName)
}

// indexClaim is the index of pods by the names of their claims.
const indexClaim = "dra-shared.claims"

// SetupWithManager registers the reconciler. It must be called before Reconcile.
func (r *Reconciler) SetupWithManager(ctx context.Context, m ctrl.Manager) error {
	r.written, r.uids = claimstatus.NewLog(r.Clock, 0), map[types.NamespacedName]types.UID{}
	if err := m.GetFieldIndexer().IndexField(ctx, &corev1.Pod{}, indexClaim, claimNames); err != nil {
		return err
	}
	others := &claimpods.Watcher{Cluster: r.Cluster, Labels: withoutPodGroup}
	r.others = others
	return ctrl.NewControllerManagedBy(m).Named("fabricstatus").
		For(&resourceapi.ResourceClaim{}).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(requestsForPod)).
		WatchesRawSource(others.Source()).
		WithOptions(retry.Options()).
		Complete(r)
}

// claimNames returns the names of a pod's claims.
func claimNames(o client.Object) []string {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return nil
	}
	return claimref.Names(pod)
}

// requestsForPod returns a request for each claim of a pod.
func requestsForPod(_ context.Context, o client.Object) (requests []reconcile.Request) {
	for _, name := range claimNames(o) {
		claim := types.NamespacedName{Namespace: o.GetNamespace(), Name: name}
		requests = append(requests, reconcile.Request{NamespacedName: claim})
	}
	return requests
}

// Reconcile implements reconcile.Reconciler: it writes the status of the claim if
// the number of its pods, of running pods, or of nodes has changed.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var claim resourceapi.ResourceClaim
	err := r.Client.Get(ctx, req.NamespacedName, &claim)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, err
	}
	if err != nil || !r.hasFabric(&claim) || r.uids[req.NamespacedName] != claim.UID {
		r.written.Forget(r.uids[req.NamespacedName])
		delete(r.uids, req.NamespacedName)
	}
	if err != nil || !r.hasFabric(&claim) {
		r.others.Forget(req.NamespacedName)
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	r.uids[req.NamespacedName] = claim.UID // one worker
	if age, ok := r.written.Age(claim.UID); ok && age < minWriteInterval {
		return ctrl.Result{RequeueAfter: minWriteInterval - age}, nil
	}
	pods, err := r.podsOf(ctx, &claim)
	if err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{}, r.write(ctx, &claim, summarize(pods))
}

// write applies the status of the claim's fabrics if it differs from the last
// write.
func (r *Reconciler) write(
	ctx context.Context, claim *resourceapi.ResourceClaim, summary v1alpha1.FabricStatusSummary,
) error {
	entries, err := statusEntries(claim, summary, r.Driver)
	if err != nil {
		return err
	}
	digest, err := claimstatus.DigestOf(entries)
	if err != nil || r.written.Has(claim.UID, digest) {
		return err
	}
	if err := claimstatus.Apply(ctx, r.Cluster, claim, v1alpha1.FieldManagerController, entries); err != nil {
		r.written.Fail(claim.UID)
		return err
	}
	r.written.Record(claim.UID, digest)
	klog.FromContext(ctx).V(4).Info("Wrote status of fabric shares", "claim", klog.KObj(claim),
		"podCount", summary.Pods, "runningPodCount", summary.Running, "nodeCount", summary.Nodes)
	return nil
}

// hasFabric reports whether a share of one of the driver's fabrics is allocated to
// the claim.
func (r *Reconciler) hasFabric(claim *resourceapi.ResourceClaim) bool {
	if claim.Status.Allocation == nil {
		return false
	}
	for _, d := range claim.Status.Allocation.Devices.Results {
		if d.Driver == r.Driver && fabricpool.Is(d.Pool) {
			return true
		}
	}
	return false
}

// podsOf returns the pods that use the claim: the pods of PodGroups, and the others that it is reserved for.
func (r *Reconciler) podsOf(ctx context.Context, claim *resourceapi.ResourceClaim) (pods []*corev1.Pod, err error) {
	var cached corev1.PodList
	err = r.Client.List(ctx, &cached, client.InNamespace(claim.Namespace),
		client.MatchingFields{indexClaim: claim.Name}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, err
	}
	others := map[types.UID]bool{}
	for _, entry := range claim.Status.ReservedFor {
		if claimref.IsPodEntry(entry) {
			others[entry.UID] = true
		}
	}
	for i := range cached.Items {
		pods = append(pods, &cached.Items[i])
		delete(others, cached.Items[i].UID)
	}
	if len(others) == 0 {
		// A watch that was started stays until the claim no longer has a fabric: a new pod of a PodGroup may count as one of
		// the others for a moment, until the cache has it.
		return pods, nil
	}
	all, err := r.others.Pods(ctx, client.ObjectKeyFromObject(claim))
	for _, pod := range all {
		if others[pod.UID] {
			pods = append(pods, pod)
		}
	}
	return pods, err
}

// summarize counts the pods of a claim that are bound to a node and not terminal.
func summarize(pods []*corev1.Pod) v1alpha1.FabricStatusSummary {
	s := v1alpha1.FabricStatusSummary{TypeMeta: v1alpha1.TypeMeta(v1alpha1.FabricStatusSummaryKind)}
	nodes := map[string]bool{}
	for _, p := range pods {
		if p.Spec.NodeName == "" || podstatus.IsTerminal(p) {
			continue
		}
		s.Pods++
		if p.Status.Phase == corev1.PodRunning {
			s.Running++
			nodes[p.Spec.NodeName] = true
		}
	}
	s.Nodes = int32(len(nodes))
	return s
}

// statusEntries returns the status entries for the claim's shares of fabrics. A request with admin access does not have
// a share.
func statusEntries(
	claim *resourceapi.ResourceClaim, s v1alpha1.FabricStatusSummary, driver string,
) (entries []resourceapi.AllocatedDeviceStatus, err error) {
	data, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	for _, d := range claim.Status.Allocation.Devices.Results {
		if d.Driver == driver && fabricpool.Is(d.Pool) && !ptr.Deref(d.AdminAccess, false) {
			entries = append(entries, claimstatus.NewEntry(d, &runtime.RawExtension{Raw: data}, readyCondition(s)))
		}
	}
	return entries, nil
}

// readyCondition returns the condition Ready of a share of a fabric.
func readyCondition(s v1alpha1.FabricStatusSummary) metav1.Condition {
	if s.Running == 0 {
		return metav1.Condition{
			Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNotRunning,
			Message: fmt.Sprintf("none of %d pods is running yet; the events of a pod explain why it does not start", s.Pods),
		}
	}
	return metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonPrepared,
		Message: fmt.Sprintf("%d of %d pods are running, on %d nodes", s.Running, s.Pods, s.Nodes),
	}
}
