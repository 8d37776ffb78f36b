// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
)

func claim(uid types.UID) *Claim {
	return &Claim{Phase: Prepared, Namespace: "n", Name: "c", UID: uid, Shares: []Share{{
		Name: "x", Kind: "nic", Request: "r", Pool: "n1", Device: "nic0", ShareID: "s", Number: 0x10,
		Capacity: map[string]resource.Quantity{
			"bandwidth": resource.MustParse("100M"),
		}, Parameters: json.RawMessage(`{"mode":"Private"}`),
	}}}
}

func store(t *testing.T) *Store {
	t.Helper()
	s, err := NewStore(filepath.Join(t.TempDir(), "claims"), "this-boot", nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestCapacitiesOf(t *testing.T) {
	memory := func(amount string) map[string]resource.Quantity {
		return map[string]resource.Quantity{"memory": resource.MustParse(amount)}
	}
	shares := []*Share{
		{Name: "a", Capacity: memory("1Gi")}, {Name: "b", AdminAccess: true}, {Name: "c", Capacity: memory("2Gi")},
	}
	want := []map[string]resource.Quantity{memory("1Gi"), nil, memory("2Gi")}
	if diff := cmp.Diff(want, CapacitiesOf(shares)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := CapacitiesOf(nil); len(got) != 0 {
		t.Errorf("without shares: %v", got)
	}
}

func TestStore_roundTrip(t *testing.T) {
	s := store(t)
	want := claim("u")
	if err := s.Put(want); err != nil {
		t.Fatal(err)
	}
	got, err := s.Get("u")
	if err != nil || got.BootID != "this-boot" || got.Version != Version {
		t.Fatalf("%+v, %v", got, err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	got.Phase, got.Shares = Unpreparing, append(got.Shares, Share{Name: "y"})
	if again, err := s.Get("u"); err != nil || again.Phase != Prepared || len(again.Shares) != 1 {
		t.Errorf("after the caller changed an earlier result: %+v, %v", again, err)
	}
	if !got.Shares[0].Same(want.Shares[0]) {
		t.Error("its share is not the same")
	}
	for range 2 {
		if err := s.Delete("u"); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := s.Get("u"); got != nil || err != nil {
		t.Errorf("after Delete: %+v, %v", got, err)
	}
}

func TestShare_Same(t *testing.T) {
	a := claim("u").Shares[0]
	for name, change := range map[string]func(*Share){
		"share ID": func(s *Share) { s.ShareID = "other" },
		"device":   func(s *Share) { s.Device = "nic1" },
		"capacity": func(s *Share) { s.Capacity = map[string]resource.Quantity{"bandwidth": resource.MustParse("200M")} },
	} {
		b := claim("u").Shares[0]
		change(&b)
		if a.Same(b) {
			t.Errorf("another %s, and the same share", name)
		}
	}
	b := claim("u").Shares[0]
	b.Number = 0x20
	b.Capacity = map[string]resource.Quantity{"bandwidth": resource.MustParse("0.1G")}
	if !a.Same(b) {
		t.Error("the class is the NIC class, and 0.1G is 100M")
	}
}

func TestStore_Put_isAtomic(t *testing.T) {
	s := store(t)
	if err := s.Put(claim("u")); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	for _, at := range []string{"write claim record", "rename claim record"} {
		s.failpoints = func(name string, do func() error) error {
			if name == at {
				return broken
			}
			return do()
		}
		changed := claim("u")
		changed.Phase = Unpreparing
		if err := s.Put(changed); !errors.Is(err, broken) || !strings.Contains(err.Error(), "write record of claim n/c") {
			t.Errorf("%s: got %v", at, err)
		}
		if got, err := s.Get("u"); err != nil || got.Phase != Prepared {
			t.Errorf("%s: %+v, %v", at, got, err)
		}
		if left, err := os.ReadDir(s.dir); err != nil || len(left) != 1 {
			t.Errorf("%s: left %v, %v", at, left, err)
		}
	}
}

func TestStore_List_withUnreadableRecords(t *testing.T) {
	s := store(t)
	if err := s.Put(claim("good")); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"torn": `{"vers`, "newer": `{"version": 7}`, "wrong": `{"version": 1, "uid": "good", "phase": "Prepared"}`,
		"odd": `{"version": 1, "uid": "odd", "phase": "Odd"}`, "zero": `{}`, "empty": "",
	} {
		if err := os.WriteFile(filepath.Join(s.dir, name+".json"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	wants := []string{
		"torn.json: the record is corrupt",
		"newer.json: a newer plugin wrote the record: it has version 7, this plugin reads up to 1",
		"wrong.json: the record is corrupt: it belongs to claim good",
		`phase "Odd"`,
		"version 0",
		"empty.json: the record is corrupt: the file is empty: the node crashed before the record reached the disk",
	}
	claims, err := s.List()
	for _, want := range wants {
		if len(claims) != 1 || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%d records, want 1; error %v, want %s", len(claims), err, want)
		}
	}
	corrupt, err := s.RenameCorrupt()
	found := errors.Join(corrupt...)
	if err != nil || found == nil || strings.Contains(found.Error(), "newer.json") ||
		!strings.Contains(found.Error(), "torn.json") {
		t.Errorf("RenameCorrupt returned %v and error %v", found, err)
	}
	if _, err := s.List(); errors.Is(err, ErrCorrupt) || !errors.Is(err, ErrNewer) {
		t.Errorf("afterwards: %v", err)
	}
	kept, err := filepath.Glob(filepath.Join(s.dir, "*"+unreadableSuffix))
	if err != nil || len(kept) != 4 || strings.Contains(fmt.Sprint(kept), "empty") {
		t.Errorf("kept: %v, %v", kept, err)
	}
	if _, err := os.Stat(filepath.Join(s.dir, "empty.json")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the empty record remains: %v", err)
	}
}

// Every release reads the records of all earlier releases.
func TestStore_readsRecordsOfEarlierReleases(t *testing.T) {
	golden, err := filepath.Glob("testdata/v*.json")
	if err != nil || len(golden) != Version {
		t.Fatalf("one file for each version that there was, want %d: %v %v", Version, golden, err)
	}
	for _, file := range golden {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		got, err := decode(raw)
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		want := claim("u")
		want.Version, want.BootID = got.Version, "this-boot"
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", file, diff)
		}
	}
}

// The plugin may be rolled back while pods run: the previous release reads what
// this one writes.
func TestStore_previousReleaseReadsRecord(t *testing.T) {
	want, err := os.ReadFile("testdata/v1.json")
	if err != nil {
		t.Fatal(err)
	}
	recorded, err := decode(want)
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewStore(t.TempDir(), recorded.BootID, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Put(recorded); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(s.dir, "u.json"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.TrimSpace(string(want)), string(got)); diff != "" {
		t.Errorf("claim record of this release (-previous release +this release):\n%s", diff)
	}
}

func FuzzClaim(f *testing.F) {
	f.Add(
		[]byte(
			`{"version": 1, "uid": "u", "phase": "Prepared", "shares": ` +
				`[{"name": "n", "device": "d", "capacity": {"bandwidth": "1G"}}]}`,
		),
	)
	f.Add([]byte(`{"version": 9}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := decode(raw)
		switch {
		case err != nil && !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrNewer):
			t.Errorf("%s: neither corrupt nor newer: %v", raw, err)
		case err == nil && (c.UID == "" || c.Version != Version):
			t.Errorf("%s: accepted as %+v", raw, c)
		}
	})
}

func FuzzUID(f *testing.F) {
	f.Add("9b2a4c1e-0000-0000-0000-000000000000")
	f.Add("../x")
	f.Add("..")
	f.Fuzz(func(t *testing.T, uid string) {
		s := &Store{dir: "/dir"}
		path, err := s.path(types.UID(uid))
		if err == nil && filepath.Dir(path) != "/dir" {
			t.Errorf("%q: %s", uid, path)
		}
	})
}
