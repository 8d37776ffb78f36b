// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Versions of Request and Response; see "Version skew" above.
const (
	// ProtocolVersion is the version that this release sends.
	ProtocolVersion = 1
	// oldestProtocol and newestProtocol are the versions that it accepts.
	oldestProtocol = 1
	newestProtocol = 1
)

// Request asks the plugin to attach one share to one pod sandbox, or reports why the hook refuses
// the container.
type Request struct {
	Version   int    `json:"version"`
	ClaimUID  string `json:"claimUID"`
	Share     string `json:"share"` // the CDI device's name
	Pod       Pod    `json:"pod"`
	SandboxID string `json:"sandboxID"`
	// Refusal is the reason why the hook refuses the container, or "". A request with a reason does not have
	// descriptors, and the plugin does not attach anything: a plugin from an earlier release, which does not know this
	// field, refuses the request because descriptors are missing.
	Refusal string `json:"refusal,omitempty"`
	// Packet means that the request has a third descriptor, for a packet socket. The hook sends it when the plugin has
	// asked for it; see Response.Packet.
	Packet bool `json:"packet,omitempty"`
}

// descriptors returns the request's number of descriptors.
func (r Request) descriptors() int {
	switch {
	case r.Refusal != "":
		return 0
	case r.Packet:
		return maxDescriptors
	default:
		return descriptorsIn
	}
}

// Pod identifies a pod.
type Pod struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// Response is the plugin's answer.
type Response struct {
	Version int `json:"version"`
	// Error is "" if the share is attached. Otherwise it appears in the pod's
	// events.
	Error string `json:"error,omitempty"`
	// Retry means that the plugin is about to repair what Error describes: the hook
	// asks again while it has time.
	Retry bool `json:"retry,omitempty"`
	// Packet means that the plugin needs a packet socket that was opened in the pod, to lease an address: the hook
	// opens one and asks again. A hook from an earlier release reports Error.
	Packet bool `json:"packet,omitempty"`
}

const (
	maxMessage     = 8 << 10 // bytes, either direction
	descriptorsIn  = 2       // descriptors of a request: the namespace and the socket
	maxDescriptors = 3       // the same with a packet socket
	network        = "unixpacket"
	maxRequestName = 253     // the longest name in Kubernetes
	maxRefusal     = 1 << 10 // bytes; JSON needs up to six for one
	maxError       = 1 << 10 // bytes
)

// validate refuses a request of an unknown version or with missing fields.
func (r Request) validate() error {
	if r.Version < oldestProtocol || r.Version > newestProtocol {
		return fmt.Errorf(
			"request has version %d, this plugin accepts %d to %d: are hook and plugin more than one release apart?",
			r.Version, oldestProtocol, newestProtocol)
	}
	for field, value := range map[string]string{
		"claimUID": r.ClaimUID, "share": r.Share,
		"pod.uid": r.Pod.UID, "pod.namespace": r.Pod.Namespace, "pod.name": r.Pod.Name,
	} {
		if value == "" || len(value) > maxRequestName {
			return fmt.Errorf("request field %s has %d characters, want 1 to %d", field, len(value), maxRequestName)
		}
	}
	if len(r.Refusal) > maxRefusal {
		return fmt.Errorf("request field refusal has %d characters, want at most %d", len(r.Refusal), maxRefusal)
	}
	return nil
}

// truncate returns the start of a text, at most that many bytes.
func truncate(text string, bytes int) string {
	return strings.ToValidUTF8(text[:min(len(text), bytes)], "") // the cut may be within a character
}

// send writes one message with descriptors.
func send(conn *net.UnixConn, message any, files ...*os.File) error {
	payload, err := json.Marshal(message)
	if err != nil {
		return err
	}
	if len(payload) > maxMessage {
		return fmt.Errorf("message has %d bytes, want at most %d", len(payload), maxMessage)
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	_, _, err = conn.WriteMsgUnix(payload, rights, nil)
	return err
}

// receive reads one message with exactly that many descriptors. It refuses a message that is truncated or has a
// different number of descriptors, and closes them.
func receive(conn *net.UnixConn, message any, descriptors int) ([]*os.File, error) {
	return receiveMessage(conn, message, func() int { return descriptors })
}

// receiveMessage reads one message, and then calls descriptors to find out how many it must have.
func receiveMessage(conn *net.UnixConn, message any, descriptors func() int) ([]*os.File, error) {
	payload := make([]byte, maxMessage)
	rights := make([]byte, unix.CmsgSpace(4*maxDescriptors))
	n, rn, flags, _, err := conn.ReadMsgUnix(payload, rights)
	if err != nil {
		return nil, err
	}
	files, err := descriptorsOf(rights[:rn])
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errors.New("message is longer than allowed or has too many descriptors")
	}
	if err == nil {
		err = json.Unmarshal(payload[:n], message)
	}
	if err == nil && len(files) != descriptors() {
		err = fmt.Errorf("message has %d descriptors, want %d", len(files), descriptors())
	}
	if err != nil {
		closeAll(files)
		return nil, err
	}
	return files, nil
}

func descriptorsOf(rights []byte) (files []*os.File, err error) {
	if len(rights) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		fds, rightsErr := unix.ParseUnixRights(&messages[i])
		if rightsErr != nil {
			err = errors.Join(err, rightsErr)
			continue
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, err
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // nothing was written
	}
}
