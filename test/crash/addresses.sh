#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Attaches pods with addresses of a pool under random faults, and writes the section about it in
# docs/dev/scale-addresses.md.
# usage: addresses.sh ATTACHES [SEED]
set -euo pipefail
cd "$(dirname "$0")/../.."
results=$(mktemp)
trap 'rm -f "$results"' EXIT
start=$SECONDS
ADDRESS_ATTACHES=$1 ADDRESS_SEED=${2:-} ADDRESS_REPORT=$results \
	go test -count=1 -timeout 60m -run '^TestAddresses_randomFaults$' ./test/crash
test/env/section.sh docs/dev/scale-addresses.md <<EOF
## Random faults

Written by \`make test-addresses\` on $(date -u +%F), on a machine with $(nproc) cores and Linux $(uname -r), in $((SECONDS - start)) s.

\`TestAddresses_randomFaults\` in \`test/crash\` attaches and ends pods on three nodes, whose plugins are processes with real links
and real records, and share an API server that orders requests as a real one does. One in 300 operations of a plugin fails, half
of them after their effect. No two links had the same address at the same time, except links of nodes that had been lost,
which were blocked. At the end, all addresses of the pool could be assigned. \`make test-crash\` does the same with 200
attachments.

\`\`\`text
$(cat "$results")
\`\`\`
EOF
