// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command nettool is the program in the image of the test pods. It measures
// traffic, and shows links, devices, files, and the environment. The image
// contains this static binary and no shell.
package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"
)

var errUsage = errors.New(`usage:
  nettool                        wait for SIGTERM or SIGINT
  nettool serve ADDR:PORT [--while-stdin-is-open]
                                 serve measure commands until a signal arrives, or until stdin closes
  nettool measure [flags] ADDR:PORT
                                 measure the rates to and from a server
  nettool spoof INTERFACE SOURCE DESTINATION
                                 send 10 UDP datagrams with a source address of the caller's choice
  nettool record INTERFACE SUBNET
                                 print which MAC addresses use the addresses of a subnet, until a signal arrives;
                                 fail if two use one at the same time
  nettool show [--wait]          print links, addresses, and the variables of DRA drivers
  nettool get URL                print the response of an HTTP server
  nettool open PATH...           open device nodes and print those that can be opened
  nettool mknod PATH MAJOR MINOR create a character device node
  nettool devices [--wait]       print the device metadata of this container's claims
  nettool cookie-helper          print whether programs of tc can get the cookie of a sender's network namespace by
                                 a helper of the kernel
  nettool env                    print the environment
  nettool cat FILE               print a file; $VARIABLES in its name are expanded
  nettool exit                   send SIGTERM to process 1, which ends the container`)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "nettool:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		wait()
		return nil
	}
	command, args := args[0], args[1:]
	switch command {
	case "serve":
		return serveCommand(args)
	case "measure":
		return measureCommand(args)
	case "spoof":
		return spoof(args)
	case "record":
		return record(args)
	case "show":
		return thenWait(args, show)
	case "get":
		return withArgument(args, get)
	case "open":
		return openNodes(args)
	case "mknod":
		return mknod(args)
	case "devices":
		return thenWait(args, func() error { return showDevices(os.DirFS("/")) })
	case "cat":
		return withArgument(args, cat)
	case "env":
		_, err := fmt.Println(strings.Join(os.Environ(), "\n"))
		return err
	case "cookie-helper":
		return showCookieHelper()
	case "exit":
		return syscall.Kill(1, syscall.SIGTERM)
	default:
		return errUsage
	}
}

// thenWait runs a command, and waits for a signal if the command has an
// argument, which is --wait.
func thenWait(args []string, command func() error) error {
	if err := command(); err != nil || len(args) == 0 {
		return err
	}
	wait()
	return nil
}

// withArgument runs a command that needs exactly one argument.
func withArgument(args []string, command func(string) error) error {
	if len(args) != 1 {
		return errUsage
	}
	return command(args[0])
}

func cat(name string) error {
	raw, err := os.ReadFile(os.ExpandEnv(name))
	if err == nil {
		_, err = os.Stdout.Write(raw)
	}
	return err
}

func get(url string) error {
	response, err := http.Get(url)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("get %s: %s", url, response.Status)
	}
	_, err = io.Copy(os.Stdout, response.Body)
	return err
}

// exitDelay is the time between a signal and the end of process 1. In it,
// `nettool exit`, which is another process of the container, ends successfully.
const exitDelay = 100 * time.Millisecond

// wait waits for SIGTERM or SIGINT.
func wait() {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	<-stop
	<-time.After(exitDelay)
}

// A connection starts with a header of 9 bytes from the client: the direction,
// as the client sees it, and the duration in nanoseconds.
const (
	send    = 'S'
	receive = 'R'
)

// result is the count of the receiving end. A count of the sender would include
// the bytes in its buffers.
type result struct {
	Bytes       uint64
	Nanoseconds int64
}

func (r result) bitsPerSecond() float64 {
	if r.Nanoseconds == 0 {
		return 0
	}
	return float64(r.Bytes) * 8 * 1e9 / float64(r.Nanoseconds)
}

func serveCommand(args []string) error {
	switch {
	case len(args) == 1:
	case len(args) == 2 && args[1] == "--while-stdin-is-open":
		go exitAtEndOfStdin()
	default:
		return errUsage
	}
	return serve(args[0])
}

// exitAtEndOfStdin exits when the process that started this one has ended.
func exitAtEndOfStdin() {
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

// serve serves measure commands of clients.
func serve(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			if err := serveOne(c); err != nil {
				fmt.Fprintln(os.Stderr, "nettool:", c.RemoteAddr(), err)
			}
		}()
	}
}

// serveOne serves one connection of a client.
func serveOne(c net.Conn) error {
	var header [9]byte
	if _, err := io.ReadFull(c, header[:]); err != nil {
		return err
	}
	duration := time.Duration(binary.BigEndian.Uint64(header[1:]))
	if header[0] == receive {
		return push(c, duration)
	}
	r, err := pull(c)
	if err != nil {
		return err
	}
	return binary.Write(c, binary.BigEndian, r)
}

// push sends for the duration, and then closes the connection for writing.
func push(c net.Conn, duration time.Duration) error {
	buf := make([]byte, 256<<10)
	for end := time.Now().Add(duration); time.Now().Before(end); {
		if _, err := c.Write(buf); err != nil {
			return err
		}
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		return tcp.CloseWrite()
	}
	return nil
}

