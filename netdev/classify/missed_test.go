// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package classify_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/classify"
	"github.com/dra-shared/dra-driver-shared/netdev/classify/trial"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
	"github.com/dra-shared/dra-driver-shared/netdev/shape"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// verdict is the result of a program for every frame.
type verdict int32

const (
	next verdict = -1 // the kernel runs the next program
	pass verdict = 0  // the kernel runs no other program
	drop verdict = 2
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

// attachPoints returns the attach points that the kernel has.
func attachPoints(t *testing.T) []classify.AttachPoint {
	t.Helper()
	if hasTCX(t) {
		return classify.AttachPoints()
	}
	return []classify.AttachPoint{classify.AttachClsact}
}

// newTestEnvAtPoint returns a testEnv with programs attached at an attach point.
func newTestEnvAtPoint(t *testing.T, point classify.AttachPoint) *testEnv {
	t.Helper()
	o := optionsOfTrial(t, func(r *trial.Result) { r.AttachPoint = point })
	nic, wire := nstest.NIC(t, "nic0", 1500, wireIP+"/16", "fd00:20::fe/64")
	return newTestEnvWith(t, o, nic, wire, netdev.NICConfig{})
}

// optionsOfTrial returns options with the result of the trial of the strongest key, which change modifies.
func optionsOfTrial(t *testing.T, change func(*trial.Result)) netdev.Options {
	t.Helper()
	o := netdev.Options{BPFFS: nstest.MountBPFFS(t)}
	results, err := trial.Run(o.BPFFS, nil, classify.Keys()...)
	if err != nil {
		t.Fatal(err)
	}
	way, err := trial.Strongest(results)
	if err != nil {
		t.Fatal(err)
	}
	change(&way)
	o.Trials = []trial.Result{way}
	return o
}

// traffic is the frames that a NIC sends, or those that it receives.
type traffic struct {
	verb   string // as in the text of Missed
	parent uint32 // of filters
	attach ebpf.AttachType
	send   func(*testEnv, *pod) error
}

var (
	sent = traffic{"sends", netlink.HANDLE_MIN_EGRESS, ebpf.AttachTCXEgress, func(e *testEnv, p *pod) error {
		_, err := p.Flood("net1", e.datagramOf(p), false, 200*time.Millisecond)
		return err
	}}
	received = traffic{"receives", netlink.HANDLE_MIN_INGRESS, ebpf.AttachTCXIngress, func(e *testEnv, p *pod) error {
		_, err := e.wire.Flood("wire", frame(e.wireMAC(), p.attachment.MAC), false, 200*time.Millisecond)
		return err
	}}
)

// attachForeign attaches a program of another owner to the traffic of a NIC.
type attachForeign func(*testing.T, *testEnv, traffic, *ebpf.Program) (remove func() error)

// asFilter attaches a program by a filter of the highest priority.
func asFilter(t *testing.T, e *testEnv, frames traffic, p *ebpf.Program) (remove func() error) {
	t.Helper()
	if err := nstest.AddClsact(e.nic.Index); err != nil {
		t.Fatal(err)
	}
	filter := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: e.nic.Index, Parent: frames.parent, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1,
		},
		Fd: p.FD(), Name: "foreign", DirectAction: true,
	}
	if err := netlink.FilterAdd(filter); err != nil {
		t.Fatal(err)
	}
	return func() error { return netlink.FilterDel(filter) }
}

// byTCX returns a function that attaches a program by TCX, before or after those that are attached.
func byTCX(anchor link.Anchor) attachForeign {
	return func(t *testing.T, e *testEnv, frames traffic, p *ebpf.Program) (remove func() error) {
		t.Helper()
		needTCX(t)
		l, err := link.AttachTCX(link.TCXOptions{
			Interface: e.nic.Index, Program: p, Attach: frames.attach, Anchor: anchor,
		})
		if err != nil {
			t.Fatal(err)
		}
		return l.Close
	}
}

