#!/usr/bin/env bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs the suites of `make test` and prints the time that each took. The first
# suite that fails ends the run; the table at the end shows it, followed by the
# failures of that suite.
#
# The suites that measure rates and latencies run alone. The checks in `checks` only
# need processor time: they run at idle priority next to the suites that mostly wait,
# and end before the first suite that measures starts.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
MAKE=${MAKE:-make}
checks=(generate-check chart-check lint test-fuzz)
waiting=(test-controlplane test-packages)
measuring=(test-classify test-crash e2e demo test-kind test-lab)

results=$(mktemp -d)
export RERUNS=$results/reruns # names of flaky tests; see gotest.sh
mkdir "$RERUNS"
background= # the process group of run_checks while it runs
stop_background() {
	[ -z "$background" ] || kill -TERM -- "-$background" 2>/dev/null
	background=
}
trap 'stop_background; rm -rf "$results"' EXIT
trap 'exit 130' INT TERM

# suite NAME COMMAND...: runs a suite, and writes its time and result.
suite() {
	local name=$1 start=$SECONDS result=passed
	shift
	"$@" || result=failed
	echo "$name $((SECONDS - start)) $result" >>"$results/times"
	[ $result = passed ]
}

# target NAME: runs a make target as a suite in the foreground.
target() {
	echo "test: $1"
	suite "$1" logged "$MAKE" --no-print-directory "$1"
}

# again NAME: runs the demo or the lab once more. gotest.sh does so for Go tests.
again() {
	case $1 in demo | test-lab) target "$1" && echo "$1: 2 runs, 1 failures" >"$RERUNS/$1" ;; *) false ;; esac
}

# logged COMMAND...: runs a command and also writes its output to a file, for failures.
logged() { "$@" 2>&1 | tee "$results/output"; }

# failures: prints the lines of the output of the suite that failed that name tests and
# reasons.
failures() {
	local reasons
	reasons=$(grep -E '^ *(--- FAIL|failed:|[a-z_]+_test\.go:[0-9]+:|panic:|FAIL:)|^[a-z-]+: .*(error|fail)|\*\*\*' "$results/output")
	printf '%s\n' "${reasons:-$(cat "$results/output")}" | cut -c 1-240 | tail -n 12
}

# run_checks: runs the checks one after the other. The output of a check goes to
# a file, and is printed if the check fails.
run_checks() {
	local name
	for name in "${checks[@]}"; do
		suite "$name" "${idle[@]}" "$MAKE" --no-print-directory "$name" >"$results/check" 2>&1 || {
			sed "s/^/$name: /" "$results/check"
			return 1
		}
	done
}

# finish STATUS: prints the table and exits.
finish() {
	stop_background
	local name seconds result
	printf '\n%-18s %8s  %s\n' suite seconds result
	while read -r name seconds result; do
		printf '%-18s %8d  %s\n' "$name" "$seconds" "$result"
	done <"$results/times"
	for name in build "${checks[@]}" "${waiting[@]}" "${measuring[@]}"; do
		grep -q "^$name " "$results/times" || printf '%-18s %8s  %s\n' "$name" - "not completed"
	done
	printf '%-18s %8d\n' total $SECONDS
	grep -hs ' 2 runs, 1 failures' "$RERUNS"/* | sed 's/^/flaky: /'
	if [ "$1" -eq 0 ]; then echo "test: all suites passed"; else failures; fi
	exit "$1"
}

idle=(nice -n 19)
chrt --idle 0 true 2>/dev/null && idle=(chrt --idle 0)
touch "$results/times" "$results/output"
echo "test: build"
suite build logged "$MAKE" --no-print-directory test-build || finish 1
set -m # gives run_checks a separate process group, which stop_background can signal
run_checks </dev/null &
background=$!
set +m
for name in "${waiting[@]}"; do
	target "$name" || finish 1
done
wait $background || { mv "$results/check" "$results/output"; finish 1; }
background=
for name in "${measuring[@]}"; do
	target "$name" || again "$name" || finish 1
done
finish 0
