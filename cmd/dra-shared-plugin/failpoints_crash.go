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
)

// newFailpoints returns an injector that ends the plugin before or after the n-th
// operation since the file "die" appeared in the run directory. The file contains
// "before n" or "after n"; the injector removes it, so that the next plugin runs. It
// appends the name of each operation to the file "steps", if that exists.
func newFailpoints(runDir string) failpoint.Injector {
	c := &crashInjector{die: filepath.Join(runDir, "die"), steps: filepath.Join(runDir, "steps")}
	return c.run
}

type crashInjector struct {
	die, steps string

	mu      sync.Mutex
	command string // the content of the file die
	seen    int    // the number of operations since it appeared
}

func (c *crashInjector) run(name string, operation func() error) error {
	c.log(name)
	when := c.due()
	if when == "before" {
		c.end()
	}
	err := operation()
	if when == "after" {
		c.end()
	}
	return err
}

func (c *crashInjector) log(name string) {
	if f, err := os.OpenFile(c.steps, os.O_WRONLY|os.O_APPEND, 0); err == nil {
		_, _ = fmt.Fprintln(f, name)
		_ = f.Close()
	}
}

// due returns when to end at this operation: "before", "after", or "" for never.
func (c *crashInjector) due() (when string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	raw, err := os.ReadFile(c.die)
	if err != nil {
		return ""
	}
	if c.command != string(raw) {
		c.command, c.seen = string(raw), 0
	}
	c.seen++
	var at int
	if n, _ := fmt.Sscan(c.command, &when, &at); n != 2 || at != c.seen {
		return ""
	}
	return when
}

func (c *crashInjector) end() {
	_ = os.Remove(c.die)
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	os.Exit(137) // process 1 of a container ignores its own SIGKILL; os.Exit runs no deferred functions either
}
