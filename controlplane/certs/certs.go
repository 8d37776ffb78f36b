// Package certs gives the webhook its certificates, and the API server the means
// to trust them, without anything else to install: a certificate authority in a
// Secret, made and rotated by cert-manager's library (it is what cert-manager
// serves its own webhook with), from which each replica signs its own
// certificate in memory.
package certs

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	servertls "github.com/cert-manager/cert-manager/pkg/server/tls"
	"github.com/cert-manager/cert-manager/pkg/server/tls/authority"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/manager"
)

// Options of the certificates.
type Options struct {
	// Namespace and Secret of the authority.
	Namespace, Secret string
	// DNSNames that the API server calls the webhook by.
	DNSNames []string
	// Configurations are the names of the webhook configurations, mutating and
	// validating, that are to trust the authority.
	Configurations []string
}

// Add makes a manager keep the certificates, and returns what its webhook server
// serves.
func Add(m manager.Manager, cluster kubernetes.Interface, config *rest.Config, o Options) (func(*tls.Config), error) {
	ca := &authority.DynamicAuthority{SecretNamespace: o.Namespace, SecretName: o.Secret, CommonName: o.Secret, RESTConfig: config}
	source := &servertls.DynamicSource{DNSNames: o.DNSNames, Authority: ca}
	if err := m.Add(everywhere{source.Start}); err != nil {
		return nil, err
	}
	injector := &injector{cluster: cluster, options: o, rotated: make(chan struct{}, 1)}
	ca.WatchRotation(injector.rotated)
	if err := m.Add(everywhere{injector.start}); err != nil {
		return nil, err
	}
	return func(c *tls.Config) { c.GetCertificate = source.GetCertificate }, nil
}

// everywhere is for what each replica does, leader or not.
type everywhere struct {
	start func(context.Context) error
}

// Start implements manager.Runnable.
func (e everywhere) Start(ctx context.Context) error { return e.start(ctx) }

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (everywhere) NeedLeaderElection() bool { return false }

// injector writes the authority's certificate into the webhook configurations.
type injector struct {
	cluster kubernetes.Interface
	options Options
	rotated chan struct{}
}

// injectAgain is for configurations that somebody has replaced.
const injectAgain = 30 * time.Second

func (i *injector) start(ctx context.Context) error {
	tick := time.NewTicker(injectAgain)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-i.rotated:
		case <-tick.C:
		}
		if err := i.inject(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "The API server does not trust the webhook yet; trying again")
		}
	}
}

func (i *injector) inject(ctx context.Context) error {
	secret, err := i.cluster.CoreV1().Secrets(i.options.Namespace).Get(ctx, i.options.Secret, metav1.GetOptions{})
	if err != nil {
		return missing(err)
	}
	ca := secret.Data["ca.crt"]
	if len(ca) == 0 {
		return fmt.Errorf("secret %s/%s has no ca.crt", i.options.Namespace, i.options.Secret)
	}
	// Each by itself: one that somebody deleted must not keep another from being
	// trusted.
	for _, name := range i.options.Configurations {
		err = errors.Join(err, i.mutating(ctx, name, ca), i.validating(ctx, name, ca))
	}
	return err
}

func (i *injector) mutating(ctx context.Context, name string, ca []byte) error {
	api := i.cluster.AdmissionregistrationV1().MutatingWebhookConfigurations()
	configuration, err := api.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return missing(err)
	}
	var bundles [][]byte
	for _, w := range configuration.Webhooks {
		bundles = append(bundles, w.ClientConfig.CABundle)
	}
	return trust(bundles, ca, func(raw []byte) error {
		_, err := api.Patch(ctx, name, types.JSONPatchType, raw, metav1.PatchOptions{})
		return err
	})
}

func (i *injector) validating(ctx context.Context, name string, ca []byte) error {
	api := i.cluster.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	configuration, err := api.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return missing(err)
	}
	var bundles [][]byte
	for _, w := range configuration.Webhooks {
		bundles = append(bundles, w.ClientConfig.CABundle)
	}
	return trust(bundles, ca, func(raw []byte) error {
		_, err := api.Patch(ctx, name, types.JSONPatchType, raw, metav1.PatchOptions{})
		return err
	})
}

func trust(bundles [][]byte, ca []byte, patch func([]byte) error) error {
	raw, err := caPatch(bundles, ca)
	if err != nil || raw == nil {
		return err
	}
	return patch(raw)
}

// missing is for what the chart makes and somebody has deleted.
func missing(err error) error {
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("%w: `helm upgrade` makes it again", err)
	}
	return err
}

// caPatch makes every webhook trust the authority; nil if they do. It is pure.
func caPatch(bundles [][]byte, ca []byte) ([]byte, error) {
	type operation struct {
		Op    string `json:"op"`
		Path  string `json:"path"`
		Value []byte `json:"value"`
	}
	var operations []operation
	for i, bundle := range bundles {
		if !bytes.Equal(bundle, ca) {
			operations = append(operations, operation{"add", fmt.Sprintf("/webhooks/%d/clientConfig/caBundle", i), ca})
		}
	}
	if operations == nil {
		return nil, nil
	}
	return json.Marshal(operations)
}
