// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Hook is the hook's end of the protocol: the arguments of one run.
type Hook struct {
	RunDir   string
	ClaimUID string
	Share    string
	// AnnounceIPv6 makes the kernel announce the IPv6 addresses of the pod's links; see
	// announceIPv6.
	AnnounceIPv6 bool
	// Wait is the time to wait for a plugin that is not running.
	Wait time.Duration
}

// AnnounceIPv6Flag is the name of the hook's flag that sets AnnounceIPv6.
const AnnounceIPv6Flag = "announce-ipv6"

// TryFlag is the name of the flag that makes the hook exit immediately.
const TryFlag = "try"

// DefaultWait is less than the kubelet's timeout of two minutes for requests to
// the runtime.
const DefaultWait = 60 * time.Second

// state is the container's state that an OCI runtime passes to a hook (OCI
// runtime-spec, "State").
type state struct {
	Pid         int               `json:"pid"`
	Bundle      string            `json:"bundle"`
	Annotations map[string]string `json:"annotations"`
}

// Run attaches the share to the pod of the container that has its state on stdin. If it returns an error, the
// container must not start.
func (h Hook) Run(ctx context.Context, stdin io.Reader) error {
	var s state
	if err := json.NewDecoder(io.LimitReader(stdin, 1<<20)).Decode(&s); err != nil {
		return fmt.Errorf("read the container's state: %w", err)
	}
	request, err := h.request(s)
	if err != nil {
		if stackErr := checkNetworkStack("/proc", s.Pid); errors.Is(stackErr, errVirtualMachine) {
			return stackErr // older shims of Kata Containers pass no annotations
		}
		return err
	}
	namespace, err := podNamespace(s)
	if err != nil {
		return h.refuse(ctx, request, err)
	}
	defer namespace.Close()
	pod, err := h.prepareNamespace(namespace)
	if err != nil {
		return h.refuse(ctx, request, err)
	}
	if pod.attached {
		return nil
	}
	defer pod.socket.Close()
	if err := h.attach(ctx, request, namespace, pod.socket); err != nil {
		return err
	}
	if err := h.setSysctls(namespace, pod.id); err != nil {
		return h.refuse(ctx, request, err)
	}
	return nil
}

// setSysctls sets the attached link's kernel parameters. If it fails, the pod's next container tries again.
func (h Hook) setSysctls(namespace *os.File, id Namespace) error {
	record, err := OpenRecords(h.RunDir, AnyBoot, nil).Read(h.ClaimUID, h.Share, id)
	if err != nil {
		return nil //nolint:nilerr // the share is not a link, or its pod is ending
	}
	link, err := record.Link()
	if err != nil || len(link.Sysctls) == 0 {
		return nil //nolint:nilerr // as above
	}
	return runIn(namespace, func() error {
		if !link.exists() {
			return nil // the pod has deleted the link
		}
		return link.setSysctls()
	})
}

// runtimeAnnotations are the keys of the annotations that a container runtime uses to identify a container's pod.
type runtimeAnnotations struct{ sandboxID, podUID, podNamespace, podName string }

// runtimes lists the container runtimes. containerd's keys come from its package pkg/cri/annotations. CRI-O adds the
// kubelet's labels (package k8s.io/kubelet/pkg/types) to a container's annotations.
var runtimes = []runtimeAnnotations{
	{sandboxID: "io.kubernetes.cri.sandbox-id", podUID: "io.kubernetes.cri.sandbox-uid",
		podNamespace: "io.kubernetes.cri.sandbox-namespace", podName: "io.kubernetes.cri.sandbox-name"},
	{sandboxID: "io.kubernetes.cri-o.SandboxID", podUID: "io.kubernetes.pod.uid",
		podNamespace: "io.kubernetes.pod.namespace", podName: "io.kubernetes.pod.name"},
}

// request returns the request for a container. It identifies the pod by the runtime's annotations.
//
// CRI-O and, if configured to, containerd also copy the annotations of users' pods. Neither lets them replace an
// annotation that the runtime itself sets, but a user can add the other runtime's. So request refuses a container
// with annotations from two runtimes: one of them may name another user's pod.
func (h Hook) request(s state) (Request, error) {
	var found []runtimeAnnotations
	for _, keys := range runtimes {
		if s.Annotations[keys.sandboxID] != "" {
			found = append(found, keys)
		}
	}
	switch len(found) {
	case 0:
		return Request{}, errors.New(
			"the container's annotations do not identify its pod: is the runtime containerd or CRI-O?")
	case 1:
	default:
		return Request{}, fmt.Errorf("the container has the annotations of two runtimes, %s and %s: "+
			"remove the one that the runtime did not set from the pod", found[0].sandboxID, found[1].sandboxID)
	}
	keys := found[0]
	r := Request{
		Version: ProtocolVersion, ClaimUID: h.ClaimUID, Share: h.Share, SandboxID: s.Annotations[keys.sandboxID],
		Pod: Pod{
			UID: s.Annotations[keys.podUID], Namespace: s.Annotations[keys.podNamespace], Name: s.Annotations[keys.podName],
		},
	}
	return r, r.validate()
}

// podNamespace opens the container's network namespace. It refuses a namespace that does not belong to the pod.
func podNamespace(s state) (*os.File, error) {
	if s.Pid <= 0 {
		return nil, fmt.Errorf("the container's state has pid %d: is this a createRuntime hook?", s.Pid)
	}
	if err := checkNetworkStack("/proc", s.Pid); err != nil {
		return nil, err
	}
	namespace, err := os.Open(filepath.Join("/proc", strconv.Itoa(s.Pid), "ns/net"))
	if err != nil {
		return nil, fmt.Errorf("open the pod's network namespace: %w", err)
	}
	if err := checkNamespace(namespace, s.Bundle); err != nil {
		return nil, errors.Join(err, namespace.Close())
	}
	return namespace, nil
}

