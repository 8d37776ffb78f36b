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

// Link is a link as it was attached.
type Link struct {
	Parent    int      `json:"parent"` // index of the NIC
	Index     int      `json:"index"`  // in the pod
	Name      string   `json:"name"`   // in the pod
	MAC       string   `json:"mac"`
	MTU       int      `json:"mtu"` // bytes
	Addresses []string `json:"addresses,omitempty"`
}

// Record says that a share is attached to a sandbox, and all that is needed to
// detach it. It is true until the node boots, as is everything in it: it lies
// on a tmpfs.
type Record struct {
	Version   int       `json:"version"`
	ClaimUID  string    `json:"claimUID"`
	Share     string    `json:"share"`
	Kind      string    `json:"kind"`   // of the device
	Device    string    `json:"device"` // as published
	Pod       Pod       `json:"pod"`
	SandboxID string    `json:"sandboxID"`
	Namespace Namespace `json:"namespace"`
	Link      Link      `json:"link"`
	// Class is the minor number of the class that the link's frames queue in.
	Class uint16 `json:"class"`
}

// recordPath puts a claim's records in one directory. The names are hashed
// because they come from outside and need not be fit for a path.
func recordPath(dir, claimUID, share string, ns Namespace) string {
	sum := sha256.Sum256([]byte(share))
	return filepath.Join(dir, pathElement(claimUID), fmt.Sprintf("%x-%x.json", ns.Cookie, sum[:10]))
}

// pathElement makes an identifier one element of a path that is no pattern.
func pathElement(id string) string {
	if id == "" || id[0] == '.' || strings.ContainsAny(id, "/\x00*?[\\") {
		return fmt.Sprintf("%x", sha256.Sum256([]byte(id)))
	}
	return id
}

// WriteRecord writes a record, whole or not at all. It is not synced: it need
// not outlive the kernel.
func WriteRecord(dir string, r Record) error {
	r.Version = RecordVersion
	path := recordPath(dir, r.ClaimUID, r.Share, r.Namespace)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	raw, err := json.Marshal(r)
	if err != nil {
		return err
	}
	temporary := path + ".tmp"
	if err := os.WriteFile(temporary, raw, 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

// ReadRecord returns the record of a share in a namespace, an error that is
// os.ErrNotExist if there is none.
func ReadRecord(dir, claimUID, share string, ns Namespace) (Record, error) {
	r, err := readFile(recordPath(dir, claimUID, share, ns))
	if err != nil {
		return r, err
	}
	if r.ClaimUID != claimUID || r.Share != share || r.Namespace.Inode != ns.Inode || r.Namespace.Cookie != ns.Cookie {
		return r, fmt.Errorf("attach record is of claim %s, share %s, namespace %d: %w", r.ClaimUID, r.Share, r.Namespace.Inode, os.ErrNotExist)
	}
	return r, nil
}

func readFile(path string) (Record, error) {
	var r Record
	raw, err := os.ReadFile(path)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(raw, &r); err != nil {
		return r, fmt.Errorf("attach record %s: %w", path, err)
	}
	if r.Version != RecordVersion {
		return r, fmt.Errorf("attach record %s has version %d, want %d", path, r.Version, RecordVersion)
	}
	return r, nil
}

// ListRecords returns the records of all claims. Unreadable ones are errors
// beside what could be read.
func ListRecords(dir string) ([]Record, error) { return list(filepath.Join(dir, "*")) }

// ClaimRecords returns the records of one claim, as ListRecords does.
func ClaimRecords(dir, claimUID string) ([]Record, error) {
	return list(filepath.Join(dir, pathElement(claimUID)))
}

func list(dirs string) ([]Record, error) {
	files, err := filepath.Glob(filepath.Join(dirs, "*.json"))
	if err != nil {
		return nil, err
	}
	var (
		records []Record
		failed  error
	)
	for _, f := range files {
		r, err := readFile(f)
		if err != nil {
			if !errors.Is(err, os.ErrNotExist) {
				failed = errors.Join(failed, err)
			}
			continue
		}
		records = append(records, r)
	}
	return records, failed
}

// RemoveRecord removes a record, and its claim's directory with the last. It
// is no error if there is none.
func RemoveRecord(dir string, r Record) error {
	path := recordPath(dir, r.ClaimUID, r.Share, r.Namespace)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	err := os.Remove(filepath.Dir(path))
	if err == nil || errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTEMPTY) {
		return nil
	}
	return err
}
