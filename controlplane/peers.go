// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/controlplane/certs"
)

// peerAuth authenticates the replicas of the controller to each other. Client and server present the certificate of
// their webhook server. Only replicas have a key for its name.
type peerAuth struct {
	// name is the DNS name in the certificates.
	name string
	// certificate returns the certificate of this replica.
	certificate func() (*tls.Certificate, error)
	// trusted returns the authorities that sign the certificates of all replicas.
	trusted func() (*x509.CertPool, error)
}

// newPeerAuth returns a peerAuth with the certificates of the rotator or, if it is nil, with the certificates that
// another component, such as cert-manager, issues for all replicas.
func newPeerAuth(o Options, rotator *certs.Rotator) peerAuth {
	if rotator != nil {
		certificate := func() (*tls.Certificate, error) { return rotator.GetCertificate(nil) }
		return peerAuth{o.webhookName(), certificate, rotator.Trusted}
	}
	directory := o.Webhook.Directory
	certificate := func() (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(
			filepath.Join(directory, corev1.TLSCertKey), filepath.Join(directory, corev1.TLSPrivateKeyKey))
		return &pair, err
	}
	return peerAuth{o.webhookName(), certificate, func() (*x509.CertPool, error) { return trustedCertificates(directory) }}
}

// client returns the client that replicas call each other's webhook servers with.
func (p peerAuth) client() *http.Client {
	return &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{
			MinVersion:         tls.VersionTLS12,
			InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies: the authorities change while this runs
			VerifyConnection:   p.verify,
			GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
				return p.certificate()
			},
		},
		ForceAttemptHTTP2: true,
	}}
}

// requestCertificates makes a server request client certificates, and accept clients without one: the API server, which
// calls the webhooks, does not have one.
func requestCertificates(c *tls.Config) { c.ClientAuth = tls.RequestClientCert }

// requireReplica returns a handler that answers other replicas, and refuses clients without their certificate.
func (p peerAuth) requireReplica(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if request.TLS == nil {
			http.Error(w, "this path needs TLS", http.StatusUnauthorized)
			return
		}
		if err := p.verify(*request.TLS); err != nil {
			klog.FromContext(request.Context()).V(2).Info("Refused a client without the certificate of a replica",
				"path", request.URL.Path, "address", request.RemoteAddr, "err", err)
			http.Error(w, "only controller replicas may use this endpoint: "+err.Error(), http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, request)
	})
}

// verify verifies that the other end of a connection has the certificate of a replica.
func (p peerAuth) verify(state tls.ConnectionState) error {
	if len(state.PeerCertificates) == 0 {
		return errors.New("no certificate was presented")
	}
	roots, err := p.trusted()
	if err != nil {
		return err
	}
	intermediates := x509.NewCertPool()
	for _, c := range state.PeerCertificates[1:] {
		intermediates.AddCert(c)
	}
	// The certificates of webhook servers are for servers, which is the default of KeyUsages.
	_, err = state.PeerCertificates[0].Verify(x509.VerifyOptions{
		Roots: roots, Intermediates: intermediates, DNSName: p.name,
	})
	return err
}

// trustedCertificates returns the authorities that another component, such as
// cert-manager, wrote next to the certificate. All replicas have the same.
func trustedCertificates(directory string) (*x509.CertPool, error) {
	path := filepath.Join(directory, "ca.crt")
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(raw) {
		return nil, fmt.Errorf("%s contains no certificate", path)
	}
	return pool, nil
}
