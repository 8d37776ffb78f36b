// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package certs

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	authorityLifetime = 365 * 24 * time.Hour
	leafLifetime      = 7 * 24 * time.Hour
	// trustOverlap is how long the webhook configurations trust a new authority
	// before it signs. It covers replicas and API servers that learn of the change
	// late.
	trustOverlap = time.Hour
	// clockSkew is how far an API server's clock may be behind the controller's.
	clockSkew = 5 * time.Minute
)

// Keys of the Secret in addition to corev1.TLSCertKey and corev1.TLSPrivateKeyKey,
// which have the current authority. While there is only one authority, ca.crt
// equals tls.crt, as in Secrets that earlier releases wrote.
const (
	trustedKey         = "ca.crt"
	nextCertificateKey = "next.crt"
	nextPrivateKeyKey  = "next.key"
)

// authority is a certificate authority with its private key.
type authority struct {
	certificate                   *x509.Certificate
	key                           crypto.Signer
	certificatePEM, privateKeyPEM []byte
}

// authoritySet is the content of the Secret.
type authoritySet struct {
	current *authority // signs; nil if the Secret does not have a usable authority
	next    *authority // replaces current after trustOverlap; may be nil
	// trusted are the certificates of current and next, and of previous authorities if their signatures may still be in
	// use.
	trusted []*x509.Certificate
}

// decodeAuthorities reads the data of a Secret and omits authorities that it cannot use.
func decodeAuthorities(data map[string][]byte) authoritySet {
	a := authoritySet{trusted: decodeCertificates(data[trustedKey])}
	a.current = decodeAuthority(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	next := decodeAuthority(data[nextCertificateKey], data[nextPrivateKeyKey])
	// The webhook configurations do not trust an authority that is missing here: a
	// previous release of the controller may have rewritten the other keys.
	if next != nil && slices.ContainsFunc(a.trusted, next.certificate.Equal) {
		a.next = next
	}
	return a
}

func decodeAuthority(certificate, key []byte) *authority {
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil
	}
	signer, ok := pair.PrivateKey.(crypto.Signer)
	if !ok || pair.Leaf == nil || !pair.Leaf.IsCA {
		return nil
	}
	return &authority{certificate: pair.Leaf, key: signer, certificatePEM: certificate, privateKeyPEM: key}
}

// decodeCertificates returns the certificates of a PEM file up to the first that
// it cannot parse.
func decodeCertificates(raw []byte) (certificates []*x509.Certificate) {
	for {
		block, rest := pem.Decode(raw)
		if block == nil {
			return certificates
		}
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return certificates
		}
		certificates, raw = append(certificates, certificate), rest
	}
}

// advance takes the next step that is due at the time now, and returns the
// reason for it. The result has a current authority.
func (a authoritySet) advance(commonName string, now time.Time) (authoritySet, string, error) {
	usable := a.current != nil && now.Before(a.current.certificate.NotAfter)
	promotable := a.next != nil && now.Before(a.next.certificate.NotAfter)
	switch {
	case promotable && (!usable || now.Sub(a.next.created()) >= trustOverlap):
		a.current, a.next = a.next, nil
		return a.prune(now), "the next authority replaces the current one", nil
	case !usable:
		generated, err := newAuthority(commonName, now)
		a.current, a.next = generated, nil
		return a.prune(now), "the Secret has no valid authority", err
	case a.next == nil && renewalDue(a.current.certificate, now):
		generated, err := newAuthority(commonName, now)
		a.next = generated
		return a.prune(now), "the current authority is nearing expiry", err
	}
	return a.prune(now), "the list of trusted authorities is out of date", nil
}

// prune returns the authorities with the trusted certificates that are in use at
// the time now.
func (a authoritySet) prune(now time.Time) authoritySet {
	var trusted []*x509.Certificate
	for _, own := range []*authority{a.current, a.next} {
		if own != nil {
			trusted = append(trusted, own.certificate)
		}
	}
	// Replicas may serve certificates of previous authorities until these expire.
	if a.current != nil && now.Sub(a.current.created()) < 2*trustOverlap+leafLifetime {
		for _, previous := range a.trusted {
			if now.Before(previous.NotAfter) && !slices.ContainsFunc(trusted, previous.Equal) {
				trusted = append(trusted, previous)
			}
		}
	}
	a.trusted = trusted
	return a
}

// renewalDue reports whether less than a third of a certificate's lifetime is
// left.
func renewalDue(certificate *x509.Certificate, now time.Time) bool {
	lifetime := certificate.NotAfter.Sub(certificate.NotBefore)
	return certificate.NotAfter.Sub(now) < lifetime/3
}

// newAuthority generates an authority with a new key.
func newAuthority(commonName string, now time.Time) (*authority, error) {
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: commonName},
		NotBefore:             now.Add(-clockSkew),
		NotAfter:              now.Add(authorityLifetime),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true, // signs no other authorities
	}
	certificate, key, err := generate(template, nil)
	if err != nil {
		return nil, fmt.Errorf("generate a certificate authority: %w", err)
	}
	rawKey, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode the key of a certificate authority: %w", err)
	}
	return &authority{
		certificate:    certificate,
		key:            key,
		certificatePEM: encodeCertificate(certificate),
		privateKeyPEM:  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: rawKey}),
	}, nil
}

// created returns the time when newAuthority generated the authority.
func (a *authority) created() time.Time { return a.certificate.NotBefore.Add(clockSkew) }

// sign issues a serving certificate with a new key. The certificate expires no later than the
// authority.
func (a *authority) sign(dnsNames []string, now time.Time) (*servingCertificate, error) {
	notAfter := now.Add(leafLifetime)
	if notAfter.After(a.certificate.NotAfter) {
		notAfter = a.certificate.NotAfter
	}
	template := &x509.Certificate{
		DNSNames:              dnsNames,
		NotBefore:             now.Add(-clockSkew),
		NotAfter:              notAfter,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	leaf, key, err := generate(template, a)
	if err != nil {
		return nil, err
	}
	pair := &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf}
	return &servingCertificate{pair: pair, leaf: leaf, issuer: a.certificate}, nil
}

// generate creates a key and a certificate for it that issuer signs; without an
// issuer the certificate signs itself.
func generate(template *x509.Certificate, issuer *authority) (*x509.Certificate, crypto.Signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	if issuer == nil {
		issuer = &authority{certificate: template, key: key}
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, issuer.certificate, key.Public(), issuer.key)
	if err != nil {
		return nil, nil, err
	}
	certificate, err := x509.ParseCertificate(raw)
	return certificate, key, err
}

// encode writes the authorities to the data of a Secret and leaves other keys
// alone.
func (a authoritySet) encode(data map[string][]byte) {
	data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey] = a.current.certificatePEM, a.current.privateKeyPEM
	delete(data, nextCertificateKey)
	delete(data, nextPrivateKeyKey)
	if a.next != nil {
		data[nextCertificateKey], data[nextPrivateKeyKey] = a.next.certificatePEM, a.next.privateKeyPEM
	}
	data[trustedKey] = a.bundle()
}

// bundle returns the trusted certificates in PEM.
func (a authoritySet) bundle() []byte {
	var b bytes.Buffer
	for _, certificate := range a.trusted {
		b.Write(encodeCertificate(certificate))
	}
	return b.Bytes()
}

func encodeCertificate(certificate *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Raw})
}
