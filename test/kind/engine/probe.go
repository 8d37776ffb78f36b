// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

const probeCommand = "probe-container"

// Facts are the abilities of a privileged container of a daemon.
type Facts struct {
	// BPF is empty if a process with only the plugin's capabilities can create a BPF
	// map. Otherwise it says what failed.
	BPF string
	// Cgroup2 reports whether the container has cgroup v2.
	Cgroup2 bool
	// OOMScore reports whether a process can lower its OOM score, as systemd does for
	// services and the kubelet for itself.
	OOMScore bool
}

// probe runs this program in a privileged container.
func (e *Engine) probe(ctx context.Context) (facts Facts, err error) {
	image := fmt.Sprintf("dra-shared-probe:%d", os.Getpid())
	archive, err := programArchive()
	if err != nil {
		return facts, err
	}
	load := e.Command(ctx, "docker", "import", "-", image)
	load.Stdin = bytes.NewReader(archive)
	if _, err := output(load); err != nil {
		return facts, fmt.Errorf("docker import: %w", err)
	}
	defer func() {
		_, removeErr := e.Docker(context.WithoutCancel(ctx), "image", "rm", image)
		err = errors.Join(err, removeErr)
	}()
	out, err := e.Docker(ctx, "run", "--rm", "--privileged", "--network=none", image, "/program", probeCommand)
	if err != nil {
		return facts, err
	}
	return facts, json.Unmarshal([]byte(out), &facts)
}

// programArchive returns a tar archive that contains this program.
func programArchive() ([]byte, error) {
	content, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	err = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "program", Mode: 0o755, Size: int64(len(content))})
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(content); err != nil {
		return nil, err
	}
	return archive.Bytes(), w.Close()
}

// printFacts is the script that the container runs.
func printFacts() error {
	var facts Facts
	var stat unix.Statfs_t
	if err := unix.Statfs("/sys/fs/cgroup", &stat); err != nil {
		return fmt.Errorf("inspect /sys/fs/cgroup: %w", err)
	}
	facts.Cgroup2 = stat.Type == unix.CGROUP2_SUPER_MAGIC
	facts.OOMScore = os.WriteFile("/proc/self/oom_score_adj", []byte("-999"), 0o644) == nil
	if err := tryBPF(); err != nil {
		facts.BPF = err.Error()
	}
	return json.NewEncoder(os.Stdout).Encode(facts)
}

// pluginCapabilities are those that the chart requests for the plugin and that older
// container engines do not know.
var pluginCapabilities = []int{unix.CAP_BPF, unix.CAP_PERFMON}

// tryBPF drops all other capabilities, as the runtime does for the plugin's container,
// and creates a BPF map.
func tryBPF() error {
	runtime.LockOSThread() // and never unlocks it: the thread has lost its capabilities
	var sets [2]unix.CapUserData
	for _, c := range pluginCapabilities {
		sets[c/32].Effective |= 1 << (c % 32)
		sets[c/32].Permitted |= 1 << (c % 32)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if err := unix.Capset(&header, &sets[0]); err != nil {
		return fmt.Errorf("keep only CAP_BPF and CAP_PERFMON: %w", err)
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return err
	}
	return m.Close()
}
