// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestWrite_entryPointIsFirstFile(t *testing.T) {
	list := write(t, "list", "# comment\n"+
		write(t, "a", "AAA")+" /bin/a # the entry point\n\n"+
		write(t, "b", "BBB")+" /usr/lib/b\n")
	out := filepath.Join(t.TempDir(), "sub", "out.tar")
	if err := Write(list, "registry.local/x:dev", "arm64", out); err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag("registry.local/x:dev")
	if err != nil {
		t.Fatal(err)
	}
	img, err := tarball.ImageFromPath(out, &tag)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if got := config.Config.Entrypoint; len(got) != 1 || got[0] != "/bin/a" {
		t.Errorf("entry point of the image: got %v, want [/bin/a]", got)
	}
	if config.Architecture != "arm64" {
		t.Errorf("architecture %q, want arm64", config.Architecture)
	}
}

func TestWrite_invalidList(t *testing.T) {
	for content, want := range map[string]string{
		"bin/a bin/a":      ":1: want SOURCE and an absolute DESTINATION",
		"# nothing":        "no files",
		"bin/none /none\n": "build it first",
	} {
		err := Write(write(t, "list", content), "x:y", "amd64", filepath.Join(t.TempDir(), "o"))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("content list %q: got error %v, want one that contains %q", content, err, want)
		}
	}
}

func TestCompare(t *testing.T) {
	archive := func(arch, content, destination string) string {
		t.Helper()
		out := filepath.Join(t.TempDir(), arch+".tar")
		files := []File{{write(t, "a", content), destination}}
		if err := WriteFiles(files, "registry.local/x:"+arch, arch, out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	reference := archive("amd64", "AAA", "/bin/a")
	if err := Compare(reference, archive("amd64", "AAA", "/bin/a")); err != nil {
		t.Errorf("Compare of equal images: %v", err)
	}
	for name, test := range map[string]struct {
		other string
		want  []string
	}{
		"content": {archive("amd64", "AAB", "/bin/a"), []string{"/bin/a: type "}},
		"path": {
			archive("amd64", "AAA", "/usr/a"),
			[]string{"/bin: ", "/bin/a: ", "/usr: none in", "/usr/a: none in", "entry point: "},
		},
		"architecture": {archive("arm64", "AAA", "/bin/a"), []string{`platform: linux/amd64 in`}},
		"not an image": {write(t, "x.tar", "AAA"), []string{"read image archive"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := Compare(reference, test.other)
			if err == nil {
				t.Fatal("Compare found no difference")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("Compare returned %q, which does not contain %q", err, want)
				}
			}
		})
	}
}
