// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package certs provides the webhook server's certificate and makes the API server trust it, so the driver does not
// need a certificate manager.
//
// One Secret holds a certificate authority. Every replica of the controller runs
// a Rotator, which keeps three things up to date:
//   - the Secret: the first replica to find the authority missing, broken, or due
//     for rotation updates it; the others read what that replica wrote.
//   - the serving certificate: each replica signs its own with the authority and
//     holds it in memory; the server picks up a renewed one without a restart.
//   - the CA bundles of the webhook configurations: they contain every authority
//     that may have signed the certificate of some replica.
//
// A rotation has stages, so that replicas never serve a certificate that the API server does not trust yet. First the
// Rotator generates the next authority and adds it to the bundles, while the current one still signs. After
// trustOverlap the next authority becomes the current one. The Rotator removes the previous one from the bundles after
// the last certificate that it signed has expired. The stage follows from the Secret and the time alone, so replicas do
// not need leader election and a restart does not lose anything.
package certs

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/retry"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Options configure a Rotator.
type Options struct {
	// Namespace and Secret name the Secret of the authority.
	Namespace, Secret string
	// DNSNames are the names that the API server calls the webhook by.
	DNSNames []string
	// Configurations are the names of the webhook configurations that have to trust
	// the authority. Each is the name of both a MutatingWebhookConfiguration and a
	// ValidatingWebhookConfiguration.
	Configurations []string
}

const (
	// renewalPeriod bounds how late a certificate is renewed. No event announces that a renewal is due. It is short in
	// comparison with trustOverlap.
	renewalPeriod = 10 * time.Minute
	// retryPeriod is the delay after the first of several failures; it doubles up to
	// maxRetryPeriod.
	retryPeriod    = time.Second
	maxRetryPeriod = 10 * time.Second
)

// Rotator is a manager.Runnable that generates, rotates, and distributes the
// certificates of one replica.
type Rotator struct {
	client  kubernetes.Interface
	options Options
	clock   clock.PassiveClock

	mu      sync.Mutex
	serving *servingCertificate // nil until the first sync
	trusted *x509.CertPool      // nil until the first sync
}

// NewRotator returns a Rotator; Start runs it.
func NewRotator(client kubernetes.Interface, o Options, c clock.PassiveClock) *Rotator {
	return &Rotator{client: client, options: o, clock: c}
}

// NeedLeaderElection implements manager.LeaderElectionRunnable: every replica
// serves the webhook.
func (*Rotator) NeedLeaderElection() bool { return false }

// Start keeps the certificates up to date until ctx ends. It implements
// manager.Runnable.
func (r *Rotator) Start(ctx context.Context) error {
	changed := make(chan struct{}, 1)
	stop, err := r.watchObjects(ctx, changed)
	if err != nil {
		return err
	}
	defer stop()
	retryDelay := retryPeriod
	for {
		delay := renewalPeriod
		switch err := r.sync(ctx); {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			klog.FromContext(ctx).Error(err, "Failed to update webhook certificates; retrying", "delay", retryDelay)
			delay, retryDelay = retryDelay, min(2*retryDelay, maxRetryPeriod)
		default:
			retryDelay = retryPeriod
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-time.After(delay):
		}
	}
}

// watchObjects sends to changed when the Secret or a webhook configuration changes. The
// returned function waits until the watches, which ctx ends, have stopped.
func (r *Rotator) watchObjects(ctx context.Context, changed chan<- struct{}) (stop func(), err error) {
	secret := r.informersOf(r.options.Secret, informers.WithNamespace(r.options.Namespace))
	factories := []informers.SharedInformerFactory{secret}
	watched := []cache.SharedIndexInformer{secret.Core().V1().Secrets().Informer()}
	for _, name := range r.options.Configurations {
		configurations := r.informersOf(name)
		api := configurations.Admissionregistration().V1()
		factories = append(factories, configurations)
		watched = append(watched,
			api.MutatingWebhookConfigurations().Informer(), api.ValidatingWebhookConfigurations().Informer())
	}
	notify := func() {
		select {
		case changed <- struct{}{}:
		default: // a notification is pending already
		}
	}
	for _, informer := range watched {
		_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { notify() },
			UpdateFunc: func(any, any) { notify() },
			DeleteFunc: func(any) { notify() },
		})
		if err != nil {
			return nil, fmt.Errorf("watch Secret %s/%s and the webhook configurations %q: %w",
				r.options.Namespace, r.options.Secret, r.options.Configurations, err)
		}
	}
	for _, factory := range factories {
		factory.Start(ctx.Done())
	}
	return func() {
		for _, factory := range factories {
			factory.Shutdown()
		}
	}, nil
}

