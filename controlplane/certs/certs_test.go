// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package certs

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	admissionregistration "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"
	testclock "k8s.io/utils/clock/testing"
)

const (
	namespace  = "ns"
	secretName = "webhook-ca"
	dnsName    = "webhook.ns.svc"
	webhooks   = "webhook"
)

var options = Options{
	Namespace:      namespace,
	Secret:         secretName,
	DNSNames:       []string{dnsName},
	Configurations: []string{webhooks},
}

// testEnv is an API server with the webhook configurations, and a clock.
type testEnv struct {
	*testing.T
	client   *fake.Clientset
	clock    *testclock.FakePassiveClock
	listener net.Listener
}

func newTestEnv(t *testing.T, objects ...runtime.Object) *testEnv {
	t.Helper()
	objects = append(objects,
		&admissionregistration.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: webhooks},
			Webhooks: []admissionregistration.MutatingWebhook{{Name: "a"}, {Name: "b"}}},
		&admissionregistration.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: webhooks},
			Webhooks: []admissionregistration.ValidatingWebhook{{Name: "c"}}})
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := listener.Close(); err != nil {
			t.Error(err)
		}
	})
	return &testEnv{
		T:        t,
		client:   fake.NewClientset(objects...),
		clock:    testclock.NewFakePassiveClock(start),
		listener: listener,
	}
}

// replica returns a Rotator that has not synced yet.
func (e *testEnv) replica() *Rotator { return NewRotator(e.client, options, e.clock) }

func (e *testEnv) advance(d time.Duration) { e.clock.SetTime(e.clock.Now().Add(d)) }

func (e *testEnv) sync(r *Rotator) {
	e.Helper()
	if err := r.sync(e.Context()); err != nil {
		e.Fatalf("sync at %s: %v", e.clock.Now(), err)
	}
}

func (e *testEnv) secret() *corev1.Secret {
	e.Helper()
	s, err := e.client.CoreV1().Secrets(namespace).Get(e.Context(), secretName, metav1.GetOptions{})
	if err != nil {
		e.Fatal(err)
	}
	return s
}

// bundle returns the CA bundle of the webhook configurations, which must agree.
func (e *testEnv) bundle() []byte {
	e.Helper()
	bundle, agree := e.currentBundle()
	if !agree {
		e.Fatal("the webhooks have different CA bundles")
	}
	return bundle
}

// currentBundle returns the CA bundle of the validating webhook, and whether the
// mutating ones have the same.
func (e *testEnv) currentBundle() (bundle []byte, agree bool) {
	e.Helper()
	api := e.client.AdmissionregistrationV1()
	mutating, err := api.MutatingWebhookConfigurations().Get(e.Context(), webhooks, metav1.GetOptions{})
	if err != nil {
		e.Fatal(err)
	}
	validating, err := api.ValidatingWebhookConfigurations().Get(e.Context(), webhooks, metav1.GetOptions{})
	if err != nil {
		e.Fatal(err)
	}
	bundle = validating.Webhooks[0].ClientConfig.CABundle
	for _, w := range mutating.Webhooks {
		if !bytes.Equal(w.ClientConfig.CABundle, bundle) {
			return bundle, false
		}
	}
	return bundle, true
}

// handshake connects to a replica as an API server does that trusts the bundle.
func (e *testEnv) handshake(r *Rotator, bundle []byte, now clock.PassiveClock) error {
	e.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(bundle)
	served := make(chan error, 1)
	go func() {
		connection, err := e.listener.Accept()
		if err != nil {
			served <- err
			return
		}
		server := tls.Server(connection, &tls.Config{GetCertificate: r.GetCertificate, MinVersion: tls.VersionTLS13})
		served <- errors.Join(server.HandshakeContext(e.Context()), connection.Close())
	}()
	address := e.listener.Addr()
	client, err := tls.Dial(address.Network(), address.String(), &tls.Config{
		RootCAs: roots, ServerName: dnsName, Time: now.Now, MinVersion: tls.VersionTLS13,
	})
	if serveErr := <-served; err != nil {
		return errors.Join(err, serveErr)
	}
	return client.Close()
}

