// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

const driverName = "dra-shared.dev"

func TestResources_oneDevicePerFabric(t *testing.T) {
	r := Resources([]config.Fabric{
		{Name: "rack1", NodeSelector: map[string]string{"b": "2", "a": "1"}},
		{Name: "rack2", NodeSelector: map[string]string{"a": "2"}},
	})
	if len(r.Pools) != 2 {
		t.Fatalf("%d pools, want 2: %+v", len(r.Pools), r)
	}
	rack2 := r.Pools["fabric/rack2"].Slices
	if len(rack2) != 1 || len(rack2[0].Devices) != 1 || rack2[0].Devices[0].Name != "rack2" {
		t.Errorf("slices of rack2: %+v", rack2)
	}
	want := []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
		{Key: "a", Operator: corev1.NodeSelectorOpIn, Values: []string{"1"}},
		{Key: "b", Operator: corev1.NodeSelectorOpIn, Values: []string{"2"}},
	}}}
	if diff := cmp.Diff(want, r.Pools["fabric/rack1"].NodeSelector.NodeSelectorTerms); diff != "" {
		t.Errorf("node selector of rack1 (-want +got):\n%s", diff)
	}
}

// startPublisher runs a publisher until stop is called, which returns the result
// of Start. The fake API server does not support generated names, so only one
// ResourceSlice can be created.
func startPublisher(t *testing.T, p *Publisher) (stop func() error) {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	p.syncDelay = ptr.To(10 * time.Millisecond)
	stopped := make(chan error, 1)
	go func() { stopped <- p.Start(ctx) }()
	return func() error {
		cancel()
		return <-stopped
	}
}

// nextSlice returns the ResourceSlice of the next event that accept returns true for.
func nextSlice(
	t *testing.T, events <-chan watchEvent, condition string, accept func(watchEvent) bool,
) *resourceapi.ResourceSlice {
	t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		select {
		case event := <-events:
			if accept(event) {
				return event.slice
			}
		case <-timeout:
			t.Fatalf("the publisher did not write a ResourceSlice: %s", condition)
		}
	}
}

// watchEvent is a change of a ResourceSlice.
type watchEvent struct {
	kind  string
	slice *resourceapi.ResourceSlice
}

// watchSlices returns the changes of ResourceSlices from now on.
func watchSlices(t *testing.T, client *fake.Clientset) <-chan watchEvent {
	t.Helper()
	watch, err := client.ResourceV1().ResourceSlices().Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(watch.Stop)
	events := make(chan watchEvent, 100)
	go func() {
		for event := range watch.ResultChan() {
			if s, ok := event.Object.(*resourceapi.ResourceSlice); ok {
				events <- watchEvent{kind: string(event.Type), slice: s}
			}
		}
	}()
	return events
}

func ownerRole() *rbacv1.ClusterRole {
	return &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "controller", UID: "role"}}
}

