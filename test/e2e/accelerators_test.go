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

// Two nodes that look like a machine with eight GPUs, each beside its NIC, and
// that have a few devices of other sorts: sysfs and procfs are a tree's, device
// nodes are those of drivers that every kernel has, so that they can be opened.
func TestAccelerators(t *testing.T) {
	needsCluster(t)
	b, err := clusterclient.New(".cluster-e2e-accelerators")
	if err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(b.Root, "test/env/accelerators.yaml")
	machine := filepath.Join(b.Dir, "machine")
	b.Values = []string{"--values", at, "--set", "plugin.sysfs=" + machine + "/sys", "--set", "plugin.procfs=" + machine + "/proc"}
	tellOn(t, "testdata/accelerators", b, clusterclient.Options{Nodes: 2, Gates: "all", Before: func(ctx context.Context) error {
		if err := fstree.Write(nodesOf(t, b), machine); err != nil {
			return err
		}
		for _, node := range []string{"n1", "n2"} {
			if _, err := b.Node(ctx, node, "sh", "-ec", deviceNodes); err != nil {
				return err
			}
			if _, err := b.Kubectl(ctx, "label", "node", node, "example.com/rack=1"); err != nil {
				return err
			}
		}
		return nil
	}})
}

// nodesOf is the machine, with its first two NICs by the names that the
// cluster's have.
func nodesOf(t *testing.T, b *clusterclient.Cluster) fstest.MapFS {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(b.Root, "accel/testdata/eight-h200.tree"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := fstree.Parse(strings.NewReader(strings.NewReplacer("enp24s0np0", "nic0", "enp64s0np0", "nic1").Replace(string(raw))))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// deviceNodes are misc devices under other names, none of which containers may
// open by themselves: fuse (10:229), btrfs-control (10:234), autofs (10:235),
// loop-control (10:237).
const deviceNodes = `
cd /dev
mknod nvidia0 c 10 234
mknod nvidia1 c 10 229
for i in 2 3 4 5 6 7; do mknod nvidia$i c 10 234; done
mknod nvidiactl c 10 237
mknod nvidia-uvm c 10 235
for i in whole0 free0 part0; do mknod $i c 10 234; done`
