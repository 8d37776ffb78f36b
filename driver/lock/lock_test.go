// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package lock

import (
	"path/filepath"
	"strconv"
	"sync"
	"testing"
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
	var (
		all   sync.WaitGroup
		count int // guarded by the lock alone
	)
	for range 50 {
		all.Go(func() {
			release, err := d.Key("claim")
			if err != nil {
				t.Error(err)
				return
			}
			defer release()
			count++
		})
	}
	all.Wait()
	if count != 50 {
		t.Errorf("counted %d of 50", count)
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

func TestKey_limitsTheNumberOfFiles(t *testing.T) {
	d := open(t)
	for i := range 1000 {
		release, err := d.Key("claim-" + strconv.Itoa(i))
		if err != nil {
			t.Fatal(err)
		}
		release()
	}
	files, err := filepath.Glob(filepath.Join(string(d), "*"))
	if err != nil || len(files) > buckets {
		t.Errorf("%d files, %v", len(files), err)
	}
}
