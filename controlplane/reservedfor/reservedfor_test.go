package reservedfor

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

func TestHolders(t *testing.T) {
	for text, want := range map[string]string{
		"batch/jobs/train":               "",
		"/replicationcontrollers/web":    "",
		"/pods/leader":                   "a pod holds the claims that it names",
		"example.com/rockets/a.b-c":      "",
		"":                               "must be <API group>/<resource>/<name>",
		"jobs/train":                     "must be <API group>/<resource>/<name>",
		"batch/v1/jobs/train":            "must be <API group>/<resource>/<name>",
		"batch/jobs/":                    "must be <API group>/<resource>/<name>",
		"Batch/jobs/train":               `"Batch" is no API group`,
		"batch/Jobs/train":               `"Jobs" is no resource: its lower-case plural`,
		"batch/jobs/Train":               `"Train" is no name`,
		"scheduling.k8s.io/podgroups/pg": "",
	} {
		h, err := Parse(text)
		switch {
		case want == "" && (err != nil || h.String() != text):
			t.Errorf("%q: %v, %v", text, h, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%q: got %v, want %s", text, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("batch/jobs/train")
	f.Add("//")
	f.Fuzz(func(t *testing.T, text string) {
		if h, err := Parse(text); err == nil && h.String() != text {
			t.Errorf("%q is read as %q", text, h)
		}
	})
}

func TestAHolderIsInAndOut(t *testing.T) {
	owner := func(uid types.UID) claims.Owner {
		return claims.Owner{GroupVersionKind: schema.GroupVersionKind{Group: "batch"}, Resource: "jobs", Name: "train", UID: uid}
	}
	pod := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "p", UID: "p"}
	other := resourceapi.ResourceClaimConsumerReference{APIGroup: "apps", Resource: "deployments", Name: "train", UID: "d"}
	ended := resourceapi.ResourceClaimConsumerReference{APIGroup: scheduling.GroupName, Resource: "pods", Name: "e", UID: "e"}
	now := metav1.Now()
	for _, tc := range []struct {
		name     string
		reserved []resourceapi.ResourceClaimConsumerReference
		owner    types.UID // "" is gone
		bound    bool
		deleting *metav1.Time
		want     string
	}{
		{"not bound yet", []resourceapi.ResourceClaimConsumerReference{pod}, "1", false, nil, ""},
		{"bound", []resourceapi.ResourceClaimConsumerReference{pod}, "1", true, nil, "+1"},
		{"held", []resourceapi.ResourceClaimConsumerReference{owner("1").Reference()}, "1", true, nil, ""},
		{"being deleted", []resourceapi.ResourceClaimConsumerReference{pod}, "1", true, &now, ""},
		{"gone, pods live", []resourceapi.ResourceClaimConsumerReference{pod, owner("1").Reference()}, "", false, nil, "-1!"},
		{"gone, alone", []resourceapi.ResourceClaimConsumerReference{owner("1").Reference()}, "", false, nil, "deallocate"},
		{"gone, the cluster deallocates", []resourceapi.ResourceClaimConsumerReference{owner("1").Reference()}, "", false, &now, "-1!"},
		{"gone, never there", []resourceapi.ResourceClaimConsumerReference{pod}, "", false, nil, ""},
		{"gone, free", nil, "", false, nil, ""},
		{"another of its name", []resourceapi.ResourceClaimConsumerReference{owner("1").Reference()}, "2", true, nil, "+2-1!"},
		{"gone, with pods that have ended", []resourceapi.ResourceClaimConsumerReference{owner("1").Reference(), ended}, "", false, nil, "deallocate"},
		{"held, with pods that have ended", []resourceapi.ResourceClaimConsumerReference{owner("1").Reference(), ended}, "1", true, nil, ""},
		{"gone, and its entry too: Kubernetes was faster", []resourceapi.ResourceClaimConsumerReference{ended}, "", false, nil, "deallocate"},
		{"the same, being deleted", []resourceapi.ResourceClaimConsumerReference{ended}, "", false, &now, "-e!"},
		{"somebody else's", []resourceapi.ResourceClaimConsumerReference{other}, "", true, nil, ""},
	} {
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: tc.deleting}, Status: resourceapi.ResourceClaimStatus{ReservedFor: tc.reserved}}
		c := change(claim, owner(tc.owner), tc.bound)
		got := ""
		if c.Deallocate {
			got = "deallocate"
		}
		for _, a := range c.Add {
			got += "+" + string(a.UID)
		}
		for _, r := range c.Remove {
			got += "-" + string(r)
		}
		if c.Precondition {
			got += "!"
		}
		if got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
}
