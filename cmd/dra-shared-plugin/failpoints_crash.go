// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build crash

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/internal/failpoint/failpointtest"
)

// newFailpoints returns an injector that ends the plugin before or after the n-th operation since the file "die"
// appeared in the run directory. The file contains "before n" or "after n"; the injector removes it so that the next
// plugin runs. It appends the name of each operation to the file "steps", if that exists.
func newFailpoints(runDir string) failpoint.Injector {
	c := &crashInjector{die: filepath.Join(runDir, "die"), steps: filepath.Join(runDir, "steps")}
	return func(name string, operation func() error) error { return c.killer().Inject(name, operation) }
}

type crashInjector struct {
	die, steps string

	mu      sync.Mutex
	command string // the content of the file die
	current *failpointtest.Killer
}

// killer returns the killer for the content of the file die. It counts the operations since the content appeared.
func (c *crashInjector) killer() *failpointtest.Killer {
	c.mu.Lock()
	defer c.mu.Unlock()
	raw, _ := os.ReadFile(c.die) // without the file, no operation ends the plugin
	if c.current == nil || c.command != string(raw) {
		c.command = string(raw)
		c.current = &failpointtest.Killer{Point: parsePoint(c.command), Kill: c.kill, Record: c.record}
	}
	return c.current
}

// parsePoint parses "before n" or "after n". For any other text, it returns the zero Point, which
// is never reached.
func parsePoint(command string) (p failpointtest.Point) {
	var side string
	if n, _ := fmt.Sscan(command, &side, &p.N); n != 2 || side != "before" && side != "after" {
		return failpointtest.Point{}
	}
	p.After = side == "after"
	return p
}

func (c *crashInjector) record(operation string, _ int) {
	if f, err := os.OpenFile(c.steps, os.O_WRONLY|os.O_APPEND, 0); err == nil {
		_, _ = fmt.Fprintln(f, operation)
		_ = f.Close()
	}
}

func (c *crashInjector) kill(string) error {
	_ = os.Remove(c.die)
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	os.Exit(137) // process 1 of a container ignores its own SIGKILL; os.Exit runs no deferred functions either
	return nil
}
