// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

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
)

// Two bugs of Kubernetes' resource claim controller rarely matter elsewhere, but
// always where a holder keeps a claim longer than its pods exist:
//
//   - The controller reserves the claim for a terminal pod that still exists, removes the entry, and repeats both as
//     fast as its rate limit permits until the pod is deleted (kubernetes/kubernetes#141274; all versions up to 1.37).
//     It does not touch a pod if any entry has its UID, and does not touch entries that are not for pods. An entry that
//     the driver's controller writes with the pod's UID therefore stops the loop.
//   - Before 1.36, the controller ignores a claim that has an entry for anything but a
//     pod. Entries of deleted pods stay until status.reservedFor is full
//     (kubernetes/kubernetes#136406).

// MaxTerminalPods is the number of terminal pods that get an entry of the controller in a claim if its owner cannot
// generate more shards. The rest of status.reservedFor is for the pods of a full node (110 by default). Kubernetes'
// loop affects the remaining terminal pods.
const MaxTerminalPods = MaxPods - 128

// terminalPodEntry returns the controller's entry for a terminal pod.
func terminalPodEntry(p PodState) resourceapi.ResourceClaimConsumerReference {
	return resourceapi.ResourceClaimConsumerReference{
		APIGroup: scheduling.GroupName, Resource: "pods", Name: p.Name, UID: p.UID,
	}
}

// IsTerminalPodEntry reports whether the entry is the controller's for a terminal pod.
func IsTerminalPodEntry(entry resourceapi.ResourceClaimConsumerReference) bool {
	return entry.APIGroup == scheduling.GroupName && entry.Resource == "pods"
}

// StaleEntriesChange returns the change that maintains the stale entries of a held
// claim: terminal pods get an entry of the controller, up to maxTerminal of them, and the
// entries of deleted pods, given by their UIDs, are removed.
func StaleEntriesChange(
	claim *resourceapi.ResourceClaim, pods []PodState, deleted []types.UID, maxTerminal int,
) Change {
	if claim.Status.Allocation == nil || claim.DeletionTimestamp != nil {
		return Change{}
	}
	present := len(claim.Status.ReservedFor)
	if len(deleted) > 0 && len(deleted) == present {
		return Change{Deallocate: true} // see ReleaseChange
	}
	return Change{
		Add:          missingTerminalEntries(claim, pods, present-len(deleted), maxTerminal),
		Remove:       deleted,
		Precondition: len(deleted) > 0,
	}
}

// missingTerminalEntries returns the entries to add for terminal pods. used is the
// number of entries that the claim keeps.
func missingTerminalEntries(
	claim *resourceapi.ResourceClaim, pods []PodState, used, maxTerminal int,
) []resourceapi.ResourceClaimConsumerReference {
	done := map[types.UID]bool{}
	for _, e := range claim.Status.ReservedFor {
		if IsTerminalPodEntry(e) {
			done[e.UID] = true
		}
	}
	var missing []resourceapi.ResourceClaimConsumerReference
	room := resourceapi.ResourceClaimReservedForMaxSize - used
	for _, p := range pods {
		// Kubernetes' loop does not affect pods that never had a node or that are being
		// deleted.
		affected := p.Terminal && p.Bound && !p.Terminating
		if !affected || done[p.UID] || len(done) >= maxTerminal {
			continue
		}
		// The pod's own entry, which has the same UID, is replaced and does not need room.
		if !IsReservedFor(claim, p.UID) {
			if room == 0 {
				continue
			}
			room--
		}
		missing = append(missing, terminalPodEntry(p))
		done[p.UID] = true
	}
	return missing
}

// PodLookup finds the pods of a claim.
type PodLookup struct {
	// APIReader reads from the API server.
	APIReader client.Reader
	// ClusterLeavesStaleEntries is the result of the function of that name.
	ClusterLeavesStaleEntries bool
}

