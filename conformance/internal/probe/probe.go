// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package probe is the program that the containers of the suite's pods run. It reports what a container has, serves and
// opens connections, and opens device nodes. Results are written to the termination message, so the suite does not need
// access to the kubelet.
package probe

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// View lists the interfaces, device nodes, mounts, and variables of a container.
type View struct {
	Interfaces []Interface `json:"interfaces,omitempty"`
	// Devices are the device nodes below /dev.
	Devices []Node `json:"devices,omitempty"`
	// Mounts are the mount points.
	Mounts []string `json:"mounts,omitempty"`
	// Env are the variables of the environment, as NAME=VALUE.
	Env []string `json:"env,omitempty"`
}

// Interface is a network interface, in the form of an entry of ip -json address.
type Interface struct {
	Name    string `json:"ifname"`
	Address string `json:"address,omitempty"`
	MTU     int    `json:"mtu,omitempty"`
	Up      bool   `json:"up,omitempty"`
	// Addresses are sorted.
	Addresses []Address `json:"addr_info,omitempty"`
}

// Global returns the addresses that are not link-local, in CIDR form, sorted.
func (i Interface) Global() (all []string) {
	for _, a := range i.Addresses {
		if a.Scope != "link" {
			all = append(all, fmt.Sprint(a.Local, "/", a.Length))
		}
	}
	slices.Sort(all)
	return all
}

// Address is an IP address of an interface.
type Address struct {
	Local  string `json:"local"`
	Length int    `json:"prefixlen"`
	// Scope is link or global.
	Scope string `json:"scope"`
}

// Node is a device node.
type Node struct {
	Path string `json:"path"`
	// Number is the type and the numbers of the device, as in "c 1:3".
	Number string `json:"number"`
}

// Inspect returns the view of this process. The termination message has room for 4096 bytes, so mounts of the kernel's
// own file systems are left out.
func Inspect() (v View, err error) {
	if v.Interfaces, err = interfaces(); err != nil {
		return v, err
	}
	if v.Devices, err = nodes("/dev"); err != nil {
		return v, err
	}
	v.Mounts, err = mounts("/proc/self/mountinfo")
	v.Env = slices.Sorted(slices.Values(os.Environ()))
	return v, err
}

func interfaces() (all []Interface, err error) {
	list, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	for _, i := range list {
		addresses, err := i.Addrs()
		if err != nil {
			return nil, fmt.Errorf("addresses of interface %s: %w", i.Name, err)
		}
		view := Interface{Name: i.Name, Address: i.HardwareAddr.String(), MTU: i.MTU, Up: i.Flags&net.FlagUp != 0}
		for _, a := range addresses {
			if prefix, ok := a.(*net.IPNet); ok {
				view.Addresses = append(view.Addresses, address(prefix))
			}
		}
		slices.SortFunc(view.Addresses, func(a, b Address) int { return strings.Compare(a.Local, b.Local) })
		all = append(all, view)
	}
	return all, nil
}

func address(prefix *net.IPNet) Address {
	length, _ := prefix.Mask.Size()
	scope := "global"
	if prefix.IP.IsLinkLocalUnicast() {
		scope = "link"
	}
	return Address{Local: prefix.IP.String(), Length: length, Scope: scope}
}

// nodes returns the device nodes below a directory.
func nodes(dir string) (all []Node, err error) {
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
			return nil // it is gone, or cannot be used
		case err != nil:
			return err
		case entry.IsDir() && slices.Contains([]string{"/dev/pts", "/dev/shm", "/dev/mqueue", "/dev/fd"}, path):
			return fs.SkipDir
		case entry.Type()&fs.ModeDevice == 0:
			return nil
		}
		number, err := deviceNumber(path)
		all = append(all, Node{path, number})
		return err
	})
	return all, err
}

// mounts returns the mount points of a container that are not part of every container.
func mounts(file string) (points []string, err error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 5 {
			return nil, fmt.Errorf("%s: line %q has %d fields", file, lines.Text(), len(fields))
		}
		point := fields[4]
		if point != "/" && !slices.ContainsFunc([]string{"/proc", "/sys", "/dev"},
			func(dir string) bool { return point == dir || strings.HasPrefix(point, dir+"/") }) {
			points = append(points, point)
		}
	}
	slices.Sort(points)
	return points, lines.Err()
}

const usage = `container needs one of these commands:
  inspect               print what the container has
  routes NAME           print the routes through an interface, one a line
  serve PORT NAME...    answer connections on all interfaces but these, until a signal
  dial PORT LIST NAME...
                        exchange data with one of the addresses in LIST, separated by commas, through an
                        interface that is not one of these
  open NUMBER...        open a device node of each number, such as c:195:0; succeeds if none can be opened`

// terminationMessage is the file that the kubelet copies into the status.
const terminationMessage = "/dev/termination-log"

// Main runs a command in a container. The termination message has its result or its error.
func Main(ctx context.Context, args []string) error {
	text, err := command(ctx, args)
	if err != nil {
		text = err.Error()
	}
	if written := os.WriteFile(terminationMessage, []byte(text), 0o644); written != nil {
		return errors.Join(err, written)
	}
	return err
}

func command(ctx context.Context, args []string) (string, error) {
	switch {
	case len(args) == 1 && args[0] == "inspect":
		v, err := Inspect()
		if err != nil {
			return "", err
		}
		raw, err := json.Marshal(v)
		return string(raw), err
	case len(args) == 2 && args[0] == "routes":
		all, err := routes("/proc/net", args[1])
		return strings.Join(all, "\n"), err
	case len(args) >= 2 && args[0] == "serve":
		return "", serve(ctx, args[1], args[2:])
	case len(args) >= 3 && args[0] == "dial":
		return dial(ctx, args[1], strings.Split(args[2], ","), args[3:])
	case len(args) >= 2 && args[0] == "open":
		return "", refused(args[1:])
	}
	return "", errors.New(usage)
}
