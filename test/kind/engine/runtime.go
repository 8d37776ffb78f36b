// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// Names of files in the same directory: the runtime that a private daemon starts,
// which is a link to this program, and the runc that it starts in turn.
const (
	runtimeName = "dra-shared-runc"
	runcName    = "runc"
)

// capabilityNames are the names of all capabilities, by number; see capability(7).
var capabilityNames = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID",
	"CAP_SETUID", "CAP_SETPCAP", "CAP_LINUX_IMMUTABLE", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_ADMIN",
	"CAP_NET_RAW", "CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT",
	"CAP_SYS_PTRACE", "CAP_SYS_PACCT", "CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE",
	"CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_MKNOD", "CAP_LEASE", "CAP_AUDIT_WRITE", "CAP_AUDIT_CONTROL",
	"CAP_SETFCAP", "CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG", "CAP_WAKE_ALARM", "CAP_BLOCK_SUSPEND",
	"CAP_AUDIT_READ", "CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE",
}

// runRuntime adapts the container's configuration to this machine and executes runc
// with the same arguments.
func runRuntime(args []string) error {
	own, err := ownCapabilities()
	if err != nil {
		return err
	}
	if path, whole := configuration(args); path != "" {
		if err := rewrite(path, func(raw []byte) ([]byte, error) { return adapt(raw, whole, own) }); err != nil {
			return fmt.Errorf("adapt %s: %w", path, err)
		}
	}
	runc := filepath.Join(filepath.Dir(args[0]), runcName)
	return fmt.Errorf("execute %s: %w", runc, unix.Exec(runc, append([]string{runc}, args[1:]...), os.Environ()))
}

// configuration returns the file that a runc command finds capabilities in: the configuration of a new container, which
// is whole, or a process for a running one. Other commands do not have such a file.
func configuration(args []string) (path string, whole bool) {
	command := func(name string) bool { return slices.Contains(args, name) }
	for i, arg := range args[:len(args)-1] {
		switch {
		case (arg == "--bundle" || arg == "-b") && (command("create") || command("run")):
			return filepath.Join(args[i+1], "config.json"), true
		case (arg == "--process" || arg == "-p") && command("exec"):
			return args[i+1], false
		}
	}
	return "", false
}

// adapt changes the capabilities of a container's process in two ways. It removes capabilities that this machine does
// not grant even to root, because runc would fail with them. To the sets of privileged containers, it adds capabilities
// that an old daemon does not know.
func adapt(raw []byte, whole bool, own []string) ([]byte, error) {
	var config map[string]any
	if err := json.Unmarshal(raw, &config); err != nil {
		return nil, err
	}
	process := config
	if whole {
		var ok bool
		if process, ok = config["process"].(map[string]any); !ok {
			return nil, errors.New("the configuration has no process")
		}
	}
	sets, _ := process["capabilities"].(map[string]any)
	for name, value := range sets {
		list, ok := value.([]any)
		if !ok {
			return nil, fmt.Errorf("capabilities.%s is not a list", name)
		}
		sets[name] = adaptSet(list, own)
	}
	return json.Marshal(config)
}

func adaptSet(list []any, own []string) []string {
	adapted := []string{}
	for _, element := range list {
		if c, ok := element.(string); ok && slices.Contains(own, c) {
			adapted = append(adapted, c)
		}
	}
	if !slices.Contains(adapted, "CAP_SYS_ADMIN") {
		return adapted
	}
	for _, c := range []string{"CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE"} {
		if slices.Contains(own, c) && !slices.Contains(adapted, c) {
			adapted = append(adapted, c)
		}
	}
	return adapted
}

// ownCapabilities returns the permitted capabilities of this process.
func ownCapabilities() ([]string, error) {
	var sets [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &sets[0]); err != nil {
		return nil, fmt.Errorf("read own capabilities: %w", err)
	}
	var own []string
	for number, name := range capabilityNames {
		if sets[number/32].Permitted&(1<<(number%32)) != 0 {
			own = append(own, name)
		}
	}
	return own, nil
}

func rewrite(path string, change func([]byte) ([]byte, error)) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if raw, err = change(raw); err != nil {
		return err
	}
	return os.WriteFile(path, raw, info.Mode())
}
