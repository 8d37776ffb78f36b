// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package admission has the webhooks that validate and complete pods, templates of
// pods, and the driver's parameters.
//
//   - join.go: a pod of a PodGroup gets the PodGroup's claims, because a pod's
//     reference to a claim template cannot change after the pod is created.
//   - listedclaims.go, workload.go, joinlisted.go, joinreplica.go: the same for the claims of a Job or a replica,
//     which are validated when the Job, CronJob, JobSet, StatefulSet, or LeaderWorkerSet is
//     created.
//   - queues.go: Kueue workloads of pods with shared claims.
//   - references.go: the containers of a pod get references to its claims of the driver, because a container without a
//     reference does not get a device.
//   - samename.go: PodGroups of Kubernetes with the name of one of the driver's.
//   - native.go: in native mode, Kubernetes schedules the pods of a PodGroup together.
//   - update.go: an update of a pod keeps what admission changed at creation.
//   - templates.go: a pod template keeps the name of its PodGroup in an
//     annotation, for clusters that drop the field.
//   - parameters.go, parameterkinds.go: parameters pass the same validation as on the node.
//   - addresspools.go: AddressPools pass the same validation as in the controller and on the node.
//   - holds.go: the controller holds a claim of others only for a PodGroup that names it.
//   - denial.go: the reasons for denials, which a metric counts.
//   - shards.go: counts pods per claim, to choose the claim of the next pod.
//   - leaderelection.go: lets the leading replica choose it.
//
// A handler reads objects, decides by functions without I/O, and answers with a
// patch, a denial, or warnings.
package admission

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/dra-shared/dra-driver-shared/api"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/controlplane/podgroups"
)

// Pods is the webhook for pods.
type Pods struct {
	// Client reads from a cache.
	Client client.Reader
	// APIReader reads from the API server, because the cache may lack a PodGroup that
	// was just created, and may still have a deleted one.
	APIReader client.Reader
	// Mapper finds out which types the API server serves.
	Mapper meta.RESTMapper
	Mode   mode.Mode
	Driver string
	Shards *Shards
	// JobClaims enables claims that the pods of a Job share, and ReplicaClaims enables claims that the pods of a replica
	// share.
	JobClaims, ReplicaClaims bool
	// Kueue denies pods that share claims and that Kueue would never admit.
	Kueue bool
}

// Handle implements admission.Handler.
func (p *Pods) Handle(ctx context.Context, req admission.Request) admission.Response {
	var pod corev1.Pod
	if err := json.Unmarshal(req.Object.Raw, &pod); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	pod.Namespace = req.Namespace
	before := pod.DeepCopy()
	if len(req.OldObject.Raw) > 0 {
		var old corev1.Pod
		if err := json.Unmarshal(req.OldObject.Raw, &old); err != nil {
			return admission.Errored(http.StatusBadRequest, err)
		}
		return patchResponse(before, &pod, keepAdmitted(&old, &pod))
	}
	request := string(req.UID)
	if ptr.Deref(req.DryRun, false) {
		request = "" // the pod does not need room in a claim
	}
	warnings, err := p.complete(ctx, &pod, request)
	if err != nil {
		return p.errorResponse(ctx, &pod, err, warnings)
	}
	return patchResponse(before, &pod, warnings)
}

// errorResponse answers as the function errorResponse does, except that it allows a pod without changes if an internal
// error occurs and no annotation says that the pod needs the driver. An outage must not keep pods of other drivers from
// starting. The policy Ignore of their webhook is not enough for that: it applies only if the webhook does not answer.
func (p *Pods) errorResponse(
	ctx context.Context, pod *corev1.Pod, err error, warnings []string,
) admission.Response {
	var denial *deniedError
	if errors.As(err, &denial) || p.needsDriver(pod) {
		return errorResponse(err, warnings)
	}
	name := cmp.Or(pod.Name, pod.GenerateName)
	klog.FromContext(ctx).Error(err, "Failed to check pod; allowed it unchanged", "pod", klog.KRef(pod.Namespace, name))
	return admission.Allowed("").WithWarnings(append(warnings, fmt.Sprintf(
		"admission could not check the pod: %v; if it uses a device of %s and no container references the claim in "+
			"resources.claims, delete the pod and create it again", err, p.Driver))...)
}

