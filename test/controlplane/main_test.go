// Package controlplane tests the controller against a real control plane whose
// nodes are simulated: what takes a thousand pods, a controller that dies between
// any two writes, or a version of Kubernetes that there are no nodes of here.
//
// The tests start a control plane (make test-controlplane), and run again in its
// network namespace, where the API server reaches the webhook that they serve:
// the chart is installed, the pod of its controller is simulated too, and the
// test is what answers at that pod's address.
package controlplane

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
)

// Environment of the tests.
const (
	envRun     = "CONTROLPLANE"         // run them
	envInside  = "CONTROLPLANE_INSIDE"  // the directory of the cluster that this process is in
	envVersion = "CONTROLPLANE_VERSION" // of Kubernetes
	envGates   = "CONTROLPLANE_GATES"
	envBench   = "CONTROLPLANE_BENCH" // measure, instead of testing
)

func TestMain(m *testing.M) {
	if os.Getenv(envRun) == "" || os.Getenv(envInside) != "" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := outside(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// outside starts the control plane, and this program again inside.
func outside(ctx context.Context) error {
	b, err := clusterclient.New(strings.TrimRight(".cluster-controlplane-"+os.Getenv(envVersion)+os.Getenv(envGates), "-"))
	if err != nil {
		return err
	}
	o := clusterclient.Options{Nodes: clusterclient.NoNodes, Kubernetes: os.Getenv(envVersion), Gates: os.Getenv(envGates), Bare: true}
	if err := b.Down(ctx); err != nil {
		return err
	}
	defer func() {
		if err := b.Down(context.WithoutCancel(ctx)); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}()
	if err := b.Up(ctx, o, os.Stdout); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	inside := exec.CommandContext(ctx, filepath.Join(b.Dir, "network"), append([]string{self}, os.Args[1:]...)...)
	inside.Env = append(os.Environ(), envInside+"="+b.Dir)
	inside.Stdout, inside.Stderr = os.Stdout, os.Stderr
	return inside.Run()
}
