// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package dhcp leases IPv4 addresses for links in pods (RFC 2131).
//
// Messages and exchanges come from insomniacslk/dhcp. This package adds what that library lacks: an exchange over a
// packet socket that another process opened in the pod (Conn), renewals that only need the Lease, which the caller
// records, the times when a client acts (Times), and the release of an address after its pod has ended (Release).
package dhcp
