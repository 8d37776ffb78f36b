// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/vishvananda/netlink"

	"github.com/dra-shared/dra-driver-shared/netdev"
	"github.com/dra-shared/dra-driver-shared/netdev/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m, nstest.Root) }

// cniPlugins is the directory of the CNI plugins; `make bench` builds them.
const cniPlugins = "../../bin/cni"

// cni calls CNI plugins as container runtimes do.
type cni struct {
	config *libcni.CNIConfig
	list   *libcni.NetworkConfigList
}

// newCNI returns a cni for a list of plugin configurations.
func newCNI(b *testing.B, plugins string) *cni {
	b.Helper()
	if _, err := os.Stat(filepath.Join(cniPlugins, "macvlan")); err != nil {
		b.Fatalf("the CNI plugins are missing, run make bin/cni: %v", err)
	}
	config := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "bench", "plugins": %s}`, plugins)
	list, err := libcni.NetworkConfFromBytes([]byte(config))
	if err != nil {
		b.Fatal(err)
	}
	directory, err := filepath.Abs(cniPlugins)
	if err != nil {
		b.Fatal(err)
	}
	// Without a writer for what plugins log, which would be between the results of benchmarks.
	exec := &invoke.DefaultExec{RawExec: &invoke.RawExec{}}
	return &cni{config: libcni.NewCNIConfigWithCacheDir([]string{directory}, b.TempDir(), exec), list: list}
}

func (c *cni) add(ctx context.Context, id string, pod *nstest.Namespace) error {
	_, err := c.config.AddNetworkList(ctx, c.list, runtimeConf(id, pod))
	return err
}

func (c *cni) del(ctx context.Context, id string, pod *nstest.Namespace) error {
	return c.config.DelNetworkList(ctx, c.list, runtimeConf(id, pod))
}

func runtimeConf(id string, pod *nstest.Namespace) *libcni.RuntimeConf {
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), pod.File.Fd())
	args := [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "default"}, {"K8S_POD_NAME", id}}
	return &libcni.RuntimeConf{ContainerID: id, NetNS: path, IfName: linkName, Args: args}
}

// linkName is the name of the links in pods.
const linkName = "net1"

// addMacvlan creates a link with as few requests as possible: it does not look for a free
// name, sets no limit, and checks nothing.
func addMacvlan(nic netdev.NIC, pod *nstest.Namespace, mac net.HardwareAddr, address netip.Prefix) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex, attrs.HardwareAddr = linkName, nic.Index, mac
	attrs.Namespace = netlink.NsFd(pod.File.Fd())
	if err := netlink.LinkAdd(&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_PRIVATE}); err != nil {
		return err
	}
	return inPod(pod, func(h *netlink.Handle, link netlink.Link) error {
		ip := &netlink.Addr{IPNet: &net.IPNet{
			IP: address.Addr().AsSlice(), Mask: net.CIDRMask(address.Bits(), address.Addr().BitLen()),
		}}
		if err := h.AddrAdd(link, ip); err != nil {
			return err
		}
		return h.LinkSetUp(link)
	})
}

func deleteLink(pod *nstest.Namespace) error {
	return inPod(pod, func(h *netlink.Handle, link netlink.Link) error { return h.LinkDel(link) })
}
