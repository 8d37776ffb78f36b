#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Compares the driver with the kernel's part alone, with CNI plugins, and with a token bucket
# in the pod, and writes docs/dev/performance.md and the files next to it. bin/cni must exist.
# The machine should be otherwise idle.
#
# usage: bench.sh [PODS [RUNS]]: PODS is the number of pods of each run. The report has the
# medians of RUNS runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
pods=${1:-200} runs=${2:-3}
out=docs/dev/performance
mkdir -p $out
{
	go test -run '^$' -bench BenchmarkPlugin -benchtime "${pods}x" -count "$runs" -timeout 60m ./test/crash
	cd test/bench
	go test -run '^$' -bench 'Benchmark(Kernel|CNI)$' -benchtime "${pods}x" -count "$runs" -timeout 60m .
	go test -run '^$' -bench BenchmarkTraffic -benchtime 1x -count "$runs" -timeout 60m .
} | tee >(cat >&2) >$out/bench.txt.new
mv $out/bench.txt.new $out/bench.txt
report=$(cd test/bench && go run ./report write ../../$out <../../$out/bench.txt)
cat >docs/dev/performance.md <<EOF
# Performance

Written by \`make bench\` on $(date -u +%F), on a machine with $(nproc) cores and Linux $(uname -r).
Times depend on the machine; compare the columns. Number of runs of which each value is the median: $runs.
[The node side at scale](scale-node.md) has numbers of netlink messages, and what a plugin uses at
rest. [bench.txt](performance/bench.txt) has all results in the format of \`benchstat\`.

The times of pods are in ms: the median of $pods pods, and the 99th percentile in parentheses. The other
pods have links on the same NIC. Pods that start at a time also end at a time: each column is one step, which
they begin together, and a time includes waiting for the others.

- *kernel*: the least netlink requests that create or delete a macvlan with an address
- *attach*: the plugin's part of the hook: the same, and the share's limits, identity, and record
- *hook*: attach, and the process that the container runtime starts
- *prepare* and *unprepare*: the kubelet's calls, each with a request to the API server. Unprepare deletes
  the link.
- *CNI*: the plugins macvlan and host-local through libcni. They limit nothing.

![Pods start one at a time](performance/start-1.svg)
![Pods start 32 at a time](performance/start-32.svg)
![Pods end one at a time](performance/end-1.svg)
![Pods end 32 at a time](performance/end-32.svg)

$report

## How traffic is measured

Two pods have the same limit. One sends TCP as fast as it can. Both measure the round trip of a datagram
to a host on the wire once per millisecond; the table shows the 99th percentile. Rates count
Ethernet frames without checksum, compared with the limit: *first second* after idleness, the others over
4 s. The token buckets, in the pod and of the CNI plugin, hold what the limit permits in 4 ms. The CNI
plugin bandwidth cannot limit macvlans; its pods have veths to the node. A token bucket in the pod limits
only what it sends, and the pod can remove it. *One flow next to eight* is the rate of a pod with one TCP flow, in
percent of that of another pod that sends eight at the same time. *Two senders* are two pods that send small
datagrams at the same time: the sum of their datagrams, as a multiple of those of one pod. \`shaping: MultiQueue\` needs
a kernel with the action skbedit, and has no results without it.
EOF
