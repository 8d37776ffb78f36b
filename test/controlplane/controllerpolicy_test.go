// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	admissionregistration "k8s.io/api/admissionregistration/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// A thief of the controller's token makes requests that RBAC permits and that the
// controller never makes. The policies deny them. The other tests show that the
// policies permit the requests of the controller.
func TestPolicy_controller(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil) // it answers the webhook for claims
	s := newThief(t, e)
	for _, m := range slices.Concat(
		s.webhookMisuses(), s.claimMisuses(), s.podMisuses(), s.statusMisuses(), s.podGroupMisuses(),
	) {
		t.Run(m.name, func(t *testing.T) { s.expectDenied(t, m) })
	}
	t.Run("hold a claim of another driver for the PodGroup that names it", s.expectHold)
	t.Run("return the address that a pod of a lost node kept", s.expectReturnedAddress)
	t.Run("change the caBundle", s.expectAuthorityChange)
}

// tokenThief has the identity of the controller, and the objects that it tries to misuse.
type tokenThief struct {
	*testEnv
	ns       string
	identity client.Client
	// claim and own are allocated: claim has a device of another driver only, and own also one of the driver. The owner of
	// ofJob is a Job, and the owner of ofGroup is the group.
	claim, own, unallocated, ofJob, ofGroup *resourceapi.ResourceClaim
	group, named                            *scheduling.PodGroup // named names the claim
	pod                                     *corev1.Pod
	inService                               *network.AddressBlock // of a node in service
}

// newThief creates the objects.
func newThief(t *testing.T, e *testEnv) *tokenThief {
	t.Helper()
	ns := e.createNamespace(t, "policy")
	scheme := e.client.Scheme()
	identity := rest.CopyConfig(e.config) // controllerConfig would record the rights that the thief uses
	identity.Impersonate = e.controllerConfig().Impersonate
	impostor, err := client.New(identity, client.Options{Scheme: scheme})
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
	// A user makes a PodGroup the owner of a claim. Both are then deleted together.
	ofGroup := fabricClaim(ns, "of-group")
	ofGroup.OwnerReferences = []metav1.OwnerReference{
		*metav1.NewControllerRef(pg, scheduling.GroupVersion.WithKind(scheduling.Kind)),
	}
	pod := newPod(ns, "victim", 0)
	pod.Annotations, pod.Spec.ResourceClaims = nil, nil
	pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/queue"}}
	inService := addressBlock("storage-4-0a150001", ownNode, "10.21.0.1-10.21.0.1")
	e.create(t, unallocated, ofJob, ofGroup, pod, inService)
	t.Cleanup(func() { _ = e.client.Delete(context.Background(), inService) }) // the cluster is removed anyway
	named := e.mustCreateGroup(t, ns, "named",
		scheduling.PodGroupResourceClaim{Name: "gpu", ResourceClaimName: &claim.Name})
	return &tokenThief{
		testEnv: e, ns: ns, identity: impostor, claim: claim, own: own, unallocated: unallocated, ofJob: ofJob,
		ofGroup: ofGroup, group: pg, named: named, pod: pod, inService: inService,
	}
}

// tokenMisuse is a request that a policy denies with a message.
type tokenMisuse struct {
	name string
	try  func(ctx context.Context) error
	want string
}

