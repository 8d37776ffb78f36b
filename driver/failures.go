// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"sync"

	"github.com/dra-shared/dra-driver-shared/attach"
)

// failures remembers why attaching shares to pods failed: by share, then by pod UID. It
// keeps an entry until attaching succeeds, or the pod or claim no longer exists.
type failures struct {
	mu      sync.Mutex
	byShare map[string]map[string]failure
	// last are the last failures, by share, except timeouts waiting for other pods (errClaimBusy).
	last map[string]failure
}

type failure struct {
	pod     attach.Pod
	message string
}

// set records the outcome of an attempt to attach a share to a pod.
func (f *failures) set(shareName string, pod attach.Pod, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		f.remove(shareName, pod.UID)
		return
	}
	if f.byShare == nil {
		f.byShare, f.last = map[string]map[string]failure{}, map[string]failure{}
	}
	if f.byShare[shareName] == nil {
		f.byShare[shareName] = map[string]failure{}
	}
	failed := failure{pod: pod, message: err.Error()}
	f.byShare[shareName][pod.UID] = failed
	if !errors.Is(err, errClaimBusy) {
		f.last[shareName] = failed
	}
}

// withLast adds a share's last failure to err, the error of a pod that waited for other pods.
func (f *failures) withLast(shareName string, err error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	last, failed := f.last[shareName]
	if !failed {
		return err
	}
	return fmt.Errorf("%w; the last request that failed was for pod %s/%s: %s",
		err, last.pod.Namespace, last.pod.Name, last.message)
}

// remove requires f.mu.
func (f *failures) remove(shareName, podUID string) {
	delete(f.byShare[shareName], podUID)
	if len(f.byShare[shareName]) == 0 {
		delete(f.byShare, shareName)
		delete(f.last, shareName)
	}
}

// pods returns the pods that one of the shares could not be attached to.
func (f *failures) pods(shares []share) (pods []attach.Pod) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range shares {
		for _, failed := range f.byShare[s.Name] {
			pods = append(pods, failed.pod)
		}
	}
	return pods
}

// messages returns the errors of a share.
func (f *failures) messages(shareName string) (messages []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, failed := range f.byShare[shareName] {
		messages = append(messages, failed.message)
	}
	return messages
}

// keepOnly forgets the failures of all pods except podUIDs.
func (f *failures) keepOnly(shares []share, podUIDs map[string]bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range shares {
		for uid := range f.byShare[s.Name] {
			if !podUIDs[uid] {
				f.remove(s.Name, uid)
			}
		}
	}
}

// forget forgets all failures of the shares.
func (f *failures) forget(shares []share) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range shares {
		delete(f.byShare, s.Name)
		delete(f.last, s.Name)
	}
}
