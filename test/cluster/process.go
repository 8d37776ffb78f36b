// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func selfPath() string {
	self, err := os.Executable()
	if err != nil {
		panic(err) // /proc is not mounted, which every part of this command needs
	}
	return self
}

func terminated() <-chan os.Signal {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGTERM, syscall.SIGINT)
	return c
}

// initProcess is process 1 of the cluster's PID namespace: it runs one child,
// reaps orphans until that child ends, and exits with the child's status. It is a
// separate process because reaping with wait4(-1) would take away the exit
// statuses that os/exec waits for.
func initProcess(path string, args []string) error {
	child, err := syscall.ForkExec(path, append([]string{path}, args...), &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{0, 1, 2, 3},
	})
	if err != nil {
		return err
	}
	syscall.CloseOnExec(3)
	_ = unix.Close(3)
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait: %w", err)
		}
		if pid == child {
			os.Exit(status.ExitStatus())
		}
	}
}

// daemon is a process that is restarted when it ends, as an init system does. A test can kill it and check that the
// cluster recovers.
type daemon struct {
	name string
	log  string
	argv []string
	env  []string
	// extraArgs, if set, returns additional arguments; it is called at every start.
	extraArgs func() ([]string, error)
	// stopped, if not empty, is the path of a file; the daemon is not restarted while
	// the file exists.
	stopped string
}

// restartDelay keeps a daemon that fails immediately from restarting in a busy loop.
const restartDelay = 500 * time.Millisecond

// start starts the daemon and restarts it whenever it ends, until ctx is canceled.
func (d daemon) start(ctx context.Context) error {
	cmd, err := d.spawn()
	if err != nil {
		return err
	}
	go func() {
		for {
			err := cmd.Wait()
			fmt.Fprintf(os.Stderr, "%s ended: %v; restarting it\n", d.name, err)
			for {
				select {
				case <-ctx.Done():
					return
				case <-time.After(restartDelay):
				}
				if _, err := os.Stat(d.stopped); err == nil {
					continue
				}
				if cmd, err = d.spawn(); err == nil {
					break
				}
				fmt.Fprintf(os.Stderr, "%s: %v\n", d.name, err)
			}
		}
	}()
	return nil
}

// garbageCollection lets the heaps of the components grow to four times the memory in use. The heaps
// are small, and several clusters on two processors would otherwise use much of their time to
// collect garbage.
const garbageCollection = "GOGC=300"

func (d daemon) spawn() (*exec.Cmd, error) {
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	argv := d.argv
	if d.extraArgs != nil {
		extra, err := d.extraArgs()
		if err != nil {
			return nil, fmt.Errorf("start %s: %w", d.name, err)
		}
		argv = append(slices.Clone(argv), extra...)
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), garbageCollection)
	cmd.Env = append(cmd.Env, d.env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", d.name, err)
	}
	return cmd, nil
}

// await calls ready every 25 ms until it returns nil, for at most a minute. It
// polls because a port or a starting API server offers no event to wait for.
func await(ctx context.Context, subject string, ready func() error) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", subject, err)
		case <-tick.C:
		}
	}
}