// A program of another owner that runs first is harmless if frames still reach this
// driver's. If they do not, Missed names it.
func TestNode_Missed_namesProgramThatTakesFrames(t *testing.T) {
	for _, test := range []struct {
		name   string
		isTCX  bool
		attach attachForeign
		cause  map[classify.AttachPoint]string // with a program that takes frames
	}{
		{"filter", false, asFilter, map[classify.AttachPoint]string{classify.AttachClsact: "filter bpf of priority 1"}},
		{"last TCX program", true, byTCX(link.Tail()), map[classify.AttachPoint]string{
			classify.AttachClsact: "TCX program ",
		}},
		{"first TCX program", true, byTCX(link.Head()), map[classify.AttachPoint]string{
			classify.AttachTCX: "TCX program ", classify.AttachClsact: "TCX program ",
		}},
	} {
		for _, point := range attachPoints(t) {
			for _, frames := range []traffic{sent, received} {
				t.Run(fmt.Sprintf("%s, attach point %s, the NIC %s", test.name, point, frames.verb), func(t *testing.T) {
					if test.isTCX {
						needTCX(t)
					}
					e := newTestEnvAtPoint(t, point)
					p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
					e.expectMissed(p, frames, "before another program is attached", "")
					for _, v := range []verdict{next, pass} {
						remove := test.attach(t, e, frames, newProgram(t, v))
						if v == next {
							e.expectMissed(p, frames, "with a program that passes frames on", "")
						} else {
							e.expectMissed(p, frames, "with a program that takes frames", test.cause[point])
						}
						if err := remove(); err != nil {
							t.Fatal(err)
						}
						e.expectMissed(p, frames, "after the program was detached", "")
					}
				})
			}
		}
	}
}

// Other programs of the NIC take or drop the frames that they see. Shares keep their grants.
func TestTCX_limitsSharesOfNICWithOtherPrograms(t *testing.T) {
	needTCX(t)
	e := newTestEnvAtPoint(t, classify.AttachTCX)
	for _, direction := range []ebpf.AttachType{ebpf.AttachTCXEgress, ebpf.AttachTCXIngress} {
		l, err := link.AttachTCX(link.TCXOptions{Interface: e.nic.Index, Program: newProgram(t, pass), Attach: direction})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	e.expectRate("pod sends", e.measure(e.fromPod(p))[0], 100*mega)
	e.expectRate("pod receives", e.measure(e.toPod(p))[0], 100*mega)
	if err := nstest.ConfigureLink("nic0", nodeIP+"/16"); err != nil {
		t.Fatal(err)
	}
	drops, err := link.AttachTCX(link.TCXOptions{
		Interface: e.nic.Index, Program: newProgram(t, drop), Attach: ebpf.AttachTCXIngress, Anchor: link.Tail(),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer drops.Close()
	e.expectRate("pod receives next to a program that drops", e.measure(e.toPod(p))[0], 100*mega)
}

// A plugin replaces the programs of a plugin that used another attach point, before or after its own.
func TestNode_Manage_takesOverFromAnotherAttachPoint(t *testing.T) {
	needTCX(t)
	for _, point := range classify.AttachPoints() {
		t.Run("from "+string(point), func(t *testing.T) {
			e := newTestEnvAtPoint(t, point)
			p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
			other := classify.AttachTCX
			if point == other {
				other = classify.AttachClsact
			}
			way := trial.Result{Key: e.node.ClassifierKey(), AttachPoint: other}
			second := *e
			second.node = newNode(t, netdev.Options{BPFFS: e.bpffs, Trials: []trial.Result{way}})
			second.manage()
			if err := second.node.Restore(p.attachment, hardCap(100*mega)); err != nil {
				t.Fatal(err)
			}
			e.expectRate("pod sends", e.measure(e.fromPod(p))[0], 100*mega)
			e.expectRate("pod receives", e.measure(e.toPod(p))[0], 100*mega)
			tcx, filters := e.programs()
			if fromTCX := point == classify.AttachTCX; (tcx == 0) != fromTCX || (filters == 0) == fromTCX {
				t.Errorf("after the takeover: %d TCX programs and %d filters, want only those of %s", tcx, filters, other)
			}
		})
	}
}

// programs returns how many TCX programs and filters the NIC has for outgoing frames.
func (e *testEnv) programs() (tcx, filters int) {
	e.t.Helper()
	programs, err := link.QueryPrograms(link.QueryOptions{Target: e.nic.Index, Attach: ebpf.AttachTCXEgress})
	if err != nil {
		e.t.Fatal(err)
	}
	found, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: e.nic.Index}},
		netlink.HANDLE_MIN_EGRESS)
	if err != nil && !errors.Is(err, unix.EINVAL) { // without clsact
		e.t.Fatal(err)
	}
	return len(programs.Programs), len(found)
}

