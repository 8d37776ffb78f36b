// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package record stores claim records: one file per claim that is prepared on this node. The record is enough to
// unprepare a claim completely, even after the claim, its pods, and the process that prepared it are gone.
//
// The plugin writes the record before the first and after the last side effect of each step. So a record has the
// intended state; the kernel has the actual one.
//
// The files are authoritative, because two plugins use the directory during a
// rolling update. A Store keeps the parsed records in memory and reads a file again
// only if it was replaced.
//
// A release reads the records of all earlier releases, and writes what the previous release can read, because the
// plugin may be rolled back while pods run. Therefore, a new version takes two releases: the first reads it, the
// second writes it. New optional fields do not need a new version, because readers ignore unknown fields.
package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// Version is the format version that this release writes, and the newest that it reads.
const Version = 1

// Phase is the phase of a claim on this node.
type Phase string

// Phases, in order.
const (
	Preparing   Phase = "Preparing"
	Prepared    Phase = "Prepared"
	Unpreparing Phase = "Unpreparing"
)

// Claim is the record of a ResourceClaim that is prepared on this node.
type Claim struct {
	Version   int       `json:"version"`
	BootID    string    `json:"bootID"`
	Phase     Phase     `json:"phase"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
	Shares    []Share   `json:"shares"`
}

// Share is one allocation result of a claim. The claim's UID, the pool, the device,
// and the share ID identify it.
type Share struct {
	// Name is the name of the CDI device, unique on the node.
	Name string `json:"name"`
	// Kind is the name of the device kind.
	Kind    string    `json:"kind"`
	Request string    `json:"request"` // including a subrequest
	Pool    string    `json:"pool"`
	Device  string    `json:"device"`
	ShareID types.UID `json:"shareID,omitempty"`
	// AdminAccess means that the claim observes the device and consumes nothing.
	AdminAccess bool `json:"adminAccess,omitempty"`
	// Capacity is the grant: the consumedCapacity of the allocation.
	Capacity map[string]resource.Quantity `json:"capacity,omitempty"`
	// Number is the share's number on its device, unique among the device's shares: FirstNumber or higher. 0 means that
	// the share has none. A kind may use it to number kernel objects; the JSON name dates from the minor number of a
	// class.
	Number uint16 `json:"class,omitempty"`
	// Parameters is the result of the kind's Configure.
	Parameters json.RawMessage `json:"parameters,omitempty"`
}

// FirstNumber is the lowest Number of a share. Lower numbers are reserved for the kinds.
const FirstNumber = 0x10

// Same reports whether two shares are the same allocation.
func (s Share) Same(other Share) bool {
	if s.Name != other.Name || s.Pool != other.Pool || s.Device != other.Device || s.ShareID != other.ShareID ||
		s.AdminAccess != other.AdminAccess || len(s.Capacity) != len(other.Capacity) {
		return false
	}
	for name, q := range s.Capacity {
		if o, ok := other.Capacity[name]; !ok || q.Cmp(o) != 0 {
			return false
		}
	}
	return true
}

// CapacitiesOf returns the grant of each share, in the order of the shares.
func CapacitiesOf(shares []*Share) []map[string]resource.Quantity {
	grants := make([]map[string]resource.Quantity, len(shares))
	for i, s := range shares {
		grants[i] = s.Capacity
	}
	return grants
}

// Share returns the share of that name.
func (c *Claim) Share(name string) (Share, bool) {
	for _, s := range c.Shares {
		if s.Name == name {
			return s, true
		}
	}
	return Share{}, false
}

// SharesOf returns the shares of one device kind.
func (c *Claim) SharesOf(kind string) (shares []Share) {
	for _, s := range c.Shares {
		if s.Kind == kind {
			shares = append(shares, s)
		}
	}
	return shares
}

// Store is a directory of records.
type Store struct {
	dir        string
	bootID     string
	failpoints failpoint.Injector

	records *files.Directory[*Claim]
}

// suffix is the suffix of record file names.
const suffix = ".json"

// Dir returns the directory of the claim records below a plugin's directory.
func Dir(pluginDir string) string { return filepath.Join(pluginDir, "claims") }

// NewStore opens the directory, and creates it if it does not exist. New records
// contain bootID, the kernel's ID of the current boot.
func NewStore(dir, bootID string, failpoints failpoint.Injector) (*Store, error) {
	s := &Store{dir: dir, bootID: bootID, failpoints: failpoints, records: files.NewDirectory(dir, "", suffix, read)}
	return s, s.MakeDir()
}

// MakeDir creates the directory of the records again if it was removed.
func (s *Store) MakeDir() error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return fmt.Errorf("open claim records: %w", err)
	}
	return nil
}

func (s *Store) path(uid types.UID) (string, error) {
	// The UID comes from the API server through the kubelet, and becomes part of a path.
	if uid == "" || strings.ContainsAny(string(uid), "/\x00") || strings.HasPrefix(string(uid), ".") {
		return "", fmt.Errorf("claim UID %q is not usable as a file name", uid)
	}
	return filepath.Join(s.dir, string(uid)+suffix), nil
}

// Put writes a record atomically for all processes of the node. It does not sync the file, which takes milliseconds
// on a disk: after a node crash, the file may be missing, be empty, or have its former content. None of that matters,
// because the kubelet prepares claims again after a boot, and a record from an earlier boot is not used.
func (s *Store) Put(c *Claim) error {
	c.Version, c.BootID = Version, s.bootID
	path, err := s.path(c.UID)
	if err != nil {
		return err
	}
	raw, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if err := files.Replace(s.failpoints, "claim record", path, raw, files.Options{Mode: 0o600}); err != nil {
		return fmt.Errorf("write record of claim %s/%s: %w", c.Namespace, c.Name, err)
	}
	return nil
}

// Current reports whether a record was written since the node booted. An older record's kernel objects no longer
// exist.
func (s *Store) Current(c *Claim) bool { return c.BootID == s.bootID }

// Errors of Get and List for one record.
var (
	// ErrCorrupt means that no release can read the record.
	ErrCorrupt = errors.New("the record is corrupt")
	// ErrNewer means that a newer release wrote the record and can read it.
	ErrNewer = errors.New("a newer plugin wrote the record")
)

// Get returns the record of a claim, or nil if there is none. The caller may set fields of
// the result and append to its shares, but must not modify the shares.
func (s *Store) Get(uid types.UID) (*Claim, error) {
	path, err := s.path(uid)
	if err != nil {
		return nil, err
	}
	c, exists, err := s.records.Get(filepath.Base(path))
	if err != nil || !exists {
		return nil, err
	}
	copied := *c
	copied.Shares = slices.Clip(copied.Shares)
	return &copied, nil
}

func read(path string) (*Claim, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	c, err := decode(raw)
	if err == nil && string(c.UID)+suffix != filepath.Base(path) {
		err = fmt.Errorf("%w: it belongs to claim %s", ErrCorrupt, c.UID)
	}
	if err != nil {
		return nil, fmt.Errorf("claim record %s: %w", path, err)
	}
	return c, nil
}

// decode decodes a record of any version. A new version adds the conversion from
// its predecessor here, and a file of the predecessor to testdata.
func decode(raw []byte) (*Claim, error) {
	if len(raw) == 0 {
		return nil, fmt.Errorf("%w: the file is empty: the node crashed before the record reached the disk", ErrCorrupt)
	}
	var c Claim
	if err := json.Unmarshal(raw, &c); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if c.Version > Version {
		return nil, fmt.Errorf(
			"%w: it has version %d, this plugin reads up to %d: upgrade the plugin again, or drain the node before a rollback",
			ErrNewer, c.Version, Version)
	}
	return &c, c.validate()
}

// validate refuses a record that no plugin has written.
func (c *Claim) validate() error {
	switch {
	case c.Version < 1:
		return fmt.Errorf("%w: version %d", ErrCorrupt, c.Version)
	case c.UID == "":
		return fmt.Errorf("%w: it lacks a claim UID", ErrCorrupt)
	case c.Phase != Preparing && c.Phase != Prepared && c.Phase != Unpreparing:
		return fmt.Errorf("%w: phase %q", ErrCorrupt, c.Phase)
	}
	for _, s := range c.Shares {
		if s.Name == "" || s.Device == "" {
			return fmt.Errorf("%w: a share lacks a name or a device", ErrCorrupt)
		}
	}
	return nil
}

// unreadableSuffix ends the names of renamed records that cannot be read.
const unreadableSuffix = ".unreadable"

// RenameUnreadable renames a record that cannot be read and returns its new path. The file
// stays there for an administrator. RenameUnreadable removes an empty record, and returns "".
func (s *Store) RenameUnreadable(uid types.UID) (kept string, err error) {
	path, err := s.path(uid)
	if err != nil {
		return "", err
	}
	return s.rename(path)
}

// HasUnreadable reports whether a claim has a renamed record.
func (s *Store) HasUnreadable(uid types.UID) bool {
	path, err := s.path(uid)
	if err != nil {
		return false
	}
	_, err = os.Stat(path + unreadableSuffix)
	return !errors.Is(err, os.ErrNotExist)
}

func (s *Store) rename(path string) (kept string, err error) {
	if info, err := os.Stat(path); err == nil && info.Size() == 0 {
		return "", files.Remove(s.failpoints, "empty claim record", path)
	}
	kept = path + unreadableSuffix
	return kept, s.failpoints.Do("rename unreadable claim record", func() error { return os.Rename(path, kept) })
}

// RenameCorrupt renames all corrupt records, as RenameUnreadable does. It returns what is wrong with each; err is about
// renaming them.
func (s *Store) RenameCorrupt() (corrupt []error, err error) {
	var failed error
	err = s.records.Each("", func(name string, _ *Claim, readErr error) {
		if errors.Is(readErr, ErrCorrupt) {
			_, renameErr := s.rename(s.records.Path(name))
			corrupt, failed = append(corrupt, readErr), errors.Join(failed, renameErr)
		}
	})
	return corrupt, errors.Join(err, failed)
}

// List returns all records that can be read. The caller must not modify them. The
// error describes the records that cannot be read.
func (s *Store) List() ([]*Claim, error) {
	var (
		claims []*Claim
		failed error
	)
	err := s.records.Each("", func(_ string, c *Claim, err error) {
		if err != nil {
			failed = errors.Join(failed, err)
			return
		}
		claims = append(claims, c)
	})
	return claims, errors.Join(err, failed)
}

// Delete removes a record. It succeeds if there is none.
func (s *Store) Delete(uid types.UID) error {
	path, err := s.path(uid)
	if err != nil {
		return err
	}
	return files.Remove(s.failpoints, "claim record", path)
}