// PodsUsing returns pods that use the claim, by its name or through a template: all
// of them if the cluster leaves stale entries, otherwise only the terminal ones. The
// API server may answer from its watch cache.
func (l PodLookup) PodsUsing(ctx context.Context, claim *resourceapi.ResourceClaim) ([]PodState, error) {
	selector := terminalPods
	if l.ClusterLeavesStaleEntries {
		selector = fields.Everything()
	}
	var pods corev1.PodList
	err := l.APIReader.List(ctx, &pods, client.InNamespace(claim.Namespace),
		client.MatchingFieldsSelector{Selector: selector},
		&client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: "0"}})
	if err != nil {
		return nil, fmt.Errorf("list pods of namespace %s: %w", claim.Namespace, err)
	}
	var users []PodState
	for i := range pods.Items {
		pod := &pods.Items[i]
		if len(claimref.Entries(pod, claim.Name)) == 0 {
			continue
		}
		users = append(users, PodStateOf(pod))
	}
	return users, nil
}

// terminalPods selects terminal pods. Field selectors do not have an "or", so it excludes the other phases.
var terminalPods = fields.AndSelectors(
	fields.OneTermNotEqualSelector("status.phase", string(corev1.PodPending)),
	fields.OneTermNotEqualSelector("status.phase", string(corev1.PodRunning)),
	fields.OneTermNotEqualSelector("status.phase", string(corev1.PodUnknown)))

// EntriesToCheck returns the claim's entries of pods that Kubernetes does not remove when the pods are deleted: the
// controller's entries for terminal pods and, in clusters that leave stale entries, also the entries of all other pods
// if the claim has an entry for anything but a pod.
func (l PodLookup) EntriesToCheck(claim *resourceapi.ResourceClaim) []resourceapi.ResourceClaimConsumerReference {
	onlyPods := !slices.ContainsFunc(claim.Status.ReservedFor,
		func(e resourceapi.ResourceClaimConsumerReference) bool { return !claimref.IsPodEntry(e) })
	ignoredByCluster := l.ClusterLeavesStaleEntries && !onlyPods
	var entries []resourceapi.ResourceClaimConsumerReference
	for _, e := range claim.Status.ReservedFor {
		if IsTerminalPodEntry(e) || ignoredByCluster && claimref.IsPodEntry(e) {
			entries = append(entries, e)
		}
	}
	return entries
}

// DeletedPods returns the UIDs of EntriesToCheck if their pods no longer exist. It asks the API server about all pods
// except known ones, which the caller has just read.
func (l PodLookup) DeletedPods(
	ctx context.Context, claim *resourceapi.ResourceClaim, known []PodState,
) ([]types.UID, error) {
	var deleted []types.UID
	for _, e := range l.EntriesToCheck(claim) {
		if slices.ContainsFunc(known, func(p PodState) bool { return p.UID == e.UID }) {
			continue
		}
		var pod corev1.Pod
		err := l.APIReader.Get(ctx, types.NamespacedName{Namespace: claim.Namespace, Name: e.Name}, &pod)
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("get pod %s, for which claim %s is reserved: %w", e.Name, claim.Name, err)
		}
		if err != nil || pod.UID != e.UID {
			deleted = append(deleted, e.UID)
		}
	}
	return deleted, nil
}

// ClusterLeavesStaleEntries reports whether the cluster leaves stale entries: before
// Kubernetes 1.36, its resource claim controller does not remove the entries of
// deleted pods from claims that also have an entry for anything but a pod.
func ClusterLeavesStaleEntries(cluster discovery.ServerVersionInterface) (bool, error) {
	version, err := cluster.ServerVersion()
	if err != nil {
		return false, fmt.Errorf("get the version of the API server: %w", err)
	}
	minor, err := strconv.Atoi(strings.TrimRight(version.Minor, "+"))
	if err != nil {
		return false, fmt.Errorf("version %s.%s of the API server: the minor version is not a number: %w",
			version.Major, version.Minor, err)
	}
	return version.Major == "1" && minor < 36, nil
}
