package podgroups

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
)

func TestWhyAClaimIsNotHeld(t *testing.T) {
	owner := Owner(&scheduling.PodGroup{ObjectMeta: metav1.ObjectMeta{Name: "g", UID: "g"}})
	full := make([]resourceapi.ResourceClaimConsumerReference, resourceapi.ResourceClaimReservedForMaxSize)
	for _, tc := range []struct {
		name            string
		reserved        []resourceapi.ResourceClaimConsumerReference
		reason, message string
	}{
		{"for nobody", nil, "NotAllocated", "claim net is allocated and held when the first pod"},
		{"for the group", []resourceapi.ResourceClaimConsumerReference{owner.Reference()}, "", ""},
		{"for Kubernetes' own", []resourceapi.ResourceClaimConsumerReference{{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g", UID: "n"}}, "", ""},
		{"for too many", full, "NoRoom", "claim net is reserved for 256: there is no room for the group"},
	} {
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "net"}, Status: resourceapi.ResourceClaimStatus{ReservedFor: tc.reserved}}
		if reason, message := notHeld(claim, owner); reason != tc.reason || !strings.HasPrefix(message, tc.message) {
			t.Errorf("%s: %s: %s", tc.name, reason, message)
		}
	}
}
