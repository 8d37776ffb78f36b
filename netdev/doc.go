// Package netdev makes shares of a NIC real on a node: which NICs there are
// (Inventory), a macvlan per share and pod, created in the pod's namespace
// (Node.Attach), held to its bandwidth on the node (packages classify and
// shape), and what the kernel says of it afterwards (Node.Read).
//
// It knows the kernel and nothing of Kubernetes. It keeps no state of its own
// beyond which NICs it was told to manage: what a caller wants undone after a
// restart it must remember (Attachment has all that is needed).
//
// Nothing here enters another network namespace. A pod's namespace is reached
// by a descriptor of it, to create a link there; by a socket that was opened
// in it, to configure the link; and by the ID that the node's namespace gives
// it, to read the link or delete it later. A socket keeps its namespace alive,
// an ID does not.
package netdev
