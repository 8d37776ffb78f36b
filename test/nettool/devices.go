// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
)

// openNodes opens device nodes for reading and writing, and prints the paths
// that it opened. It returns an error if it cannot open all of them.
func openNodes(paths []string) error {
	var errs error
	for _, p := range paths {
		f, err := os.OpenFile(p, os.O_RDWR|syscall.O_NONBLOCK, 0)
		if err != nil {
			errs = errors.Join(errs, err)
			continue
		}
		fmt.Println(p, "opened")
		errs = errors.Join(errs, f.Close())
	}
	return errs
}

// mknod creates a character device node. Its arguments are the path, the major
// number, and the minor number.
func mknod(args []string) error {
	if len(args) != 3 {
		return errUsage
	}
	major, err := strconv.ParseUint(args[1], 10, 12)
	if err != nil {
		return err
	}
	minor, err := strconv.ParseUint(args[2], 10, 8)
	if err != nil {
		return err
	}
	return os.NewSyscallError("mknod", syscall.Mknod(args[0], syscall.S_IFCHR|0o666, int(major<<8|minor)))
}

// showDevices prints the device metadata files of KEP-5304. They tell a program in a container its devices without
// access to the API server.
func showDevices(root fs.FS) error {
	directory := strings.TrimPrefix(metadata.ContainerDir, "/")
	return fs.WalkDir(root, directory, func(name string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return errors.New("this container has no device metadata")
		}
		if err != nil || entry.IsDir() || !strings.HasSuffix(name, metadata.MetadataFileSuffix) {
			return err
		}
		return showMetadata(root, name)
	})
}

// showMetadata prints one metadata file.
func showMetadata(root fs.FS, name string) error {
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	var m metadata.DeviceMetadata
	if err := devicemetadata.DecodeMetadataFromStream(json.NewDecoder(f), &m); err != nil {
		return fmt.Errorf("decode %s: %w", name, err)
	}
	fmt.Printf("%s claim %s/%s\n", path.Join("/", name), m.Namespace, m.Name)
	for _, request := range m.Requests {
		for _, d := range request.Devices {
			fmt.Printf("request %s: device %s of pool %s\n", request.Name, d.Name, d.Pool)
			for _, key := range slices.Sorted(maps.Keys(d.Attributes)) {
				fmt.Printf("  %s: %s\n", key, text(d.Attributes[key]))
			}
			if n := d.NetworkData; n != nil {
				fmt.Printf("  link %s, %s, %s\n", n.InterfaceName, n.HardwareAddress, strings.Join(n.IPs, " "))
			}
		}
	}
	return nil
}

// text returns the value of an attribute.
func text(a resourceapi.DeviceAttribute) string {
	switch {
	case a.StringValue != nil:
		return *a.StringValue
	case a.IntValue != nil:
		return strconv.FormatInt(*a.IntValue, 10)
	case a.BoolValue != nil:
		return strconv.FormatBool(*a.BoolValue)
	case a.VersionValue != nil:
		return *a.VersionValue
	case a.StringValues != nil:
		return strings.Join(a.StringValues, " ")
	default:
		return "?"
	}
}
