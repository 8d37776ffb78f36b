// Package attach is what passes between the OCI hook and the node plugin: both
// ends, and the record that lets the hook do without the plugin.
//
// The hook runs once per container start, as root, in the node's namespaces.
// It opens a netlink socket in the pod's network namespace and sends two
// descriptors, that namespace and that socket, with a Request over a unix
// socket. The plugin answers with a Response when the share is attached, or
// refuses. No answer is a refusal: the container does not start.
//
// Each plugin instance listens on a socket of its own in SocketDir, since two
// run at once during a rolling update; the hook asks the newest first. It
// waits for a plugin that is away, because a pod whose restart policy is Never
// does not get a second try.
//
// For each link the plugin keeps a Record in its run directory, on a tmpfs that only
// root can read. A container that starts again finds its link by it, also while
// no plugin runs.
package attach

import "path/filepath"

// SocketDir is where the plugins listen.
func SocketDir(runDir string) string { return filepath.Join(runDir, "attach.d") }
