// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

// guestModules are the modules that every guest can load.
var guestModules = []string{
	// Links, queuing, and classifiers, among them those that this machine may lack.
	"8021q", "bonding", "bridge", "br_netfilter", "dummy", "ifb", "ipvlan", "ipvtap", "macsec", "macvlan", "macvtap",
	"netdevsim", "tun", "veth", "virtio_net", "vrf", "vxlan", "act_*", "cls_*", "em_*", "sch_*",
	// RDMA without hardware; only kernels of the flavor amd64 have it.
	"ib_core", "ib_uverbs", "rdma_cm", "rdma_rxe", "rdma_ucm", "siw",
	// Disks and what containers and systemd need.
	"ext4", "crc16", "crc32c*", "libcrc32c", "virtio_blk", "virtio_pci", "virtio_rng",
	"overlay", "autofs4", "fuse", "loop",
	"nf_conntrack", "nf_nat", "nf_tables", "nft_*", "ip_tables", "iptable_*", "ip6_tables", "ip6table_*", "xt_*",
}
