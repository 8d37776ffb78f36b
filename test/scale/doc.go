// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package scale tests that what the node side of the driver costs does not depend on
// the number of shares. Its tests count netlink messages, which do not depend on the
// machine.
package scale
