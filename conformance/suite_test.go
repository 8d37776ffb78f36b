// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/dra-shared/dra-driver-shared/conformance/fakeapi"
)

func TestSuite_portable(t *testing.T) {
	claimOf := func(name string, uid types.UID) *claim {
		return &claim{ResourceClaim: &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name, UID: uid}}}
	}
	shared := claimOf("conformance-b", "3-4")
	shared.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{ShareID: ptr.To(types.UID("5-6"))}}}}
	s := &suite{session: &session{dir: "/tmp/dr1234", env: Env{KubeletDir: "/tmp/dr1234/k"}},
		claims: []*claim{claimOf("conformance-a", "1-2"), shared}}
	got := s.portable("claims conformance-a and conformance-b: x.example.com/x=3-4-5-6 in /tmp/dr1234/k/cdi/1-2.json")
	const want = "claims $CLAIM_1 and $CLAIM_2: x.example.com/x=$CLAIM_UID_2-$SHARE_ID in " +
		"$KUBELET_DIR/cdi/$CLAIM_UID_1.json"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestCaseNotAttached_failsIfContainerStarted runs the case of NET-02 with a node that starts the pod, and with a node
// that does not start it.
func TestCaseNotAttached_failsIfContainerStarted(t *testing.T) {
	for _, test := range []struct {
		name  string
		first *corev1.ContainerState // of the first container; nil if it does not become known
		want  Status
	}{
		{"the pod does not start", nil, Passed},
		{"a hook of the runtime fails", &corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{ExitCode: 128, Reason: "StartError"}}, Passed},
		{"the pod starts", &corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}, Failed},
		{"the container has ended", &corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}, Failed},
	} {
		t.Run(test.name, func(t *testing.T) {
			server, err := fakeapi.New()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(server.Close)
			client, err := kubernetes.NewForConfig(server.Config())
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			ended := make(chan error, 1)
			go func() { ended <- runPod(ctx, client, test.first) }()
			s := &suite{session: &session{client: client, config: Config{Namespace: "default", Node: "n1", Pods: Pods{
				Image: "x", Impossible: &resourceapi.ResourceClaimSpec{}, Timeout: Duration{2 * time.Second}}}}}
			if got, message := s.do(ctx, caseNotAttached); got != test.want {
				t.Errorf("got %s: %s, want %s", got, message, test.want)
			}
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

// runPod binds the first pod to a node, and reports the state of its first container.
func runPod(ctx context.Context, client kubernetes.Interface, first *corev1.ContainerState) error {
	pods := client.CoreV1().Pods("default")
	return poll(ctx, func() error {
		list, err := pods.List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		if len(list.Items) == 0 {
			return errors.New("there is no pod")
		}
		p := &list.Items[0]
		p.Spec.NodeName = "n1"
		if p, err = pods.Update(ctx, p, metav1.UpdateOptions{}); err != nil || first == nil {
			return err
		}
		p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: firstContainer, State: *first}}
		_, err = pods.UpdateStatus(ctx, p, metav1.UpdateOptions{})
		return err
	})
}
