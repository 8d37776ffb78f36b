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

// newFailpoints dies before or after the n-th step from the moment that the file
// "die" appears in the run directory ("before 7", "after 7"), and removes it, so
// that the next plugin lives. Steps are written to the file "steps" beside it,
// if there is one.
func newFailpoints(runDir string) failpoint.Injector {
	s := &crashInjector{die: filepath.Join(runDir, "die"), steps: filepath.Join(runDir, "steps")}
	return s.do
}

type crashInjector struct {
	die, steps string

	mu   sync.Mutex
	told string
	seen int
}

func (s *crashInjector) do(name string, do func() error) error {
	s.note(name)
	when := s.due()
	if when == "before" {
		s.end()
	}
	err := do()
	if when == "after" {
		s.end()
	}
	return err
}

func (s *crashInjector) note(name string) {
	if f, err := os.OpenFile(s.steps, os.O_WRONLY|os.O_APPEND, 0); err == nil {
		_, _ = fmt.Fprintln(f, name)
		_ = f.Close()
	}
}

// due tells whether this step is the one.
func (s *crashInjector) due() (when string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	raw, err := os.ReadFile(s.die)
	if err != nil {
		return ""
	}
	if s.told != string(raw) {
		s.told, s.seen = string(raw), 0
	}
	s.seen++
	var at int
	if n, _ := fmt.Sscan(s.told, &when, &at); n != 2 || at != s.seen {
		return ""
	}
	return when
}

func (s *crashInjector) end() {
	_ = os.Remove(s.die)
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	os.Exit(137) // process 1 of a container does not hear its own SIGKILL; no deferred function runs here either
}
