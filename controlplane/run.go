// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/dra-shared/dra-driver-shared/controlplane/mode"
)

const (
	// minStartDelay is the delay after the first failed attempt to start; it doubles with each subsequent one up to
	// maxStartDelay.
	minStartDelay = time.Second
	maxStartDelay = 10 * time.Second
	// shutdownTimeout is how long a server waits for its open requests when it stops.
	shutdownTimeout = 5 * time.Second
)

// Run runs the controller until ctx ends. It serves health and metrics immediately: a controller that starts before the
// API server, or before the chart's objects, is alive and not ready. It repeats New until it succeeds, logs the reason
// for each failure, and then starts the manager.
//
// Run returns an error if the manager ends on its own: the mode has changed, or the
// replica has lost the lease of the leading replica, for example because the API
// server was unavailable for longer than the lease lasts. The process must then end, since
// reconcilers may still run while another replica leads.
func Run(ctx context.Context, restConfig *rest.Config, o Options) error {
	var ready readiness
	servers, err := newServers(restConfig, o, ready.check)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	ctx, stopServers := context.WithCancel(ctx)
	for _, server := range servers {
		group.Go(func() error { return server.Start(ctx) })
	}
	group.Go(func() error {
		defer stopServers()
		m := awaitManager(ctx, restConfig, o)
		if m == nil {
			return nil
		}
		if err := ready.follow(m, o.Webhook.Port != 0); err != nil {
			return err
		}
		return m.Start(ctx)
	})
	return group.Wait()
}

// awaitManager repeats New until it succeeds. It returns nil if ctx ends first.
func awaitManager(ctx context.Context, restConfig *rest.Config, o Options) manager.Manager {
	delay := minStartDelay
	for {
		m, err := New(ctx, restConfig, o)
		if err == nil {
			return m
		}
		if ctx.Err() != nil {
			return nil
		}
		klog.FromContext(ctx).Error(withRemedy(err), "Failed to start; retrying", "server", restConfig.Host, "delay", delay)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(delay):
		}
		delay = min(2*delay, maxStartDelay)
	}
}

// withRemedy adds to an error of New what to check if the API server answers.
func withRemedy(err error) error {
	switch {
	case errors.Is(err, mode.ErrDenied): // it contains the remedy, and may look like a missing right
		return err
	case meta.IsNoMatchError(err):
		return fmt.Errorf("%w: is the CustomResourceDefinition of the chart installed? `helm upgrade` recreates it", err)
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return fmt.Errorf("%w: are the chart's ClusterRole and ClusterRoleBinding of the controller installed? "+
			"`helm upgrade` recreates them", err)
	}
	return err
}

// newServers returns the servers of health and metrics that the options enable.
func newServers(restConfig *rest.Config, o Options, ready healthz.Checker) (servers []manager.Runnable, err error) {
	address := cmp.Or(o.MetricsAddress, "0") // the library would serve on its default address
	metrics, err := metricsserver.NewServer(metricsserver.Options{BindAddress: address}, restConfig, nil)
	if err != nil {
		return nil, fmt.Errorf("metrics server: %w", err)
	}
	if metrics != nil {
		servers = append(servers, metrics)
	}
	if o.HealthAddress != "0" {
		servers = append(servers, &manager.Server{
			Name:            "health",
			ShutdownTimeout: ptr.To(shutdownTimeout),
			Server: &http.Server{
				Addr: o.HealthAddress, Handler: healthHandler(ready), ReadHeaderTimeout: shutdownTimeout,
			},
		})
	}
	return servers, nil
}

// healthHandler serves /healthz, and /readyz with the result of ready.
func healthHandler(ready healthz.Checker) http.Handler {
	mux := http.NewServeMux()
	for path, check := range map[string]healthz.Checker{"/healthz": healthz.Ping, "/readyz": ready} {
		handler := http.StripPrefix(path, &healthz.Handler{Checks: map[string]healthz.Checker{"controller": check}})
		mux.Handle(path, handler)
		mux.Handle(path+"/", handler)
	}
	return mux
}

// readiness is the check of /readyz.
type readiness struct {
	checker atomic.Pointer[healthz.Checker] // nil until the manager exists
	synced  atomic.Bool
}

// follow makes the check report the state of a manager that has not started yet. It includes the state of the webhook
// server if the controller has one.
func (r *readiness) follow(m manager.Manager, servesWebhooks bool) error {
	checker := healthz.Ping
	if servesWebhooks {
		checker = m.GetWebhookServer().StartedChecker()
	}
	if err := m.Add(onSync(func() { r.synced.Store(true) })); err != nil {
		return err
	}
	r.checker.Store(&checker)
	return nil
}

// check is a healthz.Checker. The manager starts the webhook server before the caches that the webhooks read from.
func (r *readiness) check(request *http.Request) error {
	checker := r.checker.Load()
	switch {
	case checker == nil:
		return errors.New("the controller has not started yet: see its log for the cause")
	case !r.synced.Load():
		return errors.New("the controller waits for its caches; its log says which objects it cannot list")
	}
	return (*checker)(request)
}

// onSync is a Runnable that the manager calls when its caches have synchronized, in each replica: the manager starts
// such Runnables before the election of the leading replica.
type onSync func()

// Start implements manager.Runnable.
func (f onSync) Start(context.Context) error {
	f()
	return nil
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (onSync) NeedLeaderElection() bool { return false }
