// Package admission is what users meet first: what they write is checked, and
// completed, when they write it.
//
// A pod of a PodGroup gets the group's claims (join), for a reference to a
// template cannot be redirected once the pod exists. Every pod with claims of
// the driver gets them into its containers (references). Templates of pods keep
// the name of their group (templates). Parameters are held against the same code
// as on the node (parameters). What is decided is a function of what is read;
// handlers read, and answer with a patch.
package admission

import (
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
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/dra-shared/dra-driver-shared/api"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
	"github.com/dra-shared/dra-driver-shared/controlplane/podgroups"
)

// Pods is the webhook for pods.
type Pods struct {
	// Client reads from a cache.
	Client client.Client
	// APIReader reads from the API server: a PodGroup that has just been created is
	// there, and one that has been deleted is not.
	APIReader client.Reader
	Mode      mode.Mode
	Driver    string
	Shards    *Shards
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
		return patch(before, &pod, restore(&old, &pod))
	}
	warnings := misspelt(&pod)
	pg, more, err := p.group(ctx, &pod, string(req.UID))
	warnings = append(warnings, more...)
	if err != nil {
		return refuse(err, warnings)
	}
	more, err = p.refer(ctx, &pod, pg)
	warnings = append(warnings, more...)
	if err != nil {
		return refuse(err, warnings)
	}
	return patch(before, &pod, warnings)
}

// misspelt warns of annotations that look like ours and are not: nobody would
// heed them.
func misspelt(pod *corev1.Pod) (warnings []string) {
	known := []string{scheduling.GroupAnnotation, scheduling.AdmittedAnnotation, ReferencesAnnotation}
	for _, key := range slices.Sorted(maps.Keys(pod.Annotations)) {
		if domain, _, _ := strings.Cut(key, "/"); (domain == scheduling.GroupName || domain == api.DriverName) && !slices.Contains(known, key) {
			warnings = append(warnings, fmt.Sprintf("metadata.annotations[%q] means nothing: a pod's are %s and %s", key, scheduling.GroupAnnotation, ReferencesAnnotation))
		}
	}
	return warnings
}

// deniedError is of what the user must change, or wait for.
type deniedError struct{ error }

func denied(format string, args ...any) error { return deniedError{fmt.Errorf(format, args...)} }

func refuse(err error, warnings []string) admission.Response {
	if d := (deniedError{}); errors.As(err, &d) {
		return admission.Denied(err.Error()).WithWarnings(warnings...)
	}
	return admission.Errored(http.StatusInternalServerError, err)
}

// patch is what has changed between two readings of one object: fields that this
// version of the API's types does not know are in neither, and stay.
func patch(before, after any, warnings []string) admission.Response {
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

// group makes a pod one of the group that it names, and returns that, if it is one
// of ours.
func (p *Pods) group(ctx context.Context, pod *corev1.Pod, request string) (*scheduling.PodGroup, []string, error) {
	name, annotated, err := groupOf(pod)
	if err != nil || name == "" {
		return nil, nil, err
	}
	var pg scheduling.PodGroup
	err = p.APIReader.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: name}, &pg)
	switch {
	case apierrors.IsNotFound(err) && p.Mode == mode.Native && !annotated:
		return nil, nil, nil // one of Kubernetes' own PodGroups
	case apierrors.IsNotFound(err):
		return nil, nil, denied("PodGroup %q does not exist in namespace %q: create it first (kind PodGroup of %s); a Deployment or Job tries its pods again by itself", name, pod.Namespace, scheduling.GroupVersion)
	case err != nil:
		return nil, nil, fmt.Errorf("look up PodGroup %q: %w", name, err)
	case pg.DeletionTimestamp != nil:
		return nil, nil, denied("PodGroup %q is being deleted: it takes no more pods; wait until it is gone, and create it anew", name)
	}
	j := joining{group: &pg, request: request, native: p.Mode == mode.Native, shard: func(entry string) (int, error) { return p.shard(ctx, &pg, entry, request) }}
	warnings, err := j.join(pod)
	return &pg, warnings, err
}

// groupOf is the PodGroup that a pod names, and whether by the annotation.
func groupOf(pod *corev1.Pod) (name string, annotated bool, err error) {
	name, annotated = pod.Annotations[scheduling.GroupAnnotation]
	if annotated && name == "" {
		return "", true, denied("metadata.annotations[%q]: is empty: name a PodGroup, or leave it out", scheduling.GroupAnnotation)
	}
	field := ""
	if g := pod.Spec.SchedulingGroup; g != nil && g.PodGroupName != nil {
		field = *g.PodGroupName
	}
	switch {
	case !annotated:
		return field, false, nil
	case field != "" && field != name:
		return "", true, denied("metadata.annotations[%q] names PodGroup %q, and spec.schedulingGroup.podGroupName %q: a pod is in one", scheduling.GroupAnnotation, name, field)
	}
	return name, true, nil
}

// noShard is for claims that are one, for all pods.
const noShard = -1

// shard is the number of the claim for a pod more, or noShard if one claim serves
// all pods.
func (p *Pods) shard(ctx context.Context, pg *scheduling.PodGroup, entry, request string) (int, error) {
	if p.Mode == mode.Native {
		return noShard, nil
	}
	spec, err := p.specOf(ctx, pg, entry)
	if err != nil || spec == nil || !claims.RequestsFabric(spec, p.Driver) {
		return noShard, err
	}
	return p.Shards.next(pg.Namespace, request, func(n int) string { return claims.Name(podgroups.Owner(pg), entry, n) })
}

// specOf is what the claim of a group's entry asks for: the claim's own, as long
// as there is none its template's.
func (p *Pods) specOf(ctx context.Context, pg *scheduling.PodGroup, entry string) (*resourceapi.ResourceClaimSpec, error) {
	var claim resourceapi.ResourceClaim
	err := p.Client.Get(ctx, types.NamespacedName{Namespace: pg.Namespace, Name: claims.Name(podgroups.Owner(pg), entry, 0)}, &claim)
	if err == nil || !apierrors.IsNotFound(err) {
		return &claim.Spec, err
	}
	for _, c := range pg.Spec.ResourceClaims {
		if c.Name == entry && c.ResourceClaimTemplateName != nil {
			return p.template(ctx, pg.Namespace, *c.ResourceClaimTemplateName)
		}
	}
	return nil, nil
}

// template is what a template's claims ask for; nil if there is no such.
func (p *Pods) template(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaimSpec, error) {
	var t resourceapi.ResourceClaimTemplate
	err := p.get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, &t)
	if err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return &t.Spec.Spec, nil
}

// get reads from the cache, and what is not there from the API server: a user
// creates a template and its pod in one go.
func (p *Pods) get(ctx context.Context, name types.NamespacedName, into client.Object) error {
	err := p.Client.Get(ctx, name, into)
	if apierrors.IsNotFound(err) {
		return p.APIReader.Get(ctx, name, into)
	}
	return err
}
