// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/dra-shared/dra-driver-shared/attach"
	"github.com/dra-shared/dra-driver-shared/driver/record"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// Shares that the driver cannot see must not look free.
func TestRecords_failIfDirectoryCannotBeListed(t *testing.T) {
	for _, unlisted := range []string{"claims", "attached"} {
		t.Run(unlisted, func(t *testing.T) {
			dir := t.TempDir()
			claims, err := record.NewStore(filepath.Join(dir, "claims"), "boot", nil)
			if err != nil {
				t.Fatal(err)
			}
			records := &nodeRecords{claims: claims, attachments: attach.OpenRecords(dir, "boot", nil)}
			if _, err := records.sharesOfOtherClaims(t.Context(), "uid", nil); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, unlisted)
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, nil, 0o600); err != nil { // ENOTDIR
				t.Fatal(err)
			}
			if _, err := records.sharesOfOtherClaims(t.Context(), "uid", nil); !errors.Is(err, files.ErrUnlisted) {
				t.Errorf("shares of other claims: got error %v, want %v", err, files.ErrUnlisted)
			}
			if _, err := records.Claims(); (unlisted == "claims") != errors.Is(err, files.ErrUnlisted) {
				t.Errorf("claims that reservations are for: got error %v, want %v", err, files.ErrUnlisted)
			}
		})
	}
}
