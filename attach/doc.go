// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package attach contains what the OCI hook and the node plugin exchange: both ends of their protocol, and the
// records that let the hook recognize an existing attachment without the plugin.
//
// The OCI runtime runs the hook once per container start, as root, in the node's namespaces. The hook opens a netlink
// socket in the pod's network namespace, and sends the namespace's and the socket's descriptors with a Request over a
// unix socket. The plugin sends a Response once the share is attached, or with the reason why it refuses. Without a
// Response, the hook fails, and the container does not start. If the Response has Packet set, the hook resends the
// Request with a third descriptor, for a packet socket that it opened in the namespace to talk to a DHCP server.
//
// If the hook itself refuses a container, it sends a Request with the reason and
// without descriptors, so that the plugin can report it: not every OCI runtime
// reports what a hook prints.
//
// Each plugin instance listens on a separate socket in SocketDir, because two plugins run during a rolling update;
// the hook tries the newest first. It waits for a plugin that is restarting, because the kubelet does not retry a pod
// with restart policy Never.
//
// For each attachment, the plugin keeps a Record in its run directory, on a tmpfs that only root can read. With it, a
// restarting container finds its attachment even while no plugin runs.
//
// The package also contains the Opener, which opens such sockets for the plugin in running pods' namespaces. Package
// install installs the hook on the node.
//
// # Version skew
//
// A running container's hook, the records, and the plugin may come from different releases: the plugin is upgraded or
// rolled back while pods run. A release accepts the protocol and the records of the previous release, and it sends
// and writes what the previous release accepts. Therefore, a new version takes two releases: the first accepts it,
// the second sends and writes it. New optional fields do not need a new version, because readers ignore unknown
// fields.
package attach

import "path/filepath"

// RecordsDir returns the directory of the attachment records.
func RecordsDir(runDir string) string { return filepath.Join(runDir, "attached") }

// SocketDir returns the directory where the plugins listen.
func SocketDir(runDir string) string { return filepath.Join(runDir, "attach.d") }