// webhookMisuses returns changes of the webhook configurations.
func (s *tokenThief) webhookMisuses() []tokenMisuse {
	thief := s.identity
	return []tokenMisuse{
		{"send pods to another webhook server", func(ctx context.Context) error {
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
	}
}

// claimMisuses returns writes of claims that the controller does not hold.
func (s *tokenThief) claimMisuses() []tokenMisuse {
	ns, thief, claim, ofJob, ofGroup, pg, named := s.ns, s.identity, s.claim, s.ofJob, s.ofGroup, s.group, s.named
	return []tokenMisuse{
		{"create a claim without a PodGroup", func(ctx context.Context) error {
			return thief.Create(ctx, fabricClaim(ns, "stolen"))
		}, "the controller may create and delete only claims, and PodGroups of Kubernetes, that belong to a PodGroup"},
		{"create a claim that cannot be deleted", func(ctx context.Context) error {
			lasting := ofGroup.DeepCopy()
			lasting.ResourceVersion, lasting.UID, lasting.Name = "", "", "lasting"
			lasting.Annotations = map[string]string{scheduling.ClaimAnnotation: "fabric"}
			lasting.Finalizers = []string{"example.com/never"}
			return thief.Create(ctx, lasting)
		}, "the controller may not create objects with finalizers"},
		{"delete a claim that another controller generated for a Job", func(ctx context.Context) error {
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
		{"reserve a claim of another driver for a PodGroup that does not name it", func(ctx context.Context) error {
			return patchStatus(ctx, thief, claim, reservation(scheduling.GroupName, pg.Name, pg.UID))
		}, "only for a PodGroup that names it in spec.resourceClaims"},
		{"reserve a claim of another driver for a PodGroup with another UID", func(ctx context.Context) error {
			return patchStatus(ctx, thief, claim, reservation(scheduling.GroupName, named.Name, pg.UID))
		}, "only for a PodGroup that names it in spec.resourceClaims"},
		{"reserve a claim of another driver for a PodGroup of Kubernetes", func(ctx context.Context) error {
			return patchStatus(ctx, thief, claim, reservation("scheduling.k8s.io", "theirs", "1"))
		}, "only for a PodGroup that names it in spec.resourceClaims"},
		{"reserve a claim of another driver for a Job", func(ctx context.Context) error {
			return patchStatus(ctx, thief, claim, `{"metadata":{"annotations":{"scheduling.dra-shared.dev/claim":"gpu"}},
				"status":{"reservedFor":[{"apiGroup":"batch","resource":"jobs","name":"thief","uid":"1"}]}}`)
		}, "the controller may change only claims of PodGroups of the driver"},
		{"delete a user's claim whose owner is a PodGroup", func(ctx context.Context) error {
			return thief.Delete(ctx, ofGroup.DeepCopy())
		}, "the controller may create and delete only claims, and PodGroups of Kubernetes, that belong to a PodGroup"},
	}
}

// podMisuses returns changes of pods and of blocks of addresses.
func (s *tokenThief) podMisuses() []tokenMisuse {
	thief, pod, inService := s.identity, s.pod, s.inService
	return []tokenMisuse{
		{"change the image of a pod", func(ctx context.Context) error {
			return patch(ctx, thief, pod.DeepCopy(), `[{"op":"replace","path":"/spec/containers/0/image","value":"evil"}]`)
		}, "the controller may remove the scheduling gate scheduling.dra-shared.dev/reserved from pods and change nothing"},
		{"move a pod to another group", func(ctx context.Context) error {
			return patch(ctx, thief, pod.DeepCopy(), `[{"op":"add","path":"/metadata/labels","value":{"app":"web"}}]`)
		}, "the controller may remove the scheduling gate scheduling.dra-shared.dev/reserved from pods and change nothing"},
		{"remove the gate of another controller", func(ctx context.Context) error {
			return patch(ctx, thief, pod.DeepCopy(), `[{"op":"remove","path":"/spec/schedulingGates"}]`)
		}, "the controller may remove the scheduling gate scheduling.dra-shared.dev/reserved from pods and change nothing"},
		{"delete the addresses of a node in service", func(ctx context.Context) error {
			return thief.Delete(ctx, inService.DeepCopy(), client.DryRunAll)
		}, "the controller may delete only AddressBlocks of lost nodes: node " + ownNode + " exists"},
		{"give the addresses of a node to another", func(ctx context.Context) error {
			return patch(ctx, thief, inService.DeepCopy(),
				`[{"op":"replace","path":"/spec/ranges","value":["10.21.0.9-10.21.0.9"]}]`)
		}, "the controller may change AddressBlocks only to release the address of a pod from a lost node"},
		{"change the labels of a block", func(ctx context.Context) error {
			return patch(ctx, thief, inService.DeepCopy(), `[{"op":"add","path":"/metadata/labels","value":{"a":"b"}}]`)
		}, "the controller may change only the annotation network.dra-shared.dev/node-lost of AddressBlocks"},
	}
}

// statusMisuses returns changes of claims and of their status.
func (s *tokenThief) statusMisuses() []tokenMisuse {
	thief, claim, own, unallocated := s.identity, s.claim, s.own, s.unallocated
	return []tokenMisuse{
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
	}
}

// podGroupMisuses returns writes of PodGroups.
func (s *tokenThief) podGroupMisuses() []tokenMisuse {
	e, ns, thief, pg := s.testEnv, s.ns, s.identity, s.group
	return []tokenMisuse{
		{"change the claims of a PodGroup", func(ctx context.Context) error {
			return patch(ctx, thief, pg.DeepCopy(), `[{"op":"add","path":"/metadata/annotations","value":{"a":"b"}}]`)
		}, "the controller may change only its finalizer and the status of PodGroups"},
		{"keep a PodGroup from being deleted", func(ctx context.Context) error {
			return patch(ctx, thief, pg.DeepCopy(),
				`[{"op":"add","path":"/metadata/finalizers","value":["scheduling.dra-shared.dev/claims","example.com/never"]}]`)
		}, "the controller may change only its finalizer and the status of PodGroups"},
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
	}
}

// expectDenied expects that a request is refused.
func (s *tokenThief) expectDenied(t *testing.T, m tokenMisuse) {
	t.Helper()
	err := m.try(t.Context())
	if err == nil && strings.Contains(m.name, "of Kubernetes") && !s.native {
		t.Skip("the API server does not serve PodGroups of Kubernetes")
	}
	refused := apierrors.IsForbidden(err) || apierrors.IsInvalid(err)
	if !refused || !strings.Contains(err.Error(), m.want) {
		t.Errorf("got error %v, want %q", err, m.want)
	}
}

// expectHold expects that the controller can hold a claim of another driver for the PodGroup that names it.
func (s *tokenThief) expectHold(t *testing.T) {
	hold := reservation(scheduling.GroupName, s.named.Name, s.named.UID)
	if err := patchStatus(t.Context(), s.identity, s.claim, hold); err != nil {
		t.Errorf("it is denied: %v", err)
	}
}

// expectReturnedAddress expects that the controller can return the address that a pod of a lost node kept.
func (s *tokenThief) expectReturnedAddress(t *testing.T) {
	kept := addressBlock("storage-4-0a150002", "lost", "10.21.0.2-10.21.0.2")
	kept.Spec.Namespace, kept.Spec.Pod = s.ns, "web-0"
	s.create(t, kept)
	s.awaitDeleted(t, kept) // the controller takes the address from the node, and then deletes the block
}

// expectAuthorityChange expects that the controller can change the caBundle of webhooks.
func (s *tokenThief) expectAuthorityChange(t *testing.T) {
	webhook := mutating()
	if err := s.client.Get(t.Context(), client.ObjectKeyFromObject(webhook), webhook); err != nil {
		t.Fatal(err)
	}
	updated := webhook.DeepCopy()
	for i := range updated.Webhooks {
		updated.Webhooks[i].ClientConfig.CABundle = nil
	}
	if err := s.identity.Patch(t.Context(), updated, client.MergeFrom(webhook), client.DryRunAll); err != nil {
		t.Errorf("the policy denies it: %v", err)
	}
}

// With controller.endpointSlices, the controller's token can write EndpointSlices only of Services
// that request it.
func TestPolicy_controllerEndpointSlices(t *testing.T) {
	e := requireTestEnv(t)
	if err := e.install(t.Context(), "controller.endpointSlices=true"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.install(context.Background()); err != nil {
			t.Error(err)
		}
	})
	ns := e.createNamespace(t, "slices")
	identity := rest.CopyConfig(e.config)
	identity.Impersonate = e.controllerConfig().Impersonate
	thief, err := client.New(identity, client.Options{Scheme: e.client.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	service := func(name string, annotations map[string]string) *corev1.Service {
		s := &corev1.Service{ObjectMeta: objectMeta(ns, name)}
		s.Annotations, s.Spec.ClusterIP = annotations, corev1.ClusterIPNone
		e.create(t, s)
		return s
	}
	ordinary := service("ordinary", nil)
	onNetwork := service("on-network", map[string]string{network.ServiceNetworkAnnotation: "storage"})
	slice := func(of *corev1.Service, owner types.UID) *discoveryv1.EndpointSlice {
		s := &discoveryv1.EndpointSlice{ObjectMeta: objectMeta(ns, of.Name+"-shared-4-0")}
		s.Labels = map[string]string{
			discoveryv1.LabelServiceName: of.Name, discoveryv1.LabelManagedBy: v1alpha1.ManagedByController,
		}
		s.OwnerReferences = []metav1.OwnerReference{
			{APIVersion: "v1", Kind: "Service", Name: of.Name, UID: owner, Controller: ptr.To(true)},
		}
		s.AddressType, s.Endpoints = discoveryv1.AddressTypeIPv4, []discoveryv1.Endpoint{{Addresses: []string{"10.20.0.1"}}}
		return s
	}
	create := func(ctx context.Context, s *discoveryv1.EndpointSlice) error {
		return thief.Create(ctx, s, client.DryRunAll)
	}
	denied := func(s *discoveryv1.EndpointSlice, want string) {
		t.Helper()
		err := create(t.Context(), s)
		if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want %q", err, want)
		}
	}
	const otherOwner = "must be the Service in the label kubernetes.io/service-name"
	// API servers learn of the policy and of the Services with a delay.
	eventually.Eventually(t, timeout, "the policy applies", func() error {
		err := create(t.Context(), slice(ordinary, ordinary.UID))
		if err == nil || !strings.Contains(err.Error(), "Service ordinary does not have it") {
			return fmt.Errorf("got error %w, want that the Service does not ask for it", err)
		}
		return create(t.Context(), slice(onNetwork, onNetwork.UID))
	})
	denied(slice(onNetwork, "1"), otherOwner)
	ofOther := slice(onNetwork, onNetwork.UID)
	ofOther.Labels[discoveryv1.LabelServiceName] = ordinary.Name
	denied(ofOther, otherOwner)
	withoutOwner := slice(onNetwork, onNetwork.UID)
	withoutOwner.OwnerReferences = nil
	denied(withoutOwner, otherOwner)
	ofKubernetes := slice(onNetwork, onNetwork.UID)
	ofKubernetes.Labels[discoveryv1.LabelManagedBy] = "endpointslice-controller.k8s.io"
	denied(ofKubernetes, "the controller may write only EndpointSlices with the label")
}

// While the claims of Jobs and replicas are off, no webhook checks whether an author may create claims. Users then
// cannot list claims, because the controller would generate them later.
func TestPolicy_listedClaimsWhileDisabled(t *testing.T) {
	e := requireTestEnv(t)
	if err := e.install(t.Context(), "controller.jobClaims=false", "controller.replicaClaims=false"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.install(context.Background()); err != nil {
			t.Error(err)
		}
	})
	ns := e.createNamespace(t, "off")
	plain := e.createJob(t, ns)
	job := &batchv1.Job{ObjectMeta: objectMeta(ns, "listed"), Spec: *plain.Spec.DeepCopy()}
	job.Spec.Selector, job.Spec.Template.Labels = nil, nil
	job.Spec.Template.Annotations = map[string]string{scheduling.JobClaimsAnnotation: "[" + inlineFabric + "]"}
	cron := &batchv1.CronJob{ObjectMeta: objectMeta(ns, "listed"), Spec: batchv1.CronJobSpec{
		Schedule: "0 0 1 1 *", JobTemplate: batchv1.JobTemplateSpec{Spec: job.Spec},
	}}
	set := statefulSet(ns, 0)
	set.Spec.Template.Annotations = map[string]string{scheduling.ReplicaClaimsAnnotation: "[" + inlineFabric + "]"}
	for value, o := range map[string]client.Object{
		"controller.jobClaims of the chart": job, "set controller.jobClaims": cron, "controller.replicaClaims": set,
	} {
		eventually.Eventually(t, timeout, fmt.Sprintf("%T is refused", o), func() error {
			try, ok := o.DeepCopyObject().(client.Object) // the API server completes an object that it accepts
			if !ok {
				return fmt.Errorf("%T is not a client.Object", o.DeepCopyObject())
			}
			err := e.client.Create(t.Context(), try, client.DryRunAll)
			if err == nil || !strings.Contains(err.Error(), value) {
				return fmt.Errorf("got error %w, want one that names %s", err, value)
			}
			return nil
		})
	}
	suspend := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"suspend":true}}`))
	if err := e.client.Patch(t.Context(), plain, suspend); err != nil {
		t.Errorf("a Job without the annotation cannot be changed: %v", err)
	}
}

// Annotations for pods do not have an effect on the metadata of a workload, and unknown ones do not on a pod template.
// The API server says so.
func TestPolicy_misplacedAnnotations(t *testing.T) {
	e := requireTestEnv(t)
	ns := e.createNamespace(t, "misplaced")
	annotations := map[string]string{
		scheduling.GroupAnnotation: "x", scheduling.GatesAnnotation: "x", "example.com/a": "x",
	}
	set, annotatedSet := statefulSet(ns, 0), statefulSet(ns, 0)
	annotatedSet.Annotations = annotations
	plain := e.createJob(t, ns)
	spec := *plain.Spec.DeepCopy()
	spec.Selector, spec.Template.Labels = nil, nil
	cron := &batchv1.CronJob{ObjectMeta: objectMeta(ns, "cron"), Spec: batchv1.CronJobSpec{
		Schedule: "0 0 1 1 *", JobTemplate: batchv1.JobTemplateSpec{Spec: spec},
	}}
	annotatedCron := cron.DeepCopy()
	annotatedCron.Spec.JobTemplate.Annotations = annotations
	unknownSet, unknownCron := set.DeepCopy(), cron.DeepCopy()
	unknown := map[string]string{"scheduling.dra-shared.dev/podgroup": "x", "example.com/a": "x"}
	unknownSet.Spec.Template.Annotations, unknownCron.Spec.JobTemplate.Spec.Template.Annotations = unknown, unknown
	const (
		misplaced  = "the annotation scheduling.dra-shared.dev/pod-group, scheduling.dra-shared.dev/gates has no effect"
		misspelled = "the annotation scheduling.dra-shared.dev/podgroup of the pod template has no effect"
	)
	for _, tc := range []struct {
		object client.Object
		want   string
	}{
		{set, ""}, {annotatedSet, misplaced}, {unknownSet, misspelled},
		{cron, ""}, {annotatedCron, misplaced}, {unknownCron, misspelled},
	} {
		what := fmt.Sprintf("%T is created, with the warning %q", tc.object, tc.want)
		eventually.Eventually(t, timeout, what, func() error {
			return e.tryWithWarning(t.Context(), tc.object, tc.want)
		})
	}
}

// The API server warns of claims that the driver ignores or the scheduler cannot allocate because of a misspelling.
func TestPolicy_misspelledClaims(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "misspelled")
	const class = "nic." + driverName
	spec := func(capacity resourceapi.QualifiedName, driver string) resourceapi.ResourceClaimSpec {
		requests := map[resourceapi.QualifiedName]resource.Quantity{capacity: resource.MustParse("1M")}
		parameters := `{"apiVersion":"dra-shared.dev/v1alpha1","kind":"NetworkAttachment"}`
		return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "r", FirstAvailable: []resourceapi.DeviceSubRequest{{
				Name: "a", DeviceClassName: class, Capacity: &resourceapi.CapacityRequirements{Requests: requests},
			}}}},
			Config: []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
				Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(parameters)},
				},
			}}},
		}}
	}
	for _, tc := range []struct {
		spec resourceapi.ResourceClaimSpec
		want string
	}{
		{spec("bandwidth", driverName), ""},
		{spec("bandwidth", class), "opaque.driver: " + class + ": the parameters of dra-shared.dev have no effect"},
		{spec("bandwith", driverName), "capacity.requests: bandwith: no NIC has a capacity with this name"},
		{spec(driverName+"/bandwidth", driverName),
			"capacity.requests: dra-shared.dev/bandwidth: no device has a capacity with this name"},
	} {
		for _, o := range []client.Object{
			&resourceapi.ResourceClaim{ObjectMeta: objectMeta(ns, "a"), Spec: tc.spec},
			&resourceapi.ResourceClaimTemplate{
				ObjectMeta: objectMeta(ns, "a"), Spec: resourceapi.ResourceClaimTemplateSpec{Spec: tc.spec},
			},
		} {
			what := fmt.Sprintf("%T is created, with the warning %q", o, tc.want)
			eventually.Eventually(t, timeout, what, func() error { return e.tryWithWarning(t.Context(), o, tc.want) })
		}
	}
}

// tryWithWarning creates an object in a dry run, and compares the API server's warnings. Without want, none may be of
// the driver.
func (e *testEnv) tryWithWarning(ctx context.Context, o client.Object, want string) error {
	var warnings []string
	warned, err := e.clientWithWarnings(func(text string) { warnings = append(warnings, text) })
	if err != nil {
		return err
	}
	try, ok := o.DeepCopyObject().(client.Object)
	if !ok {
		return fmt.Errorf("%T is not a client.Object", o.DeepCopyObject())
	}
	if err := warned.Create(ctx, try, client.DryRunAll); err != nil {
		return err
	}
	got := strings.Join(warnings, "\n")
	if !strings.Contains(got, want) || want == "" && strings.Contains(got, driverName) {
		return fmt.Errorf("got warnings %q, want %q", got, want)
	}
	return nil
}

// reservation returns a merge patch that reserves a claim for a PodGroup.
func reservation(apiGroup, name string, uid types.UID) string {
	return fmt.Sprintf(`{"status":{"reservedFor":[{"apiGroup":%q,"resource":"podgroups","name":%q,"uid":%q}]}}`,
		apiGroup, name, uid)
}

func addressBlock(name, node, ranges string) *network.AddressBlock {
	return &network.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       network.AddressBlockSpec{Network: "storage", Pool: "policy", Node: node, Ranges: []string{ranges}},
	}
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
