// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver"
)

// metricsServer serves metrics. The plugin serves claims even without it: a port used by another program must not
// keep pods from starting.
type metricsServer struct {
	address  string
	handler  http.Handler
	interval time.Duration // between attempts to serve
	problems problemReporter
}

// problemReporter sends events about problems with the node. The plugin's driver implements it.
type problemReporter interface {
	Warn(w driver.Warning)
	EndWarning(w driver.Warning)
}

// notServed is the problem that the plugin does not serve metrics, without its message.
var notServed = driver.Warning{
	Reason:    v1alpha1.EventReasonMetricsNotServed,
	EndReason: v1alpha1.EventReasonMetricsServed, EndMessage: "the plugin serves metrics",
}

// metricsInterval is how often the plugin retries serving metrics.
const metricsInterval = 10 * time.Second

// newMetricsServer returns the server for --metrics-address.
func (f *flags) newMetricsServer(
	ctx context.Context, registry *prometheus.Registry, problems problemReporter,
) *metricsServer {
	mux := http.NewServeMux()
	// A metric that cannot be collected must not hide the others.
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, ErrorLog: errorLog{klog.FromContext(ctx)},
	}))
	if f.pprof {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	}
	return &metricsServer{address: f.metricsAddress, handler: mux, interval: metricsInterval, problems: problems}
}

// startMetrics serves metrics in the background, if --metrics-address is set. stop stops the server and waits for it:
// after an error, the plugin ends although ctx does not.
func (f *flags) startMetrics(
	ctx context.Context, registry *prometheus.Registry, problems problemReporter,
) (stop func()) {
	if f.metricsAddress == "" {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var server sync.WaitGroup
	server.Go(func() { f.newMetricsServer(ctx, registry, problems).run(ctx) })
	return func() {
		cancel()
		server.Wait()
	}
}

// run serves metrics until ctx ends. If that fails, it reports the error and tries again.
func (s *metricsServer) run(ctx context.Context) {
	logged := ""
	for {
		err := s.serve(ctx)
		if ctx.Err() != nil {
			return
		}
		if err.Error() != logged {
			klog.FromContext(ctx).Error(err, "Failed to serve metrics; retrying")
			logged = err.Error()
		}
		problem := notServed
		problem.Message = fmt.Sprintf("the plugin serves no metrics: %v: does another program on the node use the port? "+
			"If so, choose another address (--metrics-address, plugin.metricsAddress in the chart's values)", err)
		s.problems.Warn(problem)
		select {
		case <-ctx.Done():
			return
		case <-time.After(s.interval):
		}
	}
}

// serve serves metrics until ctx ends or that fails. Both plugins of a rolling update listen on the same port on the
// node (SO_REUSEPORT).
func (s *metricsServer) serve(ctx context.Context) error {
	config := net.ListenConfig{Control: reusePort}
	listener, err := config.Listen(ctx, "tcp", s.address)
	if err != nil {
		return err
	}
	s.problems.EndWarning(notServed)
	server := &http.Server{Handler: s.handler, ReadHeaderTimeout: 5 * time.Second}
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(closed)
		_ = server.Close()
	})
	err = server.Serve(listener) // it returns before Close does
	if !stop() {
		<-closed
	}
	return err
}

// errorLog logs metrics that cannot be collected.
type errorLog struct{ logger klog.Logger }

// Println implements promhttp.Logger.
func (l errorLog) Println(v ...any) {
	l.logger.Error(errors.New(strings.TrimSpace(fmt.Sprintln(v...))), "Failed to collect some metrics")
}

func reusePort(_, _ string, raw syscall.RawConn) error {
	var optionErr error
	err := raw.Control(func(fd uintptr) {
		optionErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	})
	return errors.Join(err, optionErr)
}
