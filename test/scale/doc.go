// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package scale tests that the cost of an operation on a node does not depend on the number of shares. Its tests count
// netlink messages, because their number does not depend on the machine.
package scale