// needsDriver reports whether the pod has an annotation that makes the chart's webhook use the failure policy Fail.
func (p *Pods) needsDriver(pod *corev1.Pod) bool {
	annotations := []string{scheduling.GroupAnnotation}
	if p.JobClaims {
		annotations = append(annotations, scheduling.JobClaimsAnnotation)
	}
	if p.ReplicaClaims {
		annotations = append(annotations, scheduling.ReplicaClaimsAnnotation)
	}
	return slices.ContainsFunc(annotations, func(key string) bool { return metav1.HasAnnotation(pod.ObjectMeta, key) })
}

// complete changes a pod that is being created, and returns warnings for the user. request is the
// UID of the admission request; "" in a dry run.
func (p *Pods) complete(ctx context.Context, pod *corev1.Pod, request string) ([]string, error) {
	warnings := p.unknownAnnotations(pod)
	group, joinWarnings, err := p.joinPodGroup(ctx, pod, request)
	warnings = append(warnings, joinWarnings...)
	if err != nil {
		return warnings, err
	}
	shared, listedWarnings, err := p.joinListed(ctx, pod, request)
	warnings = append(warnings, listedWarnings...)
	if err != nil {
		return warnings, err
	}
	if p.Kueue {
		if err := checkQueuedPod(pod); err != nil {
			return warnings, err
		}
	}
	referenceWarnings, err := p.addClaimReferences(ctx, pod, group, shared)
	return append(warnings, referenceWarnings...), err
}

// unknownAnnotations returns warnings about annotations that have a prefix of the
// driver and no effect, such as misspelled ones.
func (p *Pods) unknownAnnotations(pod *corev1.Pod) (warnings []string) {
	usable := []string{scheduling.GroupAnnotation, v1alpha1.ClaimReferencesAnnotation}
	if p.JobClaims {
		usable = append(usable, scheduling.JobClaimsAnnotation)
	}
	if p.ReplicaClaims {
		usable = append(usable, scheduling.ReplicaClaimsAnnotation)
	}
	if p.JobClaims || p.ReplicaClaims {
		usable = append(usable, scheduling.GatesAnnotation)
	}
	for _, key := range slices.Sorted(maps.Keys(pod.Annotations)) {
		domain, _, _ := strings.Cut(key, "/")
		isDriver := domain == scheduling.GroupName || domain == api.DriverName
		if isDriver && key != scheduling.AdmittedAnnotation && !slices.Contains(usable, key) {
			warnings = append(warnings, fmt.Sprintf(
				"metadata.annotations[%q] has no effect: the driver's annotations for pods are %s",
				key, strings.Join(usable, ", ")))
		}
	}
	return warnings
}

// patchResponse allows the request, with the difference between two states of an object as the
// patch. The patch does not change fields that the API types of this release lack, because they are
// in neither state.
func patchResponse(before, after any, warnings []string) admission.Response {
	from, err := json.Marshal(before)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, err)
	}
	to, err := json.Marshal(after)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, err)
	}
	return admission.PatchResponseFromRaw(from, to).WithWarnings(warnings...)
}

// joinPodGroup adds the pod to the PodGroup that it names, and returns the PodGroup; nil if the pod names none.
func (p *Pods) joinPodGroup(
	ctx context.Context, pod *corev1.Pod, request string,
) (group *scheduling.PodGroup, warnings []string, err error) {
	name, annotated, err := podGroupName(pod)
	if err != nil || name == "" {
		return nil, nil, err
	}
	key, keepField := types.NamespacedName{Namespace: pod.Namespace, Name: name}, false
	if annotated {
		if group, err = p.annotatedPodGroup(ctx, key); err == nil && pod.Spec.SchedulingGroup != nil {
			keepField, err = hasSameName(ctx, p.APIReader, p.Mapper, key)
		}
	} else {
		group, warnings, err = p.podGroupOfField(ctx, pod, key)
	}
	if err != nil || group == nil {
		return nil, warnings, err
	}
	if err := p.checkScheduling(ctx, pod, group); err != nil {
		return nil, nil, err
	}
	j := joiner{
		group: group, request: request, native: p.Mode == mode.Native, keepField: keepField,
		assignShard: func(entry string) (int, error) { return p.assignShard(ctx, group, entry, request) },
	}
	warnings, err = j.join(pod)
	return group, warnings, err
}

