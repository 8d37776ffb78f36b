// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nstest provides network namespaces with real links to tests: a node
// with NICs, the wire that is connected to a NIC, and pods.
//
// Main runs the test binary again in a new network namespace. It also creates a
// new user namespace unless the tests need the machine's root, so most tests
// run without privileges. The namespaces and links end with the process.
package nstest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// Privilege is the privilege that the tests of a package need.
type Privilege int

// Values of Privilege.
const (
	// User means that root of a user namespace is sufficient, as it is for links.
	User Privilege = iota
	// Root means that the tests need the machine's root, for example to load
	// BPF programs.
	Root
)

// insideVariable is the environment variable that Main sets for the process
// that it starts in the new namespaces.
const insideVariable = "NSTEST_INSIDE"

// Main runs the tests in a new network namespace and exits. Call it from TestMain. If the process lacks the privilege,
// Main prints the reason and skips all tests. If the environment variable CI is set, it fails instead: skipped tests
// would look like passing ones.
func Main(m *testing.M, need Privilege) {
	if os.Getenv(insideVariable) != "" {
		os.Exit(m.Run())
	}
	if need == Root && os.Geteuid() != 0 {
		skip("these tests load BPF programs: run them as root")
	}
	err := runInNamespaces(need)
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(exit.ExitCode())
	case errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSPC):
		skip(fmt.Sprintf("cannot create namespaces: %v: are user namespaces disabled?", err))
	case err != nil:
		fmt.Println("FAIL:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// skip exits without running tests.
func skip(reason string) {
	if os.Getenv("CI") != "" {
		fmt.Println("FAIL:", reason)
		os.Exit(1)
	}
	fmt.Println("SKIP:", reason)
	os.Exit(0)
}

// runInNamespaces runs this program with its arguments in new namespaces.
func runInNamespaces(need Privilege) error {
	self := exec.Command("/proc/self/exe", os.Args[1:]...)
	self.Env = append(os.Environ(), insideVariable+"=1")
	self.Stdin, self.Stdout, self.Stderr = os.Stdin, os.Stdout, os.Stderr
	self.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	if need == User {
		self.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		self.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		self.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	runtime.LockOSThread() // the kernel sends Pdeathsig when the parent thread ends
	return self.Run()
}

// Namespace is a network namespace that ends with the test.
type Namespace struct {
	t      testing.TB
	File   *os.File   // descriptor of the namespace
	Socket *rtnl.Conn // opened in the namespace
}

// New creates a namespace with only the loopback interface, which is up.
func New(t testing.TB) *Namespace {
	t.Helper()
	ns := &Namespace{t: t}
	onThread(t, func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		f, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		ns.File = f
		if ns.Socket, err = rtnl.Open(); err != nil {
			return err
		}
		return setUp("lo")
	})
	t.Cleanup(ns.Close)
	return ns
}

// Close closes the descriptor and the socket, and the namespace ends. The test calls it at its end; call it to end the
// namespace earlier.
func (ns *Namespace) Close() {
	_ = ns.Socket.Close()
	_ = ns.File.Close()
}

// Pod returns the namespace in the form that netdev.Node.Attach takes.
func (ns *Namespace) Pod() netdev.PodNamespace {
	return netdev.PodNamespace{File: ns.File, Socket: ns.Socket}
}

// Do runs f in the namespace, and fails the test if f returns an error.
func (ns *Namespace) Do(f func() error) {
	ns.t.Helper()
	RunIn(ns.t, ns.File, f)
}

// onThread is runOnThread, and fails the test if f returns an error.
func onThread(t testing.TB, f func() error) {
	t.Helper()
	if err := runOnThread(f); err != nil {
		t.Fatal(err)
	}
}

// runOnThread runs f on a new thread and ends the thread after f, because f may
// have moved the thread to another namespace. The runtime never ends the first
// thread of the process, which would keep a namespace from ending.
func runOnThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			done <- runOnThread(f) // on another thread, because this one is locked
			return
		}
		done <- f()
	}()
	return <-done
}

// runIn runs f in a namespace, on a separate thread.
func runIn(namespace *os.File, f func() error) error {
	return runOnThread(func() error {
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("setns", err)
		}
		return f()
	})
}

// setUp brings up a link of the current namespace.
func setUp(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("look up link %s: %w", name, err)
	}
	return netlink.LinkSetUp(link)
}

// NIC creates a NIC in the test's own namespace. The NIC is one end of a veth
// pair. The other end is the link "wire", with wireAddresses, in the returned
// namespace. The MTU is in bytes.
func NIC(t testing.TB, name string, mtu int, wireAddresses ...string) (nic netdev.NIC, wire *Namespace) {
	t.Helper()
	return NICWithQueues(t, name, mtu, 1, wireAddresses...)
}

