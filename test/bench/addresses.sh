#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Compares attaching with an address of a pool, with a static address, and with CNI plugins, and writes the section about
# it in docs/dev/scale-addresses.md. bin/cni must exist. The machine should have nothing else to do.
set -euo pipefail
cd "$(dirname "$0")/../.."
results=$(mktemp)
trap 'rm -f "$results"' EXIT
{
	go test -run '^$' -bench BenchmarkAddresses -benchtime 100x -count 3 ./test/crash
	cd test/bench
	go test -run '^$' -bench 'BenchmarkCNI$/shares=10$/parallel=1$' -benchtime 100x -count 3 .
} | tee /dev/stderr | grep '^Benchmark' >"$results"
test/env/section.sh docs/dev/scale-addresses.md <<EOF
## Attaching

Written by \`make bench-addresses\` on $(date -u +%F), on a machine with $(nproc) cores and Linux $(uname -r).

*pool* and *static* are the times of the plugin's part of the hook, measured alternately with an address of a pool and
with one that the claim names, next to 50 pods with addresses of the pool. *start* of CNI is ADD of the plugins macvlan
and host-local through libcni. \`writes/pod\` counts the writes of AddressBlocks while those 50 pods start: a node takes 64
addresses at a time from 10.20.0.0/16, and 2 from 10.20.0.0/22 (\`blockSize\` of the [pool](../user/reference/addresspool.md)).

\`\`\`text
$(sed -E 's/[0-9.]+ ns\/op//; s/[ \t]+/ /g' "$results")
\`\`\`
EOF
