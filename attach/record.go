// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

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

	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/internal/failpoint"
	"github.com/dra-shared/dra-driver-shared/internal/files"
)

// Versions of Record; see "Version skew" above.
const (
	// RecordVersion is the version that this release writes.
	RecordVersion = 1
	// oldestRecord and newestRecord are the versions that it reads.
	oldestRecord = 1
	newestRecord = 1
)

// Namespace identifies a network namespace until the next boot.
type Namespace struct {
	Inode  uint64 `json:"inode"`  // of the namespace in nsfs; the kernel reuses it
	Cookie uint64 `json:"cookie"` // the kernel never reuses it
	NSID   int    `json:"nsid"`   // its ID in the node's namespace; the kernel reuses it
}

// Same reports whether n and other are the same namespace: an earlier one with the same inode has another cookie.
func (n Namespace) Same(other Namespace) bool {
	return n.Inode == other.Inode && n.Cookie == other.Cookie
}

// Replaces reports whether n has the ID that other had. The kernel reuses an ID only after the namespace has ended.
func (n Namespace) Replaces(other Namespace) bool {
	return n.NSID == other.NSID && n.Cookie != other.Cookie
}

// identifyNamespace identifies an open namespace by a socket that was opened in it.
func identifyNamespace(namespace, socket *os.File) (Namespace, error) {
	cookie, err := unix.GetsockoptUint64(int(socket.Fd()), unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return Namespace{}, os.NewSyscallError("getsockopt SO_NETNS_COOKIE", err)
	}
	return NamespaceOf(namespace, cookie)
}

// NamespaceOf identifies an open namespace with a known cookie.
func NamespaceOf(f *os.File, cookie uint64) (Namespace, error) {
	info, err := f.Stat()
	if err != nil {
		return Namespace{}, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return Namespace{}, fmt.Errorf("%s: the file system reports no inode", f.Name())
	}
	return Namespace{Inode: stat.Ino, Cookie: cookie}, nil
}

// Link is the payload of an attachment that is a network interface. It is in this package because the hook reads it,
// without a plugin, to find out whether a restarting container's link still exists.
type Link struct {
	Parent int    `json:"parent"` // interface index of the NIC
	Index  int    `json:"index"`  // interface index in the pod
	Name   string `json:"name"`   // name in the pod
	MAC    string `json:"mac"`
	MTU    int    `json:"mtu"` // bytes
	// Addresses are the addresses from AddressPools, with their prefix lengths; Network is the pools' network. The
	// plugin writes a record with addresses, and Index 0, before it creates the link, and again afterward.
	Network   string   `json:"network,omitempty"`
	Addresses []string `json:"addresses,omitempty"`
	// Nameservers are the DNS servers of these pools.
	Nameservers []string `json:"nameservers,omitempty"`
	// Sources are all addresses that the link had at its creation, without prefix length.
	Sources []string `json:"sources,omitempty"`
	// Sysctls are the link's kernel parameters that the hook sets. IFNAME in their names stands for the link's name.
	Sysctls map[string]string `json:"sysctls,omitempty"`
	// Bridge means that the link may exchange frames with other such links of the NIC.
	Bridge bool `json:"bridge,omitempty"`
	// VEPA means that the macvlan is in mode vepa. A Bridge link without it is in mode bridge:
	// an earlier release attached it, or its NIC was without enforcement.
	VEPA bool `json:"vepa,omitempty"`
	// Identity means that the link was attached by a release that drops frames without the link's addresses.
	Identity bool `json:"identity,omitempty"`
	// DHCP is the lease of a link that gets its IPv4 address from a DHCP server. Sources also has the address.
	DHCP *Lease `json:"dhcp,omitempty"`
}

// Lease is an address that a DHCP server has leased to a link, with its options. Times are in
// milliseconds since the node booted.
type Lease struct {
	// ClientID and Hostname identify the client to servers.
	ClientID []byte `json:"clientID"`
	Hostname string `json:"hostname,omitempty"`
	// Address has a prefix length. It is "" if the lease has expired; the fields below are then
	// empty.
	Address string `json:"address,omitempty"`
	// Last is the address that the link had before its lease ended.
	Last string `json:"last,omitempty"`
	// Server is the server's identifier, and ServerMAC is where its answers came from.
	Server    string       `json:"server,omitempty"`
	ServerMAC string       `json:"serverMAC,omitempty"`
	Routes    []LeaseRoute `json:"routes,omitempty"`
	// Renew, Rebind, and Expires are T1, T2, and the end of the lease (RFC 2131); 0 if the lease does not end.
	Renew   int64 `json:"renew,omitempty"`
	Rebind  int64 `json:"rebind,omitempty"`
	Expires int64 `json:"expires,omitempty"`
}

