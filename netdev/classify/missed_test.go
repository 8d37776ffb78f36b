// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
)

// verdict is what a program returns for every frame.
type verdict int32

const (
	next verdict = -1 // the kernel runs the next program
	pass verdict = 0  // the kernel runs no other program
)

// newProgram loads a program that returns v.
func newProgram(t *testing.T, v verdict) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name:         "foreign",
		Type:         ebpf.SchedCLS,
		License:      "MIT",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, int32(v)), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// A program of another owner that runs first is harmless if frames still reach this
// driver's. If they do not, Missed names it.
func TestNode_Missed_namesProgramThatTakesFrames(t *testing.T) {
	filterAhead := func(t *testing.T, e *testEnv, p *ebpf.Program) (remove func() error) {
		filter := &netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: e.nic.Index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1,
			},
			Fd: p.FD(), Name: "foreign", DirectAction: true,
		}
		if err := netlink.FilterAdd(filter); err != nil {
			t.Fatal(err)
		}
		return func() error { return netlink.FilterDel(filter) }
	}
	tcx := func(t *testing.T, e *testEnv, p *ebpf.Program) (remove func() error) {
		needTCX(t)
		l, err := link.AttachTCX(link.TCXOptions{Interface: e.nic.Index, Program: p, Attach: ebpf.AttachTCXEgress})
		if err != nil {
			t.Fatal(err)
		}
		return l.Close
	}
	for name, test := range map[string]struct {
		attach func(*testing.T, *testEnv, *ebpf.Program) func() error
		cause  string
	}{
		"filter":      {filterAhead, "filter bpf of priority 1"},
		"TCX program": {tcx, "TCX program "},
	} {
		t.Run(name, func(t *testing.T) {
			e := newTestEnv(t, netdev.NICConfig{})
			p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
			e.expectMissed(p, "before another program is attached", "")
			for _, v := range []verdict{next, pass} {
				remove := test.attach(t, e, newProgram(t, v))
				if v == next {
					e.expectMissed(p, "with a program that passes frames on", "")
				} else {
					e.expectMissed(p, "with a program that takes frames", test.cause)
				}
				if err := remove(); err != nil {
					t.Fatal(err)
				}
				e.expectMissed(p, "after the program was detached", "")
			}
		})
	}
}

// expectMissed sends frames from a pod, and fails the test unless Missed returns a
// text that contains cause, or "" if cause is "".
func (e *testEnv) expectMissed(p *pod, when, cause string) {
	e.t.Helper()
	e.manage()
	e.arrivalRate(func() error {
		_, err := p.Flood("net1", frame(p.attachment.MAC, e.wireMAC()), false, 200*time.Millisecond)
		return err
	})
	e.manage()
	got := e.node.Missed(e.nic.Index)
	if (got == "") != (cause == "") || !strings.Contains(got, cause) {
		e.t.Errorf("Missed %s: got %q, want %q", when, got, cause)
	}
}

func (e *testEnv) manage() {
	e.t.Helper()
	if _, err := e.node.Manage(e.config); err != nil {
		e.t.Fatalf("Manage: %v", err)
	}
}
