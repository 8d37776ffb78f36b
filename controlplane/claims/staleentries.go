package claims

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/internal/claimref"
	"github.com/dra-shared/dra-driver-shared/internal/podstatus"
)

// Two things that Kubernetes' resource claim controller gets wrong become
// everyday where a claim is held for longer than its pods:
//
//   - It reserves the claim for a pod that has ended and is still there, takes that
//     back, and does both again, as fast as it may write, for as long as the pod is
//     there (kubernetes/kubernetes#141274; all versions to 1.37). It leaves a pod
//     alone whose UID is in any entry, and an entry alone that is not a pod's: one
//     of ours, with the pod's UID, keeps it quiet.
//   - Before 1.36 it leaves a claim alone that is reserved for anything but pods:
//     entries of pods that are gone stay, until there is no room for others
//     (kubernetes/kubernetes#136406).

// MaxTerminalPods is how many pods that have ended may keep their place in a claim that
// cannot get further ones: as many as a node runs (110, unless the kubelet is told
// otherwise) must find room beside them. Above that the first of the two is left to
// Kubernetes.
const MaxTerminalPods = MaxPods - 128

// terminalPodEntry is the entry of a pod that has ended.
func terminalPodEntry(p Pod) resourceapi.ResourceClaimConsumerReference {
	return resourceapi.ResourceClaimConsumerReference{APIGroup: scheduling.GroupName, Resource: "pods", Name: p.Name, UID: p.UID}
}

// IsTerminalPodEntry tells whether an entry is one of ours for a pod that has ended.
func IsTerminalPodEntry(r resourceapi.ResourceClaimConsumerReference) bool {
	return r.APIGroup == scheduling.GroupName && r.Resource == "pods"
}

// StaleEntriesChange says how the entries of pods that use a held claim no more must
// change: those that have ended get one of ours as long as no more than atMost
// have, and those of pods that are gone go.
func StaleEntriesChange(claim *resourceapi.ResourceClaim, pods []Pod, gone []types.UID, atMost int) (c Change) {
	if claim.Status.Allocation == nil || claim.DeletionTimestamp != nil {
		return c
	}
	there, kept := map[types.UID]bool{}, map[types.UID]bool{}
	for _, r := range claim.Status.ReservedFor {
		there[r.UID] = true
		if IsTerminalPodEntry(r) {
			kept[r.UID] = true
		}
	}
	if len(gone) > 0 && len(gone) == len(there) {
		return Change{Deallocate: true} // see ReleaseChange
	}
	c.Remove, c.Precondition = gone, len(gone) > 0
	count, room := len(kept), resourceapi.ResourceClaimReservedForMaxSize-len(there)+len(gone)
	for _, p := range pods {
		// Kubernetes leaves one alone that is being deleted.
		if !p.Terminal || !p.Bound || p.Terminating || kept[p.UID] || count >= atMost {
			continue
		}
		if !there[p.UID] { // or else its entry becomes ours
			if room == 0 {
				continue
			}
			room--
		}
		c.Add = append(c.Add, terminalPodEntry(p))
		kept[p.UID] = true
		count++
	}
	return c
}

// PodLookup finds out about the pods of a claim.
type PodLookup struct {
	// APIReader reads from the API server.
	APIReader client.Reader
	// ClusterLeavesStaleEntries tells that nobody else removes entries of pods from a claim that is
	// reserved for anything else, as ClusterLeavesStaleEntries says.
	ClusterLeavesStaleEntries bool
}

// PodsUsing are pods that use a claim, by its name or by a template: those that have
// ended, and all if entries of all may have to be removed. The API server may answer
// from its cache.
func (f PodLookup) PodsUsing(ctx context.Context, claim *resourceapi.ResourceClaim) (users []Pod, err error) {
	selector := endedPods
	if f.ClusterLeavesStaleEntries {
		selector = fields.Everything()
	}
	var pods corev1.PodList
	if err := f.APIReader.List(ctx, &pods, client.InNamespace(claim.Namespace), client.MatchingFieldsSelector{Selector: selector}, &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: "0"}}); err != nil {
		return nil, fmt.Errorf("list pods of namespace %s: %w", claim.Namespace, err)
	}
	for i := range pods.Items {
		if pod := &pods.Items[i]; len(claimref.Entries(pod, claim.Name)) > 0 {
			users = append(users, Pod{Name: pod.Name, UID: pod.UID, Bound: pod.Spec.NodeName != "", Terminating: pod.DeletionTimestamp != nil,
				Terminal: podstatus.IsTerminal(pod)})
		}
	}
	return users, nil
}

// endedPods selects what a pod that has ended is not.
var endedPods = fields.AndSelectors(
	fields.OneTermNotEqualSelector("status.phase", string(corev1.PodPending)),
	fields.OneTermNotEqualSelector("status.phase", string(corev1.PodRunning)),
	fields.OneTermNotEqualSelector("status.phase", string(corev1.PodUnknown)))

// EntriesToCheck are the claim's entries of pods that nobody else removes.
func (f PodLookup) EntriesToCheck(claim *resourceapi.ResourceClaim) (entries []resourceapi.ResourceClaimConsumerReference) {
	ofPod := func(r resourceapi.ResourceClaimConsumerReference) bool {
		return r.APIGroup == "" && r.Resource == "pods"
	}
	stuck := f.ClusterLeavesStaleEntries && slices.ContainsFunc(claim.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool { return !ofPod(r) })
	for _, r := range claim.Status.ReservedFor {
		if IsTerminalPodEntry(r) || stuck && ofPod(r) {
			entries = append(entries, r)
		}
	}
	return entries
}

// DeletedPods are the UIDs of the claim's entries whose pods are gone, of which users are
// known to be there.
func (f PodLookup) DeletedPods(ctx context.Context, claim *resourceapi.ResourceClaim, users []Pod) (gone []types.UID, err error) {
	for _, r := range f.EntriesToCheck(claim) {
		if slices.ContainsFunc(users, func(p Pod) bool { return p.UID == r.UID }) {
			continue
		}
		var pod corev1.Pod
		err := f.APIReader.Get(ctx, types.NamespacedName{Namespace: claim.Namespace, Name: r.Name}, &pod)
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("look whether pod %s, for which claim %s is reserved, is there: %w", r.Name, claim.Name, err)
		}
		if err != nil || pod.UID != r.UID {
			gone = append(gone, r.UID)
		}
	}
	return gone, nil
}

// ClusterLeavesStaleEntries tells whether the cluster's resource claim controller is of a
// version that leaves the entries of pods that are gone in claims which are held.
func ClusterLeavesStaleEntries(cluster discovery.ServerVersionInterface) (bool, error) {
	version, err := cluster.ServerVersion()
	if err != nil {
		return false, fmt.Errorf("ask the API server for its version: %w", err)
	}
	minor, err := strconv.Atoi(strings.TrimRight(version.Minor, "+"))
	if err != nil {
		return false, fmt.Errorf("the API server's version %s.%s: the minor version is no number: %w", version.Major, version.Minor, err)
	}
	return version.Major == "1" && minor < 36, nil
}
