package attach

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// RecordVersion of Record.
const RecordVersion = 1

// Namespace identifies a network namespace until the next boot.
type Namespace struct {
	Inode  uint64 `json:"inode"`  // of the namespace in nsfs; used again after it is gone
	Cookie uint64 `json:"cookie"` // never used again
	NSID   int    `json:"nsid"`   // as the node's namespace knows it, while it lives
}

// NamespaceOf identifies an open namespace whose cookie is known.
func NamespaceOf(f *os.File, cookie uint64) (Namespace, error) {
	info, err := f.Stat()
	if err != nil {
		return Namespace{}, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return Namespace{}, fmt.Errorf("no inode of %s", f.Name())
	}
	return Namespace{Inode: stat.Ino, Cookie: cookie}, nil
}

// Link is the payload of an attachment that is a network interface. It stands
// in this package because the hook reads it, without a plugin, to find out
// whether the link of a restarting container still exists.
type Link struct {
	Parent    int      `json:"parent"` // index of the NIC
	Index     int      `json:"index"`  // in the pod
	Name      string   `json:"name"`   // in the pod
	MAC       string   `json:"mac"`
	MTU       int      `json:"mtu"` // bytes
	Addresses []string `json:"addresses,omitempty"`
}

// Record describes one attachment: a share in one pod sandbox. It holds
// everything that the plugin needs to detach the share again. A record is valid
// until the node reboots, as is the attachment; records lie on a tmpfs.
//
// The JSON field names are those of version 1 and must not change: a plugin of
// the previous release reads these records after a rollback.
type Record struct {
	Version   int       `json:"version"`
	BootID    string    `json:"bootID"`
	ClaimUID  string    `json:"claimUID"`
	Share     string    `json:"share"`
	Kind      string    `json:"kind"`   // of the device
	Device    string    `json:"device"` // as published
	Pod       Pod       `json:"pod"`
	SandboxID string    `json:"sandboxID"`
	Namespace Namespace `json:"namespace"`
	// Class is the share's number on its device; see record.Share.
	Class uint16 `json:"class"`
	// Payload is what the device kind attached, in the kind's own format. The
	// JSON name dates from the time when NICs were the only kind to attach.
	Payload json.RawMessage `json:"link,omitempty"`
}

// Link decodes the payload of an attachment that is a network interface.
func (r Record) Link() (Link, error) {
	var l Link
	if err := json.Unmarshal(r.Payload, &l); err != nil {
		return l, fmt.Errorf("attachment record of share %s: payload is not a link: %w", r.Share, err)
	}
	return l, nil
}

// Records is the directory of attach records. Of a share in a namespace there
// is one at the most.
type Records struct {
	dir        string
	bootID     string
	failpoints failpoint.Injector
}

// AnyBoot is for who looks at the link itself before believing a record.
const AnyBoot = ""

// OpenRecords returns the attach records below a plugin's run directory.
// bootID goes into what is written; records of another boot do not exist.
func OpenRecords(runDir, bootID string, failpoints failpoint.Injector) *Records {
	return &Records{dir: filepath.Join(runDir, "attached"), bootID: bootID, failpoints: failpoints}
}

// path begins with the claim, so that its records are found without reading
// all. The share is hashed because it comes from outside and need not be fit
// for a path.
func (s *Records) path(claimUID, share string, ns Namespace) string {
	sum := sha256.Sum256([]byte(share))
	return filepath.Join(s.dir, fmt.Sprintf("%s_%x-%x.json", pathElement(claimUID), ns.Cookie, sum[:10]))
}

// pathElement makes an identifier one element of a path that is no pattern.
func pathElement(id string) string {
	if id == "" || id[0] == '.' || strings.ContainsAny(id, "/\x00*?[\\") {
		return fmt.Sprintf("%x", sha256.Sum256([]byte(id)))
	}
	return id
}

// Write writes a record, whole or not at all. It is not synced: it need not
// outlive the kernel.
func (s *Records) Write(r Record) error {
	r.Version, r.BootID = RecordVersion, s.bootID
	path := s.path(r.ClaimUID, r.Share, r.Namespace)
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	raw, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return files.Replace(s.failpoints, "attach record", path, raw, files.Options{Mode: 0o600})
}

