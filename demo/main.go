// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command demo shows what the driver is for: pods share one NIC, and each has the
// bandwidth that it was granted. It fails unless the measured rate of every pod is
// within 10 % of its grant in both directions. Rates that are too low are measured again.
//
// Without flags it starts a cluster and ends it. With --kubeconfig and --server it uses
// a running cluster, in which the chart and the image registry.local/nettool:dev are
// installed, and a `nettool serve` that the pods reach through the shared NIC.
package main

import (
	"context"
	"errors"
	"flag"
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
	"github.com/dra-shared/dra-driver-shared/test/eventually"
	"github.com/dra-shared/dra-driver-shared/test/measure"
)

const (
	tolerance  = 0.10
	measureFor = 4 * time.Second
	serverPort = 5001
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	kubeconfig := flag.String("kubeconfig", "", "kubeconfig of a running cluster")
	server := flag.String("server", "", "address of the server for measurements in a running cluster")
	flag.Parse()
	if err := run(ctx, *kubeconfig, *server); err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, kubeconfig, server string) error {
	cluster, err := clusterclient.New(".cluster-demo")
	if err != nil {
		return err
	}
	d := demo{cluster: cluster, out: os.Stdout, color: isTerminal(), server: server}
	if kubeconfig == "" {
		return d.start(ctx)
	}
	if server == "" {
		return errors.New("--kubeconfig needs --server")
	}
	cluster.Kubeconfig = kubeconfig
	start := time.Now()
	if err := d.show(ctx); err != nil {
		return err
	}
	d.conclude("The demo took %.0f s.", start)
	return d.remove(ctx)
}

// start shows the demo in a cluster that it starts.
func (d *demo) start(ctx context.Context) (err error) {
	cluster := d.cluster
	start := time.Now()
	// End the cluster of a demo that was killed.
	if err := cluster.Down(ctx); err != nil {
		return err
	}
	defer func() {
		if os.Getenv("KEEP") != "" {
			fmt.Printf("\nThe cluster keeps running: %s; `make cluster-down CLUSTER=.cluster-demo` ends it.\n",
				filepath.Join(cluster.Dir, "kubectl"))
			return
		}
		// WithoutCancel: the cluster must end even after an interrupt.
		err = errors.Join(err, cluster.Down(context.WithoutCancel(ctx)))
	}()
	if err := cluster.Up(ctx, clusterclient.Options{}, os.Stdout); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if d.server, err = cluster.Serve(ctx, serverPort); err != nil {
		return err
	}
	if err := d.show(ctx); err != nil {
		return err
	}
	d.conclude("The demo took %.0f s, including the start of the cluster.", start)
	return nil
}

// conclude prints the last line, with the time since start.
func (d *demo) conclude(format string, start time.Time) {
	result := d.bold("Every pod has the bandwidth that it was granted")
	d.printf("\n  %s. "+format+"\n", result, time.Since(start).Seconds())
}

