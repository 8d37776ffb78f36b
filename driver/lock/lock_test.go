// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package lock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

func open(t *testing.T) Dir {
	t.Helper()
	d, err := Open(filepath.Join(t.TempDir(), "locks"))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestKey_excludesOtherHolders(t *testing.T) {
	d := open(t)
	var all sync.WaitGroup
	var holders, most atomic.Int32
	for range 50 {
		all.Go(func() {
			release, err := d.Key(t.Context(), "claim")
			if err != nil {
				t.Error(err)
				return
			}
			defer release()
			n := holders.Add(1)
			for range 100 {
				runtime.Gosched() // lets another goroutine take the lock, if it can
			}
			most.Store(max(n, most.Load(), holders.Load()))
			holders.Add(-1)
		})
	}
	all.Wait()
	if got := most.Load(); got != 1 {
		t.Errorf("got %d holders at a time, want 1", got)
	}
}

// The keys of two claims, one of which waits for a DHCP server.
func TestKey_doesNotWaitForOtherKeys(t *testing.T) {
	d := open(t)
	first, other := "claim-0", ""
	for i := 1; other == ""; i++ {
		if key := "claim-" + strconv.Itoa(i); bucket(key) == bucket(first) {
			other = key
		}
	}
	release, err := d.Key(t.Context(), first)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	locked := make(chan error, 1)
	go func() {
		release, err := d.Key(t.Context(), other)
		if err == nil {
			release()
		}
		locked <- err
	}()
	select {
	case err := <-locked:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Errorf("the lock of %s waits for that of %s", other, first)
	}
}

// A plugin of an earlier release, which runs at the same time during an upgrade, locks only the bucket of a key.
func TestKey_excludesEarlierRelease(t *testing.T) {
	d := open(t)
	release, err := d.Key(t.Context(), "claim")
	if err != nil {
		t.Fatal(err)
	}
	if _, ok, err := d.TryNamed(bucket("claim")); ok || err != nil {
		t.Errorf("while the key is locked, an earlier release locks its bucket: %t, %v", ok, err)
	}
	release()
	if _, ok, err := d.TryNamed(bucket("claim")); !ok || err != nil {
		t.Errorf("after the key was released: %t, %v", ok, err)
	}
}

func TestTryNamed_doesNotWait(t *testing.T) {
	d := open(t)
	release, ok, err := d.TryNamed("background")
	if !ok || err != nil {
		t.Fatal(ok, err)
	}
	if _, ok, err := d.TryNamed("background"); ok || err != nil {
		t.Errorf("taken twice: %v, %v", ok, err)
	}
	release()
	if _, ok, err := d.TryNamed("background"); !ok || err != nil {
		t.Errorf("after it was released: %v, %v", ok, err)
	}
}

func TestNamedContext_waitsUntilContextEnds(t *testing.T) {
	d := open(t)
	release, err := d.NamedContext(t.Context(), "addresses")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := d.NamedContext(ctx, "addresses"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("another caller has the lock: got error %v, want %v", err, context.DeadlineExceeded)
	}
	release()
	// The attempt with the ended context does not keep the lock.
	ctx, cancel = context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	release, err = d.NamedContext(ctx, "addresses")
	if err != nil {
		t.Fatalf("after it was released: %v", err)
	}
	release()
}

func TestKey_waitsUntilContextEnds(t *testing.T) {
	d := open(t)
	release, err := d.Key(t.Context(), "claim")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := d.Key(ctx, "claim"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("another caller has the lock: got error %v, want %v", err, context.DeadlineExceeded)
	}
	release()
	// The attempt with the ended context does not keep the lock or its file.
	eventually.Eventually(t, 5*time.Second, "the directory has only the files of buckets", func() error {
		files, err := filepath.Glob(filepath.Join(string(d), "key-*"))
		if err == nil && len(files) > 0 {
			err = fmt.Errorf("it has %v", files)
		}
		return err
	})
	ctx, cancel = context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	release, err = d.Key(ctx, "claim")
	if err != nil {
		t.Fatalf("after it was released: %v", err)
	}
	release()
}

// The holder of a lock may end without removing the file.
func TestKey_removesUnusedFile(t *testing.T) {
	d := open(t)
	release, err := d.Named(keyFile("claim"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := d.Key(ctx, "claim"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("another caller has the lock: got error %v, want %v", err, context.DeadlineExceeded)
	}
	release()
	eventually.Eventually(t, 5*time.Second, "the file is gone", func() error {
		if _, err := os.Stat(filepath.Join(string(d), keyFile("claim"))); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("it exists (%w)", err)
		}
		return nil
	})
}

func TestKey_limitsNumberOfFiles(t *testing.T) {
	d := open(t)
	for i := range 1000 {
		release, err := d.Key(t.Context(), "claim-"+strconv.Itoa(i))
		if err != nil {
			t.Fatal(err)
		}
		release()
	}
	files, err := filepath.Glob(filepath.Join(string(d), "*"))
	if err != nil || len(files) > buckets { // the files of keys are removed
		t.Errorf("%d files, %v", len(files), err)
	}
}
