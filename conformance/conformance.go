// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package conformance tests whether a DRA driver meets the requirements of Kubernetes.
// It works with any driver: it acts as the kubelet and the scheduler of the driver's
// plugin, through its gRPC sockets and with claims that it allocates in an API server.
// It starts pods only for the profiles by kind of device, DRA-NET and DRA-ACCEL.
//
// Test runs the suite in a test of the driver. Without a cluster, the suite starts the
// driver with a fake API server in separate directories:
//
//	conformance.Test(t, conformance.Config{
//		Driver:  "gpu.example.com",
//		Command: []string{"bin/driver", "--kubeconfig=$KUBECONFIG", "--kubelet-dir=$KUBELET_DIR"},
//	})
//
// Requirements returns the tested requirements: each has a stable ID, a level, and the
// sentence that it rests on. Run returns the results as a Report, which can be written
// as a ConformanceReport in YAML, as JUnit, and as text. The command dra-conformance
// runs the suite for drivers in other languages and for drivers on a node.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// defaultCaseTimeout limits the duration of one case.
const defaultCaseTimeout = time.Minute

// Status is the result of a case.
type Status string

// Results of cases.
const (
	Passed  Status = "passed"
	Failed  Status = "failed"
	Skipped Status = "skipped"
)

// Result is the result of a case.
type Result struct {
	Requirement Requirement
	Status      Status
	// Message is the reason of a case that failed or was skipped.
	Message string
	// Calls are the last requests to the driver and its responses, and the last ones to the API
	// server.
	Calls    []string
	Duration time.Duration
	// Log is the end of the driver's log, if the suite started the driver.
	Log string
	// Measurements are numbers that the requirement does not limit, by name.
	Measurements map[string]float64
}

// Explain returns the report of a case that failed: what happened, the requests and
// responses, the sentence that the requirement rests on, and the usual cause.
func (r Result) Explain() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s (%s): %s\n", r.Requirement.ID, r.Requirement.Level, r.Message)
	fmt.Fprintf(&b, "Required: %s.\n", r.Requirement.Text)
	if s := r.Requirement.Source; s != nil {
		fmt.Fprintf(&b, "Source: %q (%s %s)\n", s.Quote, s.File, s.Version())
	} else {
		fmt.Fprintf(&b, "Derived from: %s\n", r.Requirement.Reference)
	}
	if r.Requirement.Cause != "" {
		fmt.Fprintf(&b, "Usual cause: %s\n", r.Requirement.Cause)
	}
	if r.Requirement.Note != "" {
		fmt.Fprintf(&b, "Decision of the suite: %s\n", r.Requirement.Note)
	}
	for _, call := range r.Calls {
		fmt.Fprintln(&b, call)
	}
	if r.Log != "" {
		fmt.Fprintf(&b, "End of the driver's log:\n%s\n", r.Log)
	}
	return b.String()
}