func (e *testEnv) mustTrust(r *Rotator, bundle []byte, condition string) {
	e.Helper()
	if err := e.handshake(r, bundle, e.clock); err != nil {
		e.Fatalf("TLS handshake at %s, %s: %v", e.clock.Now(), condition, err)
	}
}

func TestRotator_firstSync(t *testing.T) {
	e := newTestEnv(t)
	r := e.replica()
	if _, err := r.GetCertificate(nil); err == nil {
		t.Error("GetCertificate succeeded before the first sync")
	}
	e.sync(r)
	e.mustTrust(r, e.bundle(), "after the first sync")

	other := newTestEnv(t)
	other.sync(other.replica())
	if err := e.handshake(r, other.bundle(), e.clock); err == nil {
		t.Error("a client that trusts another authority accepted the certificate")
	}
	s := e.secret()
	if !bytes.Equal(s.Data["ca.crt"], s.Data["tls.crt"]) || len(s.Data) != 3 {
		t.Error("a Secret with one authority differs from the format of earlier releases")
	}
	e.client.ClearActions()
	e.sync(r)
	for _, a := range e.client.Actions() {
		if a.GetVerb() != "get" {
			t.Errorf("a second sync wrote: %+v", a)
		}
	}
}

func TestRotator_toleratesClockSkew(t *testing.T) {
	e := newTestEnv(t)
	r := e.replica()
	e.sync(r)
	behind := testclock.NewFakePassiveClock(e.clock.Now().Add(-clockSkew + time.Second))
	if err := e.handshake(r, e.bundle(), behind); err != nil {
		t.Errorf("an API server whose clock is behind rejects the certificate: %v", err)
	}
}

func TestRotator_renewsServingCertificate(t *testing.T) {
	e := newTestEnv(t)
	r := e.replica()
	e.sync(r)
	first, bundle := r.serving.leaf, e.bundle()
	e.advance(leafLifetime / 2)
	e.sync(r)
	if !r.serving.leaf.Equal(first) {
		t.Error("the certificate was renewed after half its lifetime")
	}
	e.advance(leafLifetime / 4)
	e.sync(r)
	if r.serving.leaf.Equal(first) {
		t.Error("the certificate was not renewed after three quarters of its lifetime")
	}
	if !bytes.Equal(e.bundle(), bundle) {
		t.Error("renewing the serving certificate changed the CA bundle")
	}
	e.advance(leafLifetime / 2)
	e.mustTrust(r, bundle, "after the first certificate expired")
}

// A certificate that nothing renews must fail, or the tests above prove nothing.
func TestRotator_certificateExpiresWithoutSync(t *testing.T) {
	e := newTestEnv(t)
	r := e.replica()
	e.sync(r)
	e.advance(leafLifetime + time.Second)
	var invalid x509.CertificateInvalidError
	if err := e.handshake(r, e.bundle(), e.clock); !errors.As(err, &invalid) || invalid.Reason != x509.Expired {
		t.Errorf("handshake with an expired certificate: %v", err)
	}
}

// Two replicas run for two years. At every moment an API server accepts both, with
// the CA bundle from before and after each sync.
func TestRotator_rotationNeverBreaksTrust(t *testing.T) {
	e := newTestEnv(t)
	replicas := []*Rotator{e.replica(), e.replica()}
	for _, r := range replicas {
		e.sync(r)
	}
	issuers := map[string]bool{}
	bundleSizes := map[int]bool{}
	for day := 0; day < 2*365; day += 2 {
		e.advance(48 * time.Hour)
		for i := range replicas {
			before := e.bundle()
			e.sync(replicas[(i+day/2)%2]) // another replica is first each time
			for _, r := range replicas {
				e.mustTrust(r, before, "CA bundle from before the sync")
				e.mustTrust(r, e.bundle(), "CA bundle from after the sync")
			}
		}
		issuers[string(replicas[0].serving.issuer.Raw)] = true
		bundleSizes[len(decodeCertificates(e.bundle()))] = true
	}
	if len(issuers) < 3 {
		t.Errorf("%d authorities signed in two years, want at least 3", len(issuers))
	}
	if !bundleSizes[1] || !bundleSizes[2] || len(bundleSizes) != 2 {
		t.Errorf("CA bundles had these numbers of authorities: %v, want 1 and, during a rotation, 2", bundleSizes)
	}
}

