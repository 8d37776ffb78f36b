// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package trial

// Patience is how long a trial waits for a frame.
const Patience = patience

// ErrFiltered is wrapped by the error of a trial that a firewall of the node prevents.
var ErrFiltered = errFiltered
