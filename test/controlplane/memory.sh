#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Measures the controller's memory in a cluster with many claims of other drivers, and writes that
# section of docs/dev/scale.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
title='## Memory with claims of other drivers'
section=$(mktemp)
trap 'rm -f "$section"' EXIT
status=0 # the section is written even if the controller uses more memory than the limit
CONTROLPLANE=1 CONTROLPLANE_BENCH=1 go test -v -count=1 -timeout 60m ./test/controlplane \
	-run TestController_memoryWithClaimsOfOtherDrivers | tee /dev/stderr |
	sed -n "/^$title/,/^--- /p" | grep -vE '^(---|[IEW][0-9]{4} | )' >"$section" || status=$?
if [ "$(head -n 1 "$section")" != "$title" ]; then
	echo "the test printed no result; docs/dev/scale.md is unchanged" >&2
	exit 1
fi
echo "Measured on $(date -u +%F), on the machine of the other measurements or one like it." >>"$section"
test/env/section.sh docs/dev/scale.md <"$section"
exit $status
