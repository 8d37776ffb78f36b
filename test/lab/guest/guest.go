// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package guest runs virtual machines with QEMU. It emulates the processor (TCG):
// that works on every machine, and the result of a test does not depend on
// whether KVM is available.
//
// A guest ends when its context is done, when it powers off or panics, and when
// the process that started it dies.
package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// Config describes a guest.
type Config struct {
	// Kernel and Initrd are files.
	Kernel, Initrd string
	// Append are arguments for the kernel besides those for the console.
	Append []string
	// CPUs is the number of virtual processors, MemoryMiB the size of the memory.
	CPUs, MemoryMiB int
	// Console receives the kernel's messages (ttyS0).
	Console io.Writer
	// Ports receive the guest's output on ttyS1, ttyS2, and ttyS3.
	Ports []io.Writer
	// Args are additional arguments for QEMU.
	Args []string
	// Prefix is a command that runs QEMU, such as one that enters a namespace. It
	// must replace itself by QEMU.
	Prefix []string
}

// Guest is a running virtual machine.
type Guest struct {
	cancel context.CancelFunc
	done   chan struct{}
	err    error
	pid    int
}

// Start starts a guest, which ends at the latest when ctx is done.
func Start(ctx context.Context, c Config) (*Guest, error) {
	ctx, cancel := context.WithCancel(ctx)
	argv := append(append([]string(nil), c.Prefix...), c.qemu()...)
	qemu := exec.CommandContext(ctx, argv[0], argv[1:]...)
	qemu.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	var stderr bytes.Buffer
	qemu.Stderr = &stderr
	var copying sync.WaitGroup
	var writeEnds []*os.File
	for i, port := range append([]io.Writer{c.Console}, c.Ports...) {
		if port == nil {
			port = io.Discard
		}
		r, w, err := os.Pipe()
		if err != nil {
			cancel()
			return nil, fmt.Errorf("make the pipe for ttyS%d: %w", i, err)
		}
		qemu.ExtraFiles = append(qemu.ExtraFiles, w)
		writeEnds = append(writeEnds, w)
		copying.Go(func() {
			defer r.Close()
			// A writer that fails must not stop the guest.
			if _, err := io.Copy(port, r); err != nil {
				_, _ = io.Copy(io.Discard, r)
			}
		})
	}
	g := &Guest{cancel: cancel, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		defer close(g.done)
		// The kernel sends Pdeathsig when the thread that forked ends, so this
		// goroutine keeps its thread as long as QEMU runs.
		runtime.LockOSThread()
		err := qemu.Start()
		for _, w := range writeEnds {
			w.Close()
		}
		if err == nil {
			g.pid = qemu.Process.Pid
		}
		started <- err
		if err != nil {
			return
		}
		if err := qemu.Wait(); err != nil {
			g.err = fmt.Errorf("QEMU: %w: %s", err, strings.TrimSpace(stderr.String()))
		}
		copying.Wait()
		if ctx.Err() != nil {
			g.err = context.Cause(ctx)
		}
	}()
	if err := <-started; err != nil {
		cancel()
		if errors.Is(err, exec.ErrNotFound) {
			return nil, fmt.Errorf("start QEMU: %w: install the Debian package qemu-system-x86", err)
		}
		return nil, fmt.Errorf("start QEMU: %w", err)
	}
	return g, nil
}

// ErrShutDown means that QEMU ended without an error although nothing ended the guest.
var ErrShutDown = errors.New("the guest shut down, or its kernel panicked")

// Wait waits until the guest has ended. It returns the cause if the context ended
// it, and QEMU's message if QEMU failed.
func (g *Guest) Wait() error {
	<-g.done
	g.cancel()
	return g.err
}

// Done is closed when the guest has ended.
func (g *Guest) Done() <-chan struct{} { return g.done }

// Stop ends the guest immediately, as if its power were cut.
func (g *Guest) Stop() {
	g.cancel()
	<-g.done
}

// PID returns the process ID of QEMU.
func (g *Guest) PID() int { return g.pid }

// qemu returns the command line of QEMU. File descriptors 3, 4, and so on are the
// serial ports.
func (c Config) qemu() []string {
	argv := []string{
		"qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi",
		// Some kernels fail with 5-level page tables under TCG.
		"-cpu", "max,la57=off", "-smp", strconv.Itoa(c.CPUs), "-m", strconv.Itoa(c.MemoryMiB),
		"-nodefaults", "-display", "none", "-no-reboot", "-device", "virtio-rng-pci",
		"-kernel", c.Kernel, "-initrd", c.Initrd,
		"-append", strings.Join(append([]string{"console=ttyS0", "panic=-1", "mitigations=off", "quiet"}, c.Append...), " "),
	}
	for i := range len(c.Ports) + 1 {
		argv = append(argv, "-serial", fmt.Sprintf("file:/proc/self/fd/%d", i+3))
	}
	return append(argv, c.Args...)
}

// Tail returns the last lines of the kernel's messages, for an error.
func Tail(console []byte) string {
	const lines = 40
	all := bytes.Split(bytes.TrimSpace(console), []byte("\n"))
	if len(all) == 1 && len(all[0]) == 0 {
		return ""
	}
	return "\nlast messages of the kernel:\n" + string(bytes.Join(all[max(0, len(all)-lines):], []byte("\n")))
}
