// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package probe is the protocol between the plugin and its container's probes. A probe connects to the plugin's unix
// socket and sends a check's name and a line feed. The plugin answers "ok", or the reason why the check failed, and
// closes the connection.
//
// The kubelet starts a program for each probe, so this package uses only what such a small program can afford. A port
// cannot replace the socket: the plugin uses the node's network, where two plugins run during a rolling update.
package probe

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Checks.
const (
	// Started checks that the kubelet has registered the plugin. The kubelet does not run liveness probes before, so
	// this must not require more.
	Started = "started"
	// Ready checks that the plugin can prepare and attach shares.
	Ready = "ready"
	// Alive checks that hooks and the kubelet reach the plugin.
	Alive = "alive"
)

const (
	ok = "ok"
	// timeout limits one check on both ends.
	timeout = 5 * time.Second
	// maxLength limits the name of a check and the answer, in bytes.
	maxLength = 64 << 10
)

// Dir returns the socket directory below a plugin's run directory.
func Dir(runDir string) string { return filepath.Join(runDir, "health") }

// Socket returns the path of a plugin instance's socket.
func Socket(runDir, instance string) string { return filepath.Join(Dir(runDir), instance+".sock") }

// Ask runs a plugin instance's check. The error is the reason why it failed.
func Ask(runDir, instance, check string) error {
	conn, err := net.DialTimeout("unix", Socket(runDir, instance), timeout)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := io.WriteString(conn, check+"\n"); err != nil {
		return err
	}
	answer, err := io.ReadAll(io.LimitReader(conn, maxLength))
	switch {
	case err != nil:
		return err
	case len(answer) == 0:
		return errors.New("the plugin closed the connection without an answer")
	case string(answer) != ok:
		return errors.New(string(answer))
	}
	return nil
}

// Serve answers checks of a plugin instance until ctx ends. Calls to check may run at the same time.
func Serve(ctx context.Context, runDir, instance string, check func(name string) error) error {
	if err := os.MkdirAll(Dir(runDir), 0o700); err != nil {
		return err
	}
	path := Socket(runDir, instance)
	// A killed process in this pod may have left the socket.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	var answers sync.WaitGroup
	defer answers.Wait()
	for {
		conn, err := listener.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		answers.Go(func() { answer(conn, check) })
	}
}

func answer(conn net.Conn, check func(name string) error) {
	defer conn.Close()
	if conn.SetDeadline(time.Now().Add(timeout)) != nil {
		return
	}
	name, err := bufio.NewReader(io.LimitReader(conn, maxLength)).ReadString('\n')
	if err != nil {
		return // a peer that only connects, to find out whether the plugin runs
	}
	result := ok
	if err := check(strings.TrimSuffix(name, "\n")); err != nil {
		result = err.Error()
	}
	_, _ = io.WriteString(conn, result) // a probe that has ended does not need an answer
}
