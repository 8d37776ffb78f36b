// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Command nri-runtime serves NRI as a container runtime without pods, on the socket that
// is its argument, until it is ended. Drivers that exit without NRI are tested with it.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/containerd/nri/pkg/adaptation"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatalf("usage: %s SOCKET", os.Args[0])
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := serve(ctx, os.Args[1]); err != nil {
		log.Print(err)
		stop()
		os.Exit(1)
	}
}

func serve(ctx context.Context, socket string) error {
	// The runtime has no pods and no containers, and updates none.
	synchronize := func(ctx context.Context, send adaptation.SyncCB) error {
		_, err := send(ctx, nil, nil)
		return err
	}
	update := func(context.Context, []*adaptation.ContainerUpdate) ([]*adaptation.ContainerUpdate, error) {
		return nil, nil
	}
	none := filepath.Join(filepath.Dir(socket), "none") // it starts no plugins itself
	a, err := adaptation.New("conformance", "v1.0.0", synchronize, update, adaptation.WithSocketPath(socket),
		adaptation.WithPluginPath(none), adaptation.WithPluginConfigPath(none))
	if err != nil {
		return err
	}
	if err := a.Start(); err != nil {
		return err
	}
	defer a.Stop()
	<-ctx.Done()
	return nil
}
