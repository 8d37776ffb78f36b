// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/utils/clock"

	"github.com/dra-shared/dra-driver-shared/controlplane/admission"
	"github.com/dra-shared/dra-driver-shared/controlplane/certs"
)

// renewDeadline is how long the leading replica tries to renew its lease, the default of
// controller-runtime.
const renewDeadline = 10 * time.Second

// newLeader returns the lock of leader election. Its identity tells other replicas where
// the leading one serves webhooks.
func newLeader(config *rest.Config, o Options, rotator *certs.Rotator) (*admission.Leader, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("leader election: %w", err)
	}
	identity := host + "_" + string(uuid.NewUUID())
	if o.Webhook.Port != 0 && o.Webhook.PodIP != "" {
		identity = admission.LeaderIdentity(identity, net.JoinHostPort(o.Webhook.PodIP, strconv.Itoa(o.Webhook.Port)))
	}
	lock, err := resourcelock.NewFromKubeconfig(resourcelock.LeasesResourceLock, o.Namespace, o.DriverName,
		resourcelock.ResourceLockConfig{Identity: identity},
		rest.AddUserAgent(config, "leader-election"), renewDeadline)
	if err != nil {
		return nil, fmt.Errorf("leader election: %w", err)
	}
	return &admission.Leader{Interface: lock, HTTP: newReplicaClient(o, rotator), Clock: clock.RealClock{}}, nil
}

// newReplicaClient returns the client with which replicas call each other's webhook servers.
func newReplicaClient(o Options, rotator *certs.Rotator) *http.Client {
	trusted := func() (*x509.CertPool, error) { return trustedCertificates(o.Webhook.Directory) }
	if rotator != nil {
		trusted = rotator.Trusted
	}
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{
			MinVersion:         tls.VersionTLS12,
			InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies: the authorities change while this runs
			VerifyConnection: func(state tls.ConnectionState) error {
				return verifyReplica(state, o.webhookName(), trusted)
			},
		},
		ForceAttemptHTTP2: true,
	}
	return &http.Client{Transport: transport}
}

// verifyReplica verifies that the server at the other end of a connection is the webhook
// server of a replica.
func verifyReplica(state tls.ConnectionState, name string, trusted func() (*x509.CertPool, error)) error {
	roots, err := trusted()
	if err != nil {
		return err
	}
	intermediates := x509.NewCertPool()
	for _, c := range state.PeerCertificates[1:] {
		intermediates.AddCert(c)
	}
	_, err = state.PeerCertificates[0].Verify(x509.VerifyOptions{
		Roots: roots, Intermediates: intermediates, DNSName: name,
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
		return nil, errors.New(path + " contains no certificate")
	}
	return pool, nil
}
