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

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
)

// Handler attaches shares. It must not keep the files, which the server closes.
// The text of an error appears in the pod's events.
type Handler interface {
	Attach(ctx context.Context, r Request, sockets Sockets) (Response, error)
	// Refused is called when the hook itself refuses a container, with the reason in
	// r.Refusal.
	Refused(ctx context.Context, r Request)
}

// Sockets are the descriptors of a request.
type Sockets struct {
	// Namespace is the pod's network namespace.
	Namespace *os.File
	// Netlink is a NETLINK_ROUTE socket that was opened in it.
	Netlink *os.File
	// Packet is a packet socket (SOCK_DGRAM, without a protocol) that was opened in it. It is nil unless a Handler has
	// asked for it with ErrPacketNeeded.
	Packet *os.File
}

// ErrPacketNeeded is wrapped by an error from a Handler that needs Sockets.Packet. The hook then opens the socket and
// resends the request.
var ErrPacketNeeded = errors.New(
	"the hook must open a packet socket in the pod; a hook of an earlier release cannot do that")

// NeedsPacket reports whether err, an error from a Handler, asks the hook for a missing socket.
func (s Sockets) NeedsPacket(err error) bool {
	return s.Packet == nil && errors.Is(err, ErrPacketNeeded)
}

// Identify identifies the namespace by the socket opened in it.
func (s Sockets) Identify() (Namespace, error) { return identifyNamespace(s.Namespace, s.Netlink) }

// Server is the plugin's end of the protocol.
type Server struct {
	handler  Handler
	listener *net.UnixListener
	slots    chan struct{}
	group    sync.WaitGroup

	mu       sync.Mutex
	perClaim map[string]int // requests that the handler serves, by claim UID
}

const (
	// maxConnections limits the hooks that are served at the same time, which take up to four descriptors each. Others
	// wait in the socket's backlog: a pod with a few claims must not fill all slots.
	maxConnections = 512
	// maxConnectionsOfClaim limits the connections for one claim: most of them only wait for each other. Hooks beyond
	// the limit ask again.
	maxConnectionsOfClaim = 16
	// requestTimeout limits the wait for a peer that connects without sending anything.
	requestTimeout = 5 * time.Second
	// attachTimeout limits the handler.
	attachTimeout = 30 * time.Second
)

// Listen opens the socket name.sock of a plugin instance in SocketDir.
func Listen(runDir, name string, handler Handler) (*Server, error) {
	dir := SocketDir(runDir)
	// Only root can enter the directory. An abstract socket would be reachable
	// from hostNetwork pods.
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, err
	}
	path := socketPath(runDir, name)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	if err != nil {
		return nil, fmt.Errorf("listen for hooks: %w", err)
	}
	return &Server{
		handler: handler, listener: listener, slots: make(chan struct{}, maxConnections), perClaim: map[string]int{},
	}, nil
}

func socketPath(runDir, name string) string { return filepath.Join(SocketDir(runDir), name+".sock") }

// Ping connects to the socket of a plugin instance, and returns an error if the instance does not
// serve hooks.
func Ping(runDir, name string) error {
	conn, err := net.DialTimeout(network, socketPath(runDir, name), dialTimeout)
	if err != nil {
		return err
	}
	return conn.Close()
}

// Serve answers hooks until ctx ends, and then waits for those in progress.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = s.listener.Close() })
	defer stop()
	defer s.group.Wait()
	for {
		conn, err := s.listener.AcceptUnix()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept hook: %w", err)
		}
		s.slots <- struct{}{}
		s.group.Go(func() {
			defer func() { <-s.slots }()
			s.serve(ctx, conn)
		})
	}
}

// errPing means that a client, such as Ping, closed the connection without sending a request.
var errPing = errors.New("connection without a request")

func (s *Server) serve(ctx context.Context, conn *net.UnixConn) {
	defer conn.Close()
	logger := logr.FromContextOrDiscard(ctx)
	response, err := s.answer(ctx, conn)
	if errors.Is(err, errPing) {
		return
	}
	if err != nil {
		if !errors.As(err, new(*handlerError)) { // the handler logs its own errors
			logger.Error(err, "Failed to read hook request")
		}
		response.Error = truncate(err.Error(), maxError)
	}
	response.Version = ProtocolVersion
	if err := errors.Join(conn.SetWriteDeadline(time.Now().Add(requestTimeout)), send(conn, response)); err != nil {
		// The hook has ended, so its container does not start. The next attempt
		// finds the share attached.
		logger.Error(err, "Failed to send hook response")
	}
}

func (s *Server) answer(ctx context.Context, conn *net.UnixConn) (Response, error) {
	if err := checkPeer(conn); err != nil {
		return Response{}, err
	}
	if err := conn.SetReadDeadline(time.Now().Add(requestTimeout)); err != nil {
		return Response{}, err
	}
	var request Request
	files, err := receiveMessage(conn, &request, func() int { return request.descriptors() })
	if errors.Is(err, io.EOF) {
		return Response{}, errPing
	}
	if err != nil {
		return Response{}, fmt.Errorf("read request: %w", err)
	}
	defer closeAll(files)
	if err := request.validate(); err != nil {
		return Response{}, err
	}
	if request.Refusal != "" {
		s.handler.Refused(ctx, request)
		return Response{}, nil
	}
	if kind, err := unix.IoctlRetInt(int(files[0].Fd()), unix.NS_GET_NSTYPE); err != nil || kind != unix.CLONE_NEWNET {
		return Response{}, errors.New("the first descriptor does not refer to a network namespace")
	}
	if !s.enter(request.ClaimUID) {
		return Response{Retry: true}, &handlerError{errTooManyRequests}
	}
	defer s.leave(request.ClaimUID)
	// A handler in progress continues while the plugin stops: a partial
	// attachment is worse than a delay.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), attachTimeout)
	defer cancel()
	sockets := Sockets{Namespace: files[0], Netlink: files[1]}
	if request.Packet {
		sockets.Packet = files[2]
	}
	response, err := s.handler.Attach(ctx, request, sockets)
	response.Packet = sockets.NeedsPacket(err)
	if err != nil {
		err = &handlerError{err}
	}
	return response, err
}

// errTooManyRequests asks the hook to try again.
var errTooManyRequests = fmt.Errorf("the plugin is still attaching shares to %d other containers that use the claim: "+
	"do the events of their pods say why it takes so long?", maxConnectionsOfClaim)

// enter counts a request for a claim, unless maxConnectionsOfClaim are in progress.
func (s *Server) enter(claim string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.perClaim[claim] == maxConnectionsOfClaim {
		return false
	}
	s.perClaim[claim]++
	return true
}

func (s *Server) leave(claim string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.perClaim[claim]--; s.perClaim[claim] == 0 {
		delete(s.perClaim, claim)
	}
}

// handlerError is an error that is not logged: the Handler's, which logs its own, or errTooManyRequests.
type handlerError struct{ error }

func (e *handlerError) Unwrap() error { return e.error }

// checkPeer refuses peers other than root. The directory already excludes them, unless its mode was changed.
func checkPeer(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var (
		peer    *unix.Ucred
		peerErr error
	)
	if err := raw.Control(func(fd uintptr) {
		peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if peerErr != nil {
		return peerErr
	}
	if peer.Uid != 0 {
		return fmt.Errorf("peer has uid %d, want 0", peer.Uid)
	}
	return nil
}
