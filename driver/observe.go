package driver

import (
	"context"
	"encoding/json"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
)

// shareState is what has become of a share, by the kernel's answers.
type shareState struct {
	record.Share
	links  []linkState
	failed []string // why pods were refused
	// unreferenced are pods that have the claim, and no container that names
	// it: their links will never be made.
	unreferenced []attach.Pod
	// conditions are all that there is to say of a share that is not attached.
	conditions []metav1.Condition
}

// observe asks the kernel about a claim's shares, and the API server about
// what the kernel cannot know: pods that are gone, or never will attach.
func (d *Driver) observe(ctx context.Context, claim *record.Claim) ([]shareState, error) {
	all, err := d.attachments.OfClaim(string(claim.UID))
	if err != nil {
		klog.FromContext(ctx).Error(err, "Some attach records are unreadable: their pods are not in the status")
	}
	var states []shareState
	open := d.failures.any(claim.Shares)
	for _, share := range claim.Shares {
		attacher := d.attacherOf(share)
		if attacher == nil {
			if reporter, ok := d.recordedKind(share).(Reporter); ok && !share.AdminAccess {
				states = append(states, shareState{Share: share, conditions: reporter.Conditions(share)})
			}
			continue
		}
		s := shareState{Share: share}
		for _, a := range all {
			if a.Share != share.Name {
				continue
			}
			state, err := attacher.Read(ctx, share, a)
			if err != nil {
				return nil, err
			}
			s.links = append(s.links, linkState{pod: a.Pod, State: state})
		}
		open = open || len(s.links) == 0
		states = append(states, s)
	}
	if open {
		if err := d.askAboutPods(ctx, claim, states); err != nil {
			return nil, err
		}
	}
	for i := range states {
		states[i].failed = d.failures.of(states[i].Name)
	}
	return states, nil
}

// askAboutPods forgets failures of pods that the claim is no longer reserved
// for, since nothing else tells that a pod is gone that was never attached, and
// finds pods whose containers do not name the claim.
func (d *Driver) askAboutPods(ctx context.Context, claim *record.Claim, states []shareState) error {
	current, err := d.current(ctx, claim)
	if current == nil || err != nil {
		return err
	}
	reserved := map[string]bool{}
	var pods []*corev1.Pod
	group := false // a consumer of another kind may stand for any pod
	for _, consumer := range current.Status.ReservedFor {
		if consumer.Resource != "pods" || consumer.APIGroup != "" {
			group = true
			continue
		}
		reserved[string(consumer.UID)] = true
		pod, err := d.options.Client.CoreV1().Pods(claim.Namespace).Get(ctx, consumer.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsForbidden(err): // told once; what else there is to report does not depend on it
			d.degraded(ctx, "PodsNotReadable", "pods whose containers do not name their claim are not found out: may the plugin get pods?", err)
		case apierrors.IsNotFound(err):
		case err != nil:
			return err
		case pod.UID == consumer.UID:
			pods = append(pods, pod)
		}
	}
	if group {
		for _, pod := range d.failures.pods(claim.Shares) {
			there, err := d.options.Client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
			if err != nil && !apierrors.IsNotFound(err) {
				return err
			}
			reserved[pod.UID] = err == nil && string(there.UID) == pod.UID
		}
	}
	d.failures.keep(claim.Shares, reserved)
	for i := range states {
		if len(states[i].links) > 0 || states[i].conditions != nil {
			continue
		}
		for _, pod := range pods {
			if !names(pod, claim.Name, states[i].Request) {
				states[i].unreferenced = append(states[i].unreferenced, attach.Pod{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name})
			}
		}
	}
	return nil
}

// names tells whether a container of the pod names the claim, or that request
// of it.
func names(pod *corev1.Pod, claim, request string) bool {
	entries := map[string]bool{}
	for _, e := range pod.Spec.ResourceClaims {
		if e.ResourceClaimName != nil && *e.ResourceClaimName == claim {
			entries[e.Name] = true
		}
	}
	for _, s := range pod.Status.ResourceClaimStatuses {
		if s.ResourceClaimName != nil && *s.ResourceClaimName == claim {
			entries[s.Name] = true
		}
	}
	request, _, _ = strings.Cut(request, "/") // a container names no alternative
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for _, c := range containers {
			for _, r := range c.Resources.Claims {
				if entries[r.Name] && (r.Request == "" || r.Request == request) {
					return true
				}
			}
		}
	}
	return len(entries) == 0 // an extended resource, or a group's: nothing to go by
}

// rows is the status of a claim's shares.
func (d *Driver) rows(shares []shareState) ([]resourceapi.AllocatedDeviceStatus, error) {
	rows := make([]resourceapi.AllocatedDeviceStatus, 0, len(shares))
	for _, s := range shares {
		row, err := statusRow(d.options.DriverName, s)
		if err != nil {
			return nil, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// failures remembers why attaches failed, until they succeed or the pod or
// claim is gone: by share, then pod UID.
type failures struct {
	mu   sync.Mutex
	seen map[string]map[string]failure
}

type failure struct {
	pod  attach.Pod
	text string
}

func (f *failures) note(share string, pod attach.Pod, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		delete(f.seen[share], pod.UID)
		if len(f.seen[share]) == 0 {
			delete(f.seen, share)
		}
		return
	}
	if f.seen == nil {
		f.seen = map[string]map[string]failure{}
	}
	if f.seen[share] == nil {
		f.seen[share] = map[string]failure{}
	}
	f.seen[share][pod.UID] = failure{pod: pod, text: err.Error()}
}

// pods that were refused a share of these.
func (f *failures) pods(shares []record.Share) (pods []attach.Pod) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range shares {
		for _, refused := range f.seen[s.Name] {
			pods = append(pods, refused.pod)
		}
	}
	return pods
}

func (f *failures) of(share string) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var texts []string
	for _, refused := range f.seen[share] {
		texts = append(texts, refused.text)
	}
	return texts
}

func (f *failures) any(shares []record.Share) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range shares {
		if len(f.seen[s.Name]) > 0 {
			return true
		}
	}
	return false
}

// keep forgets the failures of all pods but these, by UID.
func (f *failures) keep(shares []record.Share, pods map[string]bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range shares {
		for uid := range f.seen[s.Name] {
			if !pods[uid] {
				delete(f.seen[s.Name], uid)
			}
		}
	}
}

func (f *failures) forgetClaim(shares []record.Share) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range shares {
		delete(f.seen, s.Name)
	}
}

// linkState is an attachment of a share with its pod.
type linkState struct {
	pod attach.Pod
	State
}

func rawExtension(v any) (*runtime.RawExtension, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return &runtime.RawExtension{Raw: raw}, nil
}
