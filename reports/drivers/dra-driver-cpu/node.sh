#!/bin/sh
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Writes a copy of the topology of the CPUs with one cache for all, which manifests.sh mounts into the driver's pod on a
# node whose kernel does not show the caches, such as some virtual machines: the driver ignores CPUs without caches.
# The argument down removes the copy.
set -eu
copy=/var/lib/dra-driver-cpu-topology system=/sys/devices/system/cpu
if [ "$1" = down ]; then
	rm -rf "$copy"
	exit
fi
mkdir -p "$copy/smt"
for file in online possible present smt/control; do
	[ ! -e "$system/$file" ] || cat "$system/$file" >"$copy/$file"
done
for cpu in "$system"/cpu[0-9]*; do
	target=$copy/${cpu##*/}
	mkdir -p "$target/cache/index3"
	cp -a "$cpu/topology" "$cpu"/node* "$target"
	echo 3 >"$target/cache/index3/level"
	echo 0 >"$target/cache/index3/id"
	cat "$system/online" >"$target/cache/index3/shared_cpu_list"
done