// NICWithQueues is NIC, with transmit queues and as many receive queues at both ends.
func NICWithQueues(
	t testing.TB, name string, mtu, queues int, wireAddresses ...string,
) (nic netdev.NIC, wire *Namespace) {
	t.Helper()
	wire = New(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.Index = name, mtu, unusedIndex(t)
	attrs.NumTxQueues, attrs.NumRxQueues = queues, queues
	veth := &netlink.Veth{
		LinkAttrs:     attrs,
		PeerName:      "wire",
		PeerMTU:       uint32(mtu),
		PeerNamespace: netlink.NsFd(wire.File.Fd()),
	}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatalf("create NIC %s: %v", name, err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(veth) }) // the test may have deleted it
	if err := setUp(name); err != nil {
		t.Fatal(err)
	}
	wire.Do(func() error { return ConfigureLink("wire", wireAddresses...) })
	return FindNIC(t, name), wire
}

// unusedIndex returns an interface index that is not used by a link of the current namespace or by the first link of
// another one: if both ends of a veth pair have the same index, the kernel may take a second to notice the carrier of
// the pair, and IPv6 does not work until then.
func unusedIndex(t testing.TB) int {
	t.Helper()
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	const first = 100
	index := first
	for _, l := range links {
		index = max(index, l.Attrs().Index+1)
	}
	return index
}

// ConfigureLink adds addresses to a link of the current namespace and brings
// the link up.
func ConfigureLink(name string, addresses ...string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, text := range addresses {
		address, err := netlink.ParseAddr(text)
		if err != nil {
			return err
		}
		address.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(link, address); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(link)
}

// AddClsact adds the clsact qdisc to a link of the current namespace, unless the link has it.
func AddClsact(index int) error {
	err := netlink.QdiscAdd(&netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}})
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// FindNIC returns a NIC of the test's own namespace from netdev.Inventory. It does not have attributes from sysfs.
func FindNIC(t testing.TB, name string) netdev.NIC {
	t.Helper()
	return FindNICIn(t, netdev.NewInventory("/sys"), name)
}

// FindNICIn returns a NIC of the test's own namespace from an Inventory.
func FindNICIn(t testing.TB, inventory *netdev.Inventory, name string) netdev.NIC {
	t.Helper()
	nics, err := inventory.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nics {
		if n.Name == name {
			return n
		}
	}
	t.Fatalf("NIC %s not found in %+v", name, nics)
	return netdev.NIC{}
}

// Interface returns the link of the namespace with that name, or nil.
func (ns *Namespace) Interface(name string) (found *net.Interface) {
	ns.t.Helper()
	ns.Do(func() error {
		links, err := net.Interfaces()
		for i := range links {
			if links[i].Name == name {
				found = &links[i]
			}
		}
		return err
	})
	return found
}

// Current returns the namespace that the test itself runs in.
func Current(t testing.TB) *Namespace {
	t.Helper()
	f, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	conn, err := rtnl.Open()
	if err != nil {
		t.Fatal(err)
	}
	ns := &Namespace{t: t, File: f, Socket: conn}
	t.Cleanup(ns.Close)
	return ns
}

// SetSysctl sets a kernel parameter of the current namespace. path is relative
// to /proc/sys.
func SetSysctl(path, value string) error {
	return os.WriteFile("/proc/sys/"+path, []byte(value), 0o644)
}

// RunIn runs f in a namespace, and fails the test if f returns an error.
func RunIn(t testing.TB, namespace *os.File, f func() error) {
	t.Helper()
	if err := runIn(namespace, f); err != nil {
		t.Fatal(err)
	}
}

// NamespaceExists reports whether an ID of the current namespace identifies a
// namespace that has not ended.
func NamespaceExists(id int) (bool, error) {
	conn, err := rtnl.Open()
	if err != nil {
		return false, err
	}
	defer conn.Close()
	return conn.NamespaceExists(id)
}

// Emulated reports whether the test runs on a processor that QEMU emulates. Rates there are a fraction of a real
// machine's, and vary with its load.
func Emulated() bool {
	cpuinfo, _ := os.ReadFile("/proc/cpuinfo") // without it, the processor counts as real
	return strings.Contains(string(cpuinfo), "QEMU TCG")
}

// WithoutCapabilities runs f on a thread that lacks capabilities, and fails the test
// if f returns an error.
func WithoutCapabilities(t testing.TB, f func() error, capabilities ...int) {
	t.Helper()
	onThread(t, func() error {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if err := unix.Capget(&header, &data[0]); err != nil {
			return err
		}
		for _, c := range capabilities {
			data[c/32].Effective &^= 1 << (c % 32)
			data[c/32].Permitted &^= 1 << (c % 32)
		}
		if err := unix.Capset(&header, &data[0]); err != nil {
			return err
		}
		return f()
	})
}
