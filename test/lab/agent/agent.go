// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package agent runs commands in a guest for the machine that started it. It replaces SSH, because an SSH handshake
// takes half a second of an emulated processor, and it passes arguments unchanged.
//
// A client sends a request as one line of JSON, then the standard input of the
// command. The server answers with frames: a byte for the kind, four bytes for
// the length in network order, and the content. The last frame is of kind exit;
// its content is the exit status in decimal. The server trusts every client.
package agent

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"sync"
)

// request is a command and its arguments.
type request struct{ Args []string }

const (
	frameStdout byte = 1
	frameStderr byte = 2
	frameExit   byte = 3
)

// Serve answers requests until ctx is done. path is the PATH of the commands.
func Serve(ctx context.Context, listener net.Listener, path string) error {
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	for {
		conn, err := listener.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		go func() {
			defer conn.Close()
			_ = serve(ctx, conn, path) // the client sees that the last frame is missing
		}()
	}
}

func serve(ctx context.Context, conn net.Conn, path string) error {
	in := bufio.NewReader(conn)
	line, err := in.ReadBytes('\n')
	if err != nil {
		return err
	}
	var r request
	if err := json.Unmarshal(line, &r); err != nil || len(r.Args) == 0 {
		return fmt.Errorf("request %q: %w", line, err)
	}
	out := &frames{w: conn}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// env looks the command up in this PATH, which is not the server's.
	command := exec.CommandContext(ctx, "/usr/bin/env", append([]string{"PATH=" + path}, r.Args...)...)
	command.Stdout, command.Stderr = out.kind(frameStdout), out.kind(frameStderr)
	// Not command.Stdin: Wait would wait until the client has closed its side.
	stdin, err := command.StdinPipe()
	if err != nil {
		return err
	}
	if err := command.Start(); err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(stdin, in) // the command may not read all of it
		_ = stdin.Close()
	}()
	err = command.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return err
	}
	_, err = out.kind(frameExit).Write([]byte(strconv.Itoa(command.ProcessState.ExitCode())))
	return err
}

// frames writes frames from several goroutines.
type frames struct {
	mu sync.Mutex
	w  io.Writer
}

func (f *frames) kind(kind byte) io.Writer { return frameWriter{f, kind} }

type frameWriter struct {
	*frames
	code byte
}

// Write writes p as one frame.
func (w frameWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	header := binary.BigEndian.AppendUint32([]byte{w.code}, uint32(len(p)))
	if _, err := w.w.Write(append(header, p...)); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Run runs a command at the server and returns its exit status.
func Run(ctx context.Context, address string, args []string, stdin io.Reader, stdout, stderr io.Writer) (int, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return 1, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	line, err := json.Marshal(request{Args: args})
	if err != nil {
		return 1, err
	}
	if _, err := conn.Write(append(line, '\n')); err != nil {
		return 1, err
	}
	go func() {
		if stdin != nil {
			_, _ = io.Copy(conn, stdin) // the command may not read all of it
		}
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.CloseWrite()
		}
	}()
	status, err := readFrames(conn, stdout, stderr)
	if err != nil {
		return 1, fmt.Errorf("run %s at %s: %w", strings.Join(args, " "), address, err)
	}
	return status, nil
}

// readFrames copies the output of the command and returns its exit status.
func readFrames(r io.Reader, stdout, stderr io.Writer) (int, error) {
	for {
		var header [5]byte
		if _, err := io.ReadFull(r, header[:]); err != nil {
			return 0, fmt.Errorf("the connection ended before the command: %w", err)
		}
		content := io.LimitReader(r, int64(binary.BigEndian.Uint32(header[1:])))
		var err error
		switch header[0] {
		case frameStdout:
			_, err = io.Copy(stdout, content)
		case frameStderr:
			_, err = io.Copy(stderr, content)
		case frameExit:
			raw, err := io.ReadAll(content)
			if err != nil {
				return 0, err
			}
			return strconv.Atoi(string(raw))
		default:
			return 0, fmt.Errorf("unknown frame %d", header[0])
		}
		if err != nil {
			return 0, err
		}
	}
}
