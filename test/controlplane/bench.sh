#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Measures the control plane at scale, in both modes, and writes docs/dev/scale.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
results=$(mktemp)
# make bench-memory writes this section, the last one.
memory=$(sed -n '/^## Memory with claims of other drivers/,$p' docs/dev/scale.md)
for gates in default all; do
  CONTROLPLANE=1 CONTROLPLANE_BENCH=1 CONTROLPLANE_GATES=$gates go test -v -count=1 -timeout 60m ./test/controlplane -run TestController_measuresManyPods | tee >(cat >&2) |
    sed -n '/^## /,/^--- /p' | grep -vE '^(---|[IEW][0-9]{4} )' >>"$results"
done
{
  cat <<EOF
# The control plane at scale

Written by \`make bench-controlplane\` on $(date -u +%F). One machine with $(nproc) cores ran
everything: etcd, the API server, the scheduler, the controller manager, the controller,
24 simulated nodes with their kubelets, and the client that creates the pods. Times
depend on that machine; numbers of requests do not. The section "Write by write" below the
tables explains the writes.

EOF
  cat "$results" test/controlplane/scale-notes.md
  [ -z "$memory" ] || printf '\n%s\n' "$memory"
} >docs/dev/scale.md
rm -f "$results"