// informersOf returns a factory of informers that watch one object of their types: the
// controller's role grants access to objects with these names only.
func (r *Rotator) informersOf(name string, options ...informers.SharedInformerOption) informers.SharedInformerFactory {
	one := informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
	})
	return informers.NewSharedInformerFactoryWithOptions(r.client, 0, append(options, one)...)
}

// GetCertificate returns the current serving certificate; it is meant for
// tls.Config.
func (r *Rotator) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.serving == nil {
		return nil, errors.New("the webhook's certificate has not been generated yet")
	}
	return r.serving.pair, nil
}

// Trusted returns the certificate authorities that sign the certificates of all replicas.
func (r *Rotator) Trusted() (*x509.CertPool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.trusted == nil {
		return nil, errors.New("the webhook's certificate authority has not been read yet")
	}
	return r.trusted, nil
}

// sync brings the Secret, the serving certificate, and the webhook configurations
// up to date.
func (r *Rotator) sync(ctx context.Context) error {
	set, err := r.ensureAuthorities(ctx)
	if err != nil {
		return err
	}
	r.setTrusted(set)
	return errors.Join(
		r.ensureServingCertificate(ctx, set.current),
		r.injectBundle(ctx, set.bundle()),
	)
}

func (r *Rotator) setTrusted(set authoritySet) {
	pool := x509.NewCertPool()
	for _, certificate := range set.trusted {
		pool.AddCert(certificate)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.trusted = pool
}

// ensureAuthorities advances the authorities in the Secret if they are due, and
// returns the resulting authorities. If another replica writes the Secret at the
// same time, ensureAuthorities uses what that replica wrote.
func (r *Rotator) ensureAuthorities(ctx context.Context) (set authoritySet, err error) {
	raced := func(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }
	err = retry.OnError(retry.DefaultRetry, raced, func() error {
		set, err = r.advanceAuthorities(ctx)
		return err
	})
	return set, err
}

func (r *Rotator) advanceAuthorities(ctx context.Context) (authoritySet, error) {
	api := r.client.CoreV1().Secrets(r.options.Namespace)
	secret, err := api.Get(ctx, r.options.Secret, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return authoritySet{}, err
	}
	exists := err == nil
	if !exists {
		secret = &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: r.options.Namespace, Name: r.options.Secret}}
	}
	next, reason, err := decodeAuthorities(secret.Data).advance(r.options.Secret, r.clock.Now())
	if err != nil {
		return authoritySet{}, err
	}
	data := maps.Clone(secret.Data)
	if data == nil {
		data = map[string][]byte{}
	}
	next.encode(data)
	if reflect.DeepEqual(data, secret.Data) {
		return next, nil
	}
	secret.Data = data
	if exists {
		_, err = api.Update(ctx, secret, metav1.UpdateOptions{})
	} else {
		_, err = api.Create(ctx, secret, metav1.CreateOptions{})
	}
	if err != nil {
		return authoritySet{}, recreateHint(err)
	}
	klog.FromContext(ctx).Info("Updated webhook certificate authority", "secret", klog.KObj(secret), "reason", reason)
	return next, nil
}

// recreateHint adds a remedy to the error about an object that the chart creates
// and that is missing. The controller may not create the Secret itself.
func recreateHint(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
		return fmt.Errorf("%w: was the object deleted? `helm upgrade` recreates it", err)
	}
	return err
}

// ensureServingCertificate replaces the serving certificate if it is due for
// renewal or if the current authority did not sign it.
func (r *Rotator) ensureServingCertificate(ctx context.Context, current *authority) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.clock.Now()
	if r.serving != nil && r.serving.issuer.Equal(current.certificate) && !renewalDue(r.serving.leaf, now) {
		return nil
	}
	renewed, err := current.sign(r.options.DNSNames, now)
	if err != nil {
		return fmt.Errorf("sign the webhook's certificate: %w", err)
	}
	r.serving = renewed
	klog.FromContext(ctx).V(2).Info("Renewed webhook certificate",
		"dnsNames", r.options.DNSNames, "notAfter", renewed.leaf.NotAfter)
	return nil
}

// servingCertificate is the certificate of one replica.
type servingCertificate struct {
	pair         *tls.Certificate
	leaf, issuer *x509.Certificate
}
