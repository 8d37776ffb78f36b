// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package kind

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/kind/engine"
)

// officialImage is the node image that kind uses by default. The Makefile pins the
// version of kind.
const officialImage = "kindest/node:v1.37.0@sha256:a1ed56cfb0e7b93589bdf97c8cd566405a265939e3620fc4f5de89adff580ae5"

// pull pulls an image. It gives up if the registry does not answer within pullTimeout.
func pull(ctx context.Context, e *engine.Engine, image string) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timer := time.AfterFunc(pullTimeout, func() {
		cancel(fmt.Errorf("the registry did not answer within %s", pullTimeout))
	})
	defer timer.Stop()
	cmd := e.Command(ctx, "docker", "pull", image)
	var stderr bytes.Buffer
	// Docker prints a line when it has the manifest.
	cmd.Stdout, cmd.Stderr = &firstWrite{do: func() { timer.Stop() }}, &stderr
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		message := strings.TrimSpace(stderr.String())
		return errors.New(message[strings.LastIndexByte(message, '\n')+1:])
	}
	return nil
}

// firstWrite calls do at the first write and discards everything.
type firstWrite struct {
	once sync.Once
	do   func()
}

var _ io.Writer = (*firstWrite)(nil)

func (w *firstWrite) Write(p []byte) (int, error) {
	w.once.Do(w.do)
	return len(p), nil
}
