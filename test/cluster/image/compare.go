// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Compare returns an error that lists all differences between the images of two
// docker archives: in the paths, types, modes, owners, and contents of their
// files, and in the platform, entry point, command, user, and environment of
// their configurations. Timestamps, tags, and layers are not compared.
func Compare(a, b string) error {
	first, err := describe(a)
	if err != nil {
		return err
	}
	second, err := describe(b)
	if err != nil {
		return err
	}
	var differences []error
	for _, key := range slices.Sorted(maps.Keys(merge(first, second))) {
		if first[key] != second[key] {
			differences = append(differences,
				fmt.Errorf("%s: %s in %s, %s in %s", key, orNone(first[key]), a, orNone(second[key]), b))
		}
	}
	return errors.Join(differences...)
}

// describe returns the properties of an archive's image: one for each file, by
// its path, and one for each compared field of the configuration, by its name.
func describe(archive string) (map[string]string, error) {
	img, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		return nil, fmt.Errorf("read image archive %s: %w", archive, err)
	}
	properties := map[string]string{}
	if err := describeConfig(img, properties); err != nil {
		return nil, fmt.Errorf("read the configuration of image archive %s: %w", archive, err)
	}
	if err := describeFiles(img, properties); err != nil {
		return nil, fmt.Errorf("read the layers of image archive %s: %w", archive, err)
	}
	return properties, nil
}

func describeConfig(img v1.Image, properties map[string]string) error {
	file, err := img.ConfigFile()
	if err != nil {
		return err
	}
	properties["platform"] = file.OS + "/" + file.Architecture
	properties["entry point"] = fmt.Sprintf("%q", file.Config.Entrypoint)
	properties["command"] = fmt.Sprintf("%q", file.Config.Cmd)
	properties["user"] = fmt.Sprintf("%q", file.Config.User)
	properties["environment"] = fmt.Sprintf("%q", slices.Sorted(slices.Values(file.Config.Env)))
	return nil
}

func describeFiles(img v1.Image, properties map[string]string) error {
	content := mutate.Extract(img)
	defer content.Close()
	archive := tar.NewReader(content)
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		hash := sha256.New()
		if _, err := io.Copy(hash, archive); err != nil {
			return err
		}
		name := path.Join("/", strings.TrimSuffix(header.Name, "/"))
		properties[name] = fmt.Sprintf("type %q, mode %#o, owner %d:%d, link %q, %d bytes, SHA-256 %.16x",
			header.Typeflag, header.Mode&0o7777, header.Uid, header.Gid, header.Linkname, header.Size, hash.Sum(nil))
	}
}

func merge(a, b map[string]string) map[string]string {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}

func orNone(property string) string {
	if property == "" {
		return "none"
	}
	return property
}
