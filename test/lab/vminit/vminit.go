// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package vminit is process 1 of a guest. If the guest runs programs, vminit mounts
// the kernel's file systems, runs the programs, reports their exit status, and
// powers off. The output of the programs goes to ttyS1, the report to ttyS2.
//
// If the guest has a root disk, vminit mounts that, adds the kernel's modules and other files, and replaces itself with
// the disk's init program.
package vminit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// jobFile is the path of the job in the guest.
const jobFile = "/lab/job.json"

// Job is the command of a guest, with its files and environment.
type Job struct {
	// Programs run one after the other, with the same arguments.
	Programs []string
	Args     []string
	// Env is added to the environment of the programs.
	Env []string
	// Dir is the working directory.
	Dir string
	// Modules are loaded before the first program starts. The kernel loads others when
	// they are needed.
	Modules []string
	// RootDisk is the device of the root disk of a guest that has one, such as
	// /dev/vda. Such a guest ignores Programs, Args, Env, and Dir.
	RootDisk string
	// Labels makes vminit give the files that it adds to the root disk their SELinux labels. The
	// root disk has the program and the policy for that.
	Labels bool
}

// OverlayDir is a directory of the initramfs. vminit adds its files to the root disk.
const OverlayDir = "/overlay"

// programLine is the beginning of the line that precedes the output of each program, if
// there are several.
const programLine = "=== PROGRAM "

// Report is the result of a job.
type Report struct {
	// Exit is the exit status of the first program that failed, or 128 and the
	// number of the signal that ended it. It is 0 if none failed.
	Exit int
	// Error is what kept a program from running, or "".
	Error string
}

// Main runs the job as process 1. It does not return.
func Main() {
	var report Report
	if err := unix.Mount("devtmpfs", "/dev", "devtmpfs", 0, ""); err != nil {
		fmt.Println("lab: mount /dev:", err) // without ports, there is only the console
	}
	job, err := readJob()
	if err == nil && job.RootDisk != "" {
		err = bootDisk(job)
	} else if err == nil {
		report, err = runJob(job)
	}
	if err != nil {
		fmt.Println("lab:", err)
		report.Exit, report.Error = 1, err.Error()
	}
	if err := sendReport(report); err != nil {
		fmt.Println("lab: report the result:", err)
	}
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Println("lab: power off:", err)
	}
	select {} // process 1 must not end
}

func readJob() (job Job, err error) {
	raw, err := os.ReadFile(jobFile)
	if err != nil {
		return job, err
	}
	if err := json.Unmarshal(raw, &job); err != nil {
		return job, fmt.Errorf("read %s: %w", jobFile, err)
	}
	return job, nil
}

// runJob runs the programs of the job and returns when their output has been sent.
func runJob(job Job) (report Report, err error) {
	output, err := openPort("/dev/ttyS1")
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, drain(output)) }()
	if err := prepare(job); err != nil {
		return report, err
	}
	for _, name := range job.Programs {
		if len(job.Programs) > 1 {
			fmt.Fprintf(output, "%s%s\n", programLine, filepath.Base(name))
		}
		program := exec.Command(name, job.Args...)
		program.Env = append([]string{"PATH=/bin:/sbin", "HOME=/tmp", "TMPDIR=/tmp", "TERM=dumb"}, job.Env...)
		program.Dir = job.Dir
		program.Stdout, program.Stderr = output, output
		if err := program.Start(); err != nil {
			return report, fmt.Errorf("start %s: %w", name, err)
		}
		if exit := reap(program.Process.Pid); report.Exit == 0 {
			report.Exit = exit
		}
	}
	return report, nil
}

// prepare mounts the file systems, installs the commands of busybox, and loads the modules of the job.
func prepare(job Job) error {
	err := mountAll([]mount{
		{"proc", "/proc", "proc", ""},
		{"sysfs", "/sys", "sysfs", ""},
		{"tmpfs", "/tmp", "tmpfs", "mode=1777"},
		{"tmpfs", "/run", "tmpfs", "mode=755"},
		{"devpts", "/dev/pts", "devpts", ""},
		{"tmpfs", "/dev/shm", "tmpfs", "mode=1777"},
		{"bpf", "/sys/fs/bpf", "bpf", "mode=700"},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", ""},
		{"securityfs", "/sys/kernel/security", "securityfs", ""},
	})
	if err != nil {
		return err
	}
	commands := [][]string{
		{"/bin/busybox", "--install", "-s", "/bin"},
		{"/bin/busybox", "ip", "link", "set", "lo", "up"},
	}
	return runAll(append(commands, modprobe(job.Modules)...))
}

type mount struct{ source, target, kind, data string }

func mountAll(mounts []mount) error {
	for _, m := range mounts {
		if err := os.MkdirAll(m.target, 0o755); err != nil && !errors.Is(err, os.ErrPermission) {
			return err
		}
		if err := unix.Mount(m.source, m.target, m.kind, 0, m.data); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	return nil
}

// modprobe returns the commands that load modules.
func modprobe(modules []string) (commands [][]string) {
	for _, module := range modules {
		commands = append(commands, []string{"/sbin/modprobe", module})
	}
	return commands
}

func runAll(commands [][]string) error {
	for _, argv := range commands {
		command := exec.Command(argv[0], argv[1:]...)
		if out, err := command.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, strings.TrimSpace(string(out)))
		}
	}
	return nil
}

// reap waits for all children, as process 1 must, until the program ends.
func reap(program int) int {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 1
		case pid == program && status.Signaled():
			return 128 + int(status.Signal())
		case pid == program:
			return status.ExitStatus()
		}
	}
}

func sendReport(report Report) error {
	port, err := openPort("/dev/ttyS2")
	if err != nil {
		return err
	}
	raw, err := json.Marshal(report)
	if err != nil {
		return err
	}
	if _, err := port.Write(append(raw, '\n')); err != nil {
		return err
	}
	return drain(port)
}

// ReadReport reads the report of the guest's program.
func ReadReport(r io.Reader) (Report, error) {
	var report Report
	err := json.NewDecoder(r).Decode(&report)
	if errors.Is(err, io.EOF) {
		return report, errors.New("the guest ended without a report")
	}
	return report, err
}

// openPort opens a serial port and turns off the processing of a terminal.
func openPort(name string) (*os.File, error) {
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	raw := unix.Termios{Cflag: unix.CREAD | unix.CS8 | unix.CLOCAL | unix.B115200}
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, &raw); err != nil {
		return nil, fmt.Errorf("configure %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// drain waits until the port has sent everything.
func drain(port *os.File) error {
	for {
		err := unix.IoctlSetInt(int(port.Fd()), unix.TCSBRK, 1)
		switch {
		case errors.Is(err, unix.EINTR): // the runtime signals its threads
		case err != nil:
			return fmt.Errorf("drain %s: %w", port.Name(), err)
		default:
			return nil
		}
	}
}
