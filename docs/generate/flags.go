// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// command is a program, or a subcommand of one.
type command struct {
	path, summary string
	args          []string
}

func commands() []command {
	return []command{
		{"dra-shared-plugin", "The plugin runs on every node as a DaemonSet.", nil},
		{"dra-shared-controller", "The controller runs once per cluster as a Deployment.", nil},
		{"dra-shared-hook", "The container runtime runs the hook before it starts a container with a share.", nil},
		{"dra-shared-probe", "The kubelet runs the probe to check the plugin of a pod.", nil},
		{"dra-shared-hook", "The hook limits the memory of a container's cgroup.", []string{"limit-memory"}},
		{"dra-shared-hook", "With `plugin.dhcp`, a container of the plugin's pod opens sockets in the namespaces of pods.",
			[]string{"open-namespaces"}},
		{"dra-conformance",
			"The conformance suite tests any DRA driver: `list`, `explain ID`, and `run`, whose flags these are.", nil},
	}
}

func flagsPage(root string) (string, error) {
	bin, err := os.MkdirTemp("", "reference")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(bin) }()
	for _, module := range []string{root, filepath.Join(root, "conformance")} {
		build := exec.Command("go", "build", "-o", bin, "./cmd/...")
		build.Dir = module
		if out, err := build.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build the commands: %w\n%s", err, out)
		}
	}
	var m markdown
	logging := map[string]flagDoc{}
	queue := commands()
	for len(queue) > 0 {
		c := queue[0]
		queue = queue[1:]
		help, err := helpOf(bin, c)
		if err != nil {
			return "", err
		}
		m.heading(2, strings.Join(append([]string{c.path}, c.args...), " "))
		m.paragraph(c.summary)
		for _, f := range parseFlags(help) {
			if isLogging(f) {
				if len(f.usage) > len(logging[f.name].usage) {
					logging[f.name] = f
				}
				continue
			}
			m.item(f.term(), escape(f.usage))
		}
		queue = append(subcommands(c, help), queue...)
	}
	m.heading(2, "Logging flags")
	m.paragraph("The plugin and the controller also have the logging flags of Kubernetes components. " +
		"Their subcommands have some of them.")
	fmt.Fprint(&m, "\n```text\n")
	for _, name := range sortedKeys(logging) {
		f := logging[name]
		fmt.Fprintf(&m, "%s\n%s\n", strings.TrimSpace(f.name+" "+f.kind), wrap(f.usage, "    ", "    "))
	}
	fmt.Fprint(&m, "```\n")
	return m.String(), nil
}

// helpOf returns the output of a command for --help, without the environment that gives
// some flags their defaults.
func helpOf(bin string, c command) (string, error) {
	run := exec.CommandContext(context.Background(), filepath.Join(bin, c.path), append(c.args, "--help")...)
	run.Env = []string{"PATH=" + os.Getenv("PATH")}
	out, err := run.CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return "", fmt.Errorf("run %s --help: %w", c.path, err)
	}
	return string(out), nil
}

// isLogging reports whether package k8s.io/component-base/logs adds a flag.
func isLogging(f flagDoc) bool {
	return strings.HasPrefix(f.name, "--log") || f.name == "--v" || f.name == "--vmodule"
}

var subcommand = regexp.MustCompile(`(?m)^  ([a-z-]+) +(\S.*)$`)

// subcommands returns the subcommands that a help text of cobra lists, except those
// that cobra adds.
func subcommands(parent command, help string) (commands []command) {
	_, list, ok := strings.Cut(help, "Available Commands:\n")
	if !ok || len(parent.args) > 0 {
		return nil
	}
	list, _, _ = strings.Cut(list, "\n\n")
	for _, match := range subcommand.FindAllStringSubmatch(list, -1) {
		if match[1] != "help" && match[1] != "completion" {
			commands = append(commands, command{parent.path, match[2] + ".", []string{match[1]}})
		}
	}
	return commands
}

// flagDoc is a flag in a help text.
type flagDoc struct {
	name, kind, usage string
}

func (f flagDoc) term() string {
	if f.kind == "" {
		return code(f.name)
	}
	return fmt.Sprintf("%s (%s)", code(f.name), f.kind)
}

var (
	// pflagLine matches a flag in a help text of cobra.
	pflagLine = regexp.MustCompile(`^ +(-\w, )?(--[\w-]+)( ([^ ]+))?(   ?\s*(\S.*))?$`)
	// goflagLine matches a flag in a help text of package flag.
	goflagLine = regexp.MustCompile(`^  (-[\w-]+)( (\w+))?(\t(.*))?$`)
)

// parseFlags returns the flags in a help text, in order. Lines that follow a flag
// belong to its usage.
func parseFlags(help string) (flags []flagDoc) {
	for line := range strings.Lines(help) {
		line = strings.TrimRight(line, "\n")
		if match := pflagLine.FindStringSubmatch(line); match != nil {
			flags = append(flags, flagDoc{match[2], match[4], capitalize(match[6])})
			continue
		}
		if match := goflagLine.FindStringSubmatch(line); match != nil {
			flags = append(flags, flagDoc{"-" + match[1], match[3], capitalize(match[5])})
			continue
		}
		if n := len(flags) - 1; n >= 0 && strings.HasPrefix(line, "    ") {
			flags[n].usage = capitalize(strings.TrimSpace(flags[n].usage + " " + strings.TrimSpace(line)))
		}
	}
	var own []flagDoc
	for _, f := range flags {
		if f.name != "--help" {
			own = append(own, f)
		}
	}
	return own
}
