// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/dra-shared/dra-driver-shared/test/clusterclient"
	"github.com/dra-shared/dra-driver-shared/test/fstree"
)

// TestAccelerators runs on two nodes that look like machines with eight GPUs, each GPU with a NIC on the same PCIe
// root, and with a few devices of other kinds. The nodes' sysfs and procfs come from a recorded tree. Their device
// nodes belong to drivers that every kernel has, so containers can open them.
func TestAccelerators(t *testing.T) {
	requireCluster(t)
	c, err := clusterclient.New(".cluster-e2e-accelerators")
	if err != nil {
		t.Fatal(err)
	}
	machine := filepath.Join(c.Dir, "machine")
	c.Values = []string{
		"--values", filepath.Join(c.Root, "test/env/accelerators.yaml"),
		"--set", "plugin.sysfs=" + machine + "/sys", "--set", "plugin.procfs=" + machine + "/proc",
	}
	prepareNodes := func(ctx context.Context) error {
		if err := fstree.Write(machineTree(t, c), machine); err != nil {
			return err
		}
		for _, node := range []string{"n1", "n2"} {
			if _, err := c.Node(ctx, node, "sh", "-ec", deviceNodes); err != nil {
				return err
			}
			if _, err := c.Kubectl(ctx, "label", "node", node, "example.com/rack=1"); err != nil {
				return err
			}
		}
		return nil
	}
	runStoriesOn(t, "testdata/accelerators", c, clusterclient.Options{Nodes: 2, Gates: "all", Before: prepareNodes})
}

// machineTree returns the recorded tree, with the names of the cluster's NICs for the first two NICs.
func machineTree(t *testing.T, c *clusterclient.Cluster) fstest.MapFS {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(c.Root, "accel/testdata/eight-h200.tree"))
	if err != nil {
		t.Fatal(err)
	}
	renamed := strings.NewReplacer("enp24s0np0", "nic0", "enp64s0np0", "nic1").Replace(string(raw))
	files, err := fstree.Parse(strings.NewReader(renamed))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// deviceNodes creates nodes of misc devices under other names. Containers may open
// none of them by default: fuse (10:229), btrfs-control (10:234), autofs (10:235),
// loop-control (10:237).
const deviceNodes = `
cd /dev
mknod nvidia0 c 10 234
mknod nvidia1 c 10 229
for i in 2 3 4 5 6 7; do mknod nvidia$i c 10 234; done
mknod nvidiactl c 10 237
mknod nvidia-uvm c 10 235
for i in whole0 free0 part0; do mknod $i c 10 234; done`
