#!/bin/sh
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Creates four interfaces that are connected to each other, and the shared mount that the
# DaemonSet of dranet needs at /dev/infiniband; removes them again with the argument down.
set -eu
if [ "$1" = down ]; then
	umount /dev/infiniband
	rmdir /dev/infiniband
	for i in 0 1 2 3; do ip link delete "net$i"; done
	exit
fi
mkdir -p /dev/infiniband
mount -t tmpfs tmpfs /dev/infiniband
mount --make-shared /dev/infiniband
for i in 0 1 2 3; do
	ip link add "net$i" link nic0 type macvlan mode bridge
	ip address add "10.99.0.1$i/24" dev "net$i"
	ip link set "net$i" up mtu 1400
done