// Read returns the record of a share in a namespace, an error that is
// os.ErrNotExist if there is none.
func (s *Records) Read(claimUID, share string, ns Namespace) (Record, error) {
	r, err := s.read(s.path(claimUID, share, ns))
	if err != nil {
		return r, err
	}
	if r.ClaimUID != claimUID || r.Share != share || r.Namespace.Inode != ns.Inode || r.Namespace.Cookie != ns.Cookie {
		return r, fmt.Errorf("attach record is of claim %s, share %s, namespace %d: %w", r.ClaimUID, r.Share, r.Namespace.Inode, os.ErrNotExist)
	}
	return r, nil
}

func (s *Records) read(path string) (Record, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return Record{}, err
	}
	r, err := decodeRecord(raw)
	if err != nil {
		return r, fmt.Errorf("attach record %s: %w", path, err)
	}
	if s.bootID != AnyBoot && r.BootID != s.bootID {
		return r, fmt.Errorf("attach record %s is of another boot: %w", path, os.ErrNotExist)
	}
	return r, nil
}

func decodeRecord(raw []byte) (r Record, err error) {
	if err := json.Unmarshal(raw, &r); err != nil {
		return r, err
	}
	if r.Version != RecordVersion {
		return r, fmt.Errorf("it has version %d, this plugin reads %d", r.Version, RecordVersion)
	}
	if r.ClaimUID == "" || r.Share == "" || r.Namespace.Cookie == 0 {
		return r, errors.New("it names no claim, no share or no namespace")
	}
	return r, nil
}

// List returns the records of all claims. Unreadable ones are errors beside
// what could be read; they stay, and what they told of is found in the kernel.
func (s *Records) List() ([]Record, error) {
	return s.list("*", func(Record) bool { return true })
}

// OfClaim returns the records of one claim, as List does.
func (s *Records) OfClaim(claimUID string) ([]Record, error) {
	return s.list(pathElement(claimUID)+"_*", func(r Record) bool { return r.ClaimUID == claimUID })
}

func (s *Records) list(pattern string, wanted func(Record) bool) ([]Record, error) {
	paths, err := filepath.Glob(filepath.Join(s.dir, pattern+".json"))
	if err != nil {
		return nil, err
	}
	var (
		records []Record
		failed  error
	)
	for _, path := range paths {
		r, err := s.read(path)
		switch {
		case err == nil && wanted(r):
			records = append(records, r)
		case err != nil && !errors.Is(err, os.ErrNotExist):
			failed = errors.Join(failed, err)
		}
	}
	return records, failed
}

// asideSuffix is that of records that were set aside.
const asideSuffix = ".unreadable"

// SetCorruptAside sets aside records that nobody can read, and returns what was
// wrong with them. What they told of is in the kernel; they go with their claim.
func (s *Records) SetCorruptAside() (found error, err error) {
	paths, err := filepath.Glob(filepath.Join(s.dir, "*.json"))
	for _, path := range paths {
		if _, readErr := s.read(path); readErr != nil && !errors.Is(readErr, os.ErrNotExist) {
			found = errors.Join(found, readErr)
			err = errors.Join(err, s.failpoints.Do("set attach record aside", func() error { return os.Rename(path, path+asideSuffix) }))
		}
	}
	return found, err
}

// Aside returns the records that were set aside, by path, with the claims they
// are of.
func (s *Records) Aside() (claimUIDs map[string]string, err error) {
	paths, err := filepath.Glob(filepath.Join(s.dir, "*"+asideSuffix))
	claimUIDs = map[string]string{}
	for _, path := range paths {
		claimUIDs[path], _, _ = strings.Cut(filepath.Base(path), "_")
	}
	return claimUIDs, err
}

// RemoveClaim removes whatever there is of a claim, readable or not.
func (s *Records) RemoveClaim(claimUID string) error {
	paths, err := filepath.Glob(filepath.Join(s.dir, pathElement(claimUID)+"_*"))
	for _, path := range paths {
		err = errors.Join(err, files.Remove(s.failpoints, "attach record", path, false))
	}
	return err
}

// RemoveOfOtherBoots removes records that were written before the node booted.
func (s *Records) RemoveOfOtherBoots() (removed int, failed error) {
	any := &Records{dir: s.dir, failpoints: s.failpoints, bootID: AnyBoot}
	all, err := any.List()
	for _, r := range all {
		if r.BootID == s.bootID {
			continue
		}
		removed++
		failed = errors.Join(failed, s.Remove(r))
	}
	return removed, errors.Join(err, failed)
}

// Remove removes a record. It is no error if there is none.
func (s *Records) Remove(r Record) error {
	return files.Remove(s.failpoints, "attach record", s.path(r.ClaimUID, r.Share, r.Namespace), false)
}
