#!/usr/bin/env bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs the suites of `make test` and prints the time that each took. The first
# suite that fails ends the run. The table at the end shows it, followed by the tests that
# were skipped, and the failures of that suite.
#
# The suites that measure rates and latencies run alone. Those that mostly wait run at the same
# time, and so do the checks, which only need processor time, at idle priority. All of these end
# before the first suite that measures starts.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
MAKE=${MAKE:-make}
checks=(generate-check chart-check lint test-fuzz)
waiting=(test-controlplane test-packages test-classify)
measuring=(test-rates test-crash bench-check e2e demo test-kind test-lab)

results=$(mktemp -d)
export RERUNS=$results/reruns # names of flaky tests; see gotest.sh
mkdir "$RERUNS" "$results/logs"
declare -A background # the process groups of suites that run in the background, by name
stop_background() {
	local name
	for name in "${!background[@]}"; do kill -TERM -- "-${background[$name]}" 2>/dev/null; done
	background=()
}
trap 'stop_background; rm -rf "$results"' EXIT
trap 'exit 130' INT TERM

# suite NAME COMMAND...: runs a suite, and writes its time, its processor time without that of daemons, and its
# result. LOGS names a directory for the output of its tests.
suite() {
	local name=$1 start=$SECONDS result=passed TIMEFORMAT='%U %S'
	shift
	export LOGS=$results/logs/$name
	mkdir -p "$LOGS"
	{ time "$@" 2>&3 3>&-; } 3>&2 2>"$results/cpu-$name" || result=failed
	echo "$name $((SECONDS - start)) $(awk 'END { printf "%.0f", $1 + $2 }' "$results/cpu-$name") $result" >>"$results/times"
	[ $result = passed ]
}

# target NAME: runs a make target as a suite in the foreground.
target() {
	echo "test: $1"
	suite "$1" logged "$1" "$MAKE" --no-print-directory "$1"
}

# again NAME: runs the demo or a benchmark once more. gotest.sh, e2e, and the lab do so for their tests.
again() {
	case $1 in demo | bench-check) target "$1" && echo "$1: 2 runs, 1 failures" >"$RERUNS/$1" ;; *) false ;; esac
}

# logged NAME COMMAND...: runs a command and also writes its output to the file of the suite.
logged() { "${@:2}" 2>&1 | tee "$results/output-$1"; }

# failures: prints the lines of the output of the first suite that failed, and did not pass in a second run, that name
# tests and reasons.
failures() {
	local name reasons
	name=$(awk '{ result[$1] = $4; if (!seen[$1]++) names[++n] = $1 }
		END { for (i = 1; i <= n; i++) if (result[names[i]] == "failed") { print names[i]; exit } }' "$results/times")
	reasons=$(grep -E '^ *(--- FAIL|failed:|[a-z_]+_test\.go:[0-9]+:|panic:|FAIL:)|^[a-z-]+: .*(error|fail)|\*\*\*' "$results/output-$name")
	printf '%s\n' "${reasons:-$(cat "$results/output-$name")}" | sed "s/^/$name: /" | cut -c 1-240 | tail -n 12
}

# skips NAME: prints the tests that a suite skipped, each with its reason after a tab.
skips() {
	local logs=("$results/logs/$1"/*)
	[ -e "${logs[0]}" ] || logs=("$results/output-$1")
	awk -f .ci/skips.awk "${logs[@]}" 2>/dev/null | sort -u
}

# print_skips NAME...: prints the reasons for which suites skipped tests, with the first of these tests.
print_skips() {
	local name
	for name in "$@"; do
		skips "$name" | awk -F '\t' -v suite="$name" '
			++tests[$2] == 1 { reasons[++n] = $2 }
			tests[$2] <= 3 { names[$2] = names[$2] (tests[$2] > 1 ? ", " : "") $1 }
			END {
				for (i = 1; i <= n; i++) {
					more = tests[reasons[i]] - 3
					others = more > 0 ? ", and " more " more" : ""
					print "skipped: " suite ": " names[reasons[i]] others ": " reasons[i]
				}
			}'
	done | cut -c 1-240 | awk 'NR <= 40 { print } END { if (NR > 40) print "skipped: " (NR - 40) " more reasons" }'
}

# run_checks: runs the checks one after the other. Only the output of a check that fails remains.
run_checks() {
	local name
	for name in "${checks[@]}"; do
		suite "$name" "${idle[@]}" "$MAKE" --no-print-directory "$name" >"$results/output-$name" 2>&1 || {
			sed "s/^/$name: /" "$results/output-$name"
			return 1
		}
	done
}

# start NAME COMMAND...: runs a command in the background, in a separate process group, which
# stop_background can signal.
start() {
	local name=$1
	shift
	set -m
	"$@" </dev/null >"$results/output-$name" 2>&1 &
	background[$name]=$!
	set +m
}

# await NAME: waits for a command in the background, and prints its output.
await() {
	wait "${background[$1]}"
	local status=$?
	unset "background[$1]"
	cat "$results/output-$1"
	return $status
}

# finish STATUS: prints the table and exits.
finish() {
	stop_background
	local name seconds cpu result
	printf '\n%-18s %8s %8s %8s  %s\n' suite seconds CPU skipped result
	while read -r name seconds cpu result; do
		printf '%-18s %8d %8d %8d  %s\n' "$name" "$seconds" "$cpu" "$(skips "$name" | wc -l)" "$result"
	done <"$results/times"
	for name in build "${checks[@]}" "${waiting[@]}" "${measuring[@]}"; do
		grep -q "^$name " "$results/times" || printf '%-18s %8s %8s %8s  %s\n' "$name" - - - "not completed"
	done
	printf '%-18s %8d %8d\n' total $SECONDS "$(awk '{ sum += $3 } END { print sum }' "$results/times")"
	# shellcheck disable=SC2046 # a name is one word
	print_skips $(awk '!seen[$1]++ { print $1 }' "$results/times")
	local flaky
	flaky=$(grep -hs ' 2 runs, 1 failures' "$RERUNS"/*)
	[ -z "$flaky" ] || sed 's/^/flaky: /' <<<"$flaky"
	if [ "$1" -ne 0 ]; then
		failures
	else
		echo "test: all suites passed${flaky:+, $(wc -l <<<"$flaky") tests only in their second run}"
	fi
	exit "$1"
}

idle=(nice -n 19)
chrt --idle 0 true 2>/dev/null && idle=(chrt --idle 0)
touch "$results/times"
echo "test: build"
suite build logged build "$MAKE" --no-print-directory test-build || finish 1
start checks run_checks
for name in "${waiting[@]}"; do
	echo "test: $name"
	start "$name" suite "$name" "$MAKE" --no-print-directory "$name"
done
for name in "${waiting[@]}" checks; do
	await "$name" || finish 1
done
for name in "${measuring[@]}"; do
	target "$name" || again "$name" || finish 1
done
finish 0
