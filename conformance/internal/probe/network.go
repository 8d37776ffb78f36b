// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	dialLimit    = 20 * time.Second // for all attempts: addresses can be tentative at first
	attemptLimit = 2 * time.Second
	dataLength   = 1 << 20 // bytes that dial sends and reads again
)

// serve echoes what it reads on all interfaces except these, until the context ends. Its sockets are bound to the
// interfaces, so responses do not take other interfaces.
func serve(ctx context.Context, port string, except []string) error {
	names, err := others(except)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var wait sync.WaitGroup
	for _, name := range names {
		config := net.ListenConfig{Control: boundTo(name)}
		listener, err := config.Listen(ctx, "tcp", net.JoinHostPort("", port))
		if err != nil {
			return fmt.Errorf("listen on interface %s: %w", name, err)
		}
		context.AfterFunc(ctx, func() { _ = listener.Close() })
		wait.Go(func() { stop(echo(listener)) })
	}
	wait.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// echo writes to each connection what it reads from it, until the listener is closed.
func echo(listener net.Listener) error {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			_, _ = io.Copy(conn, conn) // the client reports what is missing
			_ = conn.Close()
		}()
	}
}

// dial exchanges data with one of the addresses through one of the interfaces that are not
// excepted, and returns which ones it used.
func dial(ctx context.Context, port string, addresses, except []string) (string, error) {
	names, err := others(except)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	for {
		var errs []error
		for _, name := range names {
			for _, address := range addresses {
				if err = exchange(ctx, name, address, port); err == nil {
					return fmt.Sprintf("exchanged %d bytes with %s through %s", dataLength, address, name), nil
				}
				errs = append(errs, fmt.Errorf("through interface %s: %w", name, err))
			}
		}
		select {
		case <-ctx.Done():
			return "", errors.Join(errs...)
		case <-time.After(attemptLimit / 10): // until addresses are usable
		}
	}
}

// exchange sends data to an address through an interface, and compares what comes back.
func exchange(ctx context.Context, name, address, port string) error {
	ctx, cancel := context.WithTimeout(ctx, attemptLimit)
	defer cancel()
	if ip := net.ParseIP(address); ip != nil && ip.IsLinkLocalUnicast() && ip.To4() == nil {
		address += "%" + name
	}
	dialer := net.Dialer{Control: boundTo(name)}
	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(address, port))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // the result is known
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return err
		}
	}
	sent, received := make([]byte, dataLength), make([]byte, dataLength)
	if _, err := rand.Read(sent); err != nil {
		return err
	}
	written := make(chan error, 1)
	go func() {
		_, err := conn.Write(sent)
		written <- err
	}()
	_, err = io.ReadFull(conn, received)
	if err = errors.Join(err, <-written); err != nil {
		return err
	}
	if !bytes.Equal(sent, received) {
		return fmt.Errorf("%s returned other data", address)
	}
	return nil
}

// others returns the interfaces that are not excepted.
func others(except []string) (names []string, err error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	for _, i := range all {
		if !slices.Contains(except, i.Name) {
			names = append(names, i.Name)
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("there is no interface but %v", except)
	}
	return names, nil
}

// boundTo binds sockets to an interface.
func boundTo(name string) func(string, string, syscall.RawConn) error {
	return func(_, _ string, raw syscall.RawConn) error {
		var bound error
		if err := raw.Control(func(fd uintptr) { bound = syscall.BindToDevice(int(fd), name) }); err != nil {
			return err
		}
		return bound
	}
}
