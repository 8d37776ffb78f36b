// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// Only the controller may create claims that use a fabric without counting as a
// group.
func TestAdmission_rejectsZeroGroups(t *testing.T) {
	e := requireTestEnv(t)
	e.startController(t, nil)
	ns := e.createNamespace(t, "zero")
	zero := func(name resourceapi.QualifiedName) *resourceapi.CapacityRequirements {
		requests := map[resourceapi.QualifiedName]resource.Quantity{name: resource.MustParse("0")}
		return &resourceapi.CapacityRequirements{Requests: requests}
	}
	const class = "fabric." + driverName
	for name, request := range map[string]resourceapi.DeviceRequest{
		"one device": {
			Name: "f", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class, Capacity: zero("groups")},
		},
		"capacity with its domain": {
			Name: "f", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class, Capacity: zero(driverName + "/groups")},
		},
		"second alternative": {Name: "f", FirstAvailable: []resourceapi.DeviceSubRequest{
			{Name: "a", DeviceClassName: class}, {Name: "b", DeviceClassName: class, Capacity: zero("groups")},
		}},
	} {
		spec := fabricSpec()
		spec.Devices.Requests[0] = request
		meta := metav1.ObjectMeta{Namespace: ns, Name: "zero"}
		template := resourceapi.ResourceClaimTemplateSpec{Spec: spec}
		for _, o := range []client.Object{
			&resourceapi.ResourceClaim{ObjectMeta: meta, Spec: spec},
			&resourceapi.ResourceClaimTemplate{ObjectMeta: meta, Spec: template},
		} {
			// The API server applies the chart's policies some time after they were created.
			condition := fmt.Sprintf("%s: the API server refuses a %T", name, o)
			eventually.Eventually(t, timeout, condition, func() error {
				o.SetResourceVersion("") // an attempt that succeeded has set it
				err := e.client.Create(t.Context(), o, client.DryRunAll)
				if err == nil {
					return errors.New("it accepted the object")
				}
				if !strings.Contains(err.Error(), "would use a fabric without counting as a group: request 1") {
					return fmt.Errorf("want the reason that it would not count as a group: %w", err)
				}
				return nil
			})
		}
	}
}
