package certs

import "testing"

func TestOnlyWhoDoesNotTrustTheAuthorityIsChanged(t *testing.T) {
	raw, err := caPatch([][]byte{[]byte("new"), nil, []byte("old")}, []byte("new"))
	if want := `[{"op":"add","path":"/webhooks/1/clientConfig/caBundle","value":"bmV3"},{"op":"add","path":"/webhooks/2/clientConfig/caBundle","value":"bmV3"}]`; err != nil || string(raw) != want {
		t.Errorf("%s, %v", raw, err)
	}
	if raw, err := caPatch([][]byte{[]byte("new")}, []byte("new")); raw != nil || err != nil {
		t.Errorf("%s, %v", raw, err)
	}
}
