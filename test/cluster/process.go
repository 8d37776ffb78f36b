package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func selfPath() string {
	self, err := os.Executable()
	if err != nil {
		panic(err) // /proc is not mounted: nothing here would work
	}
	return self
}

func lockThread() { runtime.LockOSThread() }

func terminated() <-chan os.Signal {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGTERM, syscall.SIGINT)
	return c
}

// initProcess is process 1 of the bed: it runs one child and reaps every
// orphan until that child ends. It is a process of its own because reaping by
// wait4(-1) and os/exec's own waiting do not go together.
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

// daemon is a process that is started again when it ends, so that a test can
// kill it and see the world recover as it does under an init system.
type daemon struct {
	name string
	log  string
	argv []string
	env  []string
	// more arguments, asked for whenever it starts.
	more func() ([]string, error)
}

// restartPause keeps a daemon that cannot start from spinning.
const restartPause = 500 * time.Millisecond

func (d daemon) start(ctx context.Context) error {
	cmd, err := d.spawn()
	if err != nil {
		return err
	}
	go func() {
		for {
			err := cmd.Wait()
			fmt.Fprintf(os.Stderr, "%s ended: %v; starting it again\n", d.name, err)
			for {
				select {
				case <-ctx.Done():
					return
				case <-time.After(restartPause):
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

func (d daemon) spawn() (*exec.Cmd, error) {
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	argv := d.argv
	if d.more != nil {
		more, err := d.more()
		if err != nil {
			return nil, fmt.Errorf("start %s: %w", d.name, err)
		}
		argv = append(slices.Clone(argv), more...)
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), d.env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", d.name, err)
	}
	return cmd, nil
}

// await calls ready until it returns nil. What it waits for (a port, an API
// object) has no event to subscribe to from here.
func await(ctx context.Context, what string, ready func() error) error {
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
			return fmt.Errorf("%s: %w", what, err)
		case <-tick.C:
		}
	}
}