func TestPublisher_setsOwnerOfSlices(t *testing.T) {
	client := fake.NewClientset(ownerRole())
	events := watchSlices(t, client)
	stop := startPublisher(t, &Publisher{
		Client: client, DriverName: driverName, Owner: "controller",
		Config: &config.DriverConfig{Fabrics: []config.Fabric{{Name: "rack1", NodeSelector: map[string]string{"a": "1"}}}},
	})
	s := nextSlice(t, events, "at the start", func(e watchEvent) bool { return e.kind == "ADDED" })
	if s.Spec.Driver != driverName || s.Spec.Pool.Name != "fabric/rack1" || s.Spec.NodeName != nil ||
		s.Spec.NodeSelector == nil || len(s.Spec.Devices) != 1 {
		t.Errorf("ResourceSlice of the fabric: %+v", s.Spec)
	}
	want := []metav1.OwnerReference{
		{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole", Name: "controller", UID: "role"},
	}
	for i := range s.OwnerReferences {
		s.OwnerReferences[i].Controller, s.OwnerReferences[i].BlockOwnerDeletion = nil, nil
	}
	if diff := cmp.Diff(want, s.OwnerReferences); diff != "" {
		t.Errorf("owner of the ResourceSlice (-want +got):\n%s", diff)
	}
	if err := stop(); err != nil {
		t.Errorf("Start returned %v after its context ended", err)
	}
	left, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(left.Items) != 1 {
		t.Errorf("%d ResourceSlices remain for the replica that leads next, want 1 (error %v)", len(left.Items), err)
	}
}

// recreateOwner replaces the ClusterRole of ownerRole by one with another UID when the publisher watches it: the fake
// API server does not report changes from before a watch.
func recreateOwner(t *testing.T, client *fake.Clientset, watched <-chan struct{}) {
	t.Helper()
	<-watched
	roles := client.RbacV1().ClusterRoles()
	if err := roles.Delete(t.Context(), "controller", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	recreated := ownerRole()
	recreated.UID = "recreated"
	if _, err := roles.Create(t.Context(), recreated, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// watchOfRoles returns a channel that is closed when a client watches ClusterRoles.
func watchOfRoles(client *fake.Clientset) <-chan struct{} {
	watched := make(chan struct{})
	var once sync.Once
	client.PrependWatchReactor("clusterroles", func(a clienttesting.Action) (bool, watch.Interface, error) {
		w, err := client.Tracker().Watch(a.GetResource(), "")
		once.Do(func() { close(watched) })
		return true, w, err
	})
	return watched
}

// generateNames makes the fake API server generate the names of ResourceSlices. Those without the library's prefix are
// obsolete to a controller that starts.
func generateNames(client *fake.Clientset) {
	created := 0
	client.PrependReactor("create", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if create, ok := a.(clienttesting.CreateAction); ok {
			if s, ok := create.GetObject().(*resourceapi.ResourceSlice); ok {
				created++
				s.Name = fmt.Sprintf("%s%d", s.GenerateName, created)
			}
		}
		return false, nil, nil // the next reactor creates the slice
	})
}

// A tool that deploys the chart may delete and create the ClusterRole again. Garbage collection deletes slices if their
// owner has the former UID, again and again if new ones had it too.
func TestPublisher_followsRecreatedOwner(t *testing.T) {
	client := fake.NewClientset(ownerRole())
	watched := watchOfRoles(client)
	generateNames(client)
	events := watchSlices(t, client)
	stop := startPublisher(t, &Publisher{
		Client: client, DriverName: driverName, Owner: "controller",
		Config: &config.DriverConfig{Fabrics: []config.Fabric{{Name: "rack1", NodeSelector: map[string]string{"a": "1"}}}},
	})
	added := func(e watchEvent) bool { return e.kind == "ADDED" }
	current := nextSlice(t, events, "at the start", added)
	recreateOwner(t, client, watched)
	eventually.Eventually(t, 20*time.Second, "after garbage collection, a slice has the new owner", func() error {
		if err := client.ResourceV1().ResourceSlices().Delete(t.Context(), current.Name, metav1.DeleteOptions{}); err != nil {
			return err
		}
		current = nextSlice(t, events, "after garbage collection", added)
		if owner := current.OwnerReferences[0]; owner.UID != "recreated" {
			return fmt.Errorf("owner of the ResourceSlice: got %+v, want the UID of the new ClusterRole", owner)
		}
		return nil
	})
	if err := stop(); err != nil {
		t.Errorf("Start returned %v after its context ended", err)
	}
}

func TestPublisher_recreatesDeletedSlice(t *testing.T) {
	client := fake.NewClientset()
	events := watchSlices(t, client)
	stop := startPublisher(t, &Publisher{
		Client: client, DriverName: driverName,
		Config: &config.DriverConfig{Fabrics: []config.Fabric{{Name: "rack1", NodeSelector: map[string]string{"a": "1"}}}},
	})
	added := func(e watchEvent) bool { return e.kind == "ADDED" }
	first := nextSlice(t, events, "at the start", added)
	if len(first.OwnerReferences) != 0 {
		t.Errorf("without an owner the ResourceSlice has the owners %+v", first.OwnerReferences)
	}
	if err := client.ResourceV1().ResourceSlices().Delete(t.Context(), first.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	second := nextSlice(t, events, "after another client deleted it", added)
	if diff := cmp.Diff(first.Spec.Devices, second.Spec.Devices); diff != "" {
		t.Errorf("devices of the new ResourceSlice (-deleted +new):\n%s", diff)
	}
	if err := stop(); err != nil {
		t.Errorf("Start returned %v after its context ended", err)
	}
}

func TestPublisher_deletesSliceOfRemovedFabric(t *testing.T) {
	node := map[string]string{"a": "1"}
	obsolete := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "obsolete"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driverName, Pool: resourceapi.ResourcePool{Name: "fabric/removed", Generation: 1, ResourceSliceCount: 1},
			NodeSelector: nodeSelector(node), Devices: []resourceapi.Device{{Name: "removed"}},
		},
	}
	client := fake.NewClientset(obsolete)
	events := watchSlices(t, client)
	stop := startPublisher(t, &Publisher{
		Client: client, DriverName: driverName,
		Config: &config.DriverConfig{Fabrics: []config.Fabric{{Name: "rack1", NodeSelector: node}}},
	})
	nextSlice(t, events, "deletion of the removed fabric", func(e watchEvent) bool {
		return e.kind == "DELETED" && e.slice.Name == "obsolete"
	})
	if err := stop(); err != nil {
		t.Errorf("Start returned %v after its context ended", err)
	}
}

func TestPublisher_failsWithoutOwner(t *testing.T) {
	p := &Publisher{
		Client: fake.NewClientset(), DriverName: driverName, Owner: "no-such-role", Config: &config.DriverConfig{},
	}
	err := p.Start(t.Context())
	if !apierrors.IsNotFound(err) || !strings.Contains(err.Error(), "does --slices-owner name a ClusterRole?") {
		t.Errorf("Start returned %v, want that the ClusterRole does not exist, and what to check", err)
	}
}