// annotatedPodGroup returns the PodGroup that a pod names in its annotation. It denies the pod if the pod
// cannot join it.
func (p *Pods) annotatedPodGroup(ctx context.Context, key types.NamespacedName) (*scheduling.PodGroup, error) {
	var group scheduling.PodGroup
	err := p.APIReader.Get(ctx, key, &group)
	switch {
	case apierrors.IsNotFound(err):
		return nil, denied(reasonPodGroupMissing,
			"PodGroup %q does not exist in namespace %q: create it first (kind PodGroup of %s); "+
				"a Deployment or Job retries its pods", key.Name, key.Namespace, scheduling.GroupVersion)
	case err != nil:
		return nil, fmt.Errorf("look up PodGroup %q: %w", key.Name, err)
	case group.DeletionTimestamp != nil:
		return nil, denied(reasonPodGroupTerminating, "PodGroup %q is being deleted and accepts no more pods: "+
			"wait until it is deleted, then create it again", key.Name)
	}
	return &group, nil
}

// podGroupOfField returns the driver's PodGroup that a pod names in spec.schedulingGroup. If the driver does not have a
// PodGroup of that name, or Kubernetes also has one, the pod means Kubernetes' PodGroup, even if the cluster does not
// support claims of PodGroups. podGroupOfField then returns nil, with warnings, and never denies the pod.
func (p *Pods) podGroupOfField(
	ctx context.Context, pod *corev1.Pod, key types.NamespacedName,
) (*scheduling.PodGroup, []string, error) {
	others, unknown := p.isKubernetesPodGroup(ctx, key)
	if others {
		return nil, nil, nil
	}
	var group scheduling.PodGroup
	err := p.APIReader.Get(ctx, key, &group)
	if apierrors.IsNotFound(err) {
		return nil, warnWithoutPodGroup(pod, key.Name, unknown == nil), nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("look up PodGroup %q: %w", key.Name, err)
	}
	sameName, err := hasSameName(ctx, p.APIReader, p.Mapper, key)
	switch {
	case err != nil:
		return nil, nil, err
	case sameName:
		return nil, []string{sameNameWarning(fieldOfPodGroup, key.Name)}, nil
	case group.DeletionTimestamp != nil:
		return nil, []string{fmt.Sprintf("%s: PodGroup %q of %s is being deleted, and the pod does not share its claims",
			fieldOfPodGroup, key.Name, scheduling.GroupVersion)}, nil
	}
	return &group, nil, nil
}

// fieldOfPodGroup is the path of the pod field that names a PodGroup of Kubernetes.
const fieldOfPodGroup = "spec.schedulingGroup.podGroupName"

// isKubernetesPodGroup reports whether Kubernetes has the PodGroup, and the cache does not have the driver's PodGroup
// with that name. It saves a second request to the API server for pods that do not use the driver. It returns an error
// if Kubernetes' PodGroups cannot be read.
func (p *Pods) isKubernetesPodGroup(ctx context.Context, group types.NamespacedName) (bool, error) {
	if err := p.Client.Get(ctx, group, &scheduling.PodGroup{}); !apierrors.IsNotFound(err) {
		return false, nil // the caller reads the driver's PodGroup and compares
	}
	return hasSameName(ctx, p.APIReader, p.Mapper, group)
}

// warnWithoutPodGroup returns a warning for a pod with claims if its field names a PodGroup that does not exist in the
// driver or in Kubernetes. known is false if it is unknown whether Kubernetes has it; there is no warning then.
func warnWithoutPodGroup(pod *corev1.Pod, name string, known bool) []string {
	if !known || len(pod.Spec.ResourceClaims) == 0 {
		return nil
	}
	return []string{fmt.Sprintf("%s: no PodGroup %q of %s exists in namespace %q: "+
		"if the pod is to share its claims, delete it, create the PodGroup, and create the pod again; "+
		"with the annotation %s instead of the field, admission denies pods before their PodGroup exists",
		fieldOfPodGroup, name, scheduling.GroupVersion, pod.Namespace, scheduling.GroupAnnotation)}
}

