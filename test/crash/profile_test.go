// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"errors"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
)

// profiles are the periods that a plugin writes profiles for: of its processor time, allocations, and locks. Each
// period begins and ends with SIGUSR1.
type profiles struct {
	Dir     string
	Periods []string
	// AtStart means that the first period begins with the process.
	AtStart bool
}

// Endings of the names of profiles.
const (
	cpuProfile    = ".cpu"
	allocsBefore  = ".allocs-before"
	allocsProfile = ".allocs"
	mutexProfile  = ".mutex" // written last
)

// run writes the profiles in the background. It ends the process if that fails, because
// the test would wait for them.
func (p profiles) run() {
	if p.Dir == "" {
		return
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	started := make(chan struct{})
	begin := sync.OnceFunc(func() { close(started) })
	go func() {
		for i, period := range p.Periods {
			if i > 0 || !p.AtStart {
				<-signals
			}
			if err := profile(filepath.Join(p.Dir, period), begin, signals); err != nil {
				panic(err)
			}
		}
	}()
	if p.AtStart {
		<-started
	}
}

// profile writes the profiles of the time from now until a signal. It calls begin when they
// have begun.
func profile(path string, begin func(), signals <-chan os.Signal) error {
	err := writeProfile("allocs", path+allocsBefore)
	runtime.SetMutexProfileFraction(1)
	defer runtime.SetMutexProfileFraction(0)
	file, openErr := os.Create(path + cpuProfile)
	if err = errors.Join(err, openErr); err != nil {
		return err
	}
	err = pprof.StartCPUProfile(file)
	begin()
	<-signals
	pprof.StopCPUProfile()
	return errors.Join(err, file.Close(),
		writeProfile("allocs", path+allocsProfile), writeProfile("mutex", path+mutexProfile))
}

func writeProfile(name, path string) error {
	temporary, err := os.Create(path + ".tmp")
	if err != nil {
		return err
	}
	err = errors.Join(pprof.Lookup(name).WriteTo(temporary, 0), temporary.Close())
	return errors.Join(err, os.Rename(path+".tmp", path))
}

// TestProfile_plugin writes profiles of a plugin with SCALE_SHARES shares into the directory SCALE_PROFILES: of
// attaching shares, of a restart, of a minute without changes, and of a minute while a pod changes its link in a loop.
func TestProfile_plugin(t *testing.T) {
	dir := os.Getenv("SCALE_PROFILES")
	if dir == "" {
		t.Skip("SCALE_PROFILES is not set: make profiles sets it")
	}
	shares, err := strconv.Atoi(os.Getenv("SCALE_SHARES"))
	if err != nil {
		t.Fatalf("environment variable SCALE_SHARES: %v", err)
	}
	s := newScale(t)
	s.start(func(c *pluginConfig) {
		tuned(c)
		c.Profiles = profiles{Dir: dir, Periods: []string{"attach"}}
	})
	const attached = 200
	s.fill(shares - attached - 1) // one is for the loop
	s.period(dir, "attach", func() { s.fill(attached) })
	s.kill()
	s.start(func(c *pluginConfig) {
		tuned(c)
		c.Profiles = profiles{Dir: dir, Periods: []string{"restart", "rest", "loop"}, AtStart: true}
	})
	s.register()
	s.settle()
	s.endPeriod(dir, "restart")
	s.period(dir, "rest", func() { <-time.After(restPeriod) })
	pod := s.attachOne()
	s.settle()
	s.period(dir, "loop", func() { s.flapFor(pod, restPeriod) })
}

// period lets the plugin profile the time of do.
func (s *scale) period(dir, name string, do func()) {
	s.t.Helper()
	s.signal()
	s.eventually("the profile "+name+" has begun", func() error {
		_, err := os.Stat(filepath.Join(dir, name+cpuProfile))
		return err
	})
	do()
	s.endPeriod(dir, name)
}

func (s *scale) endPeriod(dir, name string) {
	s.t.Helper()
	s.signal()
	s.eventually("the profile "+name+" is written", func() error {
		_, err := os.Stat(filepath.Join(dir, name+mutexProfile))
		return err
	})
}

func (s *scale) signal() {
	s.t.Helper()
	if err := s.plugin.cmd.Process.Signal(syscall.SIGUSR1); err != nil {
		s.t.Fatal(err)
	}
}
