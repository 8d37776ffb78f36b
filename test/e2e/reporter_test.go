// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
)

// reporter is the testscript.T of stories. For a story that passes it shows only
// the headings. At the end of the suite it repeats the failures, which are hard to
// find among the other output, and prints how long each story took. run.sh looks
// for the prefixes "failed:" and "time:".
type reporter struct {
	*testing.T
	results *results
}

type results struct {
	sync.Mutex
	failures strings.Builder
	took     []storyTime
}

type storyTime struct {
	name     string
	duration time.Duration
}

func newReporter(t *testing.T) reporter {
	t.Helper()
	r := reporter{T: t, results: &results{}}
	start := time.Now()
	t.Cleanup(func() {
		r.T.Log(r.results.summary(t.Name(), time.Since(start)))
	})
	return r
}

// summary returns the times of the suite and its stories, slowest first, and the
// failures.
func (r *results) summary(suite string, total time.Duration) string {
	r.Lock()
	defer r.Unlock()
	var text strings.Builder
	stories := time.Duration(0)
	slices.SortFunc(r.took, func(a, b storyTime) int { return cmp.Compare(b.duration, a.duration) })
	for _, s := range r.took {
		stories += s.duration
		fmt.Fprintf(&text, "\ntime: %7.1f s  %s", s.duration.Seconds(), s.name)
	}
	fmt.Fprintf(&text, "\ntime: %7.1f s  %s, of which %.1f s to start and end the cluster",
		total.Seconds(), suite, (total - stories).Seconds())
	return text.String() + r.failures.String()
}

// Run implements testscript.T.
func (r reporter) Run(name string, f func(testscript.T)) {
	r.T.Run(name, func(t *testing.T) {
		start := sync.OnceValue(time.Now)
		t.Cleanup(func() {
			r.results.Lock()
			defer r.results.Unlock()
			r.results.took = append(r.results.took, storyTime{t.Name(), time.Since(start())})
		})
		f(story{reporter: reporter{T: t, results: r.results}, start: start})
	})
}

// runCase runs a case that is a Go function and records its time.
func (r reporter) runCase(name string, run func(*testing.T)) {
	r.T.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
		start := time.Now()
		t.Cleanup(func() {
			r.results.Lock()
			defer r.results.Unlock()
			r.results.took = append(r.results.took, storyTime{t.Name(), time.Since(start)})
			if t.Failed() {
				fmt.Fprintf(&r.results.failures, "\nfailed: %s", t.Name())
			}
		})
		run(t)
	})
}

// story is the reporter of one story. It measures the time from when the story
// may run, not the time that it waits for others.
type story struct {
	reporter
	start func() time.Time
	// logState logs the state of the cluster if the story has failed. It does so once, before the first change of
	// the story is reverted.
	logState func()
}

// Parallel implements testscript.T.
func (s story) Parallel() {
	s.T.Parallel()
	s.start()
}

// Verbose implements testscript.T. It is false so that phases that pass are
// logged by their headings only.
func (r reporter) Verbose() bool { return false }

// Log implements testscript.T, which calls it at the end of a story.
func (r reporter) Log(args ...any) {
	r.Helper()
	r.T.Log(args...)
	if !r.Failed() {
		return
	}
	r.results.Lock()
	defer r.results.Unlock()
	for line := range strings.SplitSeq(tail(fmt.Sprint(args...), 60), "\n") {
		fmt.Fprintf(&r.results.failures, "\nfailed: %s: %s", r.Name(), line)
	}
}

// tail returns the last lines of a text, each shortened to 300 bytes.
func tail(text string, lines int) string {
	all := strings.Split(strings.TrimSpace(text), "\n")
	all = all[max(0, len(all)-lines):]
	for i, line := range all {
		all[i] = line[:min(len(line), 300)]
	}
	return strings.Join(all, "\n")
}

// clusterState returns what is needed first to diagnose a failed story: its pods,
// claims, and events, and the state of the driver.
func clusterState(ctx context.Context, c *clusterclient.Cluster, namespace string) string {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var s strings.Builder
	for _, query := range []struct {
		lines int
		args  string
	}{
		{15, "get pods,resourceclaims,podgroups.scheduling.dra-shared.dev -n " + namespace},
		{5, "get pods -n dra-shared-system"},
		{15, "get events --sort-by=.metadata.creationTimestamp -n " + namespace},
		{10, "get events --sort-by=.metadata.creationTimestamp -n dra-shared-system"},
		{15, "logs daemonset/dra-shared-plugin -n dra-shared-system"},
	} {
		out, err := c.Kubectl(ctx, strings.Fields(query.args)...)
		if err != nil {
			out += err.Error()
		}
		fmt.Fprintf(&s, "> kubectl %s\n%s\n", query.args, tail(out, query.lines))
	}
	return s.String()
}
