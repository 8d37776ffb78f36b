// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// starterVariable makes this test binary start a guest, print the process ID of
// QEMU, and wait.
const starterVariable = "GUEST_TEST_STARTER"

func TestMain(m *testing.M) {
	if os.Getenv(starterVariable) == "" {
		os.Exit(m.Run())
	}
	g, err := Start(context.Background(), script("exec sleep 300"))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(g.PID())
	fmt.Println(g.Wait())
}

// script returns a guest with a shell script in place of QEMU. Its serial ports are the descriptors from 3 on.
func script(text string) Config {
	return Config{Prefix: []string{"sh", "-c", text}}
}

func TestStart_copiesPorts(t *testing.T) {
	var console, port bytes.Buffer
	c := script("echo kernel >&3; echo output >&4")
	c.Console, c.Ports = &console, []io.Writer{&port}
	g, err := Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if console.String() != "kernel\n" || port.String() != "output\n" {
		t.Errorf("console and port: got %q and %q, want %q and %q", console.String(), port.String(), "kernel\n", "output\n")
	}
}

func TestGuest_Wait_returnsMessageOfQEMU(t *testing.T) {
	g, err := Start(t.Context(), script("echo no such device >&2; exit 1"))
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Wait(); err == nil || !strings.Contains(err.Error(), "no such device") {
		t.Errorf("got error %v, want one with the message", err)
	}
}

func TestGuest_stops(t *testing.T) {
	cause := errors.New("too slow")
	for _, tc := range []struct {
		name string
		end  func(g *Guest, cancel context.CancelCauseFunc)
		want error
	}{
		{"when its context is done", func(_ *Guest, cancel context.CancelCauseFunc) { cancel(cause) }, cause},
		{"when it is stopped", func(g *Guest, _ context.CancelCauseFunc) { g.Stop() }, context.Canceled},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			g, err := Start(ctx, script("exec sleep 300"))
			if err != nil {
				t.Fatal(err)
			}
			tc.end(g, cancel)
			if err := g.Wait(); !errors.Is(err, tc.want) {
				t.Errorf("got error %v, want %v", err, tc.want)
			}
			expectEnded(t, g.PID())
		})
	}
}

func TestGuest_stopsWithParentProcess(t *testing.T) {
	starter := exec.Command("/proc/self/exe")
	starter.Env = append(os.Environ(), starterVariable+"=1")
	stdout, err := starter.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := starter.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Fscan(stdout, &pid); err != nil {
		t.Fatal(err)
	}
	if err := starter.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = starter.Wait() // killed
	expectEnded(t, pid)
}

func expectEnded(t *testing.T, pid int) {
	t.Helper()
	eventually.Eventually(t, 10*time.Second, fmt.Sprintf("process %d of the guest has ended", pid), func() error {
		if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
			return errors.Join(errors.New("it still runs"), err)
		}
		return nil
	})
}