// Test runs the suite as subtests, one for each requirement. Recommendations that the
// driver does not meet are logged.
func Test(t *testing.T, c Config) {
	t.Helper()
	start := time.Now()
	results, kubernetes, err := run(t.Context(), c, func(id string, f func() Result) Result {
		var r Result
		t.Run(id, func(t *testing.T) {
			r = f()
			switch {
			case r.Status == Skipped:
				t.Skip(r.Message)
			case r.Status == Failed && r.Requirement.Level == Must:
				t.Error(r.Explain())
			case r.Status == Failed:
				t.Log("recommendation: " + r.Explain())
			}
		})
		return r
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(results) == 0 {
		t.Fatal("no case was run")
	}
	if c.Report == "" {
		return
	}
	raw, err := newReport(c, results, kubernetes, start).YAML()
	if err == nil {
		err = os.WriteFile(c.Report, raw, 0o644)
	}
	if err != nil {
		t.Errorf("write the report: %v", err)
	}
}

// Run runs the suite and returns a report. progress, which may be nil, gets each result
// when it is known. An error means that the suite could not run; failed cases are in the
// report.
func Run(ctx context.Context, c Config, progress func(Result)) (Report, error) {
	start := time.Now()
	results, kubernetes, err := run(ctx, c, func(_ string, f func() Result) Result {
		r := f()
		if progress != nil {
			progress(r)
		}
		return r
	})
	if err != nil {
		return Report{}, err
	}
	return newReport(c, results, kubernetes, start), nil
}

// run runs all cases through do. kubernetes is the version of the API server.
func run(ctx context.Context, c Config, do func(string, func() Result) Result) (
	results []Result, kubernetes string, err error,
) {
	if c, err = c.complete(); err != nil {
		return nil, "", err
	}
	all, err := Requirements()
	if err != nil {
		return nil, "", err
	}
	r, kubernetes := &runner{config: c}, KubernetesVersion
	if c.isLive() { // no case can pass if the suite looks for the driver in the wrong place
		if err := r.ensureSession(ctx); err != nil {
			return nil, "", err
		}
		version, err := r.session.client.Discovery().ServerVersion()
		if err != nil {
			return nil, "", fmt.Errorf("get the version of the API server: %w", err)
		}
		kubernetes = version.GitVersion
	}
	ctx, cancel := context.WithCancel(ctx)
	separate := r.startWaiting(ctx, all)
	defer func() {
		cancel() // the cases that are no longer waited for
		separate.wait.Wait()
		err = errors.Join(err, r.endSession())
	}()
	for _, requirement := range all {
		if ctx.Err() != nil {
			return results, kubernetes, ctx.Err()
		}
		if !requirement.selected(c.Only) {
			continue
		}
		results = append(results, do(requirement.ID, func() Result {
			if result, ok := separate.results[requirement.ID]; ok {
				return <-result
			}
			return r.runCase(ctx, requirement)
		}))
	}
	return results, kubernetes, nil
}

// runner runs cases one after the other.
type runner struct {
	config  Config
	session *session // nil if the next case needs a new one
	// unstarted counts the cases in a row without a successful start of the driver.
	unstarted int
	// silent reports whether the driver published no device in the time that it has.
	silent bool
}

// maxUnstarted is the number of cases in a row without a successful start. After that, the suite no longer tries to
// start the driver.
const maxUnstarted = 3

// silentLimit is the time to publish devices for a driver that published none in an earlier
// case: a minute for each case would be long.
const silentLimit = time.Second

// endSession ends the session. The next case then gets a node without traces of the last.
func (r *runner) endSession() error {
	if r.session == nil {
		return nil
	}
	s := r.session
	r.session = nil
	return s.close()
}

// slowCase waits for the driver for a minute and a half: the resource slice controller of Kubernetes notices only after
// a minute that another client deleted a slice that it has just created, and waits for half a minute after other
// changes.
const slowCase = "PUB-10"

// waitingCases are cases that wait for the driver while nothing happens, or that repeat calls, which are
// slow if the driver's client limits its requests. Each list runs on a separate node, next to the other cases.
var waitingCases = [][]string{ //nolint:gochecknoglobals // constant
	{slowCase}, {"UNPR-12", "UNPR-14", "CDI-05", "PUB-12", "PUB-15", "STAT-03", "STAT-06", "STAT-07", "HEALTH-05"},
}

// separate holds the cases that run on separate nodes.
type separate struct {
	results map[string]chan Result // by the ID of the requirement
	wait    sync.WaitGroup
}

// startWaiting starts the waiting cases on separate nodes, next to the other cases. If the driver
// cannot run on several nodes of the suite, it starts none, and all cases run in order.
func (r *runner) startWaiting(ctx context.Context, all []Requirement) *separate {
	s := &separate{results: map[string]chan Result{}}
	if len(r.config.Only) > 0 || !r.config.runsOnTwoNodes() || r.ensureSession(ctx) != nil {
		return s
	}
	lists := map[*runner][]Requirement{}
	for _, ids := range waitingCases {
		list := slices.DeleteFunc(slices.Clone(all),
			func(q Requirement) bool { return !slices.Contains(ids, q.ID) || r.inapplicable(q) != "" })
		other := &runner{config: r.config}
		// While the driver starts on a node, it does not start or end on the others: a resource that cannot be used twice,
		// such as a port, makes the start fail.
		if len(list) == 0 || other.ensureSession(ctx) != nil {
			continue
		}
		lists[other] = list
		for _, q := range list {
			s.results[q.ID] = make(chan Result, 1)
		}
	}
	for other, list := range lists {
		s.wait.Go(func() { s.run(ctx, other, list) })
	}
	return s
}

// run runs cases on a node.
func (s *separate) run(ctx context.Context, r *runner, list []Requirement) {
	for _, q := range list {
		s.results[q.ID] <- r.runCase(ctx, q)
	}
	_ = r.endSession() // other cases report what the driver does wrong at its end
}

// ensureSession starts the driver on a new node unless the last case left one.
func (r *runner) ensureSession(ctx context.Context) (err error) {
	if r.session != nil {
		r.session.waitForRestart(ctx)
		return nil
	}
	if r.unstarted >= maxUnstarted {
		return fmt.Errorf("the driver did not start in %d cases before this one", r.unstarted)
	}
	if r.session, err = newSession(r.config); err == nil && !r.config.needsOnlyAPI() {
		_, err = r.session.start(ctx, r.session.env)
	}
	if err == nil {
		err = r.session.rememberStatic()
	}
	if err == nil && r.silent {
		r.session.publishLimit = min(r.session.publishLimit, silentLimit)
	}
	if err != nil {
		_ = r.endSession() // it never worked
		r.unstarted++
		return err
	}
	r.unstarted = 0
	return nil
}

// runCase runs the case of a requirement.
func (r *runner) runCase(ctx context.Context, requirement Requirement) (result Result) {
	result = Result{Requirement: requirement, Status: Skipped}
	if result.Message = r.inapplicable(requirement); result.Message != "" {
		return result
	}
	start := time.Now()
	defer func() { result.Duration = time.Since(start) }()
	ctx, cancel := context.WithTimeout(ctx, r.config.limit(requirement))
	defer cancel()
	if err := r.ensureSession(ctx); err != nil {
		result.Status, result.Message = Failed, err.Error()
		return result
	}
	s := &suite{session: r.session}
	defer func() { r.silent = r.silent || s.silent }()
	process := 0 // of a driver that something else starts again
	if s.server == nil && len(s.config.Hooks.PID) > 0 {
		process, _ = s.livePID(ctx) // the cases that need it report an error
	}
	result.Status, result.Message = s.do(ctx, cases()[requirement.ID])
	result.Measurements = s.numbers
	result.Calls = slices.Concat(lastCalls(s.takeCalls()), lastCalls(s.api.take()))
	if len(result.Calls) == 0 && len(s.instances) > 0 {
		result.Calls = lastCalls(s.instances[0].registered)
	}
	err := s.cleanUp(context.WithoutCancel(ctx))
	_, _ = s.takeCalls(), s.api.take() // which are not calls of the next case
	if err != nil {
		for _, i := range s.instances {
			i.awaitEnd(context.WithoutCancel(ctx))
		}
	}
	// A driver that crashes does not pass any case, even one that expects an error as the answer.
	if crash := s.crash(context.WithoutCancel(ctx), process); crash != nil && result.Status != Failed {
		result.Status, result.Message = Failed, crash.Error()
	}
	result.Log = tail(s.log.String(), 5)
	if err != nil || s.restart || result.Status == Failed {
		if s.server != nil {
			_ = r.endSession() // other cases report what the driver does wrong at its end
		}
	}
	return result
}

// noHealthCase is the requirement on drivers that do not declare Health, unlike all other requirements of the
// feature.
const noHealthCase = "HEALTH-07"

// inapplicable returns the reason why the case does not apply to the driver, or "".
func (r *runner) inapplicable(q Requirement) string {
	declared := r.config.declares(q)
	switch {
	case r.config.Skip[q.ID] != "":
		return r.config.Skip[q.ID]
	case q.ID == noHealthCase && declared:
		return "the driver declares the feature Health"
	case q.ID != noHealthCase && !declared:
		return "the driver does not declare " + q.group()
	case r.config.needsOnlyAPI() && !q.needsOnlyAPI():
		return "needs the driver's sockets: set command, or kubelet on a node of the cluster"
	case !q.Implemented():
		return fmt.Sprintf("the suite has no case yet (way: %s)", q.Way)
	}
	return ""
}

// lastCalls returns the last calls, shortened for a report.
func lastCalls(calls []string) (last []string) {
	const keep, length = 4, 1500
	for _, call := range calls[max(0, len(calls)-keep):] {
		if len(call) > length {
			call = call[:length] + " [...]"
		}
		last = append(last, call)
	}
	return last
}
