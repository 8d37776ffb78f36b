#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Profiles a plugin with the given number of shares, and writes the profiles as text to
# docs/dev/profiles.
set -euo pipefail
cd "$(dirname "$0")/../.."
raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
SCALE_PROFILES=$raw SCALE_SHARES=$1 go test -count=1 -v -timeout 30m -run TestProfile_plugin ./test/crash >&2
top() { go tool pprof -top -nodecount=30 "$@" 2>/dev/null | grep -vE '^(File|Build ID|Time):'; }
for period in attach restart rest loop; do
	{
		echo "Profiles of a plugin with $1 shares: $period"
		printf '\nProcessor time\n\n'
		top -cum "$raw/$period.cpu"
		printf '\nAllocated objects\n\n'
		top -sample_index=alloc_objects -base="$raw/$period.allocs-before" "$raw/$period.allocs"
		printf '\nTime spent waiting for locks\n\n'
		top -cum "$raw/$period.mutex"
	} >"docs/dev/profiles/$period.txt"
done
