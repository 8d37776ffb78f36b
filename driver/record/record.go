// Package record keeps what the plugin has promised: one file per claim that is
// prepared on this node, so that Unprepare is complete when the claim, its pods
// and the process that prepared it are long gone.
//
// A record is written twice per change, before the first side effect and after
// the last. It says what was intended; what is, only the kernel knows.
//
// The files are the truth: two plugins run at once during a rolling update, and
// the directory is what they have in common. What has been read once is not
// parsed again as long as its file is the same.
package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// Version of the format.
const Version = 1

// Phase of a claim on this node.
type Phase string

// Phases, in order.
const (
	Preparing   Phase = "Preparing"
	Prepared    Phase = "Prepared"
	Unpreparing Phase = "Unpreparing"
)

// Claim is a ResourceClaim as prepared on this node.
type Claim struct {
	Version   int       `json:"version"`
	BootID    string    `json:"bootID"`
	Phase     Phase     `json:"phase"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
	Shares    []Share   `json:"shares"`
}

// Share is one allocation result of a claim: its identity is the claim's UID
// with pool, device and share ID.
type Share struct {
	// Name of the CDI device, unique on the node.
	Name string `json:"name"`
	// Kind of device that made it.
	Kind    string    `json:"kind"`
	Request string    `json:"request"` // with the subrequest, if any
	Pool    string    `json:"pool"`
	Device  string    `json:"device"`
	ShareID types.UID `json:"shareID,omitempty"`
	// AdminAccess: to observe, not to use. Nothing is consumed.
	AdminAccess bool `json:"adminAccess,omitempty"`
	// Capacity is the allocation's consumedCapacity.
	Capacity map[string]resource.Quantity `json:"capacity,omitempty"`
	// Class is a number for the share that no other on the device has.
	Class uint16 `json:"class,omitempty"`
	// Parameters are the kind's, merged, complete and valid.
	Parameters json.RawMessage `json:"parameters,omitempty"`
}

// Same tells whether two shares are the same allocation.
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

// Share returns the share with that name.
func (c *Claim) Share(name string) (Share, bool) {
	for _, s := range c.Shares {
		if s.Name == name {
			return s, true
		}
	}
	return Share{}, false
}

// Store is a directory of records.
type Store struct {
	dir        string
	bootID     string
	failpoints failpoint.Injector

	mu     sync.Mutex
	parsed map[string]parsed // by path
}

// parsed is a record as it was read. It is not changed.
type parsed struct {
	file  fileID
	claim *Claim
	err   error
}

// fileID tells one content of a path from another: a record is replaced by
// another file, never written to.
type fileID struct {
	inode   uint64
	size    int64
	changed syscall.Timespec
}

// NewStore opens the directory, creating it if need be. bootID is the kernel's
// (/proc/sys/kernel/random/boot_id): it goes into what is written.
func NewStore(dir, bootID string, failpoints failpoint.Injector) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open claim records: %w", err)
	}
	return &Store{dir: dir, bootID: bootID, failpoints: failpoints, parsed: map[string]parsed{}}, nil
}

func (s *Store) path(uid types.UID) (string, error) {
	// The UID comes from the API server by way of the kubelet. It is checked
	// because it becomes a path.
	if uid == "" || strings.ContainsAny(string(uid), "/\x00") || strings.HasPrefix(string(uid), ".") {
		return "", fmt.Errorf("claim UID %q is not fit for a file name", uid)
	}
	return filepath.Join(s.dir, string(uid)+".json"), nil
}

// Put writes a record: when it returns, the record is on disk, and at no
// moment was there half of one.
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
	if err := files.Replace(s.failpoints, "claim record", path, raw, files.Options{Mode: 0o600, Durable: true}); err != nil {
		return fmt.Errorf("write record of claim %s/%s: %w", c.Namespace, c.Name, err)
	}
	return nil
}

// Current tells whether a record was written since the node booted. What one of
// another boot says was made in the kernel is not there any more.
func (s *Store) Current(c *Claim) bool { return c.BootID == s.bootID }

// Errors of Get and List, about one record.
var (
	// ErrCorrupt: nobody can read the record.
	ErrCorrupt = errors.New("the record is corrupt")
	// ErrNewer: a newer plugin wrote the record, and can read it.
	ErrNewer = errors.New("the record is of a newer plugin")
)

// Get returns a claim's record, nil if there is none.
func (s *Store) Get(uid types.UID) (*Claim, error) {
	path, err := s.path(uid)
	if err != nil {
		return nil, err
	}
	c, err := read(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return c, err
}

func read(path string) (*Claim, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	c, err := decode(raw)
	if err == nil && string(c.UID)+".json" != filepath.Base(path) {
		err = fmt.Errorf("%w: it is of claim %s", ErrCorrupt, c.UID)
	}
	if err != nil {
		return nil, fmt.Errorf("claim record %s: %w", path, err)
	}
	return c, nil
}

// decode reads a record of any version there has been. A new version adds its
// step from the last one here, and a file of the last one to testdata.
func decode(raw []byte) (*Claim, error) {
	var c Claim
	if err := json.Unmarshal(raw, &c); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if c.Version > Version {
		return nil, fmt.Errorf("%w: it has version %d, this plugin reads up to %d: update the plugin again, or drain the node before going back", ErrNewer, c.Version, Version)
	}
	return &c, c.validate()
}

// validate refuses what no plugin has written.
func (c *Claim) validate() error {
	switch {
	case c.Version < 1:
		return fmt.Errorf("%w: version %d", ErrCorrupt, c.Version)
	case c.UID == "":
		return fmt.Errorf("%w: it names no claim", ErrCorrupt)
	case c.Phase != Preparing && c.Phase != Prepared && c.Phase != Unpreparing:
		return fmt.Errorf("%w: phase %q", ErrCorrupt, c.Phase)
	}
	for _, s := range c.Shares {
		if s.Name == "" || s.Device == "" {
			return fmt.Errorf("%w: a share has no name or no device", ErrCorrupt)
		}
	}
	return nil
}

// asideSuffix is that of records that were set aside.
const asideSuffix = ".unreadable"

// SetAside moves a record that cannot be read out of the way, keeping it for
// whoever wants to know, and returns where it is now.
func (s *Store) SetAside(uid types.UID) (string, error) {
	path, err := s.path(uid)
	if err != nil {
		return "", err
	}
	return path + asideSuffix, s.setAside(path)
}

func (s *Store) setAside(path string) error {
	return s.failpoints.Do("set claim record aside", func() error { return os.Rename(path, path+asideSuffix) })
}

// SetCorruptAside sets aside all records that nobody can read, and returns what
// was wrong with them.
func (s *Store) SetCorruptAside() (found error, err error) {
	err = s.each(func(path string, _ *Claim, readErr error) error {
		if !errors.Is(readErr, ErrCorrupt) {
			return nil
		}
		found = errors.Join(found, readErr)
		return s.setAside(path)
	})
	return found, err
}

// List returns all records, which the caller must not change. What cannot be
// read is an error beside those that can.
func (s *Store) List() ([]*Claim, error) {
	var claims []*Claim
	err := s.each(func(_ string, c *Claim, err error) error {
		if err == nil {
			claims = append(claims, c)
		}
		return err
	})
	return claims, err
}

func (s *Store) each(do func(path string, c *Claim, err error) error) error {
	paths, err := filepath.Glob(filepath.Join(s.dir, "*.json"))
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	there := make(map[string]parsed, len(paths))
	var failed error
	for _, path := range paths {
		p, ok := s.read(path)
		if !ok {
			continue // removed meanwhile
		}
		there[path] = p
		failed = errors.Join(failed, do(path, p.claim, p.err))
	}
	s.parsed = there
	return failed
}

// read reads a record, or remembers it.
func (s *Store) read(path string) (p parsed, ok bool) {
	var stat syscall.Stat_t
	if err := syscall.Stat(path, &stat); err != nil {
		return parsed{err: err}, !errors.Is(err, os.ErrNotExist)
	}
	file := fileID{stat.Ino, stat.Size, stat.Ctim}
	if p, ok := s.parsed[path]; ok && p.file == file {
		return p, true
	}
	c, err := read(path)
	return parsed{file, c, err}, !errors.Is(err, os.ErrNotExist)
}

// Delete removes a record. It is no error if there is none.
func (s *Store) Delete(uid types.UID) error {
	path, err := s.path(uid)
	if err != nil {
		return err
	}
	return files.Remove(s.failpoints, "claim record", path, true)
}