// LeaseRoute is a route that a DHCP server names.
type LeaseRoute struct {
	Destination string `json:"destination"`
	Gateway     string `json:"gateway,omitempty"`
}

// Record describes one attachment: a share in one pod sandbox. It holds everything that the plugin needs to detach
// the share again. Like the attachment, a record is valid until the node reboots; records are on a tmpfs.
//
// The JSON field names belong to version 1 and must not change: the previous release's plugin reads these records
// after a rollback.
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
	// Payload describes the attachment in the device kind's own format. The
	// JSON name dates from the time when NICs were the only kind to attach.
	Payload json.RawMessage `json:"link,omitempty"`
	// Number is the share's number on its device; see record.Share.
	Number uint16 `json:"class"`
	// RecordedShare is a copy of the share in the claim record, in that record's format. The plugin uses it if the
	// claim record is lost. Optional.
	RecordedShare json.RawMessage `json:"grant,omitempty"`
}

// Link decodes the payload of an attachment that is a network interface.
func (r Record) Link() (Link, error) {
	var l Link
	if err := json.Unmarshal(r.Payload, &l); err != nil {
		return l, fmt.Errorf("attachment record of share %s: payload is not a link: %w", r.Share, err)
	}
	return l, nil
}

// Records is the directory of attachment records. It has at most one record per
// share and namespace.
type Records struct {
	dir        string
	bootID     string
	failpoints failpoint.Injector
	// files are all files in the directory. Files that are not records have the error errNoRecord.
	files *files.Directory[*Record]
}

// AnyBoot accepts records from any boot, for callers that compare a record to the existing link.
const AnyBoot = ""

// OpenRecords returns the attachment records below a plugin's run directory. New records contain bootID; records from
// another boot count as missing.
func OpenRecords(runDir, bootID string, failpoints failpoint.Injector) *Records {
	dir := RecordsDir(runDir)
	return &Records{
		dir: dir, bootID: bootID, failpoints: failpoints, files: files.NewDirectory(dir, "", "", readFile),
	}
}

// suffix ends the names of records.
const suffix = ".json"

// path returns the path of a record. It starts with the claim, so a claim's records are found without reading all
// records. It contains a hash of the share, because a share's name may be unsuitable for a path.
func (s *Records) path(claimUID, share string, ns Namespace) string {
	sum := sha256.Sum256([]byte(share))
	return filepath.Join(s.dir, fmt.Sprintf("%s_%x-%x%s", pathElement(claimUID), ns.Cookie, sum[:10], suffix))
}

// pathElement converts an identifier to one element of a path.
func pathElement(id string) string {
	if id == "" || id[0] == '.' || strings.ContainsAny(id, "/\x00*?[\\") { // earlier plugins used patterns
		return fmt.Sprintf("%x", sha256.Sum256([]byte(id)))
	}
	return id
}

// Write writes a record atomically. It does not sync the file, because the
// attachment ends with the kernel, too.
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
	return files.Replace(s.failpoints, "attachment record", path, raw, files.Options{Mode: 0o600})
}

// Read returns the record of a share in a namespace. If there is none, the error
// wraps os.ErrNotExist.
func (s *Records) Read(claimUID, share string, ns Namespace) (Record, error) {
	r, err := s.read(s.path(claimUID, share, ns))
	if err != nil {
		return r, err
	}
	if r.ClaimUID != claimUID || r.Share != share || !r.Namespace.Same(ns) {
		return r, fmt.Errorf("attachment record belongs to claim %s, share %s, namespace %d: %w",
			r.ClaimUID, r.Share, r.Namespace.Inode, os.ErrNotExist)
	}
	return r, nil
}

func (s *Records) read(path string) (Record, error) {
	r, err := readRecord(path)
	if err == nil && !s.isCurrent(&r) {
		return r, fmt.Errorf("attachment record %s belongs to another boot: %w", path, os.ErrNotExist)
	}
	return r, err
}

// isCurrent reports whether a record was written since the node booted.
func (s *Records) isCurrent(r *Record) bool { return s.bootID == AnyBoot || r.BootID == s.bootID }

// errNoRecord means that a file is not a record.
var errNoRecord = errors.New("the file is not an attachment record")

// readFile reads a file of the directory.
func readFile(path string) (*Record, error) {
	if !strings.HasSuffix(path, suffix) {
		return nil, errNoRecord
	}
	r, err := readRecord(path)
	return &r, err
}

// readRecord reads a record from any boot.
func readRecord(path string) (Record, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return Record{}, err
	}
	r, err := decodeRecord(raw)
	if err != nil {
		return r, fmt.Errorf("attachment record %s: %w", path, err)
	}
	return r, nil
}

// Errors of records that were read.
var (
	// ErrCorruptRecord means that no release can decode the record.
	ErrCorruptRecord = errors.New("the record is corrupt")
	// ErrNewerRecord means that a newer release wrote the record and can decode it.
	ErrNewerRecord = errors.New("a newer plugin wrote the record")
)