func TestRotator_stagesOfRotation(t *testing.T) {
	e := newTestEnv(t)
	r := e.replica()
	e.sync(r)
	oldBundle := e.bundle()
	oldIssuer := r.serving.issuer
	expectStage := func(stage string, issuerIsOld bool, trusted int) {
		t.Helper()
		e.sync(r)
		restarted := e.replica() // replicas agree on the stage whenever they start
		e.sync(restarted)
		for _, r := range []*Rotator{r, restarted} {
			if got := r.serving.issuer.Equal(oldIssuer); got != issuerIsOld {
				t.Fatalf("%s: the old authority signs: %t, want %t", stage, got, issuerIsOld)
			}
			e.mustTrust(r, e.bundle(), stage)
		}
		if got := len(decodeCertificates(e.bundle())); got != trusted {
			t.Fatalf("%s: the CA bundle has %d authorities, want %d", stage, got, trusted)
		}
	}
	e.advance(authorityLifetime/3*2 - time.Hour)
	expectStage("before the rotation is due", true, 1)
	e.advance(time.Hour + time.Minute)
	expectStage("once the rotation is due", true, 2)
	e.advance(trustOverlap - time.Minute)
	expectStage("before the overlap ends", true, 2)
	e.mustTrust(r, oldBundle, "an API server that missed the new CA bundle")
	e.advance(time.Minute)
	expectStage("once the overlap has ended", false, 2)
	e.advance(leafLifetime)
	expectStage("while certificates of the old authority may be in use", false, 2)
	e.advance(2 * trustOverlap)
	expectStage("once the last certificate of the old authority has expired", false, 1)
	if err := e.handshake(r, oldBundle, e.clock); err == nil {
		t.Error("the old authority vouches for the new certificate")
	}
	for _, key := range []string{nextCertificateKey, nextPrivateKeyKey} {
		if _, ok := e.secret().Data[key]; ok {
			t.Errorf("after the rotation the Secret still has %s", key)
		}
	}
}

// selfSigned returns a certificate and key in PEM.
func selfSigned(t *testing.T, isCA bool, notBefore, notAfter time.Time) (certificate, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: secretName},
		NotBefore:             notBefore,
		NotAfter:              notAfter,
		IsCA:                  isCA,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment,
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, template, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	rawKey, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(
			&pem.Block{Type: "CERTIFICATE", Bytes: raw},
		), pem.EncodeToMemory(
			&pem.Block{Type: "PRIVATE KEY", Bytes: rawKey},
		)
}

func secretWith(data map[string][]byte) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: secretName, Labels: map[string]string{"keep": "me"}},
		Data:       data,
	}
}

func TestRotator_adoptsAuthorityOfEarlierRelease(t *testing.T) {
	now := newTestEnv(t).clock.Now()
	certificate, key := selfSigned(t, true, now.Add(-24*time.Hour), now.Add(364*24*time.Hour))
	e := newTestEnv(t, secretWith(map[string][]byte{"ca.crt": certificate, "tls.crt": certificate, "tls.key": key}))
	r := e.replica()
	e.sync(r)
	for _, a := range e.client.Actions() {
		if a.GetResource().Resource == "secrets" && a.GetVerb() != "get" {
			t.Errorf("the Secret was rewritten: %+v", a)
		}
	}
	if !bytes.Equal(e.bundle(), certificate) {
		t.Error("the CA bundle is not the authority of the Secret")
	}
	e.mustTrust(r, certificate, "authority of an earlier release")
}

