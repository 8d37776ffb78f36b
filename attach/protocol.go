package attach

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// ProtocolVersion of Request and Response. A plugin answers what it knows.
const ProtocolVersion = 1

// Request asks for one share to be attached to one pod sandbox.
type Request struct {
	Version   int    `json:"version"`
	ClaimUID  string `json:"claimUID"`
	Share     string `json:"share"` // the CDI device's name
	Pod       Pod    `json:"pod"`
	SandboxID string `json:"sandboxID"`
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
	// Error is empty if the share is attached. Otherwise a user reads it in
	// the pod's events.
	Error string `json:"error,omitempty"`
	// Interface is the link's name in the pod.
	Interface string `json:"interface,omitempty"`
}

const (
	maxMessage     = 8 << 10 // bytes, either direction
	descriptorsIn  = 2       // of a request: the namespace, the socket
	network        = "unixpacket"
	maxRequestName = 253 // no name in Kubernetes is longer
)

func (r Request) validate() error {
	if r.Version != ProtocolVersion {
		return fmt.Errorf("request has version %d, this plugin speaks %d: do hook and plugin belong to one release?", r.Version, ProtocolVersion)
	}
	for field, value := range map[string]string{
		"claimUID": r.ClaimUID, "share": r.Share, "pod.uid": r.Pod.UID, "pod.namespace": r.Pod.Namespace, "pod.name": r.Pod.Name,
	} {
		if value == "" || len(value) > maxRequestName {
			return fmt.Errorf("request field %s has %d characters, want 1 to %d", field, len(value), maxRequestName)
		}
	}
	return nil
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

// receive reads one message and exactly as many descriptors as wanted. A
// message that is cut off, or has more, is refused: nothing in it can be trusted.
func receive(conn *net.UnixConn, message any, descriptors int) ([]*os.File, error) {
	payload := make([]byte, maxMessage)
	rights := make([]byte, unix.CmsgSpace(4*descriptorsIn))
	n, rn, flags, _, err := conn.ReadMsgUnix(payload, rights)
	if err != nil {
		return nil, err
	}
	files, err := descriptorsOf(rights[:rn])
	if err == nil {
		switch {
		case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
			err = errors.New("message is longer than allowed or has too many descriptors")
		case len(files) != descriptors:
			err = fmt.Errorf("message has %d descriptors, want %d", len(files), descriptors)
		default:
			err = json.Unmarshal(payload[:n], message)
		}
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
