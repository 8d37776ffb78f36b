// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/test/fstree"
)

// The trees below contain the links and files of Linux 6.12.
const (
	pciNIC = `
class/net/nic0 -> ../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.1/net/nic0
devices/pci0000:3a/0000:3a:00.0/0000:3b:00.1/net/nic0/device -> ../../../0000:3b:00.1
devices/pci0000:3a/0000:3a:00.0/0000:3b:00.1/net/nic0/speed = 25000\n
devices/pci0000:3a/0000:3a:00.0/0000:3b:00.1/net/nic0/dev_port = 0\n
devices/pci0000:3a/0000:3a:00.0/0000:3b:00.1/subsystem -> ../../../../bus/pci
devices/pci0000:3a/0000:3a:00.0/0000:3b:00.1/driver -> ../../../../bus/pci/drivers/mlx5_core
`
	virtioNIC = `
class/net/nic0 -> ../../devices/pci0000:00/0000:00:03.0/virtio2/net/nic0
devices/pci0000:00/0000:00:03.0/virtio2/net/nic0/device -> ../../../virtio2
devices/pci0000:00/0000:00:03.0/virtio2/net/nic0/speed = -1\n
devices/pci0000:00/0000:00:03.0/virtio2/subsystem -> ../../../../bus/virtio
devices/pci0000:00/0000:00:03.0/virtio2/driver -> ../../../../bus/virtio/drivers/virtio_net
devices/pci0000:00/0000:00:03.0/subsystem -> ../../../bus/pci
`
	subfunctionNIC = `
class/net/nic0 -> ../../devices/pci0000:3a/0000:3b:00.0/mlx5_core.sf.4/net/nic0
devices/pci0000:3a/0000:3b:00.0/mlx5_core.sf.4/net/nic0/device -> ../../../mlx5_core.sf.4
devices/pci0000:3a/0000:3b:00.0/mlx5_core.sf.4/subsystem -> ../../../../bus/auxiliary
devices/pci0000:3a/0000:3b:00.0/subsystem -> ../../../bus/pci
`
	mmioNIC = `
class/net/nic0 -> ../../devices/platform/a000.virtio_mmio/virtio0/net/nic0
devices/platform/a000.virtio_mmio/virtio0/net/nic0/device -> ../../../virtio0
devices/platform/a000.virtio_mmio/virtio0/subsystem -> ../../../../bus/virtio
devices/platform/a000.virtio_mmio/subsystem -> ../../../bus/platform
`
	usbNIC = `
class/net/nic0 -> ../../devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1:1.0/net/nic0
devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1:1.0/net/nic0/device -> ../../../1-1:1.0
devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1:1.0/subsystem -> ../../../../../../bus/usb
devices/pci0000:00/0000:00:14.0/subsystem -> ../../../bus/pci
`
	representor = `
devices/pci0000:3a/0000:3a:00.0/0000:3b:00.1/net/nic0/phys_port_name = pf1vf3\n
`
)

func TestInventory_readsHardwareFromSysfs(t *testing.T) {
	for _, tc := range []struct {
		name, tree string
		want       netdev.NIC
	}{
		{"a PCI function", pciNIC, netdev.NIC{Speed: 25e9, Driver: "mlx5_core", Bus: "pci", PCIBusID: "0000:3b:00.1"}},
		{"a representor of a virtual function", pciNIC + representor,
			netdev.NIC{Speed: 25e9, Driver: "mlx5_core", Bus: "pci", PCIBusID: "0000:3b:00.1", Port: "pf1vf3"}},
		{"virtio on PCI", virtioNIC, netdev.NIC{Driver: "virtio_net", Bus: "virtio", PCIBusID: "0000:00:03.0"}},
		{"virtio without PCI", mmioNIC, netdev.NIC{Bus: "virtio"}},
		{"a subfunction", subfunctionNIC, netdev.NIC{Bus: "auxiliary", PCIBusID: "0000:3b:00.0"}},
		{"a USB adapter", usbNIC, netdev.NIC{Bus: "usb"}},
		{"a virtual interface", `class/net/nic0/speed = 10000\n`, netdev.NIC{Speed: 10e9}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			files, err := fstree.Parse(strings.NewReader(tc.tree))
			if err != nil {
				t.Fatal(err)
			}
			sysfs := t.TempDir()
			if err := fstree.Write(files, sysfs); err != nil {
				t.Fatal(err)
			}
			tc.want.Name = "nic0"
			if diff := cmp.Diff(tc.want, netdev.Hardware(sysfs, "nic0")); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestPort(t *testing.T) {
	for _, tc := range []struct {
		number     int
		name, want string
	}{
		{0, "", ""}, {1, "", "d1"}, {0, "p1", ""}, {1, "p1", "d1"}, {0, "p0s1", "p0s1"}, {1, "pf0vf2", "pf0vf2"},
	} {
		if got := netdev.Port(tc.number, tc.name); got != tc.want {
			t.Errorf("dev_port %d, phys_port_name %q: port %q, want %q", tc.number, tc.name, got, tc.want)
		}
	}
}
