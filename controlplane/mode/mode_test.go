package mode

import (
	"context"
	"errors"
	"testing"

	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

func TestTheModeIsWhatTheAPIServerKeeps(t *testing.T) {
	for _, tc := range []struct {
		name   string
		answer func(*schedulingapi.PodGroup) (runtime.Object, error)
		want   Mode
	}{
		{"it keeps claims", func(pg *schedulingapi.PodGroup) (runtime.Object, error) { return pg, nil }, Native},
		{"it drops them", func(pg *schedulingapi.PodGroup) (runtime.Object, error) {
			pg.Spec.ResourceClaims = nil
			return pg, nil
		}, Bridge},
		{"it has no PodGroups", func(*schedulingapi.PodGroup) (runtime.Object, error) {
			return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "podgroups"}, "")
		}, Bridge},
		{"it does not say", func(*schedulingapi.PodGroup) (runtime.Object, error) { return nil, errors.New("away") }, ""},
	} {
		cluster := fake.NewClientset()
		cluster.PrependReactor("create", "podgroups", func(a clienttesting.Action) (bool, runtime.Object, error) {
			create, ok := a.(clienttesting.CreateActionImpl)
			if !ok || len(create.CreateOptions.DryRun) == 0 {
				t.Errorf("%s: it is written, not tried", tc.name)
			}
			pg, ok := create.Object.(*schedulingapi.PodGroup)
			if !ok {
				t.Fatalf("%T", create.Object)
			}
			o, err := tc.answer(pg.DeepCopy())
			return true, o, err
		})
		got, err := Detect(context.Background(), cluster, "ns")
		if got != tc.want || (err != nil) != (tc.want == "") {
			t.Errorf("%s: %s, %v", tc.name, got, err)
		}
	}
}

func TestModesByName(t *testing.T) {
	for _, name := range []string{"auto", "bridge", "native"} {
		if m, err := Parse(name); err != nil || string(m) != name {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Parse("Native"); err == nil || err.Error() != `mode "Native": must be auto, bridge or native` {
		t.Error(err)
	}
}