type demo struct {
	cluster *clusterclient.Cluster
	out     io.Writer
	color   bool
	server  string
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

func (d *demo) show(ctx context.Context) error {
	d.printf("\n  %s\n\n",
		d.bold("Pods share one NIC of 1 Gbit/s. 100 Mbit/s are reserved for the node, 900 Mbit/s can be granted."))
	if err := d.apply(ctx, "claims.yaml", "pods.yaml"); err != nil {
		return err
	}
	first := []pod{{"small", 100e6}, {"medium", 200e6}, {"large", 500e6}}
	if err := d.awaitReady(ctx, first...); err != nil {
		return err
	}
	if err := d.compare(ctx, "All three pods at the same time:", first); err != nil {
		return err
	}
	if err := d.latecomer(ctx); err != nil {
		return err
	}
	now := []pod{{"small", 100e6}, {"medium", 200e6}, {"latecomer", 400e6}}
	if err := d.compare(ctx, "With the latecomer:", now); err != nil {
		return err
	}
	return d.status(ctx, now)
}

func (d *demo) apply(ctx context.Context, files ...string) error {
	for _, f := range files {
		if _, err := d.cluster.Kubectl(ctx, "apply", "-f", filepath.Join(d.cluster.Root, "demo/share-a-nic", f)); err != nil {
			return err
		}
	}
	return nil
}

// remove removes the demo's pods and claims from a cluster that keeps running.
func (d *demo) remove(ctx context.Context) error {
	for _, f := range []string{"pods.yaml", "latecomer.yaml", "claims.yaml"} {
		_, err := d.cluster.Kubectl(ctx, "delete", "--ignore-not-found", "--wait=false",
			"-f", filepath.Join(d.cluster.Root, "demo/share-a-nic", f))
		if err != nil {
			return err
		}
	}
	return nil
}

// pod is a pod with its grant in bits per second.
type pod struct {
	name  string
	grant float64
}

// awaitReady waits until the pods are Ready.
func (d *demo) awaitReady(ctx context.Context, pods ...pod) error {
	for _, p := range pods {
		// This takes one or two seconds, but five minutes if the scheduler counts a
		// claim twice (docs/dev/limits.md).
		if _, err := d.cluster.Kubectl(ctx, "wait", "pod/"+p.name, "--for=condition=Ready", "--timeout=360s"); err != nil {
			description, _ := d.cluster.Kubectl(ctx, "describe", "pod", p.name)
			return fmt.Errorf("pod %s is not Ready: %w\n%s", p.name, err, description)
		}
	}
	return nil
}

// compare prints the rates at which all pods concurrently send, then receive. It measures
// again if a rate is too low, and returns an error for each rate that differs from the
// grant.
func (d *demo) compare(ctx context.Context, title string, pods []pod) error {
	header := fmt.Sprintf("%-10s %10s   %-31s %-31s", "pod", "granted", "sends", "receives")
	d.printf("  %s\n", title)
	var tooLow error
	for tries := (measure.Attempts{}); tries.Next(); {
		if tooLow != nil {
			d.printf("  %s\n", d.dim("Measuring again, because a pod had too little processor time to send or to receive:"))
		}
		d.printf("  %s\n", d.dim(header))
		measured, err := d.measure(ctx, pods)
		if err != nil {
			return err
		}
		for i, p := range pods {
			d.printf("  %-10s %10s   %s %s\n",
				p.name, mega(p.grant), d.bar(measured[i].Send, p.grant), d.bar(measured[i].Receive, p.grant))
		}
		d.printf("\n")
		var tooHigh error
		if tooLow, tooHigh = deviations(pods, measured); tooHigh != nil || tooLow == nil {
			return errors.Join(tooHigh, tooLow)
		}
	}
	return tooLow
}

// measure measures the rates at which all pods concurrently send, then receive.
func (d *demo) measure(ctx context.Context, pods []pod) ([]clusterclient.Rates, error) {
	measured := make([]clusterclient.Rates, len(pods))
	for _, direction := range []string{"send", "receive"} {
		errs := make([]error, len(pods))
		var wait sync.WaitGroup
		for i, p := range pods {
			wait.Go(func() {
				var r clusterclient.Rates
				r, errs[i] = d.cluster.Measure(ctx, "default/"+p.name, d.server, direction, measureFor)
				measured[i].Send += r.Send
				measured[i].Receive += r.Receive
			})
		}
		wait.Wait()
		if err := errors.Join(errs...); err != nil {
			return nil, err
		}
	}
	return measured, nil
}

// deviations returns an error for each rate that is below the grant by more than the
// tolerance, and for each that is above it.
func deviations(pods []pod, measured []clusterclient.Rates) (tooLow, tooHigh error) {
	for i, p := range pods {
		for direction, rate := range map[string]float64{"sends": measured[i].Send, "receives": measured[i].Receive} {
			deviation := math.Abs(rate-p.grant) / p.grant
			if deviation <= tolerance {
				continue
			}
			err := fmt.Errorf("pod %s %s %s and was granted %s: deviation %.0f %%, want at most %.0f %%",
				p.name, direction, mega(rate), mega(p.grant), deviation*100, tolerance*100)
			if rate < p.grant {
				tooLow = errors.Join(tooLow, err)
			} else {
				tooHigh = errors.Join(tooHigh, err)
			}
		}
	}
	return tooLow, tooHigh
}

// mega formats a rate in Mbit/s.
func mega(bitsPerSecond float64) string { return fmt.Sprintf("%.0f Mbit/s", bitsPerSecond/1e6) }

// bar draws a rate on the scale of the NIC, in red if it differs from the grant, and
// prints its value.
func (d *demo) bar(rate, grant float64) string {
	const width, full = 20, 1e9
	n := int(math.Round(rate / full * width))
	n = min(max(n, 1), width)
	code := "32"
	if math.Abs(rate-grant)/grant > tolerance {
		code = "31"
	}
	return d.style(code, strings.Repeat("█", n)) + d.dim(strings.Repeat("·", width-n)) +
		fmt.Sprintf(" %-10s", mega(rate))
}

// latecomer creates a pod that requests 400 Mbit/s while 100 Mbit/s are left. It
// starts after the pod with the largest grant is deleted.
func (d *demo) latecomer(ctx context.Context) error {
	if err := d.apply(ctx, "latecomer.yaml"); err != nil {
		return err
	}
	var reason string
	err := eventually.Poll(ctx, 20*time.Second, func() error {
		var p corev1.Pod
		if err := d.cluster.Get(ctx, &p, "pod", "latecomer"); err != nil {
			return err
		}
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
				reason, _, _ = strings.Cut(c.Message, ".")
				return nil
			}
		}
		return errors.New("pod latecomer: condition PodScheduled does not have the reason Unschedulable")
	})
	if err != nil {
		return err
	}
	d.printf("  A latecomer requests 400 Mbit/s, and 100 Mbit/s are left: %s\n",
		d.style("33", "Pending ("+strings.TrimSpace(reason)+")"))
	start := time.Now()
	if _, err := d.cluster.Kubectl(ctx, "delete", "pod", "large", "--wait=false"); err != nil {
		return err
	}
	if err := d.awaitReady(ctx, pod{name: "latecomer"}); err != nil {
		return err
	}
	d.printf("  The pod large is deleted: %s\n\n",
		d.style("32", fmt.Sprintf("the latecomer is Ready %.1f s later", time.Since(start).Seconds())))
	return nil
}

