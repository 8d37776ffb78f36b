// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package endpoints publishes the addresses that pods have on networks: as EndpointSlices of annotated Services, and as
// the pod annotation that Multus lists networks in. The source is the claim status in the namespace of the Service or
// the pod. Only the plugins write it, so neither ever contains addresses of other namespaces.
package endpoints

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
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

// minWriteInterval is the minimum time between two updates of a Service's EndpointSlices. With it, the start of
// hundreds of pods causes few writes.
const minWriteInterval = time.Second

// Reconciler writes the EndpointSlices of Services with network.ServiceNetworkAnnotation.
type Reconciler struct {
	Client client.Client
	// Pods reads from a cache of all pods, which trim.PodWithLinks has reduced. PodCache is that
	// cache as a source of events.
	Pods     client.Reader
	PodCache cache.Cache
	Driver   string
	// Networks are the names of the configured networks.
	Networks []string
	Events   events.EventRecorder
	Clock    clock.PassiveClock
	Writes   *prometheus.CounterVec

	// written holds the times of the last writes of Services' slices. They are lost when the controller restarts; it may
	// then write the slices again without a delay.
	written map[types.NamespacedName]time.Time
}

// SetupWithManager registers the reconciler, which has one worker.
func (r *Reconciler) SetupWithManager(_ context.Context, m ctrl.Manager) error {
	r.written = map[types.NamespacedName]time.Time{}
	return ctrl.NewControllerManagedBy(m).Named("endpoints").
		For(&corev1.Service{}).
		Owns(&discoveryv1.EndpointSlice{}).
		Watches(&resourceapi.ResourceClaim{}, handler.EnqueueRequestsFromMapFunc(r.servicesOf)).
		WatchesRawSource(source.Kind(r.PodCache, &corev1.Pod{}, handler.TypedEnqueueRequestsFromMapFunc(
			func(ctx context.Context, pod *corev1.Pod) []reconcile.Request { return r.servicesOf(ctx, pod) }))).
		WithOptions(retry.Options()).
		Complete(r)
}

// servicesOf returns requests for the annotated Services of an object's namespace. It ignores pods
// without claims.
func (r *Reconciler) servicesOf(ctx context.Context, o client.Object) (requests []reconcile.Request) {
	if pod, ok := o.(*corev1.Pod); ok && !claimref.MayHave(pod) {
		return nil
	}
	var all corev1.ServiceList
	if err := r.Client.List(ctx, &all, client.InNamespace(o.GetNamespace())); err != nil {
		return nil // the cache is shutting down
	}
	for i := range all.Items {
		if _, ok := all.Items[i].Annotations[network.ServiceNetworkAnnotation]; ok {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&all.Items[i])})
		}
	}
	return requests
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (result ctrl.Result, err error) {
	var service corev1.Service
	if err := r.Client.Get(ctx, req.NamespacedName, &service); err != nil {
		delete(r.written, req.NamespacedName)
		return result, client.IgnoreNotFound(err) // Kubernetes deletes the slices with their owner
	}
	if since := r.Clock.Since(r.written[req.NamespacedName]); since < minWriteInterval {
		return ctrl.Result{RequeueAfter: minWriteInterval - since}, nil
	}
	wanted, warnings, err := r.wanted(ctx, &service)
	if err != nil {
		return result, err
	}
	for _, w := range warnings {
		r.Events.Eventf(&service, nil, corev1.EventTypeWarning, w.reason, network.EventActionPublish, "%s", w.message)
	}
	written, err := r.apply(ctx, &service, wanted)
	if written {
		r.written[req.NamespacedName] = r.Clock.Now()
	}
	return result, err
}

// warning is an event on a Service.
type warning struct{ reason, message string }

func invalidService(reason error) warning {
	return warning{network.EventReasonInvalidService, reason.Error()}
}

// wanted returns the slices that a Service must have, and the warnings for its events. The Service must not have slices
// without the annotation, or if the annotation is invalid.
func (r *Reconciler) wanted(
	ctx context.Context, service *corev1.Service,
) (wanted []*discoveryv1.EndpointSlice, warnings []warning, err error) {
	name, annotated := service.Annotations[network.ServiceNetworkAnnotation]
	if !annotated || service.DeletionTimestamp != nil {
		return nil, nil, nil
	}
	selector, invalid := selectorOf(service)
	if invalid != nil {
		return nil, []warning{invalidService(invalid)}, nil
	}
	on, err := r.linksOn(ctx, name, service.Namespace, selector)
	if err != nil {
		return nil, nil, err
	}
	if !slices.Contains(r.Networks, name) {
		warnings = append(warnings, warning{
			network.EventReasonUnknownNetwork, fmt.Sprintf("annotation %s: %q: must be a network of the driver's "+
				"configuration, one of %q: was it renamed?", network.ServiceNetworkAnnotation, name, r.Networks),
		})
	}
	if len(on.missing) > 0 {
		warnings = append(warnings, warning{
			network.EventReasonIncompleteEndpoints, fmt.Sprintf("the status of the claims of pods %s lists only "+
				"some of the pods that use them: give each pod a claim of its own (resourceClaimTemplateName)",
				strings.Join(on.missing[:min(len(on.missing), 3)], ", ")),
		})
	}
	if wanted, invalid = slicesOf(service, on.links); invalid != nil {
		warnings = append(warnings, invalidService(invalid))
	}
	return wanted, warnings, nil
}