// decodeRecord decodes and validates a record.
func decodeRecord(raw []byte) (r Record, err error) {
	if err := json.Unmarshal(raw, &r); err != nil {
		return r, fmt.Errorf("%w: %w", ErrCorruptRecord, err)
	}
	switch {
	case r.Version > newestRecord:
		return r, fmt.Errorf("%w: it has version %d, this plugin reads up to %d", ErrNewerRecord, r.Version, newestRecord)
	case r.Version < oldestRecord:
		return r, fmt.Errorf("%w: it has version %d, this plugin reads %d to %d",
			ErrCorruptRecord, r.Version, oldestRecord, newestRecord)
	case r.ClaimUID == "" || r.Share == "" || r.Namespace.Cookie == 0:
		return r, fmt.Errorf("%w: it lacks a claim, a share, or a namespace", ErrCorruptRecord)
	}
	return r, nil
}

// List returns the records of all claims. The caller must not modify their payloads. The
// error describes the records that cannot be read; they stay in place.
func (s *Records) List() ([]Record, error) {
	return s.Select(func(*Record) bool { return true })
}

// Select returns the records that selected returns true for. Otherwise it behaves like List.
func (s *Records) Select(selected func(*Record) bool) ([]Record, error) {
	return s.list("", selected)
}

// OfClaim returns the records of one claim. Otherwise it behaves like List.
func (s *Records) OfClaim(claimUID string) ([]Record, error) {
	return s.list(pathElement(claimUID)+"_", func(r *Record) bool { return r.ClaimUID == claimUID })
}

// list returns the selected records among those with a path that begins with prefix.
func (s *Records) list(prefix string, selected func(*Record) bool) (records []Record, failed error) {
	var found []*Record // copied at the end, because there may be thousands
	err := s.files.Each(prefix, func(_ string, r *Record, err error) {
		switch {
		case errors.Is(err, errNoRecord):
		case err != nil:
			failed = errors.Join(failed, err)
		case s.isCurrent(r) && selected(r):
			found = append(found, r)
		}
	})
	records = make([]Record, len(found))
	for i, r := range found {
		records[i] = *r
	}
	return records, errors.Join(err, failed)
}

// unreadableSuffix ends the names of renamed records that cannot be read.
const unreadableSuffix = ".unreadable"

// RenameCorrupt renames the corrupt records, so that List no longer fails because of them. It returns what is wrong
// with each; err is about renaming them. A record that the system cannot read keeps its name, because it may be
// intact. RemoveClaim removes the renamed records.
func (s *Records) RenameCorrupt() (corrupt []error, err error) {
	var failed error
	err = s.files.Each("", func(name string, _ *Record, readErr error) {
		if !errors.Is(readErr, ErrCorruptRecord) {
			return
		}
		corrupt = append(corrupt, readErr)
		path := s.files.Path(name)
		rename := func() error { return os.Rename(path, path+unreadableSuffix) }
		failed = errors.Join(failed, s.failpoints.Do("rename unreadable attachment record", rename))
	})
	return corrupt, errors.Join(err, failed)
}

// Unreadable returns the claim UIDs of renamed records, by record path.
func (s *Records) Unreadable() (claimUIDs map[string]string, err error) {
	claimUIDs = map[string]string{}
	err = s.files.Each("", func(name string, _ *Record, _ error) {
		if strings.HasSuffix(name, unreadableSuffix) {
			claimUIDs[s.files.Path(name)], _, _ = strings.Cut(name, "_")
		}
	})
	return claimUIDs, err
}

// RemoveClaim removes all records of a claim, including unreadable ones.
func (s *Records) RemoveClaim(claimUID string) error {
	var failed error
	err := s.files.Each(pathElement(claimUID)+"_", func(name string, _ *Record, _ error) {
		failed = errors.Join(failed, files.Remove(s.failpoints, "attachment record", s.files.Path(name)))
	})
	return errors.Join(err, failed)
}

// RemoveOfOtherBoots removes the records that were written before the current
// boot, and returns their number.
func (s *Records) RemoveOfOtherBoots() (removed int, failed error) {
	err := s.files.Each("", func(name string, r *Record, err error) {
		if err != nil || s.isCurrent(r) {
			return // List describes the records that cannot be read
		}
		removed++
		failed = errors.Join(failed, files.Remove(s.failpoints, "attachment record", s.files.Path(name)))
	})
	return removed, errors.Join(err, failed)
}

// Remove removes a record. It succeeds if there is none.
func (s *Records) Remove(r Record) error {
	return files.Remove(s.failpoints, "attachment record", s.path(r.ClaimUID, r.Share, r.Namespace))
}
