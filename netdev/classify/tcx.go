// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
)

// linksDir is the directory of the pinned BPF links below the pin directory. Its name does not have a version, so a
// later release replaces the programs of an earlier one.
const linksDir = "links"

// linkPin returns the path of the pin that keeps a program attached after its process has
// ended.
func linkPin(bpffs string, index int, d direction) string {
	return filepath.Join(pinsDir(bpffs), linksDir, fmt.Sprintf("%d-%s", index, d.name))
}

// attachTCX attaches a program before all others, or replaces the one of an earlier process
// in one step.
func (c *Classifier) attachTCX(index int, d direction, program *ebpf.Program) error {
	pin := linkPin(c.bpffs, index, d)
	if c.isPinned() {
		old, err := openLink(pin)
		if err != nil {
			return err
		}
		if old != nil {
			defer old.Close()
			attached, err := isLinkOf(old, index)
			switch {
			case err != nil:
				return err
			case attached:
				return old.Update(program)
			}
			if err := os.Remove(pin); err != nil { // of a NIC that had the same interface index
				return err
			}
		}
	}
	created, err := link.AttachTCX(link.TCXOptions{
		Interface: index, Program: program, Attach: d.attach, Anchor: link.Head(),
	})
	if err != nil {
		return err
	}
	if !c.isPinned() {
		c.links = append(c.links, created)
		return nil
	}
	err = os.MkdirAll(filepath.Dir(pin), 0o700)
	if err == nil {
		err = created.Pin(pin)
	}
	return errors.Join(err, created.Close())
}

// openLink returns the link with a pin, or nil if the pin does not exist.
func openLink(pin string) (link.Link, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the BPF link %s: %w", pin, err)
	}
	return l, nil
}

// isLinkOf reports whether a link attaches a program to the NIC with that interface index.
// The kernel detaches the link when the NIC ends.
func isLinkOf(l link.Link, index int) (bool, error) {
	info, err := l.Info()
	if err != nil {
		return false, err
	}
	tcx := info.TCX()
	return tcx != nil && int(tcx.Ifindex) == index, nil
}

// attachedByTCX reports whether the link with a pin attaches program to a NIC, or any
// program if program is nil.
func attachedByTCX(pin string, index int, program *ebpf.Program) (bool, error) {
	l, err := openLink(pin)
	if l == nil {
		return false, err
	}
	defer l.Close()
	attached, err := isLinkOf(l, index)
	if err != nil || !attached || program == nil {
		return attached, err
	}
	info, err := l.Info()
	if err != nil {
		return false, err
	}
	id, err := idOf(program)
	return info.Program == id, err
}

// pinnedProgram returns the program that the link with a pin attaches to a NIC; 0 if it attaches none.
func pinnedProgram(pin string, index int) (ebpf.ProgramID, error) {
	l, err := openLink(pin)
	if l == nil {
		return 0, err
	}
	defer l.Close()
	if attached, err := isLinkOf(l, index); err != nil || !attached {
		return 0, err
	}
	info, err := l.Info()
	if err != nil {
		return 0, err
	}
	return info.Program, nil
}

// detachTCX detaches the program of the link with a pin, and removes the pin. It reports
// whether the pin existed.
func detachTCX(pin string, failpoints failpoint.Injector) (found bool, err error) {
	l, err := openLink(pin)
	if l == nil {
		return false, err
	}
	defer l.Close()
	return true, failpoints.Do("detach program", func() error { return errors.Join(l.Detach(), os.Remove(pin)) })
}