func TestRotator_replacesUnusableAuthority(t *testing.T) {
	now := newTestEnv(t).clock.Now()
	certificate, key := selfSigned(t, true, now.Add(-time.Hour), now.Add(time.Hour))
	_, otherKey := selfSigned(t, true, now, now)
	leaf, leafKey := selfSigned(t, false, now.Add(-time.Hour), now.Add(time.Hour))
	expired, expiredKey := selfSigned(t, true, now.Add(-2*time.Hour), now.Add(-time.Hour))
	for _, tc := range []struct {
		name string
		data map[string][]byte
	}{
		{"the chart's empty Secret", nil},
		{"no key", map[string][]byte{"ca.crt": certificate, "tls.crt": certificate}},
		{
			"the key of another certificate",
			map[string][]byte{"ca.crt": certificate, "tls.crt": certificate, "tls.key": otherKey},
		},
		{"no PEM", map[string][]byte{"ca.crt": []byte("x"), "tls.crt": []byte("x"), "tls.key": key}},
		{"not an authority", map[string][]byte{"ca.crt": leaf, "tls.crt": leaf, "tls.key": leafKey}},
		{"expired", map[string][]byte{"ca.crt": expired, "tls.crt": expired, "tls.key": expiredKey}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newTestEnv(t, secretWith(tc.data))
			r := e.replica()
			e.sync(r)
			e.mustTrust(r, e.bundle(), "after the replacement")
			if got := e.secret().Labels["keep"]; got != "me" {
				t.Errorf("the Secret lost its labels")
			}
			if strings.Contains(string(e.bundle()), string(expired)) {
				t.Error("the CA bundle has an expired authority")
			}
		})
	}
}

