// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// SandboxProcess returns the process that holds the namespaces of a pod, from the directory
// /proc: it is called pause, and its cgroup has the UID of the pod in its name.
func SandboxProcess(proc, uid string) (pid int, err error) {
	paths, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "comm"))
	if err != nil {
		return 0, err
	}
	for _, path := range paths {
		name, err := os.ReadFile(path)
		if err != nil || strings.TrimSpace(string(name)) != "pause" {
			continue // it may have ended
		}
		raw, err := os.ReadFile(filepath.Join(filepath.Dir(path), "cgroup"))
		if err != nil {
			continue
		}
		// systemd has another use for the character -.
		if strings.Contains(strings.ReplaceAll(string(raw), "_", "-"), uid) {
			return strconv.Atoi(filepath.Base(filepath.Dir(path)))
		}
	}
	return 0, fmt.Errorf("%s has no process called pause in a cgroup of pod %s", proc, uid)
}
