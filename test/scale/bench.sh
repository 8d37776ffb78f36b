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

The numbers are the same with 10, 100, and 1,000 shares of a NIC (\`test/scale\`). A resync of all shares
sends three requests for each NIC: the IDs of the namespaces, and the classes of the NIC and of its IFB
device.

| operation | sent | received |
| --- | --- | --- |
$(cat "$messages")

## Times

\`floor\` is the time of the least netlink requests that create the same link and class next to the same
number of shares. \`Compare\` is the comparison of all shares with the kernel at a restart or a resync.

\`\`\`text
$(cat "$bench")
\`\`\`

## Plugin

The program of the image, with a fake API server. Attach is a claim's preparation and the hook together, one at a
time. Ready is the time from the start of a plugin that takes over all shares until it serves. The
processor time (\`at rest\`) and the API requests cover a minute in which nothing changes. The plugin also gets each
claim once in 5 minutes, and writes it if another client has changed its status. Then one pod changes its link in a
loop for 10 s (\`loop\`): the table has the plugin's processor time and the writes of that time.

| shares | attach, median | attach, 9 of 10 | ready | at rest, of a core | API requests | API writes | loop, of a core | loop, API writes | resident memory | anonymous |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
$(cat "$rows")
EOF
