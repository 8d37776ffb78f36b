// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trim

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

const driver = "dra-shared.dev"

// foreignClaim returns a claim of a pod with eight devices of another driver, as drivers of accelerators write it.
func foreignClaim(i int) *resourceapi.ResourceClaim {
	const other = "gpu.example.com"
	parameters := k8sruntime.RawExtension{Raw: []byte(`{"apiVersion":"gpu.example.com/v1","kind":"GpuConfig",` +
		`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`)}
	opaque := resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
		Driver: other, Parameters: parameters,
	}}
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: fmt.Sprintf("team-%d", i%500), Name: fmt.Sprintf("train-%d-gpus-x7z9k", i),
			GenerateName: fmt.Sprintf("train-%d-gpus-", i),
			UID:          types.UID(fmt.Sprintf("0f0e9d8c-%012d", i)), ResourceVersion: fmt.Sprint(1000000 + i),
			CreationTimestamp: metav1.NewTime(time.Unix(1700000000, 0)),
			Labels:            map[string]string{"app.kubernetes.io/name": "train", "app.kubernetes.io/part-of": "research"},
			Annotations:       map[string]string{"resource.kubernetes.io/pod-claim-name": "gpus"},
			Finalizers:        []string{"resource.kubernetes.io/delete-protection"},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Pod", Name: fmt.Sprintf("train-%d", i), UID: types.UID(fmt.Sprintf("pod-%d", i)),
				Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true),
			}},
			ManagedFields: []metav1.ManagedFieldsEntry{{
				Manager: "kube-scheduler", Operation: metav1.ManagedFieldsOperationUpdate, Subresource: "status",
				FieldsV1: metav1.NewFieldsV1(`{"f:status":"` + strings.Repeat("x", 1500) + `"}`),
			}},
		},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "gpus", Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: other, Count: 8,
				Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
					Expression: `device.capacity["gpu.example.com"].memory.compareTo(quantity("80Gi")) >= 0`,
				}}},
			}}},
			Config: []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: opaque}},
		}},
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{}
	claim.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{DeviceConfiguration: opaque}}
	for d := range 8 {
		device := fmt.Sprintf("gpu-%d", d)
		pool := fmt.Sprintf("node-%d", i%5000)
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{
				Request: "gpus", Driver: other, Pool: pool, Device: device,
				ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("80Gi")},
			})
		claim.Status.Devices = append(claim.Status.Devices, resourceapi.AllocatedDeviceStatus{
			Driver: other, Pool: pool, Device: device, Data: &parameters,
		})
	}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
		{Resource: "pods", Name: fmt.Sprintf("train-%d", i), UID: types.UID(fmt.Sprintf("pod-%d", i))},
	}
	return claim
}

func TestClaim_keepsFieldsThatControllerReads(t *testing.T) {
	claim := foreignClaim(1)
	claim.Annotations[scheduling.ReservedForAnnotation] = "batch/jobs/train"
	own := resourceapi.DeviceRequestAllocationResult{
		Request: "nic", Driver: driver, Pool: "node", Device: "nic0", ShareID: ptr.To(types.UID("1")),
	}
	claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results[:1], own)
	claim.Status.Devices = append(claim.Status.Devices[:1],
		resourceapi.AllocatedDeviceStatus{Driver: driver, Device: "nic0"})
	parameters := resourceapi.DeviceClaimConfiguration{DeviceConfiguration: resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driver},
	}}
	claim.Spec.Devices.Config = append(claim.Spec.Devices.Config, parameters)
	got, err := Claim(driver)(claim.DeepCopy())
	if err != nil {
		t.Fatal(err)
	}
	want := claim.DeepCopy()
	want.GenerateName, want.Labels, want.Finalizers, want.ManagedFields, want.OwnerReferences = "", nil, nil, nil, nil
	delete(want.Annotations, "resource.kubernetes.io/pod-claim-name")
	want.Spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{parameters}
	want.Spec.Devices.Requests[0].Exactly.Selectors, want.Spec.Devices.Requests[0].Exactly.Count = nil, 0
	want.Status.Allocation.Devices.Config = nil
	want.Status.Allocation.Devices.Results = want.Status.Allocation.Devices.Results[1:]
	want.Status.Devices = want.Status.Devices[1:]
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("trimmed claim (-want +got):\n%s", diff)
	}

	ofJob := foreignClaim(1)
	ofJob.OwnerReferences[0].APIVersion, ofJob.OwnerReferences[0].Kind = "batch/v1", "Job"
	got, err = Claim(driver)(ofJob.DeepCopy())
	if trimmed, ok := got.(*resourceapi.ResourceClaim); err != nil || !ok ||
		!cmp.Equal(trimmed.OwnerReferences, ofJob.OwnerReferences) {
		t.Errorf("claim of a Job: error %v, trimmed %+v", err, got)
	}

	generated := foreignClaim(1)
	generated.Annotations[scheduling.ClaimAnnotation] = "net"
	want = generated.DeepCopy()
	want.ManagedFields = nil
	if got, err = Claim(driver)(generated); err != nil || cmp.Diff(want, got) != "" {
		t.Errorf("generated claim: error %v, (-want +got):\n%s", err, cmp.Diff(want, got))
	}
}
