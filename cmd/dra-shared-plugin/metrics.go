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
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// serveMetrics serves metrics until ctx ends. Both plugins of a rolling update
// listen on the same port of the node (SO_REUSEPORT).
func (f *flags) serveMetrics(ctx context.Context, registry *prometheus.Registry) error {
	config := net.ListenConfig{Control: reusePort}
	listener, err := config.Listen(ctx, "tcp", f.metricsAddress)
	if err != nil {
		return fmt.Errorf("--metrics-address %s: %w: is another program on the node using the port?", f.metricsAddress, err)
	}
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
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			klog.FromContext(ctx).Error(err, "Failed to serve metrics")
		}
	}()
	return nil
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
