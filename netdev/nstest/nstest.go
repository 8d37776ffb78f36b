// Package nstest lets tests work on real links in network namespaces of their
// own: a node with a NIC, the wire that the NIC is plugged into, and pods.
//
// A test binary runs itself again in a new network namespace, and in a new user
// namespace unless it asks for the machine's root: so most tests need no
// privilege at all. Nothing is left behind; the namespaces end with the process.
package nstest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// Privilege that a package's tests need.
type Privilege int

// Privileges.
const (
	// User needs none: root of a user namespace is enough for links.
	User Privilege = iota
	// Root is needed to load BPF programs.
	Root
)

const inside = "NSTEST_INSIDE"

// Main is to be called from TestMain: it runs the tests in a new network
// namespace and ends the process. Where that is impossible every test is
// skipped, with the reason.
func Main(m *testing.M, need Privilege) {
	if os.Getenv(inside) != "" {
		os.Exit(m.Run())
	}
	if need == Root && os.Geteuid() != 0 {
		fmt.Println("SKIP: these tests load BPF programs: run them as root")
		os.Exit(0)
	}
	self := exec.Command("/proc/self/exe", os.Args[1:]...)
	self.Env = append(os.Environ(), inside+"=1")
	self.Stdin, self.Stdout, self.Stderr = os.Stdin, os.Stdout, os.Stderr
	self.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	if need == User {
		self.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		self.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		self.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	runtime.LockOSThread() // Pdeathsig is about the thread
	err := self.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(exit.ExitCode())
	case errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSPC):
		fmt.Printf("SKIP: no new namespaces here: %v: are user namespaces switched off?\n", err)
	case err != nil:
		fmt.Println("FAIL:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Namespace is a network namespace that ends with the test.
type Namespace struct {
	t      testing.TB
	File   *os.File
	Socket *rtnl.Conn // opened in it
}

// New makes an empty namespace with its loopback link up.
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
		return up("lo")
	})
	t.Cleanup(ns.Close)
	return ns
}

// End lets go of the namespace before the test ends.
func (ns *Namespace) Close() {
	_ = ns.Socket.Close()
	_ = ns.File.Close()
}

// Pod is the namespace as netdev wants it.
func (ns *Namespace) Pod() netdev.PodNamespace {
	return netdev.PodNamespace{File: ns.File, Socket: ns.Socket}
}

// Do runs f in the namespace, on a thread that is thrown away.
func (ns *Namespace) Do(f func() error) {
	ns.t.Helper()
	onThread(ns.t, func() error {
		if err := unix.Setns(int(ns.File.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// onThread runs f on a fresh thread that ends with it: whatever namespace it
// went to, nothing else ever runs there.
func onThread(t testing.TB, f func() error) {
	t.Helper()
	if err := runOnThread(f); err != nil {
		t.Fatal(err)
	}
}

func runOnThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- f()
	}()
	return <-done
}

func up(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return netlink.LinkSetUp(link)
}

// NIC makes a NIC in the test's own namespace, plugged into a wire: the
// returned namespace, where its other end is the link "wire". mtu is in bytes.
func NIC(t testing.TB, name string, mtu int, wireAddresses ...string) (nic netdev.NIC, wire *Namespace) {
	t.Helper()
	wire = New(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = name, mtu
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "wire", PeerMTU: uint32(mtu), PeerNamespace: netlink.NsFd(wire.File.Fd())}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatalf("create %s: %v", name, err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(veth) }) // the test may have done so
	if err := up(name); err != nil {
		t.Fatal(err)
	}
	wire.Do(func() error { return ConfigureLink("wire", wireAddresses...) })
	return FindNIC(t, name), wire
}

// Configure gives a link of the current namespace addresses and brings it up.
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

// Find returns a NIC of the test's own namespace as the inventory sees it.
func FindNIC(t testing.TB, name string) netdev.NIC {
	t.Helper()
	nics, err := netdev.NewInventory("/sys").List()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nics {
		if n.Name == name {
			return n
		}
	}
	t.Fatalf("no NIC %s among %+v", name, nics)
	return netdev.NIC{}
}

// Interface returns a link of the namespace, nil if there is none.
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

// Own is the namespace that the test itself runs in.
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

// Sysctl sets a kernel parameter of the current namespace, by its path.
func SetSysctl(path, value string) error {
	return os.WriteFile("/proc/sys/"+path, []byte(value), 0o644)
}

// In runs f in a namespace, on a thread that is thrown away.
func RunIn(t testing.TB, namespace *os.File, f func() error) {
	t.Helper()
	onThread(t, func() error {
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// NamespaceLives tells whether the ID stands for a namespace that has not ended.
func NamespaceExists(id int) (bool, error) {
	conn, err := rtnl.Open()
	if err != nil {
		return false, err
	}
	defer conn.Close()
	get := nl.NewNetlinkRequest(unix.RTM_GETLINK, 0)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = 1
	get.AddData(msg)
	get.AddData(nl.NewRtAttr(unix.IFLA_TARGET_NETNSID, nl.Uint32Attr(uint32(id))))
	_, err = conn.Get(get)
	if errors.Is(err, unix.EINVAL) {
		return false, nil
	}
	return err == nil, err
}
