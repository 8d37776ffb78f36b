// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"bytes"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"time"
)

// The kubelet prepares a claim again while a pod is attached. The helper then writes the metadata last, from before
// the attachment. When the call returns, the file contains the attachment's network data.
func TestPlugin_refreshesMetadataWhenClaimIsPreparedAgain(t *testing.T) {
	e := newTestEnv(t)
	path := e.path(metadataDir, "metadata.json")
	var outdated atomic.Pointer[[]byte] // replaces what the plugin writes next
	injector := func(name string, operation func() error) error {
		err := operation()
		if name == "rewrite metadata" {
			if content := outdated.Swap(nil); content != nil {
				err = errors.Join(err, os.WriteFile(path, *content, 0o600))
			}
		}
		return err
	}
	config := pluginConfig{Node: e.node, Dir: e.dir, BPFFS: e.bpffs, URL: e.api.URL, Instance: "metadata"}
	e.startInProcess(config, injector)
	c, pod := e.claim("c"), e.sandbox("p")
	e.must("prepare the claim", e.prepare(t.Context(), c))
	prepared, err := os.ReadFile(path)
	e.must("read the metadata of the prepared claim", err)
	e.must("attach the claim", pod.hook(t.Context(), e.dir, c, 10*time.Second))
	attached, err := os.ReadFile(path)
	e.must("read the metadata of the attached claim", err)
	if bytes.Equal(prepared, attached) {
		t.Fatalf("attaching the claim did not change the metadata: %s", attached)
	}

	outdated.Store(&prepared)
	e.must("prepare the claim again", e.prepare(t.Context(), c))
	if outdated.Load() != nil {
		t.Fatal("preparing the claim again did not write the metadata")
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, attached) {
		t.Errorf("got metadata %s, %v, want %s", got, err, attached)
	}
}
