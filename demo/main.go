// Command demo shows the main job, from nothing, on a real node: pods share one
// NIC, each with the bandwidth that it was granted. It fails unless every pod
// gets its grant, in both directions, within a tenth.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
)

const (
	tolerance  = 0.10
	measureFor = 4 * time.Second
	serverPort = 5001
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	b, err := clusterclient.New(".cluster-demo")
	if err != nil {
		return err
	}
	start := time.Now()
	// A demo that was killed left its cluster behind.
	if err := b.Down(ctx); err != nil {
		return err
	}
	defer func() {
		if os.Getenv("KEEP") != "" {
			fmt.Printf("\nThe cluster is left running: %s; `make cluster-down CLUSTER=.cluster-demo` ends it.\n", filepath.Join(b.Dir, "kubectl"))
			return
		}
		// Also after an interrupt.
		err = errors.Join(err, b.Down(context.WithoutCancel(ctx)))
	}()
	if err := b.Up(ctx, clusterclient.Options{}, os.Stdout); err != nil {
		return err
	}
	d := demo{bed: b, out: os.Stdout, color: isTerminal()}
	if err := d.show(ctx); err != nil {
		return err
	}
	d.printf("\n  %s, from nothing to here in %.0f s.\n", d.bold("Every pod has what it was granted"), time.Since(start).Seconds())
	return nil
}

type demo struct {
	bed    *clusterclient.Cluster
	out    io.Writer
	color  bool
	server string
}

func (d *demo) printf(format string, args ...any) { fmt.Fprintf(d.out, format, args...) }