// checkNamespace refuses the node's network namespace, and any other than the one in the container's bundle.
func checkNamespace(namespace *os.File, bundle string) error {
	got, err := namespace.Stat()
	if err != nil {
		return err
	}
	// /proc/self is the first thread, which may be in another namespace.
	own, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	if os.SameFile(got, own) {
		return errors.New("the pod uses the node's network (hostNetwork): a share of a NIC cannot be attached to it: " +
			"set hostNetwork: false, or remove the claim")
	}
	path, err := namespaceInBundle(bundle)
	if err != nil {
		return err
	}
	want, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("check the network namespace in the container's config.json: %w", err)
	}
	if !os.SameFile(got, want) {
		return fmt.Errorf("the container is not in the network namespace that its config.json names, %s", path)
	}
	return nil
}

// namespaceInBundle returns the path of the network namespace in a container's
// config.json.
func namespaceInBundle(bundle string) (string, error) {
	raw, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return "", fmt.Errorf("read the container's bundle: %w", err)
	}
	var config struct {
		Linux struct {
			Namespaces []struct {
				Type string `json:"type"`
				Path string `json:"path"`
			} `json:"namespaces"`
		} `json:"linux"`
	}
	if err := json.Unmarshal(raw, &config); err != nil {
		return "", fmt.Errorf("read the container's config.json: %w", err)
	}
	for _, ns := range config.Linux.Namespaces {
		if ns.Type == "network" && ns.Path != "" {
			return ns.Path, nil
		}
	}
	return "", errors.New(
		"the container's config.json does not contain the path of a network namespace: runtimes that run pods in virtual " +
			"machines, such as Kata Containers, cannot use shares of NICs: choose another runtimeClassName for the pod",
	)
}

// preparedNamespace is a pod's network namespace after prepareNamespace.
type preparedNamespace struct {
	attached bool
	id       Namespace
	socket   *os.File // NETLINK_ROUTE
}

// prepareNamespace prepares a pod's network namespace for the attachment of the share.
func (h Hook) prepareNamespace(namespace *os.File) (result preparedNamespace, err error) {
	err = runIn(namespace, func() (err error) {
		result, err = h.prepareInNamespace(namespace)
		return err
	})
	return result, err
}

// runIn calls f in a network namespace, on a separate thread, which then ends: no other code in this process runs in
// the namespace. The Go runtime does not end the process's first thread, which would keep an ended pod's namespace.
func runIn(namespace *os.File, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // without UnlockOSThread, the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			done <- runIn(namespace, f) // on another thread, because this one is locked
			return
		}
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter the pod's network namespace: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}

// openNetlink opens a NETLINK_ROUTE socket in this thread's namespace.
func openNetlink() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a socket in the pod's network namespace: %w", err)
	}
	return os.NewFile(uintptr(fd), "rtnetlink"), nil
}

// openPacket opens a packet socket in this thread's namespace. It does not receive anything before the plugin binds
// it to a link.
func openPacket() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket in the pod's network namespace: %w", err)
	}
	return os.NewFile(uintptr(fd), "packet"), nil
}

func openPacketIn(namespace *os.File) (packet *os.File, err error) {
	err = runIn(namespace, func() (err error) {
		packet, err = openPacket()
		return err
	})
	return packet, err
}

// prepareInNamespace prepares this thread's namespace. If the share is attached, it sets the link's kernel
// parameters. Otherwise, it announces IPv6 addresses if the hook is configured to, and opens a netlink socket for the
// plugin.
func (h Hook) prepareInNamespace(namespace *os.File) (preparedNamespace, error) {
	socket, err := openNetlink()
	if err != nil {
		return preparedNamespace{}, err
	}
	id, err := identifyNamespace(namespace, socket)
	if err != nil {
		return preparedNamespace{}, errors.Join(err, socket.Close())
	}
	if link, attached := h.attached(id); attached {
		return preparedNamespace{attached: true, id: id}, errors.Join(link.setSysctls(), socket.Close())
	}
	if h.AnnounceIPv6 {
		announceIPv6()
	}
	return preparedNamespace{socket: socket, id: id}, nil
}

// announceIPv6 sets ndisc_notify for the links that the plugin will create in this thread's namespace. With it, the
// kernel sends unsolicited neighbor advertisements (RFC 4861, 7.2.6) when a link comes up, so hosts on the network
// replace the MAC address that an IP address had in another pod. The plugin cannot set it, because netlink does not
// have an attribute for it. A share works without it, so errors, such as on a kernel without IPv6, do not matter.
//
// Looking up a file below /proc/sys/net takes longer the more namespaces have had theirs looked up, because they all
// have the same parent in the kernel's dentry cache: 0.1 ms with 10 namespaces, and 5 ms with 3,000 (Linux 6.18).
func announceIPv6() {
	_ = os.WriteFile("/proc/sys/net/ipv6/conf/default/ndisc_notify", []byte("1"), 0)
}

// attached returns the share's link if it already exists in this thread's namespace, as it does for all but a pod's
// first container. If the hook cannot read the record, the share counts as not attached, and the plugin decides.
func (h Hook) attached(id Namespace) (link Link, attached bool) {
	record, err := OpenRecords(h.RunDir, AnyBoot, nil).Read(h.ClaimUID, h.Share, id)
	if err != nil {
		return link, false
	}
	link, err = record.Link()
	return link, err == nil && link.exists()
}

// exists reports whether the link exists in this thread's namespace and is up.
func (l Link) exists() bool {
	link, err := net.InterfaceByIndex(l.Index)
	return err == nil && link.HardwareAddr.String() == l.MAC && link.Flags&net.FlagUp != 0
}
