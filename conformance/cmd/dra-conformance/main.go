// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command dra-conformance tests whether a DRA driver meets the requirements of
// Kubernetes. `dra-conformance run` starts a driver with a fake API server, or tests the
// driver of this node; `list` and `explain` print the requirements.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/dra-shared/dra-driver-shared/conformance"
	"github.com/dra-shared/dra-driver-shared/conformance/internal/probe"
)

const usage = `Usage:
  dra-conformance list                 print all requirements
  dra-conformance explain ID           print a requirement, its source, and usual causes of failures
  dra-conformance docs                 print the page of all requirements, as Markdown
  dra-conformance schema               print the JSON schema of reports
  dra-conformance container COMMAND    run a command in a container of the suite's pods
  dra-conformance [run] [flags] [-- command of the driver]
                                       test a driver; the exit status is 1 if a must fails

Flags of run:
`

// errFailed is returned if the driver does not conform; it has been printed.
var errFailed = errors.New("the driver does not conform")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := dispatch(ctx, os.Args[1:], os.Stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return
	case err != nil && !errors.Is(err, errFailed):
		fmt.Fprintln(os.Stderr, "dra-conformance:", err)
	}
	if err != nil {
		stop()
		os.Exit(1)
	}
}

func dispatch(ctx context.Context, args []string, out io.Writer) error {
	command := ""
	if len(args) > 0 {
		command = args[0]
	}
	switch command {
	case "list":
		return list(out)
	case "explain":
		if len(args) != 2 {
			return errors.New("explain needs the ID of one requirement, such as PREP-07")
		}
		text, err := conformance.Explain(args[1])
		if err != nil {
			return err
		}
		_, err = io.WriteString(out, text)
		return err
	case "docs":
		page, err := conformance.Page()
		if err != nil {
			return err
		}
		_, err = io.WriteString(out, page)
		return err
	case "schema":
		_, err := io.WriteString(out, conformance.Schema())
		return err
	case "container":
		return probe.Main(ctx, args[1:])
	case "run":
		args = args[1:]
	}
	return run(ctx, args, out)
}

func list(out io.Writer) error {
	all, err := conformance.Requirements()
	if err != nil {
		return err
	}
	for _, r := range all {
		tested := "tested"
		if !r.Implemented() {
			tested = "no case"
		}
		if _, err := fmt.Fprintf(out, "%-10s %-7s %-8s %-8s %-21s %s\n", r.ID, r.Level, r.Way, tested, r.Group(),
			r.Text); err != nil {
			return err
		}
	}
	return nil
}

// outputs are the files that run writes.
type outputs struct{ report, junit, evidence, url string }

// options are the flags of run.
type options struct {
	file                     string
	features, profiles, only string // separated by commas
	// config has the fields that flags set. A flag that is not empty wins over the file.
	config conformance.Config
	outputs
}

// define defines the flags.
func (o *options) define(flags *flag.FlagSet) {
	flags.StringVar(&o.file, "config", "", "path of a file with the configuration, as YAML; flags override it")
	flags.StringVar(&o.config.Driver, "driver", "", "name of the driver")
	flags.StringVar(&o.features, "features", "", "features that the driver declares, separated by commas")
	flags.StringVar(&o.profiles, "profiles", "", "profiles by kind of device that the driver declares, separated by "+
		"commas: DRA-NET, DRA-ACCEL")
	flags.StringVar(&o.config.Pods.Image, "pod-image", "", "image with this program for the pods of DRA-NET and "+
		"DRA-ACCEL; requires pods.claims in the configuration")
	flags.StringVar(&o.only, "only", "", "IDs or prefixes of the requirements to test, separated by commas; default: all")
	flags.StringVar(&o.config.Kubelet, "kubelet", "", "data directory of this node's kubelet, such as /var/lib/kubelet: "+
		"tests the driver that runs on this node")
	flags.StringVar(&o.config.Kubeconfig, "kubeconfig", "", "path of an administrator's kubeconfig file; default with "+
		"--kubelet: the pod's service account; without --kubelet, tests what the driver publishes in the cluster")
	flags.StringVar(&o.config.Node, "node", "", "name of this node, with --kubelet")
	flags.StringVar(&o.config.Namespace, "namespace", "", "namespace for the claims of the suite (default \"default\")")
	flags.StringVar(&o.config.CDIDir, "cdi-dir", "", "directory to which the driver writes CDI specs, with --kubelet; "+
		"default: /var/run/cdi")
	flags.StringVar(&o.config.Device, "device", "", "device that the first claims request; default: any")
	flags.StringVar(&o.config.Implementation.Version, "version", "", "release of the driver, for the report")
	flags.StringVar(&o.report, "report", "", "path for the ConformanceReport, as YAML; - for standard output")
	flags.StringVar(&o.junit, "junit", "", "path for a JUnit file")
	flags.StringVar(&o.evidence, "evidence", "", "path to write the evidence text for PRODUCT.yaml to")
	flags.StringVar(&o.url, "report-url", "", "address at which the report will be published, for --evidence")
}

