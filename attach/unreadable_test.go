// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// A record that the system cannot read, such as for lack of descriptors, may be intact.
func TestRecords_RenameCorrupt_keepsRecordsAfterSystemErrors(t *testing.T) {
	dir := t.TempDir()
	records := OpenRecords(dir, "boot", nil)
	unreadable := filepath.Join(dir, "attached", "a_1-0.json")
	if err := os.MkdirAll(unreadable, 0o700); err != nil { // reading a directory fails
		t.Fatal(err)
	}
	if corrupt, err := records.RenameCorrupt(); len(corrupt) != 0 || err != nil {
		t.Errorf("RenameCorrupt returned %v and error %v, want none", corrupt, err)
	}
	if _, err := os.Stat(unreadable); err != nil {
		t.Errorf("the record was renamed: %v", err)
	}
	if _, err := records.List(); !errors.Is(err, syscall.EISDIR) {
		t.Errorf("List returned the error %v, want %v", err, syscall.EISDIR)
	}
}

// After a rollback, the records of the newer release stay for it.
func TestRecords_RenameCorrupt_keepsNewerRecords(t *testing.T) {
	dir := t.TempDir()
	records := OpenRecords(dir, "boot", nil)
	newer, torn := filepath.Join(dir, "attached", "a_1-0.json"), filepath.Join(dir, "attached", "b_1-0.json")
	if err := os.MkdirAll(filepath.Dir(newer), 0o700); err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string]string{newer: `{"version": 99}`, torn: `{"vers`} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if corrupt, err := records.RenameCorrupt(); err != nil || len(corrupt) != 1 || errors.Is(corrupt[0], ErrNewerRecord) {
		t.Errorf("RenameCorrupt returned %v and error %v, want only the torn record", corrupt, err)
	}
	if _, err := os.Stat(newer); err != nil {
		t.Errorf("the newer record is gone: %v", err)
	}
	if _, err := os.Stat(torn); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the torn record still exists: %v", err)
	}
	if _, err := records.List(); !errors.Is(err, ErrNewerRecord) {
		t.Errorf("List returned the error %v, want one that says that a record is newer", err)
	}
}
