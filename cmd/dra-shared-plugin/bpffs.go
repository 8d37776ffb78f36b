// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/dra-shared/dra-driver-shared/netdev/bpffs"
)

// newMountBPFFSCommand returns the command of the chart's init container for nodes without a BPF filesystem. systemd
// mounts one on most nodes, but not on nodes that are containers themselves, such as kind nodes.
func newMountBPFFSCommand() *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use:   "mount-bpffs",
		Short: "Mount a BPF file system if the node has none",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			mounted, err := bpffs.Mount(dir)
			if err != nil {
				return err
			}
			logger := klog.FromContext(cmd.Context())
			if mounted {
				logger.Info("Mounted BPF file system", "path", dir)
			} else {
				logger.Info("BPF file system is already mounted", "path", dir)
			}
			return nil
		},
	}
	c.Flags().StringVar(&dir, "bpffs", "/sys/fs/bpf", "directory for the BPF file system")
	return c
}
