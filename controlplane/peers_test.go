// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// peerAuthWith returns replicas with a self-signed certificate, as cert-manager issues it.
func peerAuthWith(t *testing.T, dnsName string) peerAuth {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		DNSNames: []string{dnsName}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
	}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	rawKey, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	directory := t.TempDir()
	encoded := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate})
	for file, content := range map[string][]byte{
		"tls.crt": encoded, "ca.crt": encoded,
		"tls.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: rawKey}),
	} {
		if err := os.WriteFile(filepath.Join(directory, file), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return newPeerAuth(Options{Namespace: "system", Webhook: Webhook{Service: "webhook", Directory: directory}}, nil)
}

// Only a client with the certificate of a replica gets answers, and a replica asks only servers with it.
func TestReplicas_requireReplica_refusesOtherClients(t *testing.T) {
	const name = "webhook.system.svc"
	own, others, misnamed := peerAuthWith(t, name), peerAuthWith(t, name), peerAuthWith(t, "other.system.svc")
	served := 0
	handler := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served++ })
	server := httptest.NewUnstartedServer(own.requireReplica(handler))
	certificate, err := own.certificate()
	if err != nil {
		t.Fatal(err)
	}
	server.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{*certificate}}
	requestCertificates(server.TLS)
	server.StartTLS()
	t.Cleanup(server.Close)

	anonymous := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	presents := func(p peerAuth) *http.Client {
		return peerAuth{name, p.certificate, own.trusted}.client()
	}
	for _, tc := range []struct {
		name   string
		client *http.Client
		want   int
	}{
		{"a replica", own.client(), http.StatusOK},
		{"a client without a certificate", anonymous, http.StatusUnauthorized},
		{"a certificate of another authority", presents(others), http.StatusUnauthorized},
		{"a certificate for another name", presents(misnamed), http.StatusUnauthorized},
	} {
		response, err := tc.client.Get(server.URL)
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
			continue
		}
		_ = response.Body.Close()
		if response.StatusCode != tc.want {
			t.Errorf("%s: got %s, want %d", tc.name, response.Status, tc.want)
		}
		tc.client.CloseIdleConnections()
	}
	if served != 1 {
		t.Errorf("the handler answered %d requests, want that of the replica only", served)
	}
	if response, err := others.client().Get(server.URL); err == nil {
		_ = response.Body.Close()
		t.Error("a replica asks a server with a certificate of another authority")
	}
}
