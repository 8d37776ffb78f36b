package main

import (
	"strings"
	"testing"
)

func TestABedIsNotPutWhereNodesMountOverIt(t *testing.T) {
	for _, dir := range []string{"/run/x", "/var/lib/x", "/var/log"} {
		if _, err := newBed(dir); err == nil || !strings.Contains(err.Error(), "choose a directory elsewhere") {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

func TestBedsHaveCgroupsOfTheirOwnThatALaterProcessFinds(t *testing.T) {
	a, err := newBed("/tmp/a")
	if err != nil {
		t.Fatal(err)
	}
	b, err := newBed("/tmp/b")
	if err != nil {
		t.Fatal(err)
	}
	again, err := newBed("/tmp/../tmp/a")
	if err != nil {
		t.Fatal(err)
	}
	if a.id == b.id || a.id != again.id {
		t.Errorf("%s %s %s", a.id, b.id, again.id)
	}
}

func TestOptionsThatAreWrongAreNamed(t *testing.T) {
	b, err := newBed(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		o    options
		want string
	}{
		{options{Nodes: 3, Gates: "default"}, "--nodes 3: must be 0, 1 or 2"},
		{options{Nodes: 1, Gates: "some"}, `--gates "some": must be default, all, capacity or no-capacity`},
		{options{Nodes: 1, Gates: "default", Kubernetes: "v1.35.4"}, "--kubernetes v1.35.4: nodes are of v1.37.1 only: say --nodes 0"},
	} {
		if err := b.up(t.Context(), tc.o, "."); err == nil || err.Error() != tc.want {
			t.Errorf("got %v, want %s", err, tc.want)
		}
	}
}
