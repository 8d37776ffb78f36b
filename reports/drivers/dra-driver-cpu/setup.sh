#!/bin/sh
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Writes a sysfs of one socket and one NUMA node with eight CPUs, and starts a runtime with NRI.
set -eu
mkdir -p "$STATE_DIR/nri" "$STATE_DIR/cpu/smt" "$STATE_DIR/node/node0"
cd "$STATE_DIR/cpu"
echo 0-7 | tee online possible present >../node/node0/cpulist
echo 0 | tee ../node/online >../node/possible
echo off >smt/control
for i in 0 1 2 3 4 5 6 7; do
	mkdir -p cpu$i/topology cpu$i/node0 cpu$i/cache/index3
	echo 0 >cpu$i/topology/physical_package_id
	echo $i >cpu$i/topology/core_id
	echo 65535 >cpu$i/topology/cluster_id
	echo 3 >cpu$i/cache/index3/level
	echo 0 >cpu$i/cache/index3/id
	echo 0-7 >cpu$i/cache/index3/shared_cpu_list
done
cd "$OLDPWD"
bin/peers/nri-runtime "$STATE_DIR/nri/nri.sock" >"$STATE_DIR/nri.log" 2>&1 &
echo $! >"$STATE_DIR/nri.pid"
