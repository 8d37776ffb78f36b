// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// authority signs the certificates of a cluster and writes its files to DIR/pki.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

const certificateLife = 365 * 24 * time.Hour

func newAuthority(dir string) (*authority, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	a := &authority{dir: dir}
	template := certificateTemplate(pkix.Name{CommonName: "test-cluster"}, nil)
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage |= x509.KeyUsageCertSign
	var err error
	a.cert, a.key, err = a.write("ca", template, nil)
	if err != nil {
		return nil, err
	}
	// Service account tokens are signed with a separate key.
	_, _, err = a.write("service-account", certificateTemplate(pkix.Name{CommonName: "service-account"}, nil), a)
	return a, err
}

// loadAuthority returns the authority with its files in dir.
func loadAuthority(dir string) (*authority, error) {
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key"))
	if err != nil {
		return nil, fmt.Errorf("load the cluster's certificate authority: %w: is the cluster running?", err)
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("load the cluster's certificate authority: the key is a %T, want ECDSA", pair.PrivateKey)
	}
	return &authority{dir: dir, cert: pair.Leaf, key: key}, nil
}

// issueNode writes the certificate of a node's kubelet.
func (a *authority) issueNode(index int) error {
	name := nodeName(index)
	subject := pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}}
	return a.issue(name, subject, name, nodeIP(index))
}

func certificateTemplate(subject pkix.Name, hosts []string) *x509.Certificate {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 64))
	if err != nil {
		panic(err) // the system does not have a source of randomness
	}
	t := &x509.Certificate{
		SerialNumber: serial,
		Subject:      subject,
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(certificateLife),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, h)
		}
	}
	return t
}

// issue writes NAME.crt and NAME.key for a user or a server.
func (a *authority) issue(name string, subject pkix.Name, hosts ...string) error {
	_, _, err := a.write(name, certificateTemplate(subject, hosts), a)
	return err
}

// write creates a key, signs the template with the key of signer, or with the new
// key if signer is nil, and writes certificate and keys as PEM files.
func (a *authority) write(
	name string, template *x509.Certificate, signer *authority,
) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	parent, parentKey := template, key
	if signer != nil {
		parent, parentKey = signer.cert, signer.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), parentKey)
	if err != nil {
		return nil, nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, err
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	pubDER, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, nil, err
	}
	return cert, key, errors.Join(
		writePEM(filepath.Join(a.dir, name+".crt"), "CERTIFICATE", der, 0o644),
		writePEM(filepath.Join(a.dir, name+".key"), "EC PRIVATE KEY", keyDER, 0o600),
		writePEM(filepath.Join(a.dir, name+".pub"), "PUBLIC KEY", pubDER, 0o644),
	)
}

func writePEM(path, kind string, der []byte, mode os.FileMode) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), mode)
}

// kubeconfig writes a kubeconfig (in JSON, which is YAML) for a user with a certificate written by issue.
func (a *authority) kubeconfig(path, name, server string) error {
	raw, err := json.MarshalIndent(map[string]any{
		"apiVersion": "v1",
		"kind":       "Config",
		"clusters": []any{map[string]any{"name": "test", "cluster": map[string]any{
			"server": server, "certificate-authority": filepath.Join(a.dir, "ca.crt")}}},
		"users": []any{map[string]any{"name": name, "user": map[string]any{
			"client-certificate": filepath.Join(a.dir, name+".crt"), "client-key": filepath.Join(a.dir, name+".key")}}},
		"contexts": []any{map[string]any{
			"name": "test", "context": map[string]any{"cluster": "test", "user": name}}},
		"current-context": "test",
	}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, raw, 0o600)
}

// client returns an HTTP client that presents the certificate issued for name.
func (a *authority) client(name string) (*http.Client, error) {
	cert, err := tls.LoadX509KeyPair(filepath.Join(a.dir, name+".crt"), filepath.Join(a.dir, name+".key"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	config := &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
	return &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{TLSClientConfig: config}}, nil
}
