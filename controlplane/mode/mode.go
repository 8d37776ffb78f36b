// Package mode finds out who makes a claim serve a group of pods: the cluster,
// where it can (Native), or the controller, everywhere else (Bridge).
package mode

import (
	"context"
	"errors"
	"fmt"
	"time"

	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// Mode of the control plane.
type Mode string

const (
	// Auto finds out.
	Auto Mode = "auto"
	// Bridge generates claims and reserves them, pod by pod and for the group.
	Bridge Mode = "bridge"
	// Native translates PodGroups to Kubernetes' own, which the scheduler, the
	// resource claim controller and the kubelet know (KEP-5729).
	Native Mode = "native"
)

// ErrChanged ends a process whose mode is not the cluster's any more.
var ErrChanged = errors.New("the cluster's PodGroup API has come or gone: starting anew in the other mode")

// Parse returns the mode of that name.
func Parse(name string) (Mode, error) {
	switch m := Mode(name); m {
	case Auto, Bridge, Native:
		return m, nil
	}
	return "", fmt.Errorf("mode %q: must be auto, bridge or native", name)
}

// Detect asks the API server whether it keeps the claims of a PodGroup of its
// own: it may serve the type and drop the field, by feature gates that are set
// apart. Nothing is written; namespace is any that exists.
//
// Scheduler, controllers and kubelets have gates of their own, which nobody can
// ask for: where they differ from the API server's, say which mode it is.
func Detect(ctx context.Context, cluster kubernetes.Interface, namespace string) (Mode, error) {
	probe := &schedulingapi.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "dra-shared-probe-"},
		Spec: schedulingapi.PodGroupSpec{
			SchedulingPolicy: schedulingapi.PodGroupSchedulingPolicy{Basic: &schedulingapi.BasicSchedulingPolicy{}},
			ResourceClaims:   []schedulingapi.PodGroupResourceClaim{{Name: "probe", ResourceClaimName: ptr.To("probe")}},
		},
	}
	kept, err := cluster.SchedulingV1beta1().PodGroups(namespace).Create(ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	switch {
	case apierrors.IsNotFound(err):
		return Bridge, nil
	case err != nil:
		return "", fmt.Errorf("ask whether the cluster knows PodGroups: %w", err)
	case len(kept.Spec.ResourceClaims) == 0:
		return Bridge, nil
	}
	return Native, nil
}

// askAgain is how often a Watcher looks: there is no event for feature gates,
// which change when an API server starts.
const askAgain = 10 * time.Second

// Watcher ends the manager when the mode is not the cluster's any more: all that
// a process does is of one mode, and what the other one left it finds when it
// starts.
type Watcher struct {
	Cluster   kubernetes.Interface
	Namespace string
	Mode      Mode
}

// NeedLeaderElection implements manager.LeaderElectionRunnable: admission is of
// a mode too.
func (*Watcher) NeedLeaderElection() bool { return false }

// Start implements manager.Runnable.
func (w *Watcher) Start(ctx context.Context) error {
	tick := time.NewTicker(askAgain)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		switch now, err := Detect(ctx, w.Cluster, w.Namespace); {
		case err != nil:
			klog.FromContext(ctx).Error(err, "Cannot tell the mode; it stays", "mode", w.Mode)
		case now != w.Mode:
			return fmt.Errorf("%w: %s", ErrChanged, now)
		}
	}
}
