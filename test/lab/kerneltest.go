// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/lab/guest"
	"github.com/dra-shared/dra-driver-shared/test/lab/kernel"
	"github.com/dra-shared/dra-driver-shared/test/lab/vminit"
)

// kernelTest is one run of static binaries in a guest.
type kernelTest struct {
	selector        string
	append          []string
	timeout         time.Duration
	cpus, memoryMiB int
	files           map[string]string // path in the guest -> file of this machine
	console         string
	job             vminit.Job
	binaries        []string
	dir             string // for temporary files
}

func runTest(ctx context.Context, cache string, args []string) (int, error) {
	test := kernelTest{files: map[string]string{}}
	flags := flag.NewFlagSet("lab test", flag.ContinueOnError)
	flags.StringVar(&test.selector, "kernel", "6.12", "kernel to boot")
	flags.Func("append", "argument for the kernel, such as lockdown=confidentiality (repeatable)", func(s string) error {
		test.append = append(test.append, s)
		return nil
	})
	flags.Func("env", "variable NAME=VALUE for the binary (repeatable)", func(s string) error {
		test.job.Env = append(test.job.Env, s)
		return nil
	})
	flags.Func("module", "kernel module to load first (repeatable)", func(s string) error {
		test.job.Modules = append(test.job.Modules, s)
		return nil
	})
	flags.Func("file", "file to add, as FILE or FILE:PATH-IN-GUEST (repeatable)", func(s string) error {
		file, name, found := strings.Cut(s, ":")
		if !found {
			name = filepath.Join("/lab", filepath.Base(file))
		}
		test.files[name] = file
		return nil
	})
	flags.StringVar(&test.job.Dir, "dir", "/tmp", "working directory in the guest")
	flags.StringVar(&test.console, "console", "", "file for the messages of the kernel")
	flags.DurationVar(&test.timeout, "timeout", 10*time.Minute, "time after which the guest is ended")
	flags.IntVar(&test.cpus, "cpus", 2, "number of processors")
	flags.IntVar(&test.memoryMiB, "memory", 1536, "memory in MiB")
	before, after, err := parse(flags, args)
	if err != nil {
		return 2, err
	}
	if len(before) == 0 {
		return 2, errUsage
	}
	dir, err := os.MkdirTemp("", "lab-test-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	test.dir = dir
	if err := test.add(ctx, before); err != nil {
		return 1, err
	}
	test.job.Args = after
	return test.run(ctx, cache, os.Stdout)
}

// add adds static binaries, and packages with tests to run.
func (t *kernelTest) add(ctx context.Context, programs []string) error {
	for _, program := range programs {
		binary, err := testBinary(ctx, program, t.dir)
		if err != nil {
			return err
		}
		t.binaries = append(t.binaries, binary)
		t.job.Programs = append(t.job.Programs, "/lab/"+filepath.Base(binary))
	}
	return nil
}

// testBinary returns the file to run: file itself, or, if it is the directory of
// a package, the static binary of the package's tests, which it builds in dir.
func testBinary(ctx context.Context, file, dir string) (string, error) {
	info, err := os.Stat(file)
	if err != nil || !info.IsDir() {
		return file, err
	}
	binary := filepath.Join(dir, filepath.Base(file)+".test")
	build := exec.CommandContext(ctx, "go", "test", "-c", "-o", binary, goPackage(file))
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	build.Stdout, build.Stderr = os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		return "", fmt.Errorf("build the tests of %s: %w", file, err)
	}
	return binary, nil
}

// goPackage returns a directory in the form that the go command takes for a package.
func goPackage(dir string) string {
	if filepath.IsAbs(dir) {
		return dir
	}
	return "./" + filepath.Clean(dir)
}

// run boots the guest, copies the output of the binaries, and returns their exit
// status.
func (t kernelTest) run(ctx context.Context, cache string, output io.Writer) (int, error) {
	k, err := kernel.Fetch(ctx, t.selector, filepath.Join(cache, "kernels"))
	if err != nil {
		return 1, err
	}
	modules, err := k.Staged(ctx, guestModules, filepath.Join(cache, "modules"))
	if err != nil {
		return 1, err
	}
	initrd := filepath.Join(t.dir, "initrd")
	if err := t.writeInitrd(initrd, modules); err != nil {
		return 1, fmt.Errorf("write the initramfs: %w", err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, t.timeout,
		fmt.Errorf("guest with Linux %s: ended after %s", k.Release, t.timeout))
	defer cancel()
	var console, status bytes.Buffer
	g, err := guest.Start(ctx, guest.Config{
		Kernel: k.Image(), Initrd: initrd, Append: t.append, CPUs: t.cpus, MemoryMiB: t.memoryMiB,
		Console: &console, Ports: []io.Writer{output, &status},
	})
	if err != nil {
		return 1, err
	}
	waitErr := g.Wait()
	if t.console != "" {
		if err := os.WriteFile(t.console, console.Bytes(), 0o644); err != nil {
			return 1, err
		}
	}
	if waitErr != nil {
		return 1, fmt.Errorf("%w%s", waitErr, guest.Tail(console.Bytes()))
	}
	report, err := vminit.ReadReport(&status)
	if err != nil {
		return 1, fmt.Errorf("guest with Linux %s: %w%s", k.Release, err, guest.Tail(console.Bytes()))
	}
	if report.Error != "" {
		return report.Exit, fmt.Errorf("guest with Linux %s: %s%s", k.Release, report.Error, guest.Tail(console.Bytes()))
	}
	return report.Exit, nil
}

// writeInitrd writes the first file system of the guest, with the test binaries.
func (t kernelTest) writeInitrd(file, modules string) error {
	archive, err := vminit.NewArchive(file, t.job, modules)
	if err != nil {
		return err
	}
	for i, binary := range t.binaries {
		archive.CopyFile(t.job.Programs[i], binary)
	}
	for name, source := range t.files {
		archive.CopyFile(name, source)
	}
	return archive.Close()
}
