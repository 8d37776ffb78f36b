// Command nettool sends, receives and shows rates. It is the test image: one
// static binary, no shell needed.
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
  nettool                        wait for ever
  nettool serve ADDR:PORT [--while-stdin-is-open]
                                 be the other end of measure, until told to stop
  nettool measure [flags] ADDR:PORT
  nettool show [--wait]          links, addresses, and what DRA drivers put into the environment
  nettool get URL                print what is there
  nettool open PATH...           open device nodes, and tell which can be
  nettool mknod PATH MAJOR MINOR make a device node, if that is allowed
  nettool devices [--wait]       what the device metadata of this container's claims says
  nettool env                    the environment
  nettool cat FILE               what is in a file; its name may have $VARIABLES
  nettool exit                   end the container: tell process 1 to stop`)

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
	switch args[0] {
	case "serve":
		if len(args) == 3 && args[2] == "--while-stdin-is-open" {
			go func() {
				_, _ = io.Copy(io.Discard, os.Stdin)
				os.Exit(0) // whoever started this is gone
			}()
		} else if len(args) != 2 {
			return errUsage
		}
		return serve(args[1])
	case "measure":
		return measureCommand(args[1:])
	case "show":
		if err := show(); err != nil || len(args) == 1 {
			return err
		}
		wait()
		return nil
	case "get":
		if len(args) != 2 {
			return errUsage
		}
		return get(args[1])
	case "open":
		return openNodes(args[1:])
	case "mknod":
		return mknod(args[1:])
	case "devices":
		if err := showDevices(os.DirFS("/")); err != nil || len(args) == 1 {
			return err
		}
		wait()
		return nil
	case "cat":
		if len(args) != 2 {
			return errUsage
		}
		raw, err := os.ReadFile(os.ExpandEnv(args[1]))
		if err == nil {
			_, err = os.Stdout.Write(raw)
		}
		return err
	case "env":
		_, err := fmt.Println(strings.Join(os.Environ(), "\n"))
		return err
	case "exit":
		return syscall.Kill(1, syscall.SIGTERM)
	default:
		return errUsage
	}
}

func get(url string) error {
	response, err := http.Get(url)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, response.Status)
	}
	_, err = io.Copy(os.Stdout, response.Body)
	return err
}

// farewell is for `nettool exit`, in another process of the container, to end
// well before this one does.
const farewell = 100 * time.Millisecond

func wait() {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	<-stop
	<-time.After(farewell)
}

// Directions, as the client sees them; the first byte of a connection.
const (
	send    = 'S'
	receive = 'R'
)

// result is what the receiving end counted: the sender's own count would
// include what still waits in its buffers.
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

// push sends for the duration, then says that this was all.
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

// pull counts until the other end has said that this was all.
func pull(c net.Conn) (r result, err error) {
	buf := make([]byte, 256<<10)
	_, err = c.Read(buf) // the clock starts with the first bytes, which do not count
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

// Measurement is what measure prints as JSON, in bits per second of payload.
type Measurement struct {
	Send    float64 `json:"send,omitempty"`
	Receive float64 `json:"receive,omitempty"`
}

func measureCommand(args []string) error {
	f := flag.NewFlagSet("measure", flag.ContinueOnError)
	duration := f.Duration("for", 3*time.Second, "how long, each direction")
	direction := f.String("direction", "both", "send, receive, both (one after the other) or together")
	connections := f.Int("connections", 1, "how many at once")
	priority := f.Int("priority", 0, "SO_PRIORITY of the sockets")
	asJSON := f.Bool("json", false, "print JSON")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() != 1 {
		return errUsage
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

func measure(address, direction string, duration time.Duration, connections, priority int) (m Measurement, err error) {
	one := func(way byte, into *float64) error {
		n, err := many(address, way, duration, connections, priority)
		*into = n
		return err
	}
	switch direction {
	case "send":
		err = one(send, &m.Send)
	case "receive":
		err = one(receive, &m.Receive)
	case "both":
		if err = one(send, &m.Send); err == nil {
			err = one(receive, &m.Receive)
		}
	case "together":
		var wait sync.WaitGroup
		var sendErr error
		wait.Go(func() { sendErr = one(send, &m.Send) })
		err = one(receive, &m.Receive)
		wait.Wait()
		err = errors.Join(err, sendErr)
	default:
		err = fmt.Errorf("--direction %q: want send, receive, both or together", direction)
	}
	return m, err
}

func many(address string, way byte, duration time.Duration, connections, priority int) (sum float64, err error) {
	results := make([]result, connections)
	errs := make([]error, connections)
	var wait sync.WaitGroup
	for i := range connections {
		wait.Go(func() { results[i], errs[i] = connect(address, way, duration, priority) })
	}
	wait.Wait()
	for _, r := range results {
		sum += r.bitsPerSecond()
	}
	return sum, errors.Join(errs...)
}

func connect(address string, way byte, duration time.Duration, priority int) (r result, err error) {
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
	if _, err := c.Write(binary.BigEndian.AppendUint64([]byte{way}, uint64(duration))); err != nil {
		return r, err
	}
	if way == receive {
		return pull(c)
	}
	if err := push(c, duration); err != nil {
		return r, err
	}
	err = binary.Read(c, binary.BigEndian, &r)
	return r, err
}

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
