package certs

import (
	"context"
	"testing"

	admissionregistration "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

// Somebody deleted one configuration: that is said, and the other one is trusted.
func TestAConfigurationThatIsMissingKeepsNoOther(t *testing.T) {
	ctx := context.Background()
	client := fake.NewClientset(
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "ca"}, Data: map[string][]byte{"ca.crt": []byte("authority")}},
		&admissionregistration.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "ours"}, Webhooks: []admissionregistration.ValidatingWebhook{{Name: "a"}, {Name: "b"}}},
	)
	i := &injector{cluster: client, options: Options{Namespace: "ns", Secret: "ca", Configurations: []string{"ours"}}}
	if err := i.inject(ctx); !apierrors.IsNotFound(err) {
		t.Errorf("got %v, want that the mutating configuration is missing", err)
	}
	configuration, err := client.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(ctx, "ours", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range configuration.Webhooks {
		if string(w.ClientConfig.CABundle) != "authority" {
			t.Errorf("webhook %s trusts %q", w.Name, w.ClientConfig.CABundle)
		}
	}
}

func TestOnlyWhoDoesNotTrustTheAuthorityIsChanged(t *testing.T) {
	raw, err := caPatch([][]byte{[]byte("new"), nil, []byte("old")}, []byte("new"))
	if want := `[{"op":"add","path":"/webhooks/1/clientConfig/caBundle","value":"bmV3"},{"op":"add","path":"/webhooks/2/clientConfig/caBundle","value":"bmV3"}]`; err != nil || string(raw) != want {
		t.Errorf("%s, %v", raw, err)
	}
	if raw, err := caPatch([][]byte{[]byte("new")}, []byte("new")); raw != nil || err != nil {
		t.Errorf("%s, %v", raw, err)
	}
}
