// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package endpoints

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/retry"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// StatusReconciler writes network.NetworkStatusAnnotation. It keeps the entries of other networks.
type StatusReconciler struct {
	Client client.Client
	// Pods reads from a cache of all pods, which trim.PodWithLinks has reduced. PodCache is that
	// cache as a source of events.
	Pods     client.Reader
	PodCache cache.Cache
	Driver   string
	Writes   *prometheus.CounterVec
}

// networkStatus is an entry of the annotation.
type networkStatus struct {
	Name      string   `json:"name"`
	Interface string   `json:"interface,omitempty"`
	IPs       []string `json:"ips,omitempty"`
	MAC       string   `json:"mac,omitempty"`
	MTU       int32    `json:"mtu,omitempty"`
	DNS       dns      `json:"dns"`
}

type dns struct {
	Nameservers []string `json:"nameservers,omitempty"`
}

// indexClaim is the index of pods by the names of their claims.
const indexClaim = "dra-shared.claims"

// SetupWithManager registers the reconciler.
func (r *StatusReconciler) SetupWithManager(ctx context.Context, m ctrl.Manager) error {
	byClaim := func(o client.Object) []string {
		if pod, ok := o.(*corev1.Pod); ok {
			return claimref.AllNames(pod)
		}
		return nil
	}
	if err := r.PodCache.IndexField(ctx, &corev1.Pod{}, indexClaim, byClaim); err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(m).Named("networkstatus").
		Watches(&resourceapi.ResourceClaim{}, handler.EnqueueRequestsFromMapFunc(r.podsOf)).
		WatchesRawSource(source.Kind(r.PodCache, &corev1.Pod{}, handler.TypedEnqueueRequestsFromMapFunc(
			func(_ context.Context, pod *corev1.Pod) []reconcile.Request {
				if !claimref.MayHave(pod) {
					return nil
				}
				return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(pod)}}
			}))).
		WithOptions(retry.Options()).
		Complete(r)
}

// podsOf returns requests for the pods that use a claim.
func (r *StatusReconciler) podsOf(ctx context.Context, claim client.Object) (requests []reconcile.Request) {
	var pods corev1.PodList
	if err := r.Pods.List(ctx, &pods, client.InNamespace(claim.GetNamespace()),
		client.MatchingFields{indexClaim: claim.GetName()}); err != nil {
		return nil // the cache is shutting down
	}
	for i := range pods.Items {
		requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&pods.Items[i])})
	}
	return requests
}

// Reconcile implements reconcile.Reconciler.
func (r *StatusReconciler) Reconcile(ctx context.Context, req ctrl.Request) (result ctrl.Result, err error) {
	var pod corev1.Pod
	if err := r.Pods.Get(ctx, req.NamespacedName, &pod); err != nil {
		return result, client.IgnoreNotFound(err)
	}
	if podstatus.IsTerminal(&pod) || pod.DeletionTimestamp != nil {
		return result, nil
	}
	links, _, err := podLinks(ctx, r.Client, &pod, r.Driver)
	if err != nil {
		return result, err
	}
	value, err := annotationOf(pod.Annotations[network.NetworkStatusAnnotation], links, r.Driver)
	if err != nil || value == pod.Annotations[network.NetworkStatusAnnotation] {
		return result, err
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": pod.UID, "resourceVersion": pod.ResourceVersion,
		"annotations": map[string]string{network.NetworkStatusAnnotation: value},
	}})
	if err != nil {
		return result, err
	}
	if err := r.Client.Patch(ctx, &pod, client.RawPatch(types.MergePatchType, patch)); err != nil {
		return result, client.IgnoreNotFound(err)
	}
	r.Writes.WithLabelValues(objectPod).Inc()
	return result, nil
}

// annotationOf returns the annotation with the links, and with the entries of other networks in the
// current annotation. It returns the current annotation if there is nothing to change.
func annotationOf(present string, links []link, driver string) (string, error) {
	var others, own []json.RawMessage
	if present != "" {
		if err := json.Unmarshal([]byte(present), &others); err != nil {
			return "", fmt.Errorf("annotation %s is not a JSON list: %w: which program wrote it?",
				network.NetworkStatusAnnotation, err)
		}
	}
	var kept []json.RawMessage
	for _, raw := range others {
		var entry networkStatus
		if err := json.Unmarshal(raw, &entry); err != nil || !strings.HasPrefix(entry.Name, driver+"/") {
			kept = append(kept, raw)
		}
	}
	for _, l := range links {
		entry := networkStatus{Name: driver + "/" + l.network, Interface: l.name, MAC: l.mac, MTU: l.mtu}
		entry.DNS.Nameservers = l.nameservers
		for _, a := range l.addresses {
			entry.IPs = append(entry.IPs, a.String())
		}
		raw, err := json.Marshal(entry)
		if err != nil {
			return "", err
		}
		own = append(own, raw)
	}
	if len(own) == 0 && len(kept) == len(others) {
		return present, nil
	}
	all, err := json.Marshal(append(kept, own...))
	return string(all), err
}
