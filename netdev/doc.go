// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package netdev attaches shares of a NIC to pods. It lists the NICs of a node
// (Inventory), creates a macvlan for each share in the network namespace of the
// pod (Node.Attach), limits the share's bandwidth on the node (packages
// classify and shape), and reads the state of the link from the kernel
// (Node.ReadAndBlock).
//
// The package depends on the kernel and not on Kubernetes. It writes no files. To
// detach a link after a restart, the caller stores the Attachment, which identifies
// the link. A Node finds what it knows about NICs and links again after a restart.
// An Inventory does not remember uplinks: the caller stores Inventory.Uplinks and
// restores them.
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
