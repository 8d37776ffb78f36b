// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package attach contains what the OCI hook and the node plugin exchange: both
// ends of their protocol, and the records by which the hook recognizes an
// existing attachment without the plugin.
//
// The OCI runtime runs the hook once per container start, as root, in the node's
// namespaces. The hook opens a netlink socket in the pod's network namespace and
// sends two descriptors, of that namespace and of that socket, with a Request
// over a unix socket. The plugin sends a Response once the share is attached, or
// with the reason why it refuses. Without a Response the hook fails, and the
// container does not start. If the Response has Packet set, the hook sends the
// Request again with a third descriptor, of a packet socket that it opened in the
// namespace, for the exchange with a DHCP server.
//
// If the hook itself refuses a container, it sends a Request with the reason and
// without descriptors, so that the plugin can report it: not every OCI runtime
// reports what a hook prints.
//
// Each plugin instance listens on a separate socket in SocketDir, because two
// plugins run during a rolling update; the hook tries the newest first. It waits
// for a plugin that is restarting, because the kubelet does not retry a pod whose
// restart policy is Never.
//
// For each attachment the plugin keeps a Record in its run directory, on a tmpfs
// that only root can read. A restarting container finds its attachment by it,
// even while no plugin runs.
//
// The package also contains the Opener, which opens such sockets for the plugin in the
// namespaces of running pods, and the Installation of the hook on the node.
//
// # Version skew
//
// The hook of a running container, the records, and the plugin may come from
// different releases: the plugin is upgraded or rolled back while pods run. A
// release accepts the protocol and the records of the previous release, and it
// sends and writes what the previous release accepts. Therefore a new version
// takes two releases: the first accepts it, the second sends and writes it. New
// optional fields do not need a new version, because readers ignore unknown
// fields.
package attach

import "path/filepath"

// RecordsDir returns the directory of the attachment records.
func RecordsDir(runDir string) string { return filepath.Join(runDir, "attached") }

// SocketDir returns the directory in which the plugins listen.
func SocketDir(runDir string) string { return filepath.Join(runDir, "attach.d") }