func (d *demo) style(code, text string) string {
	if !d.color {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (d *demo) bold(text string) string { return d.style("1", text) }
func (d *demo) dim(text string) string  { return d.style("2", text) }

func (d *demo) show(ctx context.Context) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if d.server, err = d.bed.Serve(ctx, serverPort); err != nil {
		return err
	}
	d.printf("\n  %s\n\n", d.bold("One NIC of 1 Gbit/s, shared by pods; 100 Mbit/s are kept for the node, 900 can be granted."))
	if err := d.apply(ctx, "claims.yaml", "pods.yaml"); err != nil {
		return err
	}
	first := []pod{{"small", 100e6}, {"medium", 200e6}, {"large", 500e6}}
	if err := d.running(ctx, first...); err != nil {
		return err
	}
	if err := d.measure(ctx, "All three at once:", first); err != nil {
		return err
	}
	if err := d.latecomer(ctx); err != nil {
		return err
	}
	now := []pod{{"small", 100e6}, {"medium", 200e6}, {"latecomer", 400e6}}
	if err := d.measure(ctx, "And now:", now); err != nil {
		return err
	}
	return d.status(ctx, now)
}

func (d *demo) apply(ctx context.Context, files ...string) error {
	for _, f := range files {
		if _, err := d.bed.Kubectl(ctx, "apply", "-f", filepath.Join(d.bed.Root, "demo/share-a-nic", f)); err != nil {
			return err
		}
	}
	return nil
}

// pod and its grant in bits per second.
type pod struct {
	name  string
	grant float64
}

func (d *demo) running(ctx context.Context, pods ...pod) error {
	for _, p := range pods {
		// A second or two; the scheduler may count a claim twice and look again
		// after five minutes (docs/dev/limits.md).
		if _, err := d.bed.Kubectl(ctx, "wait", "pod/"+p.name, "--for=condition=Ready", "--timeout=360s"); err != nil {
			why, _ := d.bed.Kubectl(ctx, "describe", "pod", p.name)
			return fmt.Errorf("%w\n%s", err, why)
		}
	}
	return nil
}

// measure lets all pods send, then receive, as fast as they can.
func (d *demo) measure(ctx context.Context, title string, pods []pod) error {
	d.printf("  %s\n  %s\n", title, d.dim(fmt.Sprintf("%-10s %10s   %-31s %-31s", "pod", "granted", "sends", "receives")))
	measured := make([]clusterclient.Rates, len(pods))
	for _, direction := range []string{"send", "receive"} {
		errs := make([]error, len(pods))
		var wait sync.WaitGroup
		for i, p := range pods {
			wait.Go(func() {
				var r clusterclient.Rates
				r, errs[i] = d.bed.Measure(ctx, "default/"+p.name, d.server, direction, measureFor)
				measured[i].Send += r.Send
				measured[i].Receive += r.Receive
			})
		}
		wait.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
	var failed error
	for i, p := range pods {
		d.printf("  %-10s %10s   %s %s\n", p.name, mega(p.grant), d.bar(measured[i].Send, p.grant), d.bar(measured[i].Receive, p.grant))
		for direction, rate := range map[string]float64{"sends": measured[i].Send, "receives": measured[i].Receive} {
			if off := math.Abs(rate-p.grant) / p.grant; off > tolerance {
				failed = errors.Join(failed, fmt.Errorf("pod %s %s %s, granted %s: %.0f %% off, want at most %.0f %%", p.name, direction, mega(rate), mega(p.grant), off*100, tolerance*100))
			}
		}
	}
	d.printf("\n")
	return failed
}

func mega(bitsPerSecond float64) string { return fmt.Sprintf("%.0f Mbit/s", bitsPerSecond/1e6) }

// bar draws a rate on the scale of the NIC, and says how far it is from the grant.
func (d *demo) bar(rate, grant float64) string {
	const width, full = 20, 1e9
	n := int(math.Round(rate / full * width))
	n = min(max(n, 1), width)
	code := "32"
	if math.Abs(rate-grant)/grant > tolerance {
		code = "31"
	}
	return d.style(code, strings.Repeat("█", n)) + d.dim(strings.Repeat("·", width-n)) + fmt.Sprintf(" %-10s", mega(rate))
}

// latecomer wants 400 Mbit/s where 100 are left, and gets them when the
// largest of the others is gone.
func (d *demo) latecomer(ctx context.Context) error {
	if err := d.apply(ctx, "latecomer.yaml"); err != nil {
		return err
	}
	var why string
	err := clusterclient.Eventually(ctx, 20*time.Second, func() error {
		var p corev1.Pod
		if err := d.bed.Get(ctx, &p, "pod", "latecomer"); err != nil {
			return err
		}
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
				why, _, _ = strings.Cut(c.Message, ".")
				return nil
			}
		}
		return errors.New("the latecomer has not been found unschedulable")
	})
	if err != nil {
		return err
	}
	d.printf("  A latecomer wants 400 Mbit/s, 100 are left: %s\n", d.style("33", "Pending ("+strings.TrimSpace(why)+")"))
	start := time.Now()
	if _, err := d.bed.Kubectl(ctx, "delete", "pod", "large", "--wait=false"); err != nil {
		return err
	}
	if err := d.running(ctx, pod{name: "latecomer"}); err != nil {
		return err
	}
	d.printf("  large is deleted: %s\n\n", d.style("32", fmt.Sprintf("the latecomer runs %.1f s later", time.Since(start).Seconds())))
	return nil
}

// status prints what the claims say, which is what the kernel was asked.
func (d *demo) status(ctx context.Context, pods []pod) error {
	d.printf("  What the claims' status says, read back from the kernel:\n")
	for _, p := range pods {
		var claim resourceapi.ResourceClaim
		if err := d.bed.Get(ctx, &claim, "resourceclaim", p.name); err != nil {
			return err
		}
		if len(claim.Status.Devices) != 1 || claim.Status.Devices[0].NetworkData == nil {
			return fmt.Errorf("claim %s has no network data in its status", p.name)
		}
		s := claim.Status.Devices[0]
		var conditions []string
		for _, c := range s.Conditions {
			conditions = append(conditions, fmt.Sprintf("%s=%s (%s)", c.Type, c.Status, c.Reason))
			if c.Status != "True" {
				return fmt.Errorf("claim %s: %s is %s: %s", p.name, c.Type, c.Status, c.Message)
			}
		}
		d.printf("  %-10s %s %s %s  %s\n", p.name, s.NetworkData.InterfaceName, s.NetworkData.IPs[0], s.NetworkData.HardwareAddress, d.dim(strings.Join(conditions, " ")))
	}
	return nil
}

func isTerminal() bool {
	info, err := os.Stdout.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
