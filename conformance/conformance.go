// Package conformance holds any DRA kubelet plugin to what Kubernetes asks of
// it. It knows no driver: it plays kubelet and scheduler towards one that runs,
// over the plugin's own gRPC socket, with claims that it makes and allocates in
// the API server.
//
// A Target says where the plugin is; Cases are what it must do, each with the
// place where Kubernetes says so. Run a case against a fake API server and a
// plugin in the same process, or all of them by the command dra-conformance
// against a plugin on a node.
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
	// Client of the API server that the plugin uses. It may create and
	// delete ResourceClaims in Namespace and write their status.
	Client    kubernetes.Interface
	Namespace string
	// Driver is the plugin's driver name, Node the node it runs on.
	Driver, Node string
	// DeviceClass that claims name. It need not exist: the suite allocates.
	DeviceClass string
	// Socket is the path of the plugin's DRA socket (dra.sock, or
	// dra-<pod UID>.sock with rolling updates).
	Socket string
	// CDIDir is where the plugin writes CDI specs; empty if that cannot be
	// looked at from here.
	CDIDir string
	// Device restricts the suite to one device; empty: the first that fits.
	Device string
}

// Case is one thing that a plugin must do.
type Case struct {
	Name string
	// Because says where Kubernetes asks for it.
	Because string
	// Needs says what the target must offer; nil if nothing special. An
	// error is the reason to skip.
	Needs func(context.Context, *Suite) error
	Run   func(context.Context, *Suite) error
}

// Suite is a connection to a Target. A case gets one of its own.
type Suite struct {
	Target
	conn   *grpc.ClientConn
	plugin drapb.DRAPluginClient
	made   []*claim
}

// ErrSkipped is wrapped by what Do returns if the target lacks what a case needs.
var ErrSkipped = errors.New("skipped")

// Do runs one case against a target, and removes what it made.
func Do(ctx context.Context, t Target, c Case) (err error) {
	conn, err := grpc.NewClient("unix://"+t.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to the plugin: %w", err)
	}
	s := &Suite{Target: t, conn: conn, plugin: drapb.NewDRAPluginClient(conn)}
	defer func() {
		err = errors.Join(err, s.cleanUp(context.WithoutCancel(ctx)), conn.Close())
	}()
	if c.Needs != nil {
		if err := c.Needs(ctx, s); err != nil {
			return fmt.Errorf("%w: %w", ErrSkipped, err)
		}
	}
	return c.Run(ctx, s)
}

// cleanUp unprepares and deletes the claims of a case.
func (s *Suite) cleanUp(ctx context.Context) error {
	var failed error
	for _, c := range s.made {
		if err := s.unprepareOne(ctx, c); err != nil {
			failed = errors.Join(failed, fmt.Errorf("clean up: %w", err))
		}
		failed = errors.Join(failed, s.delete(ctx, c))
	}
	return failed
}
