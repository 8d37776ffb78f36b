// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// fakeDocker answers the commands that check runs. The container prints $FACTS.
const fakeDocker = `#!/bin/sh
echo "$*" >>"$(dirname "$0")/calls"
case $1 in
version) [ "$DAEMON" = answers ] || { echo "Cannot connect" >&2; exit 1; } ;;
import) cat >/dev/null ;;
run) [ "$PRIVILEGED" = works ] || { echo "unable to apply caps" >&2; exit 125; }; echo "$FACTS" ;;
esac
`

func TestEngine_check(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "docker"), []byte(fakeDocker), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	for name, test := range map[string]struct {
		daemon, privileged, facts string
		unfit                     string
	}{
		"fit":                      {"answers", "works", `{"BPF": "", "Cgroup2": true, "OOMScore": true}`, ""},
		"no daemon":                {"", "", "", "Cannot connect"},
		"no privileged containers": {"answers", "", "", "unable to apply caps"},
		"no CAP_BPF": {
			"answers", "works", `{"BPF": "keep only CAP_BPF: not permitted"}`, "keep only CAP_BPF",
		},
		"the container prints no answer": {"answers", "works", "", "unexpected end of JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("DAEMON", test.daemon)
			t.Setenv("PRIVILEGED", test.privileged)
			t.Setenv("FACTS", test.facts)
			var e Engine
			err := e.check(t.Context())
			if test.unfit == "" {
				if err != nil || e.Facts != (Facts{Cgroup2: true, OOMScore: true}) {
					t.Errorf("got error %v and facts %+v", err, e.Facts)
				}
			} else if err == nil || !strings.Contains(err.Error(), test.unfit) {
				t.Errorf("got error %v, want one that contains %q", err, test.unfit)
			}
		})
	}
	calls, err := os.ReadFile(filepath.Join(dir, "calls"))
	if err != nil {
		t.Fatal(err)
	}
	imports, removals := strings.Count(string(calls), "import "), strings.Count(string(calls), "image rm ")
	if imports == 0 || imports != removals {
		t.Errorf("imported %d images and removed %d", imports, removals)
	}
}

// The probe runs as the program of a container does. As an ordinary user it lacks the
// capabilities that an old daemon withholds.
func TestProbe(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		credential *syscall.Credential
		want       string
	}{
		"as root":             {nil, ""},
		"as an ordinary user": {&syscall.Credential{Uid: 65534, Gid: 65534}, "keep only CAP_BPF"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "/proc/self/exe", probeCommand)
			cmd.Path = program
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: test.credential}
			if test.credential != nil { // go test builds into a directory that only root can read
				cmd.Path = filepath.Join(worldReadable(t), "probe")
				copyFile(t, program, cmd.Path)
			}
			out, err := cmd.Output()
			if err != nil {
				t.Fatal(err)
			}
			var facts Facts
			if err := json.Unmarshal(out, &facts); err != nil {
				t.Fatal(err)
			}
			if test.want == "" && facts.BPF != "" || !strings.Contains(facts.BPF, test.want) {
				t.Errorf("got BPF %q, want %q", facts.BPF, test.want)
			}
		})
	}
}

func worldReadable(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "probe-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	content, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, content, 0o755); err != nil {
		t.Fatal(err)
	}
}
