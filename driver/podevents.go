package driver

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
)

// ReasonRecovered is the event that ends what a Warning began.
const ReasonRecovered = "SharedDeviceRecovered"

// tellPods makes events on the pods whose shares' conditions have become other
// than the API server has them: what a pod's owner could do something about.
// What kept a container from starting the kubelet tells.
func (d *Driver) tellPods(current *resourceapi.ResourceClaim, shares []shareState, rows []resourceapi.AllocatedDeviceStatus) {
	for i, row := range rows {
		before := conditionsOf(current, row)
		for _, now := range row.Conditions {
			old := meta.FindStatusCondition(before, now.Type)
			switch {
			case old != nil && old.Status == now.Status && old.Reason == now.Reason:
			case now.Status == metav1.ConditionFalse && now.Reason != ReasonPrepared && now.Reason != ReasonAttachFailed:
				d.tell(current, shares[i], corev1.EventTypeWarning, now.Reason, now.Message)
			case now.Status == metav1.ConditionTrue && old != nil && old.Reason != ReasonPrepared && old.Reason != ReasonAttachFailed:
				d.tell(current, shares[i], corev1.EventTypeNormal, ReasonRecovered, now.Type+": "+now.Message)
			}
		}
	}
}

func (d *Driver) tell(claim *resourceapi.ResourceClaim, share shareState, kind, reason, message string) {
	pods := share.unreferenced
	for _, l := range share.links {
		pods = append(pods, l.pod)
	}
	if share.conditions != nil { // nobody knows which containers have it
		pods = consumers(claim)
	}
	// Without its resourceVersion: events that are alike are one series then.
	about := &corev1.ObjectReference{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim", Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}
	for _, pod := range pods {
		d.options.Events.Eventf(podReference(pod), about, kind, reason, "Share", "claim %s, device %s: %s", claim.Name, share.Device, truncate(message, maxNote))
	}
}

// consumers are the pods that a claim is reserved for.
func consumers(claim *resourceapi.ResourceClaim) (pods []attach.Pod) {
	for _, c := range claim.Status.ReservedFor {
		if c.APIGroup == "" && c.Resource == "pods" {
			pods = append(pods, attach.Pod{UID: string(c.UID), Namespace: claim.Namespace, Name: c.Name})
		}
	}
	return pods
}

// maxNote leaves room, within the API's 1024 characters, for the names before it.
const maxNote = 512

func podReference(pod attach.Pod) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID)}
}

// degraded says once, in the log, and as long as the plugin runs in a metric,
// what does not work.
func (d *Driver) degraded(ctx context.Context, what, consequence string, err error) {
	gauge := d.metrics.degraded.WithLabelValues(what)
	if _, told := d.told.LoadOrStore(what, true); !told {
		klog.FromContext(ctx).Error(err, "Degraded", "what", what, "consequence", consequence)
		gauge.Set(1)
	}
}
