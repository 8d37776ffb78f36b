// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package engine finds a Docker daemon that can run the driver's nodes in its containers, or starts one.
//
// Find does not depend on version numbers. It runs a privileged container on this machine's daemon. The container tries
// the operations of the node's kubelet and the plugin. Where that fails, or where there is no daemon, Find starts a
// private one:
//
//	dockerd in separate network, mount, and PID namespaces, with the runtime of
//	runtime.go, which adapts containers to this machine and runs the project's runc.
//
// The program that uses this package calls Main first: it is also the container that
// probes, the runtime, and process 1 of the private daemon's namespaces.
package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Engine is a Docker daemon.
type Engine struct {
	// Host is the address of a private daemon. It is empty for the daemon that the
	// docker command finds without help.
	Host string
	// Init is process 1 of a private daemon's namespaces, as this machine numbers it,
	// and Started is when that process started, in the unit of /proc/PID/stat. They
	// are 0 for a daemon that this package did not start.
	Init    int
	Started uint64
	// CgroupParent is the parent of the cgroups of a private daemon's containers.
	CgroupParent string
	// Facts are the abilities of a container of the daemon.
	Facts Facts
}

// Main runs the part of this package that os.Args selects, if any, and then does not return.
func Main() {
	var err error
	switch {
	case filepath.Base(os.Args[0]) == runtimeName:
		err = runRuntime(os.Args)
	case len(os.Args) == 2 && os.Args[1] == probeCommand:
		err = printFacts()
	case len(os.Args) == 3 && os.Args[1] == initCommand:
		err = runInit(os.Args[2])
	default:
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Find returns a daemon that can run nodes. If this machine's daemon is unfit or absent, Find starts a private one,
// with its files in dir, and reports the reason. prepare installs the dependencies of a private daemon, and returns the
// path of runc.
func Find(
	ctx context.Context, dir string, prepare func(context.Context) (runc string, err error), report func(message string),
) (*Engine, error) {
	e := &Engine{}
	reason := e.check(ctx)
	if reason == nil {
		return e, nil
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	report(fmt.Sprintf("The Docker daemon of this machine cannot run the nodes (%v): starting a private one", reason))
	runc, err := prepare(ctx)
	if err != nil {
		return nil, err
	}
	e, err = start(ctx, dir, runc)
	if err != nil {
		return nil, err
	}
	if err := e.check(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("the private Docker daemon cannot run nodes either: %w", err), e.Stop(ctx))
	}
	return e, nil
}

// Private reports whether this package started the daemon.
func (e *Engine) Private() bool { return e.Init != 0 }

// Command returns a command that uses the daemon: docker, or a program that connects to
// ports of its containers.
func (e *Engine) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	if !e.Private() {
		return exec.CommandContext(ctx, name, args...)
	}
	enter := []string{"--net", "--target", strconv.Itoa(e.Init), "--", name}
	cmd := exec.CommandContext(ctx, "nsenter", append(enter, args...)...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+e.Host)
	return cmd
}

// Docker runs the docker command and returns its standard output.
func (e *Engine) Docker(ctx context.Context, args ...string) (string, error) {
	out, err := output(e.Command(ctx, "docker", args...))
	if err != nil {
		err = fmt.Errorf("docker %s: %w", args[0], err)
	}
	return out, err
}

// check fills in Facts. It returns an error that says why the daemon is unfit.
func (e *Engine) check(ctx context.Context) error {
	if _, err := exec.LookPath("docker"); err != nil {
		return errors.New("the docker command is not installed")
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if _, err := e.Docker(ctx, "version", "--format", "{{.Server.Version}}"); err != nil {
		return fmt.Errorf("it does not answer: %w", err)
	}
	facts, err := e.probe(ctx)
	if err != nil {
		return err
	}
	if facts.BPF != "" {
		return fmt.Errorf("a privileged container cannot use BPF: %s", facts.BPF)
	}
	e.Facts = facts
	return nil
}

// output runs cmd and returns its standard output. The error has the first line of its
// standard error.
func output(cmd *exec.Cmd) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		message, _, _ := strings.Cut(strings.TrimSpace(stderr.String()), "\n")
		return stdout.String(), fmt.Errorf("%w: %s", err, message)
	}
	return stdout.String(), nil
}
