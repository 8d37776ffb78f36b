#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs stories of the suites below on new clusters, which the variables E2E_* describe, and
# prints the result for a table. Failures and the names of skipped stories go to standard
# error. bin/e2e.test must exist.
#
# usage: stories.sh REGEXP
set -uo pipefail
cd "$(dirname "$0")"
suites="TestOneNode|TestAddresses|TestIsolation"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
start=$SECONDS
status=0
E2E=1 ../../bin/e2e.test -test.v -test.parallel 1 -test.timeout 30m \
	-test.run "^($suites)\$/^($1)\$" >"$log" 2>&1
skipped=$(sed -n 's,^    --- SKIP: [^/]*/\([^ ]*\) .*,\1,p' "$log")
[ -z "$skipped" ] || echo "skipped:" $skipped >&2
if grep -q '^PASS' "$log"; then
	result="passed: $(grep -c '^    --- PASS' "$log") stories"
else
	status=1
	grep -E '^ *(failed|FAIL|[a-z0-9_]+_test\.go:)' "$log" >&2
	result="**failed**: $(grep '^    --- FAIL' "$log" | sed 's,.*/,,; s, .*,,' | paste -sd' ')"
	passed=$(grep -c '^    --- PASS' "$log") && result="$result; $passed passed"
fi
[ -z "$skipped" ] || result="$result, skipped: $(wc -w <<<"$skipped")"
echo "$result in $((SECONDS - start)) s"
exit $status