// selectorOf returns the selector for the pods of an annotated Service, or an error if the Service
// is invalid.
func selectorOf(service *corev1.Service) (labels.Selector, error) {
	if len(service.Spec.Selector) > 0 {
		return nil, fmt.Errorf("spec.selector: Forbidden: with it, Kubernetes adds the addresses of the pods in the cluster "+
			"network: move it to the annotation %s", network.ServiceSelectorAnnotation)
	}
	text := service.Annotations[network.ServiceSelectorAnnotation]
	selector, err := labels.Parse(text)
	if err != nil || selector.Empty() {
		return nil, fmt.Errorf("annotation %s: %q: must be a label selector, such as app=web",
			network.ServiceSelectorAnnotation, text)
	}
	return selector, nil
}

// networkLinks are the links that pods have on a network.
type networkLinks struct {
	links   []podLink
	missing []string // names of pods with links that their claims do not list
}

// linksOn returns the links that the selected pods have on a network.
func (r *Reconciler) linksOn(
	ctx context.Context, name, namespace string, selector labels.Selector,
) (on networkLinks, err error) {
	var pods corev1.PodList
	if err := r.Pods.List(ctx, &pods, client.InNamespace(namespace),
		client.MatchingLabelsSelector{Selector: selector}); err != nil {
		return on, err
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if podstatus.IsTerminal(pod) {
			continue
		}
		all, complete, err := podLinks(ctx, r.Client, pod, r.Driver)
		if err != nil {
			return on, err
		}
		if !complete {
			on.missing = append(on.missing, pod.Name)
		}
		for _, l := range all {
			if l.network == name {
				on.links = append(on.links, podLink{pod, l})
			}
		}
	}
	return on, nil
}

// podLinks returns the links of a pod; see linksOf.
func podLinks(
	ctx context.Context, claims client.Reader, pod *corev1.Pod, driver string,
) (links []link, complete bool, err error) {
	complete = true
	for _, name := range claimref.AllNames(pod) {
		var claim resourceapi.ResourceClaim
		err := claims.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: name}, &claim)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, false, err
		}
		if !isReservedFor(&claim, pod.UID) {
			continue // it is the claim of a pod that had the same name
		}
		found, all := linksOf(&claim, pod, driver)
		links, complete = append(links, found...), complete && all
	}
	return links, complete, nil
}

// apply creates, updates, and deletes EndpointSlices until the Service has the wanted ones, and
// reports whether it wrote any.
func (r *Reconciler) apply(
	ctx context.Context, service *corev1.Service, wanted []*discoveryv1.EndpointSlice,
) (written bool, err error) {
	var list discoveryv1.EndpointSliceList
	err = r.Client.List(ctx, &list, client.InNamespace(service.Namespace), client.MatchingLabels(managedLabels(service)))
	if err != nil {
		return false, err
	}
	var present []*discoveryv1.EndpointSlice
	for i := range list.Items {
		if metav1.IsControlledBy(&list.Items[i], service) {
			present = append(present, &list.Items[i])
		}
	}
	for _, w := range diffSlices(present, wanted) {
		if err := r.write(ctx, w); err != nil {
			return written, err
		}
		written = true
		r.Writes.WithLabelValues(objectSlice).Inc()
	}
	return written, nil
}

// write performs one write.
func (r *Reconciler) write(ctx context.Context, w sliceWrite) (err error) {
	logger := klog.FromContext(ctx).V(2).WithValues("slice", klog.KObj(w.slice))
	switch w.verb {
	case createSlice:
		err = r.Client.Create(ctx, w.slice)
	case updateSlice:
		err = r.Client.Update(ctx, w.slice)
	case deleteSlice:
		if err = client.IgnoreNotFound(r.Client.Delete(ctx, w.slice)); err == nil {
			logger.Info("Deleted EndpointSlice")
		}
		return err
	}
	if err == nil {
		logger.Info("Wrote EndpointSlice", "endpointCount", len(w.slice.Endpoints))
	}
	return err
}
