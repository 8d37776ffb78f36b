#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Measures the node side at scale, and writes docs/dev/scale-node.md.
# Arguments: the numbers of shares of the plugin to measure.
set -euo pipefail
cd "$(dirname "$0")/../.."
rows=$(mktemp) bench=$(mktemp) messages=$(mktemp)
trap 'rm -f "$rows" "$bench" "$messages"' EXIT
go test -count=1 -v -run TestNode_messages ./test/scale | tee >(cat >&2) |
  sed -nE 's/^.*messages_test.go:[0-9]+: (.*): ([0-9]+) sent, ([0-9]+) received$/| \1 | \2 | \3 |/p' >"$messages"
go test -run '^$' -bench . -benchtime 200x -timeout 20m ./test/scale | tee >(cat >&2) | grep '^Benchmark' >"$bench"
SCALE_SHARES="$*" SCALE_REPORT=$rows go test -count=1 -v -timeout 30m -run TestScale_ ./test/crash >&2
cat >docs/dev/scale-node.md <<EOF
# The node side at scale

Written by \`make bench-node\` on $(date -u +%F), on a machine with $(nproc) cores and Linux $(uname -r).
Times depend on the machine; numbers of messages do not, and \`make test\` checks them.

## Netlink messages

The numbers are the same with 10 and 3,000 shares of a NIC (\`test/scale\`). They include the sockets of the node
and of the pod. A resync of all shares sends three requests for each NIC: the IDs of the namespaces, and the classes of
the NIC and of its IFB device. With more than about 1,160 pods, it sends one more for each
([limits](limits.md#listing-network-namespaces)).

| operation | sent | received |
| --- | --- | --- |
$(cat "$messages")

## Times

\`floor\` is the time of the least netlink requests that create the same link and class next to the same
number of shares. \`Compare\` is the comparison of all shares with the kernel at a restart or a resync; here, 100 shares
have one namespace.

\`\`\`text
$(cat "$bench")
\`\`\`

## Plugin

The program of the image, with a fake API server. Attach is a claim's preparation, the creation of the pod's network
namespace, which takes the kernel up to 50 ms, and the hook, one at a time. Ready is the time from the start of a
plugin that takes over all shares until it serves. The processor time (\`at rest\`) and the API requests cover a
minute in which nothing changes. The plugin also gets each claim once in 5 minutes, and writes it if another client
has changed its status. Then one pod changes its link in a loop for a minute (\`loop\`): the table has the processor
time that this adds, and the writes of the claim's status in that minute.

| shares | attach, median | attach, 9 of 10 | ready | at rest, of a core | API requests | API writes | loop adds, of a core | loop, writes of the claim | resident memory | anonymous |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
$(cat "$rows")
EOF
