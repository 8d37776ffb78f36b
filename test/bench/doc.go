// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package bench compares links and limits of the driver with what clusters use without it:
// the CNI plugins macvlan and bandwidth, a token bucket in the pod, and the kernel's part
// alone. `make bench` runs it, and writes the results into docs/dev/performance.md. It also
// measures the IPAM plugins host-local and whereabouts, which `make bench-addresses` compares
// with the driver's pools. It is a separate module because only it needs CNI.
package bench
