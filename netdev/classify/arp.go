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
)

// Names in arp.h: of the program that records the senders of ARP, and of its map.
const (
	arpProgram = "dra_shared_arp_xmit"
	arpMap     = "dra_shared_arp_senders"
)

// arpPin returns the path of the pin that keeps the program attached. Earlier versions pin theirs as "arp". Their
// programs at the NICs need it until Attach replaces them, so it stays until RemovePins.
func arpPin(bpffs string) string { return filepath.Join(pinsDir(bpffs), linksDir, "arp-senders") }

// TraceARP attaches the program that records the sender of ARP for the programs at the NICs, including later processes'
// programs. It replaces the program of an earlier process without a gap. It has the requirements of ReadsRoutes, and
// needs a kernel with function tracing. Call it before Attach.
func (c *Classifier) TraceARP() error {
	if !c.readsRoutes {
		return fmt.Errorf("the programs for key %s do not read the kernel's memory", c.key)
	}
	parsed, err := parseObject()
	if err != nil {
		return err
	}
	senders := parsed.Maps[arpMap].Copy()
	senders.MaxEntries = c.maps.DraSharedArpSenders.MaxEntries()
	spec := &ebpf.CollectionSpec{
		Maps:     map[string]*ebpf.MapSpec{arpMap: senders},
		Programs: map[string]*ebpf.ProgramSpec{arpProgram: parsed.Programs[arpProgram].Copy()},
		Types:    parsed.Types, ByteOrder: parsed.ByteOrder,
	}
	loaded, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		MapReplacements: map[string]*ebpf.Map{arpMap: c.maps.DraSharedArpSenders},
	})
	if err != nil {
		return fmt.Errorf("load the program that traces ARP: %w", withoutHint(err))
	}
	defer loaded.Close()
	traced, err := link.AttachTracing(link.TracingOptions{Program: loaded.Programs[arpProgram]})
	if err != nil {
		return fmt.Errorf("attach the program that traces ARP: %w: does the kernel have function tracing?", err)
	}
	if c.isPinned() {
		if err := c.pinARPTrace(traced); err != nil {
			return errors.Join(err, traced.Close())
		}
	}
	c.links, c.arpTrace = append(c.links, traced), traced
	return nil
}

func (c *Classifier) pinARPTrace(l link.Link) error {
	return c.failpoints.Do("trace ARP", func() error { return replacePin(l, arpPin(c.bpffs)) })
}

// KeepARPTraced pins the program that traces ARP again if its pin was removed. Without the pin, the
// program would end with this process, and the programs at the NICs would then refuse the ARP of
// the node, because they could not identify its sender. KeepARPTraced does nothing unless TraceARP
// was called.
func (c *Classifier) KeepARPTraced() error {
	if c.arpTrace == nil || !c.isPinned() {
		return nil
	}
	_, err := os.Stat(arpPin(c.bpffs))
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := c.pinARPTrace(c.arpTrace); err != nil {
		return fmt.Errorf("pin the program that traces ARP again: %w", err)
	}
	return nil
}

// replacePin pins a link at path. It replaces the link that is pinned there, and the kernel
// detaches that link.
func replacePin(l link.Link, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	next := path + "-next" // a BPF file system permits no dots in names

	// A process that was killed may have left it.
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	// The library does not pin a link that it has pinned already, and does not notice the renaming.
	if err := errors.Join(l.Unpin(), l.Pin(next)); err != nil {
		return err
	}
	return os.Rename(next, path)
}

// SendersOfARP returns the cookies of namespaces that have sent ARP that the program at a NIC has not seen yet.
func (c *Classifier) SendersOfARP() (cookies []uint64, err error) {
	var frame uint64
	var sender bpfArpSender
	entries := c.maps.DraSharedArpSenders.Iterate()
	for entries.Next(&frame, &sender) {
		cookies = append(cookies, sender.Cookie)
	}
	return cookies, entries.Err()
}
