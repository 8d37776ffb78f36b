package record

import (
	"encoding/json"
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
		Name: "x", Kind: "nic", Request: "r", Pool: "n1", Device: "nic0", ShareID: "s", Class: 0x10,
		Capacity: map[string]resource.Quantity{"bandwidth": resource.MustParse("100M")}, Parameters: json.RawMessage(`{"mode":"Private"}`),
	}}}
}

func store(t *testing.T) *Store {
	t.Helper()
	s, err := NewStore(filepath.Join(t.TempDir(), "claims"), "this-boot")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestARecordComesBackAsItWas(t *testing.T) {
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

func TestSharesDifferInWhatMatters(t *testing.T) {
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
	b.Class = 0x20
	b.Capacity = map[string]resource.Quantity{"bandwidth": resource.MustParse("0.1G")}
	if !a.Same(b) {
		t.Error("the class is ours, and 0.1G is 100M")
	}
}

func TestNothingIsHalfWritten(t *testing.T) {
	s := store(t)
	if err := s.Put(claim("u")); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(s.dir, 0o500); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Chmod(s.dir, 0o700) })
	if os.Geteuid() == 0 {
		t.Skip("root may write anywhere: run without root")
	}
	changed := claim("u")
	changed.Phase = Unpreparing
	if err := s.Put(changed); err == nil || !strings.Contains(err.Error(), "write record of claim n/c") {
		t.Errorf("got %v", err)
	}
	if got, err := s.Get("u"); err != nil || got.Phase != Prepared {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestAnUnreadableRecordIsNamedAndHidesNoOther(t *testing.T) {
	s := store(t)
	if err := s.Put(claim("good")); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"torn": `{"vers`, "newer": `{"version": 7}`} {
		if err := os.WriteFile(filepath.Join(s.dir, name+".json"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	claims, err := s.List()
	if len(claims) != 1 || err == nil || !strings.Contains(err.Error(), "torn.json") || !strings.Contains(err.Error(), "newer.json has version 7, this plugin reads 1") {
		t.Errorf("%v, %v", claims, err)
	}
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
