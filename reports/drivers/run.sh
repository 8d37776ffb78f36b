#!/bin/sh
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# run.sh DRIVER [flags of dra-conformance run]: tests a driver of this folder in mount and network
# namespaces with eight network interfaces. Run it in the root of the repository, as root, after
# `make bin/dra-conformance bin/peers`.
set -eu
driver=$1
shift
exec unshare --mount --net sh -euc '
	mount -t sysfs sysfs /sys
	ip link set lo up
	for i in 0 1 2 3 4 5 6 7; do
		ip tuntap add dev "nic$i" mode tap
		ip link set "nic$i" up
	done
	exec bin/dra-conformance run "$@"
' sh --config "reports/drivers/$driver/conformance.yaml" "$@"
