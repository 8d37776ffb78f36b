// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package ipam_test

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	network "github.com/dra-shared/dra-driver-shared/api/network/v1alpha1"
	"github.com/dra-shared/dra-driver-shared/driver/lock"
	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// An attachment gets an address of the node's blocks although the API server does not answer, even while
// the plugin waits for an answer, and after requests to return blocks have failed.
func TestAssign_doesNotNeedAPIServer(t *testing.T) {
	for name, hang := range map[string]bool{"requests fail": false, "requests hang": true} {
		t.Run(name, func(t *testing.T) {
			api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) { s.BlockSize = ptr.To(int32(4)) }))
			node := newNode(t, api, "n1")
			a := node.plugin(t.Context(), "p1", time.Second)
			for i := range 9 { // three blocks
				if _, err := node.assign(t.Context(), a, i, "office"); err != nil {
					t.Fatal(err)
				}
			}
			returning, answer := make(chan struct{}), make(chan struct{})
			var isReturning atomic.Bool
			api.setIntercept(func(operation string) error { // the first request to return a block, and all later ones
				if operation == "delete" && isReturning.CompareAndSwap(false, true) {
					close(returning)
				}
				if !isReturning.Load() {
					return nil
				}
				if hang {
					<-answer
				}
				return errInjected
			})
			defer api.setIntercept(nil)
			defer close(answer)
			for i := 1; i < 9; i++ {
				node.release(a, i)
			}
			<-returning
			for i := range 3 {
				ctx, cancel := context.WithTimeout(t.Context(), waitTimeout/4)
				if _, err := node.assign(ctx, a, 100+i, "office"); err != nil {
					t.Errorf("attachment %d: got error %v, want an address of the node's blocks", i, err)
				}
				cancel()
			}
		})
	}
}

// When the API server answers again, the plugin uses a block that it failed to return, or returns it.
func TestMaintenance_afterFailedReturn(t *testing.T) {
	api := newFakeAPI(addressPool("office", func(s *network.AddressPoolSpec) {
		s.Ranges, s.BlockSize = []string{"10.20.1.0/29"}, ptr.To(int32(2))
	}))
	node := newNode(t, api, "n1")
	a := node.plugin(t.Context(), "p1", time.Second)
	for i := range 8 {
		if _, err := node.assign(t.Context(), a, i, "office"); err != nil {
			t.Fatal(err)
		}
	}
	failed := make(chan struct{})
	var once sync.Once
	api.setIntercept(func(operation string) error {
		if operation != "delete" {
			return nil
		}
		once.Do(func() { close(failed) })
		return errInjected
	})
	for i := range 8 {
		node.release(a, i)
	}
	<-failed
	api.setIntercept(nil)
	eventually.Eventually(t, waitTimeout, "all addresses can be assigned again", func() error {
		for i := range 8 {
			if _, err := node.assign(t.Context(), a, 100+i, "office"); err != nil {
				return err
			}
		}
		return nil
	})
	checkUnique(t, node)
}

func TestAssign_stopsWhenContextEnds(t *testing.T) {
	node := newNode(t, newFakeAPI(addressPool("office", nil)), "n1")
	a := node.plugin(t.Context(), "p1", time.Second)
	if _, err := node.assign(t.Context(), a, 1, "office"); err != nil {
		t.Fatal(err)
	}
	locks, err := lock.Open(filepath.Join(node.dir, "locks"))
	if err != nil {
		t.Fatal(err)
	}
	release, err := locks.Named("addresses") // as another plugin of the node
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := node.assign(ctx, a, 2, "office"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got error %v, want %v", err, context.DeadlineExceeded)
	}
}
