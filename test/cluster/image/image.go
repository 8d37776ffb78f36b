// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package image writes container images as docker archives. An image holds prebuilt static binaries on an empty base,
// like a Dockerfile with `FROM scratch` and COPY. The Dockerfile in deployments/image is generated from the same
// content list, so both images hold the same files.
package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// File is one file of an image. The first file of a list is the entry point.
type File struct {
	Source      string // on this machine; empty for a symbolic link
	Destination string // in the image, absolute
	Link        string // where a symbolic link points to
}

// Write reads a content list and writes the image archive to out. The sources in
// the list are relative to the working directory; arch is their architecture, such
// as amd64.
func Write(list, tag, arch, out string) error {
	files, err := readList(list)
	if err != nil {
		return err
	}
	return WriteFiles(files, tag, arch, out)
}

// readList parses a content list: lines of "SOURCE DESTINATION". '#' starts a comment.
func readList(list string) ([]File, error) {
	f, err := os.Open(list)
	if err != nil {
		return nil, fmt.Errorf("read the content list of the image: %w", err)
	}
	defer f.Close()
	var files []File
	scan := bufio.NewScanner(f)
	for n := 1; scan.Scan(); n++ {
		text, _, _ := strings.Cut(scan.Text(), "#")
		switch fields := strings.Fields(text); {
		case len(fields) == 0:
		case len(fields) == 2 && path.IsAbs(fields[1]):
			files = append(files, File{Source: fields[0], Destination: fields[1]})
		default:
			return nil, fmt.Errorf("%s:%d: want SOURCE and an absolute DESTINATION, got %q", list, n, text)
		}
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s: no files", list)
	}
	return files, scan.Err()
}

// WriteFiles writes the archive of an image that holds files for the architecture
// arch to out. The image has the name tag (NAME:TAG), and also the names of aliases.
func WriteFiles(files []File, tag, arch, out string, aliases ...string) error {
	content, err := layer(files)
	if err != nil {
		return err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content)), nil
	})
	if err != nil {
		return err
	}
	config := v1.Config{Entrypoint: []string{files[0].Destination}, Env: []string{"PATH=/bin"}}
	return writeImage(l, config, arch, out, append([]string{tag}, aliases...))
}

// WriteLayer writes the archive of an image with a single layer, the tar archive layer, which it does not compress.
func WriteLayer(layer, tag, arch string, config v1.Config, out string) error {
	l, err := tarball.LayerFromFile(layer, tarball.WithCompressionLevel(gzip.NoCompression))
	if err != nil {
		return err
	}
	return writeImage(l, config, arch, out, []string{tag})
}

func writeImage(l v1.Layer, config v1.Config, arch, out string, tags []string) error {
	img, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		return err
	}
	file, err := img.ConfigFile()
	if err != nil {
		return err
	}
	file.Architecture, file.OS, file.Config = arch, "linux", config
	if img, err = mutate.ConfigFile(img, file); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	images := map[name.Reference]v1.Image{}
	for _, tag := range tags {
		ref, err := name.NewTag(tag)
		if err != nil {
			return err
		}
		images[ref] = img
	}
	return tarball.MultiRefWriteToFile(out, images)
}

// Tag returns the name (NAME:TAG) of the first image in an archive.
func Tag(archive string) (string, error) {
	manifest, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return os.Open(archive) })
	if err != nil {
		return "", fmt.Errorf("read the manifest of %s: %w", archive, err)
	}
	if len(manifest) == 0 || len(manifest[0].RepoTags) == 0 {
		return "", fmt.Errorf("%s: the manifest names no image", archive)
	}
	return manifest[0].RepoTags[0], nil
}

// layer returns a tar archive of the files and their parent directories.
func layer(files []File) ([]byte, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	made := map[string]bool{"/": true}
	for _, f := range files {
		if err := addParents(w, made, path.Dir(f.Destination)); err != nil {
			return nil, err
		}
		if f.Link != "" {
			link := &tar.Header{
				Typeflag: tar.TypeSymlink, Name: strings.TrimPrefix(f.Destination, "/"), Linkname: f.Link, Mode: 0o777,
			}
			if err := w.WriteHeader(link); err != nil {
				return nil, err
			}
			continue
		}
		content, err := os.ReadFile(f.Source)
		if errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("%w: build it first", err)
		} else if err != nil {
			return nil, err
		}
		header := &tar.Header{
			Typeflag: tar.TypeReg, Name: strings.TrimPrefix(f.Destination, "/"), Mode: 0o755, Size: int64(len(content)),
		}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(content); err != nil {
			return nil, err
		}
	}
	return buf.Bytes(), w.Close()
}

func addParents(w *tar.Writer, made map[string]bool, dir string) error {
	if made[dir] {
		return nil
	}
	if err := addParents(w, made, path.Dir(dir)); err != nil {
		return err
	}
	made[dir] = true
	return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: strings.TrimPrefix(dir, "/") + "/", Mode: 0o755})
}
