// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package netdev attaches shares of a NIC to pods. It lists the NICs of a node
// (Inventory), creates a macvlan for each share in the network namespace of the
// pod (Node.Attach), limits the share's bandwidth on the node (packages
// classify and shape), and reads the state of the link from the kernel
// (Node.ReadAndGuard).
//
// The package depends on the kernel and not on Kubernetes. A Node stores
// nothing, so a caller that has to detach a link after a restart stores the
// Attachment, which identifies the link. What a Node keeps in memory about NICs
// and links, it finds again after a restart. A caller that wants an uplink to stay
// one stores Inventory.Uplinks.
//
// No function of this package enters another network namespace. A Node works
// on a pod's namespace in three ways:
//   - with a file descriptor of the namespace, to create a link in it
//   - with a socket that was opened in the namespace, to configure the link
//   - with the ID that the node's namespace assigns to it (NSID), to read or
//     delete the link later
//
// An open socket or descriptor keeps its namespace alive, an ID does not.
//
// Unless a name or comment states otherwise, rates are in bits per second, and
// sizes and MTUs are in bytes.
package netdev
