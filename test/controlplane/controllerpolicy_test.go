// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"strings"
	"testing"

	admissionregistration "k8s.io/api/admissionregistration/v1"
	batchv1 "k8s.io/api/batch/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

// A thief of the controller's token tries what RBAC permits and the controller never
// does. The other tests show that the policies permit what it does.
func TestPolicy_controller(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil) // it answers the webhook for claims
	ns := e.createNamespace(t, "policy")
	scheme := e.client.Scheme()
	identity := rest.CopyConfig(e.config) // controllerConfig would count what the thief uses
	identity.Impersonate = e.controllerConfig().Impersonate
	thief, err := client.New(identity, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	foreign := result("gpu", otherDriver, "pool")
	claim := e.allocatedClaim(t, ns, ownNode, nil, foreign)
	own := e.allocatedClaim(t, ns, ownNode, []resourceapi.AllocatedDeviceStatus{entry(foreign, "before")},
		result("own", driverName, ownNode), foreign)
	unallocated := fabricClaim(ns, "unallocated")
	unallocated.Annotations = map[string]string{scheduling.ReservedForAnnotation: "apps/deployments/web"}
	pg := e.mustCreateGroup(t, ns, "victim")
	// Another controller generates claims for Jobs.
	ofJob := fabricClaim(ns, "of-job")
	ofJob.OwnerReferences = []metav1.OwnerReference{
		*metav1.NewControllerRef(e.createJob(t, ns), batchv1.SchemeGroupVersion.WithKind("Job")),
	}
	e.create(t, unallocated, ofJob)

	for _, tc := range []struct {
		name string
		try  func(ctx context.Context) error
		want string
	}{
		{"send pods to a webhook of one's own", func(ctx context.Context) error {
			return patch(ctx, thief, mutating(),
				`[{"op":"replace","path":"/webhooks/0/clientConfig","value":{"url":"https://203.0.113.1/"}}]`)
		}, "the controller may change only the caBundle of webhooks"},
		{"make a webhook match all pods", func(ctx context.Context) error {
			return patch(ctx, thief, mutating(),
				`[{"op":"remove","path":"/webhooks/0/matchConditions"}]`)
		}, "the controller may change only the caBundle of webhooks"},
		{"remove a webhook", func(ctx context.Context) error {
			return patch(ctx, thief, validating(),
				`[{"op":"remove","path":"/webhooks/0"}]`)
		}, "the controller may change only the caBundle of webhooks"},
		{"create a claim for no PodGroup", func(ctx context.Context) error {
			return thief.Create(ctx, fabricClaim(ns, "stolen"))
		}, "the controller may create and delete only claims, and PodGroups of Kubernetes, that belong to a PodGroup"},
		{"delete a claim of a Job that was not generated for it", func(ctx context.Context) error {
			return thief.Delete(ctx, ofJob.DeepCopy())
		}, "the controller may create and delete only claims, and PodGroups of Kubernetes, that belong to a PodGroup"},
		{"delete a claim of another driver", func(ctx context.Context) error {
			return thief.Delete(ctx, claim.DeepCopy())
		}, "the controller may create and delete only claims, and PodGroups of Kubernetes, that belong to a PodGroup"},
		{"deallocate a claim of another driver", func(ctx context.Context) error {
			return patchStatus(ctx, thief, claim, `{"status":{"allocation":null,"reservedFor":null}}`)
		}, "the controller may change only claims of PodGroups of the driver"},
		{"reserve a claim of another driver for a pod", func(ctx context.Context) error {
			return patchStatus(ctx, thief, claim,
				`{"status":{"reservedFor":[{"resource":"pods","name":"thief","uid":"1"}]}}`)
		}, "the controller may change only claims of PodGroups of the driver"},
		{"allocate a device to a claim", func(ctx context.Context) error {
			return patchStatus(ctx, thief, unallocated, `{"status":{"allocation":{"devices":{"results":[
				{"request":"fabric","driver":"`+driverName+`","pool":"p","device":"d"}]}}}}`)
		}, "the controller may deallocate claims, but not allocate them"},
		{"forge the status of another driver's device", func(ctx context.Context) error {
			return patchStatus(ctx, thief, own, `{"status":{"devices":[]}}`)
		}, ""}, // Kubernetes 1.36 refuses it before the policy does
		{"take a claim of another driver away from its holder", func(ctx context.Context) error {
			return patch(ctx, thief, unallocated.DeepCopy(), `[{"op":"remove",
				"path":"/metadata/annotations/scheduling.dra-shared.dev~1reserved-for"}]`)
		}, "the controller may change only the status and the annotation scheduling.dra-shared.dev/held of claims"},
		{"give a claim another owner", func(ctx context.Context) error {
			return patch(ctx, thief, claim.DeepCopy(), `[{"op":"add","path":"/metadata/ownerReferences","value":[
				{"apiVersion":"v1","kind":"ConfigMap","name":"none","uid":"1"}]}]`)
		}, "the controller may change only the status and the annotation scheduling.dra-shared.dev/held of claims"},
		{"change the claims of a PodGroup", func(ctx context.Context) error {
			return patch(ctx, thief, pg.DeepCopy(), `[{"op":"add","path":"/metadata/annotations","value":{"a":"b"}}]`)
		}, "the controller may change only the finalizers and the status of PodGroups"},
		{"create a PodGroup of Kubernetes", func(ctx context.Context) error {
			if !e.native {
				return nil // the API server does not serve the type
			}
			basic := schedulingapi.PodGroupSchedulingPolicy{Basic: &schedulingapi.BasicSchedulingPolicy{}}
			return thief.Create(ctx, &schedulingapi.PodGroup{
				ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "stolen"},
				Spec:       schedulingapi.PodGroupSpec{SchedulingPolicy: basic},
			})
		}, "the controller may create and delete only claims, and PodGroups of Kubernetes, that belong to a PodGroup"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.try(t.Context())
			if err == nil && strings.Contains(tc.name, "of Kubernetes") && !e.native {
				t.Skip("the API server does not serve PodGroups of Kubernetes")
			}
			refused := apierrors.IsForbidden(err) || apierrors.IsInvalid(err)
			if !refused || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got error %v, want %q", err, tc.want)
			}
		})
	}
	t.Run("change the caBundle", func(t *testing.T) {
		webhook := mutating()
		if err := e.client.Get(t.Context(), client.ObjectKeyFromObject(webhook), webhook); err != nil {
			t.Fatal(err)
		}
		updated := webhook.DeepCopy()
		for i := range updated.Webhooks {
			updated.Webhooks[i].ClientConfig.CABundle = nil
		}
		if err := thief.Patch(t.Context(), updated, client.MergeFrom(webhook), client.DryRunAll); err != nil {
			t.Errorf("the policy denies it: %v", err)
		}
	})
}

// controllerName is the name of the controller's webhook configurations.
const controllerName = "dra-shared-controller"

func mutating() *admissionregistration.MutatingWebhookConfiguration {
	return &admissionregistration.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: controllerName}}
}

func validating() *admissionregistration.ValidatingWebhookConfiguration {
	return &admissionregistration.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: controllerName}}
}

func patch(ctx context.Context, c client.Client, o client.Object, operations string) error {
	return c.Patch(ctx, o, client.RawPatch(types.JSONPatchType, []byte(operations)), client.DryRunAll)
}

func patchStatus(ctx context.Context, c client.Client, claim *resourceapi.ResourceClaim, merge string) error {
	options := &client.SubResourcePatchOptions{PatchOptions: client.PatchOptions{DryRun: []string{metav1.DryRunAll}}}
	return c.Status().Patch(ctx, claim.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(merge)), options)
}
