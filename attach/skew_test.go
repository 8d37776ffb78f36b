// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The files in testdata/v1 are what the release before the rename of the record's
// payload sent and wrote. "Version skew" in the package comment states the rules
// that these tests hold.

// fixture reads a file of testdata/v1.
func fixture(t *testing.T, name string) []byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", "v1", name))
	if err != nil {
		t.Fatal(err)
	}
	return bytes.TrimSpace(raw)
}

func TestSkew_pluginAcceptsPreviousHook(t *testing.T) {
	var r Request
	if err := json.Unmarshal(fixture(t, "request.json"), &r); err != nil {
		t.Fatal(err)
	}
	if err := r.validate(); err != nil {
		t.Errorf("request of the previous release: %v", err)
	}
}

func TestSkew_previousPluginAcceptsHook(t *testing.T) {
	want := fixture(t, "request.json")
	var r Request
	if err := json.Unmarshal(want, &r); err != nil {
		t.Fatal(err)
	}
	r.Version = ProtocolVersion
	got, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("request of this release (-previous release +this release):\n%s", diff)
	}
}

func TestSkew_hookUnderstandsPreviousPlugin(t *testing.T) {
	var r Response
	if err := json.Unmarshal(fixture(t, "response.json"), &r); err != nil || r.Error != "" {
		t.Errorf("response of the previous release: %+v, %v", r, err)
	}
}

// The previous plugin does not know refusals, and requires two descriptors of each
// request. It must not attach the share of a container that the hook refuses.
func TestSkew_previousPluginRejectsRefusals(t *testing.T) {
	a, b := pair(t)
	r := request()
	r.Refusal = "the pod uses the node's network"
	if err := send(a, r, open(t, r.descriptors())...); err != nil {
		t.Fatal(err)
	}
	var got Request
	if _, err := receive(b, &got, descriptorsIn); err == nil {
		t.Error("the previous plugin accepts a refusal as a request to attach the share")
	}
}

func TestSkew_refusesUnknownVersions(t *testing.T) {
	for _, version := range []int{oldestProtocol - 1, newestProtocol + 1} {
		r := request()
		r.Version = version
		if err := r.validate(); err == nil ||
			!strings.Contains(err.Error(), "are hook and plugin more than one release apart?") {
			t.Errorf("request of version %d: %v", version, err)
		}
	}
}

// A container restarts after an upgrade: the hook finds the attachment by the
// record of the previous release.
func TestSkew_readsPreviousRecord(t *testing.T) {
	r, err := decodeRecord(fixture(t, "record.json"))
	if err != nil {
		t.Fatal(err)
	}
	link, err := r.Link()
	want := Link{Parent: 4, Index: 2, Name: "net1", MAC: "02:11:22:33:44:55", MTU: 9000}
	if diff := cmp.Diff(want, link); diff != "" || err != nil || r.Number != 16 || r.Kind != "nic" ||
		r.Namespace.NSID != 3 {
		t.Errorf("record of the previous release: %+v, %v, link (-want +got):\n%s", r, err, diff)
	}
}

// The plugin is rolled back while pods run: the previous release reads what this
// one wrote.
func TestSkew_previousReleaseReadsRecord(t *testing.T) {
	want := fixture(t, "record.json")
	r, err := decodeRecord(want)
	if err != nil {
		t.Fatal(err)
	}
	records := OpenRecords(t.TempDir(), "boot", nil)
	if err := records.Write(r); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(records.path(r.ClaimUID, r.Share, r.Namespace))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("record of this release (-previous release +this release):\n%s", diff)
	}
}

// New optional fields need no new version.
func TestSkew_ignoresUnknownFields(t *testing.T) {
	record := bytes.Replace(fixture(t, "record.json"), []byte(`{"version":1,`), []byte(`{"version":1,"later":{"a":1},`), 1)
	if _, err := decodeRecord(record); err != nil {
		t.Errorf("record with an unknown field: %v", err)
	}
	var r Request
	raw := bytes.Replace(fixture(t, "request.json"), []byte(`{"version":1,`), []byte(`{"version":1,"later":true,`), 1)
	if err := json.Unmarshal(raw, &r); err != nil || r.validate() != nil {
		t.Errorf("request with an unknown field: %v, %v", err, r.validate())
	}
}
