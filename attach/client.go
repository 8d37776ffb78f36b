// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sort"
	"time"
)

const (
	// retryInterval is how often the hook tries to reach a plugin: no event announces that a socket accepts
	// connections.
	retryInterval = 100 * time.Millisecond
	dialTimeout   = time.Second
)

// attach sends the request to the plugins until one returns a final response, without Retry.
func (h Hook) attach(ctx context.Context, r Request, namespace, socket *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, h.Wait)
	defer cancel()
	ticker := time.NewTicker(retryInterval)
	defer ticker.Stop()
	exchange := exchange{Request: r, namespace: namespace, socket: socket}
	defer exchange.close()
	var last, refused error
	for {
		sockets, err := h.sockets()
		if err != nil {
			last = err
		}
		for _, path := range sockets {
			response, err := exchange.do(ctx, path)
			if err != nil {
				last = err
				continue
			}
			if response.Error == "" {
				return nil
			}
			if refused = errors.New(response.Error); !response.Retry {
				return refused
			}
			break // an older plugin would answer from an older configuration
		}
		select {
		case <-ctx.Done():
			if refused != nil {
				return refused
			}
			return fmt.Errorf("no dra-shared-plugin answered for %s: is its pod running on this node? Last error: %w",
				h.Wait, last)
		case <-ticker.C:
		}
	}
}

// exchange is a request with its descriptors.
type exchange struct {
	Request
	namespace, socket *os.File
	packet            *os.File // if a plugin has asked for it: closing one takes the kernel milliseconds
}

// do sends the request to one plugin, and returns its response. If the plugin needs a packet socket, do opens it
// and sends the request again with it.
func (e *exchange) do(ctx context.Context, path string) (Response, error) {
	if e.packet != nil {
		return roundTrip(ctx, path, e.Request, e.namespace, e.socket, e.packet)
	}
	response, err := roundTrip(ctx, path, e.Request, e.namespace, e.socket)
	if err != nil || !response.Packet {
		return response, err
	}
	if e.packet, err = openPacketIn(e.namespace); err != nil {
		return response, err
	}
	e.Packet = true
	return roundTrip(ctx, path, e.Request, e.namespace, e.socket, e.packet)
}

func (e *exchange) close() {
	if e.packet != nil {
		_ = e.packet.Close()
	}
}

// refusalTimeout limits how long a refusal delays the runtime's error.
const refusalTimeout = 2 * time.Second

// refuse returns the reason why the hook refuses a container, and sends it to the plugin, because not every OCI
// runtime reports what a hook prints: crun does not.
func (h Hook) refuse(ctx context.Context, r Request, reason error) error {
	ctx, cancel := context.WithTimeout(ctx, refusalTimeout)
	defer cancel()
	r.Refusal = truncate(reason.Error(), maxRefusal)
	sockets, err := h.sockets()
	if err == nil {
		_, err = roundTrip(ctx, sockets[0], r)
	}
	if err != nil {
		return fmt.Errorf("%w; the hook could not report this to the plugin: %w", reason, err)
	}
	return reason
}

var errNoPlugin = errors.New("no plugin is listening")

// sockets returns the paths of the plugins' sockets, newest first.
func (h Hook) sockets() ([]string, error) {
	entries, err := os.ReadDir(SocketDir(h.RunDir))
	if err != nil {
		return nil, err
	}
	type candidate struct {
		path  string
		since time.Time
	}
	var found []candidate
	for _, e := range entries {
		if info, err := e.Info(); err == nil && info.Mode()&os.ModeSocket != 0 {
			found = append(found, candidate{filepath.Join(SocketDir(h.RunDir), e.Name()), info.ModTime()})
		}
	}
	if len(found) == 0 {
		return nil, errNoPlugin
	}
	sort.Slice(found, func(a, b int) bool { return found[a].since.After(found[b].since) })
	paths := make([]string, len(found))
	for i, c := range found {
		paths[i] = c.path
	}
	return paths, nil
}

// roundTrip sends the request with descriptors to the plugin that listens at path, and returns its response.
func roundTrip(ctx context.Context, path string, r Request, descriptors ...*os.File) (Response, error) {
	var response Response
	dialer := net.Dialer{Timeout: dialTimeout}
	c, err := dialer.DialContext(ctx, network, path)
	if err != nil {
		return response, err
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return response, errors.Join(fmt.Errorf("%s is not a unix socket", path), c.Close())
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return response, err
	}
	if err := send(conn, r, descriptors...); err != nil {
		return response, err
	}
	_, err = receive(conn, &response, 0)
	return response, err
}