// status prints the claims' status, which the plugin reads from the kernel, and
// checks that all conditions are True.
func (d *demo) status(ctx context.Context, pods []pod) error {
	d.printf("  The claims' status, as the plugin reads it from the kernel:\n")
	for _, p := range pods {
		var claim resourceapi.ResourceClaim
		if err := d.cluster.Get(ctx, &claim, "resourceclaim", p.name); err != nil {
			return err
		}
		if len(claim.Status.Devices) != 1 || claim.Status.Devices[0].NetworkData == nil {
			return fmt.Errorf("status of claim %s does not contain network data", p.name)
		}
		s := claim.Status.Devices[0]
		var conditions []string
		for _, c := range s.Conditions {
			conditions = append(conditions, fmt.Sprintf("%s=%s (%s)", c.Type, c.Status, c.Reason))
			if c.Status != "True" {
				return fmt.Errorf("condition %s of claim %s is %s: %s", c.Type, p.name, c.Status, c.Message)
			}
		}
		n := s.NetworkData
		d.printf("  %-10s %s %s %s  %s\n",
			p.name, n.InterfaceName, n.IPs[0], n.HardwareAddress, d.dim(strings.Join(conditions, " ")))
	}
	return nil
}

func isTerminal() bool {
	info, err := os.Stdout.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
