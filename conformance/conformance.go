// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package conformance tests whether a DRA kubelet plugin meets the requirements of
// Kubernetes. It works with any driver: it acts as the kubelet and the scheduler
// of a running plugin, through the plugin's own gRPC socket, with claims that it
// creates and allocates in the API server. It starts no pods.
//
// A Target identifies the plugin. Cases returns the requirements, each with a
// reference to the document that states it, and Do tests one. Tests run them
// against a fake API server and a plugin in the same process. The command
// dra-conformance runs them against the plugin of a node.
package conformance

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/client-go/kubernetes"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// Target is a plugin under test.
type Target struct {
	// Client accesses the API server that the plugin uses. It must be permitted to
	// list ResourceSlices, to create and delete ResourceClaims in Namespace, and to
	// write their status.
	Client    kubernetes.Interface
	Namespace string
	// Driver is the name of the plugin's driver, and Node the node that it runs on.
	Driver, Node string
	// DeviceClass is the DeviceClass of the claims. It need not exist, because the
	// suite allocates the devices.
	DeviceClass string
	// Socket is the path of the plugin's DRA socket (dra.sock, or
	// dra-<pod UID>.sock with rolling updates).
	Socket string
	// CDIDir is the directory to which the plugin writes CDI specs. If it is empty,
	// cases that read CDI specs are skipped.
	CDIDir string
	// Device is the name of the device to allocate; if it is empty, the first one
	// without taints.
	Device string
}

// Case is a requirement for plugins.
type Case struct {
	Name string
	// Reference names the document that states the requirement.
	Reference string
	// Requires returns the reason to skip the case for a target, or nil. The field
	// is nil if the case applies to every target.
	Requires func(context.Context, *Suite) error
	// Run returns an error if the plugin does not meet the requirement.
	Run func(context.Context, *Suite) error
}

// Suite is the state of one case that runs against a Target.
type Suite struct {
	Target
	conn   *grpc.ClientConn
	plugin drapb.DRAPluginClient
	claims []*claim // to clean up
}

// ErrSkipped is wrapped by the error of Do if the case does not apply to the
// target.
var ErrSkipped = errors.New("skipped")

// Do runs one case against a target, and then unprepares and deletes the claims of
// the case.
func Do(ctx context.Context, t Target, c Case) (err error) {
	conn, err := grpc.NewClient("unix://"+t.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to the plugin: %w", err)
	}
	s := &Suite{Target: t, conn: conn, plugin: drapb.NewDRAPluginClient(conn)}
	defer func() {
		err = errors.Join(err, s.cleanUp(context.WithoutCancel(ctx)), conn.Close())
	}()
	if c.Requires != nil {
		if err := c.Requires(ctx, s); err != nil {
			return fmt.Errorf("%w: %w", ErrSkipped, err)
		}
	}
	return c.Run(ctx, s)
}

// cleanUp unprepares and deletes the claims of a case.
func (s *Suite) cleanUp(ctx context.Context) error {
	var errs []error
	for _, c := range s.claims {
		if err := s.unprepareOne(ctx, c); err != nil {
			errs = append(errs, fmt.Errorf("clean up claim %s: %w", c.Name, err))
		}
		errs = append(errs, s.delete(ctx, c))
	}
	return errors.Join(errs...)
}
