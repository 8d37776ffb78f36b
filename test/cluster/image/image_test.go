// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
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
		files := []File{{Source: write(t, "a", content), Destination: destination}}
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

func TestWriteFiles_linksAndAliases(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out.tar")
	files := []File{
		{Source: write(t, "a", "AAA"), Destination: "/bin/a"},
		{Destination: "/usr/bin/b", Link: "/bin/a"},
	}
	if err := WriteFiles(files, "registry.local/x:1", "amd64", out, "registry.local/y:2"); err != nil {
		t.Fatal(err)
	}
	for _, alias := range []string{"registry.local/x:1", "registry.local/y:2"} {
		image := readImage(t, out, alias)
		found := false
		content := tar.NewReader(mutate.Extract(image))
		for header, err := content.Next(); err == nil; header, err = content.Next() {
			found = found || header.Name == "usr/bin/b" && header.Typeflag == tar.TypeSymlink && header.Linkname == "/bin/a"
		}
		if !found {
			t.Errorf("image %s does not contain the symbolic link usr/bin/b to /bin/a", alias)
		}
	}
}

func TestWriteLayer(t *testing.T) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "etc/", Mode: 0o755}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "out.tar")
	config := v1.Config{StopSignal: "SIGRTMIN+3", Entrypoint: []string{"/sbin/init"}}
	if err := WriteLayer(write(t, "layer.tar", layer.String()), "registry.local/x:1", "arm64", config, out); err != nil {
		t.Fatal(err)
	}
	image := readImage(t, out, "registry.local/x:1")
	got, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if got.Config.StopSignal != "SIGRTMIN+3" || got.Architecture != "arm64" || got.Config.Entrypoint[0] != "/sbin/init" {
		t.Errorf("got architecture %s and configuration %+v", got.Architecture, got.Config)
	}
	if header, err := tar.NewReader(mutate.Extract(image)).Next(); err != nil || header.Name != "etc" {
		t.Errorf("first file of the image: got %+v and error %v, want etc", header, err)
	}
}

func readImage(t *testing.T, archive, alias string) v1.Image {
	t.Helper()
	tag, err := name.NewTag(alias)
	if err != nil {
		t.Fatal(err)
	}
	image, err := tarball.ImageFromPath(archive, &tag)
	if err != nil {
		t.Fatal(err)
	}
	return image
}