// podGroupName returns the name of the PodGroup that a pod names, and whether it
// names it in the annotation.
func podGroupName(pod *corev1.Pod) (name string, annotated bool, err error) {
	name, annotated = pod.Annotations[scheduling.GroupAnnotation]
	if annotated && name == "" {
		return "", true, denied(reasonInvalid,
			"metadata.annotations[%q]: must not be empty: name a PodGroup, or omit the annotation",
			scheduling.GroupAnnotation)
	}
	field := ""
	if g := pod.Spec.SchedulingGroup; g != nil && g.PodGroupName != nil {
		field = *g.PodGroupName
	}
	if !annotated {
		return field, false, nil
	}
	if field != "" && field != name {
		return "", true, twoPodGroups("", name, field)
	}
	return name, true, nil
}

// twoPodGroups denies a pod, or a pod template at path, if its annotation and its field name different PodGroups.
func twoPodGroups(path, annotation, field string) error {
	return denied(reasonConflict,
		"%smetadata.annotations[%q] names PodGroup %q, but spec.schedulingGroup.podGroupName names %q: "+
			"a pod can be in only one PodGroup", path, scheduling.GroupAnnotation, annotation, field)
}

// notSharded stands for the number of a shard where one claim serves all pods.
const notSharded = -1

// assignShard returns the number of the claim that serves one more pod of a
// PodGroup's entry, or notSharded if one claim serves all pods.
func (p *Pods) assignShard(ctx context.Context, group *scheduling.PodGroup, entry, request string) (int, error) {
	if p.Mode == mode.Native {
		return notSharded, nil
	}
	spec, err := p.entrySpec(ctx, group, entry)
	if err != nil || spec == nil {
		return notSharded, err
	}
	isFabric, err := claims.RequestsFabric(spec, p.Driver, p.deviceClass(ctx))
	if err != nil || !isFabric {
		return notSharded, err
	}
	first := claims.Name(podgroups.Owner(group), entry, 0)
	return p.Shards.assign(ctx, shardQuestion{Namespace: group.Namespace, Claim: first, Request: request})
}

// entrySpec returns the spec of the claim that is generated for a PodGroup's entry. It is the claim's spec, or the
// template's before the claim exists. It returns nil if neither exists.
func (p *Pods) entrySpec(
	ctx context.Context, group *scheduling.PodGroup, entry string,
) (*resourceapi.ResourceClaimSpec, error) {
	var claim resourceapi.ResourceClaim
	name := claims.Name(podgroups.Owner(group), entry, 0)
	err := p.Client.Get(ctx, types.NamespacedName{Namespace: group.Namespace, Name: name}, &claim)
	if err == nil || !apierrors.IsNotFound(err) {
		return &claim.Spec, err
	}
	for _, c := range group.Spec.ResourceClaims {
		if c.Name == entry && c.ResourceClaimTemplateName != nil {
			return p.templateSpec(ctx, group.Namespace, *c.ResourceClaimTemplateName)
		}
	}
	return nil, nil
}

// templateSpec returns the spec of the claims that a template generates, or nil if
// the template does not exist.
func (p *Pods) templateSpec(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaimSpec, error) {
	var t resourceapi.ResourceClaimTemplate
	if err := p.get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, &t); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return &t.Spec.Spec, nil
}

// claimSpec returns the spec of a claim, or nil if the claim does not exist.
func (p *Pods) claimSpec(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaimSpec, error) {
	var c resourceapi.ResourceClaim
	if err := p.get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, &c); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return &c.Spec, nil
}

// deviceClass returns a function that returns a DeviceClass, or nil if it does not exist.
func (p *Pods) deviceClass(ctx context.Context) func(string) (*resourceapi.DeviceClass, error) {
	return func(name string) (*resourceapi.DeviceClass, error) {
		var class resourceapi.DeviceClass
		err := p.get(ctx, types.NamespacedName{Name: name}, &class)
		if apierrors.IsNotFound(err) {
			return nil, nil
		}
		return &class, err
	}
}

// get reads an object from the cache, or from the API server if the cache does not
// have it: a user may create a template and its pod at the same time.
func (p *Pods) get(ctx context.Context, name types.NamespacedName, into client.Object) error {
	err := p.Client.Get(ctx, name, into)
	if apierrors.IsNotFound(err) {
		return p.APIReader.Get(ctx, name, into)
	}
	return err
}
