// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"net"
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error)
	go func() { served <- Serve(ctx, listener, "/usr/bin:/bin") }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	for _, tc := range []struct {
		name           string
		args           []string
		stdin          string
		stdout, stderr string
		status         int
	}{
		{"output and status", []string{"sh", "-c", "echo out; echo err >&2; exit 3"}, "", "out\n", "err\n", 3},
		{"arguments pass unchanged", []string{"printf", "%s|", "a b", `"$x"`, ""}, "", `a b|"$x"||`, "", 0},
		{"input", []string{"cat"}, strings.Repeat("x", 100_000), strings.Repeat("x", 100_000), "", 0},
		{"input that the command ignores", []string{"echo", "done"}, strings.Repeat("x", 100_000), "done\n", "", 0},
		{"unknown command", []string{"sh", "-c", "exec 2>/dev/null; exec no-such-command"}, "", "", "", 127},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			status, err := Run(t.Context(), listener.Addr().String(), tc.args, strings.NewReader(tc.stdin), &stdout, &stderr)
			if err != nil {
				t.Fatal(err)
			}
			if status != tc.status {
				t.Errorf("status: got %d, want %d", status, tc.status)
			}
			if stdout.String() != tc.stdout {
				t.Errorf("stdout: got %.100q, want %.100q", stdout.String(), tc.stdout)
			}
			if stderr.String() != tc.stderr {
				t.Errorf("stderr: got %q, want %q", stderr.String(), tc.stderr)
			}
		})
	}
}