// The interface index of a NIC can be the same as an earlier one's, and the earlier one's pins remain.
func TestNode_Manage_replacesPinOfMissingNIC(t *testing.T) {
	needTCX(t)
	e := newTestEnvAtPoint(t, classify.AttachTCX)
	for _, name := range []string{"nic0", shape.IFBName("nic0")} {
		l, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkDel(l)
		}
		if err != nil {
			t.Fatalf("delete %s: %v", name, err)
		}
	}
	nic, wire := nstest.NIC(t, "nic0", 1500, wireIP+"/16", "fd00:20::fe/64")
	if nic.Index != e.nic.Index {
		t.Fatalf("the new NIC has the index %d, want %d", nic.Index, e.nic.Index)
	}
	e.nic, e.wire, e.config.MAC = nic, wire, nic.MAC
	e.manage()
	p := e.pod(0, 1, hardCap(100*mega), netdev.Private)
	e.expectRate("pod sends", e.measure(e.fromPod(p))[0], 100*mega)
	e.expectRate("pod receives", e.measure(e.toPod(p))[0], 100*mega)
}

// The members of an idle bond send frames of LACP, which the bond counts as its own. They pass no program at the bond.
func TestNode_Missed_idleBond(t *testing.T) {
	nstest.Cable(t, "m0", "w0")
	nstest.Cable(t, "m1", "w1")
	nstest.Bond(t, "bond0", netlink.BOND_MODE_802_3AD, "m0", "m1")
	nstest.Bond(t, "bond1", netlink.BOND_MODE_802_3AD, "w0", "w1") // a partner with the fast rate

	// The bond sends nothing else.
	if err := nstest.SetSysctl("net/ipv6/conf/bond0/disable_ipv6", "1"); err != nil {
		t.Fatal(err)
	}
	e := newTestEnvOn(t, nstest.MountBPFFS(t), nstest.FindNIC(t, "bond0"), nstest.New(t), enforced())
	sent := func() uint64 {
		bond, err := netlink.LinkByName("bond0")
		if err != nil {
			t.Fatal(err)
		}
		return bond.Attrs().Statistics.TxPackets
	}
	e.manage()
	first := sent()
	const enough = 40
	eventually.Eventually(t, time.Minute, "the members have sent frames of LACP", func() error {
		if frames := sent() - first; frames < enough {
			return fmt.Errorf("the bond has counted %d frames, want %d", frames, enough)
		}
		return nil
	})
	e.manage()
	if got := e.node.Missed(e.nic.Index); got != "" {
		t.Errorf("Missed of an idle bond: got %q, want none", got)
	}
}

// expectMissed sends frames from or to a pod, and fails the test unless Missed returns a
// text that contains the verb of the frames and cause, or "" if cause is "".
func (e *testEnv) expectMissed(p *pod, frames traffic, when, cause string) {
	e.t.Helper()
	e.manage()
	if err := frames.send(e, p); err != nil {
		e.t.Fatal(err)
	}
	e.manage()
	got := e.node.Missed(e.nic.Index)
	if (got == "") != (cause == "") || !strings.Contains(got, cause) {
		e.t.Errorf("Missed %s: got %q, want %q", when, got, cause)
	}
	if got != "" && !strings.HasPrefix(got, "frames that the NIC "+frames.verb+" ") {
		e.t.Errorf("Missed %s: got %q, want only frames that the NIC %s", when, got, frames.verb)
	}
}

func (e *testEnv) manage() {
	e.t.Helper()
	if _, err := e.node.Manage(e.config); err != nil {
		e.t.Fatalf("Manage: %v", err)
	}
}
