package fabrics

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/klog/v2/ktesting"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
)

func TestEachFabricIsAPoolOfOneDevice(t *testing.T) {
	r := Resources([]config.Fabric{{Name: "rack1", NodeSelector: map[string]string{"b": "2", "a": "1"}}, {Name: "rack2", NodeSelector: map[string]string{"a": "2"}}})
	if len(r.Pools) != 2 || len(r.Pools["fabric/rack2"].Slices) != 1 || r.Pools["fabric/rack2"].Slices[0].Devices[0].Name != "rack2" {
		t.Errorf("%+v", r)
	}
	terms := r.Pools["fabric/rack1"].NodeSelector.NodeSelectorTerms
	if len(terms) != 1 || len(terms[0].MatchExpressions) != 2 || terms[0].MatchExpressions[0].Key != "a" || terms[0].MatchExpressions[0].Operator != corev1.NodeSelectorOpIn {
		t.Errorf("node selector %+v", terms)
	}
}

// The API server, as a fake, knows no generated names: one fabric.
func TestSlicesGoWithTheController(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	client := fake.NewClientset(&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "controller", UID: "role"}})
	watch, err := client.ResourceV1().ResourceSlices().Watch(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	p := &Publisher{Client: client, DriverName: "dra-shared.dev", Owner: "controller",
		Config: &config.DriverConfig{Fabrics: []config.Fabric{{Name: "rack1", NodeSelector: map[string]string{"a": "1"}}}}}
	ended := make(chan error, 1)
	go func() { ended <- p.Start(ctx) }()
	select {
	case event := <-watch.ResultChan():
		s, ok := event.Object.(*resourceapi.ResourceSlice)
		if !ok || s.Spec.NodeName != nil || len(s.Spec.Devices) != 1 || len(s.OwnerReferences) != 1 || s.OwnerReferences[0].Kind != "ClusterRole" || s.OwnerReferences[0].UID != "role" {
			t.Errorf("%+v", event.Object)
		}
	case <-time.After(20 * time.Second):
		t.Error("nothing is published")
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestAnOwnerThatIsNotThereIsAnError(t *testing.T) {
	p := &Publisher{Client: fake.NewClientset(), DriverName: "dra-shared.dev", Owner: "no-such-role", Config: &config.DriverConfig{}}
	if err := p.Start(t.Context()); err == nil {
		t.Error("nobody said so")
	}
}
