// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package dhcp

// ErrNoAnswer means that no server answered.
var ErrNoAnswer = errNoAnswer

// OpenSocket opens a socket for NewConn in this thread's namespace.
var OpenSocket = openSocket