// An earlier release, which runs next to this one during an upgrade or a rollback,
// replaces ca.crt and does not know the next authority.
func TestRotator_discardsUntrustedNextAuthority(t *testing.T) {
	e := newTestEnv(t)
	r := e.replica()
	e.sync(r)
	e.advance(authorityLifetime / 4 * 3)
	e.sync(r)
	s := e.secret()
	abandoned := s.Data[nextCertificateKey]
	if len(abandoned) == 0 {
		t.Fatal("no rotation is under way")
	}
	now := e.clock.Now()
	certificate, key := selfSigned(t, true, now, now.Add(authorityLifetime))
	s.Data["ca.crt"], s.Data["tls.crt"], s.Data["tls.key"] = certificate, certificate, key
	if _, err := e.client.CoreV1().Secrets(namespace).Update(t.Context(), s, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	e.sync(r)
	e.mustTrust(r, certificate, "after an earlier release replaced the authority")
	e.advance(2 * trustOverlap)
	e.sync(r)
	if r.serving.issuer.Equal(decodeCertificates(abandoned)[0]) || bytes.Contains(e.bundle(), abandoned) {
		t.Error("the abandoned authority is in use")
	}
}

func TestRotator_racingReplicasAgreeOnAuthority(t *testing.T) {
	for _, tc := range []struct {
		verb    string
		objects []runtime.Object
		answer  error
	}{
		{"create", nil, apierrors.NewAlreadyExists(corev1.Resource("secrets"), secretName)},
		{"update", []runtime.Object{secretWith(nil)}, apierrors.NewConflict(corev1.Resource("secrets"), secretName, nil)},
	} {
		t.Run(tc.verb, func(t *testing.T) {
			e := newTestEnv(t, tc.objects...)
			fast := e.replica()
			// The slow replica has a separate client, because a fake client is locked while
			// it reacts.
			client := &fake.Clientset{}
			client.AddReactor("*", "*", clienttesting.ObjectReaction(e.client.Tracker()))
			slow := NewRotator(client, options, e.clock)
			raced := false
			client.PrependReactor(tc.verb, "secrets", func(clienttesting.Action) (bool, runtime.Object, error) {
				if raced {
					return false, nil, nil
				}
				raced = true
				e.sync(fast)
				return true, nil, tc.answer
			})
			e.sync(slow)
			if !raced || !slow.serving.issuer.Equal(fast.serving.issuer) {
				t.Errorf("raced: %t; the replicas use different authorities", raced)
			}
			e.mustTrust(slow, e.bundle(), "slow replica")
			e.mustTrust(fast, e.bundle(), "fast replica")
		})
	}
}

func TestRotator_Start(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	e := newTestEnv(t)
	r := NewRotator(e.client, options, clock.RealClock{})
	stopped := make(chan error, 1)
	go func() { stopped <- r.Start(ctx) }()
	// untilServed waits until the replica serves a certificate that the webhook
	// configurations trust, and returns who signed it.
	untilServed := func(condition string, previous *x509.Certificate) (issuer *x509.Certificate) {
		t.Helper()
		const interval, timeout = 5 * time.Millisecond, 5 * time.Second
		err := wait.PollUntilContextTimeout(ctx, interval, timeout, true, func(context.Context) (bool, error) {
			r.mu.Lock()
			serving := r.serving
			r.mu.Unlock()
			if serving == nil || previous != nil && serving.issuer.Equal(previous) {
				return false, nil
			}
			issuer = serving.issuer
			//nolint:contextcheck // the helper uses the test's context
			bundle, agree := e.currentBundle() // may be in the middle of an update
			//nolint:contextcheck // the helper uses the test's context
			return agree && e.handshake(r, bundle, clock.RealClock{}) == nil, nil
		})
		if err != nil {
			t.Errorf("%s: the replica does not serve a trusted certificate: %v", condition, err)
		}
		return issuer
	}
	first := untilServed("after the start", nil)
	// Deleting the Secret is how an administrator replaces the authority immediately.
	if err := e.client.CoreV1().Secrets(namespace).Delete(ctx, secretName, metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
	second := untilServed("after the Secret was deleted", first)
	if second == nil {
		t.FailNow()
	}
	// Helm replaces the webhooks, and their bundles with them.
	api := e.client.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	replaced := &admissionregistration.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: webhooks},
		Webhooks: []admissionregistration.ValidatingWebhook{{Name: "c"}}}
	if _, err := api.Update(ctx, replaced, metav1.UpdateOptions{}); err != nil {
		t.Error(err)
	}
	untilServed("after the validating configuration was replaced", first)
	cancel()
	if err := <-stopped; err != nil {
		t.Errorf("Start returned %v after its context ended", err)
	}
}

func TestRotator_injectsIntoRemainingConfigurations(t *testing.T) {
	e := newTestEnv(t)
	if err := e.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Delete(
		t.Context(),
		webhooks,
		metav1.DeleteOptions{},
	); err != nil {
		t.Fatal(err)
	}
	r := e.replica()
	err := r.sync(t.Context())
	if !apierrors.IsNotFound(err) || !strings.Contains(err.Error(), "`helm upgrade` recreates it") {
		t.Errorf("sync returned %v, want that the mutating configuration is missing, and the remedy", err)
	}
	validating, err := e.client.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(
		t.Context(),
		webhooks,
		metav1.GetOptions{},
	)
	if err != nil {
		t.Fatal(err)
	}
	e.mustTrust(r, validating.Webhooks[0].ClientConfig.CABundle, "validating webhook")
}

func TestBundlePatch(t *testing.T) {
	raw, err := bundlePatch("7", [][]byte{[]byte("new"), nil, []byte("old")}, []byte("new"))
	want := `[{"op":"add","path":"/webhooks/1/clientConfig/caBundle","value":"bmV3"},` +
		`{"op":"add","path":"/webhooks/2/clientConfig/caBundle","value":"bmV3"},` +
		`{"op":"replace","path":"/metadata/resourceVersion","value":"7"}]`
	if err != nil || string(raw) != want {
		t.Errorf("patch %s, %v, want %s", raw, err, want)
	}
	if raw, err := bundlePatch("7", [][]byte{[]byte("new")}, []byte("new")); raw != nil || err != nil {
		t.Errorf("patch %s, %v, want none", raw, err)
	}
}