// override replaces fields of c by the flags that are not empty. command is the command that starts the driver.
func (o *options) override(c *conformance.Config, command []string) {
	f := o.config
	for _, field := range []struct {
		to   *string
		from string
	}{
		{&c.Driver, f.Driver}, {&c.Kubelet, f.Kubelet}, {&c.Kubeconfig, f.Kubeconfig}, {&c.Node, f.Node},
		{&c.Namespace, f.Namespace}, {&c.CDIDir, f.CDIDir}, {&c.Device, f.Device},
		{&c.Pods.Image, f.Pods.Image}, {&c.Implementation.Version, f.Implementation.Version},
	} {
		if field.from != "" {
			*field.to = field.from
		}
	}
	if o.features != "" {
		c.Features = strings.Split(o.features, ",")
	}
	if o.profiles != "" {
		c.Profiles = strings.Split(o.profiles, ",")
	}
	if o.only != "" {
		c.Only = strings.Split(o.only, ",")
	}
	if len(command) > 0 {
		c.Command = command
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	var o options
	flags := flag.NewFlagSet("dra-conformance", flag.ContinueOnError)
	flags.SetOutput(out)
	flags.Usage = func() {
		_, _ = io.WriteString(out, usage)
		flags.PrintDefaults()
	}
	o.define(flags)
	if err := flags.Parse(args); err != nil {
		return err
	}
	c, err := load(o.file)
	if err != nil {
		return err
	}
	o.override(&c, flags.Args())
	report, err := conformance.Run(ctx, c, func(r conformance.Result) { printResult(out, r) })
	if err != nil {
		return err
	}
	return o.write(out, report)
}

func load(file string) (c conformance.Config, err error) {
	if file == "" {
		return c, nil
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		return c, err
	}
	if c, err = conformance.LoadConfig(raw); err != nil {
		return c, fmt.Errorf("--config %s: %w", file, err)
	}
	return c, nil
}

// printResult prints the result of one case.
func printResult(out io.Writer, r conformance.Result) {
	switch {
	case r.Status == conformance.Passed:
		_, _ = fmt.Fprintf(out, "ok    %s\n", r.Requirement.ID)
	case r.Status == conformance.Skipped:
		_, _ = fmt.Fprintf(out, "skip  %s: %s\n", r.Requirement.ID, r.Message)
	case r.Requirement.Level == conformance.Must:
		_, _ = fmt.Fprintf(out, "FAIL  %s", r.Explain())
	default:
		_, _ = fmt.Fprintf(out, "warn  %s", r.Explain())
	}
}

// write writes the files, prints a summary, and returns errFailed if a must failed.
func (o outputs) write(out io.Writer, r conformance.Report) error {
	yaml, err := r.YAML()
	if err != nil {
		return err
	}
	junit, err := r.JUnit()
	if err != nil {
		return err
	}
	for _, file := range []struct {
		path    string
		content []byte
	}{{o.report, yaml}, {o.junit, junit}, {o.evidence, []byte(r.Evidence(o.url))}} {
		if file.path == "" || file.path == "-" {
			continue
		}
		if err := os.WriteFile(file.path, file.content, 0o644); err != nil {
			return err
		}
	}
	passed, skipped := 0, 0
	for _, x := range r.Results() {
		switch x.Status {
		case conformance.Passed:
			passed++
		case conformance.Skipped:
			skipped++
		}
	}
	failed := r.Failed()
	_, _ = fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", passed, len(failed), skipped)
	if o.report == "-" {
		_, _ = fmt.Fprintf(out, "---\n%s", yaml)
	}
	if len(failed) > 0 {
		return fmt.Errorf("%w: %s", errFailed, strings.Join(failed, ", "))
	}
	return nil
}
