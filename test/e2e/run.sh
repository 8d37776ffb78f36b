#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs the suites on two clusters at a time, because they mostly wait: whenever a
# suite ends, the next one starts. At the end it prints the failures and the time
# of each story and suite. bin/e2e.test must exist.
#
# usage: run.sh [REGEXP]: with REGEXP, runs only the stories whose names match, one
# after the other.
set -uo pipefail
cd "$(dirname "$0")/../.."
export E2E=1
run_tests() { (cd test/e2e && exec ../../bin/e2e.test -test.v -test.parallel 1 -test.timeout 30m "$@"); }
if [ $# -gt 0 ]; then
	run_tests -test.run "/$1"
	exit
fi

# The longest suites come first, so that both lanes end at about the same time. A
# suite that is not listed here runs last.
first="TestOneNode TestPrivileges TestPodGroups_bridgeMode TestPodGroups_nativeMode TestFaults TestAccelerators TestModeChange"
all=$(run_tests -test.list . | grep '^Test') || { echo "bin/e2e.test lists no tests" >&2; exit 1; }
suites=$(printf '%s\n' $first $all | awk '!seen[$0]++')
logs=$(mktemp -d)
start=$SECONDS
failed=0
set -m # gives background jobs process groups of their own, which can be signaled
trap 'rm -rf "$logs"' EXIT
trap 'for job in $(jobs -p); do kill -INT -- "-$job"; done; wait; exit 130' INT TERM
for suite in $suites; do
	while [ "$(jobs -pr | wc -l)" -ge 2 ]; do wait -n || true; done
	{
		run_tests -test.run "^$suite\$" >"$logs/$suite" 2>&1
		cat "$logs/$suite"
	} &
done
while [ -n "$(jobs -pr)" ]; do wait -n || true; done
for suite in $suites; do
	grep -q "^--- PASS: $suite " "$logs/$suite" || { failed=1; echo "failed: suite $suite"; }
done
grep -hoE '^ *time: .*' "$logs"/* | sed 's/^ *//' | sort -rn -k2,2
grep -hoE '^ *failed: .*' "$logs"/* | sed 's/^ *//'
echo "e2e: $((SECONDS - start)) s"
exit $failed
