// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package netdev

// The kernel reuses the ID of a network namespace after the namespace has ended. A Node misses the event for the end if
// it was not running or its socket overflowed. The cookie of a namespace is never reused, but only a socket in the
// namespace shows it, so Attach records it.

// rememberNamespace records the cookie of the namespace that has an ID.
func (n *Node) rememberNamespace(id int, cookie uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cookies[id] = cookie
}

// isIDReused reports whether another namespace is known to have the ID of the attachment's namespace. It may be wrong
// for an attachment of another plugin on the node, so the caller looks for its MAC address first.
func (n *Node) isIDReused(a Attachment) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	cookie, known := n.cookies[a.NSID]
	return known && cookie != a.Cookie
}

// namespaceExists reports whether the namespace of an attachment exists, as far as it is known: otherwise, whether
// any namespace has its ID.
func (n *Node) namespaceExists(a Attachment) (bool, error) {
	if n.isIDReused(a) {
		return false, nil
	}
	return n.conn.NamespaceExists(a.NSID)
}
