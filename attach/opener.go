// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// OpenerCommand is the command of the hook that runs an Opener.
const OpenerCommand = "open-namespaces"

// Opener opens sockets in running pods' network namespaces, which the plugin uses to renew address leases. The plugin
// itself does not have the privilege to enter namespaces. The Opener is the only part of the driver that enters
// namespaces after pods have started. It does not change anything or keep state, and it closes each socket once sent.
//
// It opens only the namespaces of attachments that have a lease (Link.DHCP).
type Opener struct {
	// Socket is the path of its unix socket.
	Socket string
	// Namespaces is the directory where the runtime mounts pods' network namespaces.
	Namespaces string
	// RunDir is the plugin's run directory.
	RunDir string
}

// openRequest asks for sockets in an attachment's namespace. The answer is a Response with a netlink socket's and a
// packet socket's descriptors, or with an error.
type openRequest struct {
	Version   int       `json:"version"`
	ClaimUID  string    `json:"claimUID"`
	Share     string    `json:"share"`
	Namespace Namespace `json:"namespace"`
}

// Serve answers requests until ctx ends, and then waits for those in progress.
func (o Opener) Serve(ctx context.Context) error {
	if err := os.Remove(o.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.ListenUnix(network, &net.UnixAddr{Name: o.Socket, Net: network})
	if err != nil {
		return fmt.Errorf("listen for the plugin: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	var group sync.WaitGroup
	defer group.Wait()
	slots := make(chan struct{}, maxConnections)
	for {
		conn, err := listener.AcceptUnix()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept the plugin: %w", err)
		}
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			o.serve(conn)
		})
	}
}

// serve answers one request. It does not report connection errors, because the plugin does.
func (o Opener) serve(conn *net.UnixConn) {
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(requestTimeout)); err != nil {
		return
	}
	response := Response{Version: ProtocolVersion}
	files, err := o.answer(conn)
	if err != nil {
		response.Error = truncate(err.Error(), maxError)
	}
	_ = send(conn, response, files...)
	closeAll(files)
}

func (o Opener) answer(conn *net.UnixConn) ([]*os.File, error) {
	if err := checkPeer(conn); err != nil {
		return nil, err
	}
	var r openRequest
	if _, err := receive(conn, &r, 0); err != nil {
		return nil, fmt.Errorf("read request: %w", err)
	}
	record, err := OpenRecords(o.RunDir, AnyBoot, nil).Read(r.ClaimUID, r.Share, r.Namespace)
	if err != nil {
		return nil, err
	}
	if link, err := record.Link(); err != nil || link.DHCP == nil {
		return nil, fmt.Errorf("share %s of claim %s has no lease", r.Share, r.ClaimUID)
	}
	return o.open(record.Namespace)
}

// open opens a netlink socket and a packet socket in a namespace.
func (o Opener) open(id Namespace) (files []*os.File, err error) {
	namespace, err := o.find(id.Inode)
	if err != nil {
		return nil, err
	}
	defer namespace.Close()
	err = runIn(namespace, func() error {
		socket, err := openNetlink()
		if err != nil {
			return err
		}
		files = append(files, socket)
		// The kernel reuses inodes, but not cookies.
		if found, err := identifyNamespace(namespace, socket); err != nil || found.Cookie != id.Cookie {
			return errors.Join(err, fmt.Errorf("the namespace %d belongs to another pod: %w", id.Inode, os.ErrNotExist))
		}
		packet, err := openPacket()
		if err != nil {
			return err
		}
		files = append(files, packet)
		return nil
	})
	if err != nil {
		closeAll(files)
		return nil, err
	}
	return files, nil
}

// find opens the namespace with an inode number.
func (o Opener) find(inode uint64) (*os.File, error) {
	entries, err := os.ReadDir(o.Namespaces)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		path := filepath.Join(o.Namespaces, e.Name())
		var stat unix.Stat_t
		if unix.Stat(path, &stat) != nil || stat.Ino != inode { // a namespace may end meanwhile
			continue
		}
		file, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		if kind, err := unix.IoctlRetInt(int(file.Fd()), unix.NS_GET_NSTYPE); err == nil && kind == unix.CLONE_NEWNET {
			return file, nil
		}
		_ = file.Close() // has the same inode number, but is not in nsfs
	}
	return nil, fmt.Errorf("%s has no namespace %d: has the pod ended, or does the runtime mount the namespaces of pods "+
		"elsewhere?: %w", o.Namespaces, inode, os.ErrNotExist)
}

// OpenIn asks the opener that listens on a socket to open sockets in an attachment's namespace. The caller closes
// them.
func OpenIn(ctx context.Context, path string, r Record) (opened Sockets, err error) {
	dialer := net.Dialer{Timeout: dialTimeout}
	c, err := dialer.DialContext(ctx, network, path)
	if err != nil {
		return opened, fmt.Errorf("request sockets in the pod: %w: does the container that opens namespaces run?", err)
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return opened, errors.Join(fmt.Errorf("%s is not a unix socket", path), c.Close())
	}
	defer conn.Close()
	request := openRequest{Version: ProtocolVersion, ClaimUID: r.ClaimUID, Share: r.Share, Namespace: r.Namespace}
	if err := errors.Join(conn.SetDeadline(time.Now().Add(requestTimeout)), send(conn, request)); err != nil {
		return opened, err
	}
	var response Response
	files, err := receiveMessage(conn, &response, func() int {
		if response.Error != "" {
			return 0
		}
		return openedDescriptors
	})
	switch {
	case errors.Is(err, io.EOF):
		return opened, errors.New("request sockets in the pod: the opener closed the connection")
	case err != nil:
		return opened, fmt.Errorf("request sockets in the pod: %w", err)
	case response.Error != "":
		return opened, errors.New("open sockets in the pod: " + response.Error)
	}
	return Sockets{Netlink: files[0], Packet: files[1]}, nil
}

// openedDescriptors is the number of descriptors in the answer to an openRequest.
const openedDescriptors = 2

// Close closes the descriptors.
func (s Sockets) Close() {
	for _, f := range []*os.File{s.Namespace, s.Netlink, s.Packet} {
		if f != nil {
			_ = f.Close() // nothing was written
		}
	}
}
