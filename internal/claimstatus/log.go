// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package claimstatus

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
)

// Digest identifies the content of entries. No entries have the zero value as their digest.
type Digest [sha256.Size]byte

// DigestOf returns the digest of entries, which must not have transition times:
// Apply fills them in.
func DigestOf(entries []resourceapi.AllocatedDeviceStatus) (Digest, error) {
	raw, err := json.Marshal(entries)
	if err != nil {
		return Digest{}, fmt.Errorf("encode status entries: %w", err)
	}
	return sha256.Sum256(raw), nil
}

// Log remembers a component's last write to each claim, so that it can skip writes that would not change anything. It
// is safe for concurrent use.
type Log struct {
	clock  clock.PassiveClock
	maxAge time.Duration

	mu   sync.Mutex
	last map[types.UID]write
}

// write is the last write to a claim.
type write struct {
	digest Digest
	at     time.Time
}

// NewLog returns an empty Log that reads the time from c. Another client may change what was written, so a write
// older than maxAge no longer counts. With maxAge 0, every write counts.
func NewLog(c clock.PassiveClock, maxAge time.Duration) *Log {
	return &Log{clock: c, maxAge: maxAge, last: map[types.UID]write{}}
}

// Record notes that the entries with that digest were written to the claim now.
func (l *Log) Record(claim types.UID, digest Digest) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last[claim] = write{digest: digest, at: l.clock.Now()}
}

// Has reports whether the last write to the claim had that digest and still
// counts.
func (l *Log) Has(claim types.UID, digest Digest) bool {
	age, ok := l.Age(claim)
	return ok && l.Wrote(claim, digest) && (l.maxAge == 0 || age < l.maxAge)
}

// Wrote reports whether the last write to the claim had that digest, however old it is.
func (l *Log) Wrote(claim types.UID, digest Digest) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	last, ok := l.last[claim]
	return ok && last.digest == digest
}

// Age returns the time since the last write to the claim, successful or not; ok is false if the Log
// has no write to it.
func (l *Log) Age(claim types.UID) (age time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	last, ok := l.last[claim]
	if !ok {
		return 0, false
	}
	return l.clock.Since(last.at), true
}

// Fail notes that the component failed to read or write the claim now. The result of a write is unknown, so the next
// entries are written in any case; Age limits how often.
func (l *Log) Fail(claim types.UID) { l.Record(claim, Digest{}) }

// Forget removes the claim. Callers use it for claims that no longer exist.
func (l *Log) Forget(claim types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.last, claim)
}

// ForgetAll removes all claims.
func (l *Log) ForgetAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.last)
}