// pull receives and counts until the other end closes the connection.
func pull(c net.Conn) (r result, err error) {
	buf := make([]byte, 256<<10)
	_, err = c.Read(buf) // the first bytes start the clock and do not count
	start := time.Now()
	for err == nil {
		var n int
		n, err = c.Read(buf)
		r.Bytes += uint64(n)
	}
	r.Nanoseconds = time.Since(start).Nanoseconds()
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return r, err
}

// Measurement is the JSON output of measure: rates of payload in bits per second.
type Measurement struct {
	Send    float64 `json:"send,omitempty"`
	Receive float64 `json:"receive,omitempty"`
}

func measureCommand(args []string) error {
	f := flag.NewFlagSet("measure", flag.ContinueOnError)
	duration := f.Duration("for", 3*time.Second, "duration of the measurement in each direction")
	direction := f.String("direction", "both", "send, receive, both (one after the other), or together")
	connections := f.Int("connections", 1, "number of simultaneous connections")
	priority := f.Int("priority", 0, "SO_PRIORITY of the sockets")
	at := f.String("at", "", "start at this time (RFC 3339), so that several programs measure at the same time")
	asJSON := f.Bool("json", false, "print JSON")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() != 1 {
		return errUsage
	}
	if err := waitUntil(*at); err != nil {
		return err
	}
	m, err := measure(f.Arg(0), *direction, *duration, *connections, *priority)
	if err != nil {
		return err
	}
	if *asJSON {
		return json.NewEncoder(os.Stdout).Encode(m)
	}
	fmt.Printf("send %8.1f Mbit/s   receive %8.1f Mbit/s\n", m.Send/1e6, m.Receive/1e6)
	return nil
}

// waitUntil waits until a time, if it is not empty. It fails if the time has passed.
func waitUntil(at string) error {
	if at == "" {
		return nil
	}
	start, err := time.Parse(time.RFC3339Nano, at)
	if err != nil {
		return fmt.Errorf("--at: %w", err)
	}
	remaining := time.Until(start)
	if remaining < 0 {
		return fmt.Errorf("too late to start at %s: the time has passed %s ago", at, -remaining)
	}
	<-time.After(remaining)
	return nil
}

func measure(address, direction string, duration time.Duration, connections, priority int) (m Measurement, err error) {
	measureSend := func() (err error) {
		m.Send, err = sumOfConnections(address, send, duration, connections, priority)
		return err
	}
	measureReceive := func() (err error) {
		m.Receive, err = sumOfConnections(address, receive, duration, connections, priority)
		return err
	}
	switch direction {
	case "send":
		err = measureSend()
	case "receive":
		err = measureReceive()
	case "both":
		if err = measureSend(); err == nil {
			err = measureReceive()
		}
	case "together":
		var running sync.WaitGroup
		var sendErr error
		running.Go(func() { sendErr = measureSend() })
		err = measureReceive()
		running.Wait()
		err = errors.Join(err, sendErr)
	default:
		err = fmt.Errorf("--direction %q: want send, receive, both, or together", direction)
	}
	return m, err
}

// sumOfConnections measures simultaneous connections in one direction and
// returns the sum of their rates in bits per second.
func sumOfConnections(
	address string, direction byte, duration time.Duration, connections, priority int,
) (sum float64, err error) {
	results := make([]result, connections)
	errs := make([]error, connections)
	var running sync.WaitGroup
	for i := range connections {
		running.Go(func() { results[i], errs[i] = connect(address, direction, duration, priority) })
	}
	running.Wait()
	for _, r := range results {
		sum += r.bitsPerSecond()
	}
	return sum, errors.Join(errs...)
}

// connect measures one connection in one direction.
func connect(address string, direction byte, duration time.Duration, priority int) (r result, err error) {
	dialer := net.Dialer{Timeout: 10 * time.Second, Control: func(_, _ string, raw syscall.RawConn) (err error) {
		if priority == 0 {
			return nil
		}
		return errors.Join(raw.Control(func(fd uintptr) {
			err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_PRIORITY, priority)
		}), err)
	}}
	c, err := dialer.Dial("tcp", address)
	if err != nil {
		return r, err
	}
	defer c.Close()
	if _, err := c.Write(binary.BigEndian.AppendUint64([]byte{direction}, uint64(duration))); err != nil {
		return r, err
	}
	if direction == receive {
		return pull(c)
	}
	if err := push(c, duration); err != nil {
		return r, err
	}
	err = binary.Read(c, binary.BigEndian, &r)
	return r, err
}

// show prints the links of the pod, and the variables of this driver.
func show() error {
	links, err := net.Interfaces()
	if err != nil {
		return err
	}
	w := bufio.NewWriter(os.Stdout)
	for _, l := range links {
		addresses, err := l.Addrs()
		if err != nil {
			return err
		}
		texts := make([]string, len(addresses))
		for i, a := range addresses {
			texts[i] = a.String()
		}
		fmt.Fprintf(w, "%-15s %s mtu %d %s\n", l.Name, l.HardwareAddr, l.MTU, strings.Join(texts, " "))
	}
	for _, e := range os.Environ() {
		if strings.HasPrefix(e, "DRA_SHARED_") {
			fmt.Fprintln(w, e)
		}
	}
	return w.Flush()
}
