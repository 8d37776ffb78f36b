#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs the suites on three clusters at a time, because they mostly wait: whenever a
# suite ends, the next one starts. At the end it prints the failures and the time
# of each story and suite. bin/e2e.test must exist. If RERUNS names a directory, up to five
# stories that fail run once more, and if LOGS names one, it receives the output of each suite; see .ci/gotest.sh.
#
# usage: run.sh [--long | [SUITE/]REGEXP]: with REGEXP, runs only the stories whose names match, one
# after the other. With --long, runs only the stories in `long`, and writes their results to
# docs/dev/long-stories.md; without, it leaves them out, and TestPrivileges, which `make test-privileges`
# runs.
set -uo pipefail
cd "$(dirname "$0")/../.."
export E2E=1
run_tests() { (cd test/e2e && exec ../../bin/e2e.test -test.v -test.parallel 1 -test.timeout 30m "$@"); }

# The stories that are not in `make test`, because they repeat one fault many times, because they wait for minutes, or
# because test/controlplane tests the same in seconds.
declare -A long=(
	[TestFaults]='plugin-killed-at-any-step|ten-rolling-updates'
	[TestPodGroups_nativeMode]='random-scaling|lost-node'
	[TestTimeouts]='removed-sockets'
	[TestPodGroups_bridgeMode]='deleted-claim|recreated-group|reserved-for-annotation|taints|namespace-and-chart-removal'
)
# selection SUITE: prints the flags that select the stories of a suite, one in a line.
selection() {
	local stories="^$1\$/^(${long[$1]:-})\$"
	if [ "$mode" = --long ]; then
		printf '%s\n' -test.run "$stories"
	else
		printf '%s\n' -test.run "^$1\$"
		[ -z "${long[$1]:-}" ] || printf '%s\n' -test.skip "$stories"
	fi
}

mode=${1:-}
if [ $# -gt 0 ] && [ "$mode" != --long ]; then
	log=$(mktemp)
	case $1 in */*) stories=$1 ;; *) stories=/$1 ;; esac
	run_tests -test.run "$stories" | tee "$log"
	result=$?
	grep -q '^=== RUN .*/' "$log" || { echo "RUN=$1 matches no story: test/e2e/testdata has their names" >&2; result=1; }
	rm -f "$log"
	exit $result
fi

# The longest suites come first, so that all lanes end at about the same time. A
# suite that is not listed here runs last.
first="TestAddresses TestOneNode TestTimeouts TestPodGroups_nativeMode TestIsolation TestAccelerators
TestFaults TestUpgrade TestPodGroups_bridgeMode TestModeChange"
all=$(run_tests -test.list . | grep '^Test') || { echo "bin/e2e.test lists no tests" >&2; exit 1; }
if [ "$mode" = --long ]; then all=${!long[*]} first=; fi
suites=$(printf '%s\n' $first $all | awk '!seen[$0]++ && $0 != "TestPrivileges"')
logs=$(mktemp -d)
start=$SECONDS
failed=0
lanes=3
set -m # gives background jobs separate process groups, which can be signaled
trap 'rm -rf "$logs"' EXIT
trap 'for job in $(jobs -p); do kill -INT -- "-$job"; done; wait; exit 130' INT TERM
for suite in $suites; do
	while [ "$(jobs -pr | wc -l)" -ge $lanes ]; do wait -n || true; done
	{
		mapfile -t flags < <(selection "$suite")
		run_tests "${flags[@]}" >"$logs/$suite" 2>&1
		cat "$logs/$suite"
	} &
done
while [ -n "$(jobs -pr)" ]; do wait -n || true; done

# failed_stories SUITE: prints the stories of a suite that failed, or - if the suite failed
# without one.
failed_stories() {
	grep -q "^--- FAIL: $1 " "$logs/$1" || return 0
	sed -nE "s|^ *--- FAIL: $1/([^/ ]+) .*|\1|p" "$logs/$1" | sort -u | grep . || echo -
}

# again SUITE STORY...: runs stories of a suite once more, on another cluster.
again() {
	local suite=$1 filter flags
	shift
	filter=$(IFS='|'; [ "$*" = - ] || echo "/^($*)\$")
	echo "again: suite $suite, stories $*"
	mapfile -t flags < <(selection "$suite")
	run_tests "${flags[@]}" -test.run "^$suite\$$filter" >"$logs/again" 2>&1
	cat "$logs/again"
	if grep -q "^--- PASS: $suite " "$logs/again"; then
		echo "test/e2e.$suite$filter: 2 runs, 1 failures" >>"$RERUNS/e2e"
		mv "$logs/again" "$logs/$suite"
	fi
	rm -f "$logs/again"
}
[ -z "${LOGS:-}" ] || cp "$logs"/* "$LOGS"
failures=$(for suite in $suites; do failed_stories "$suite"; done | wc -l)
if [ -n "${RERUNS:-}" ] && [ "$failures" -le 5 ] && ! grep -qE '^panic:|DATA RACE' "$logs"/*; then
	for suite in $suites; do
		mapfile -t stories < <(failed_stories "$suite")
		[ ${#stories[@]} -eq 0 ] || again "$suite" "${stories[@]}"
	done
fi
grep -hoE '^ *time: .*' "$logs"/* | sed 's/^ *//' | sort -rn -k2,2
for suite in $suites; do
	grep -q "^--- PASS: $suite " "$logs/$suite" && continue
	if grep -q "^--- SKIP: $suite " "$logs/$suite"; then
		echo "skipped: suite $suite: $(sed -n 's/^ *[a-z_]*_test\.go:[0-9]*: //p' "$logs/$suite" | tail -1)"
		continue
	fi
	failed=1
	echo "failed: suite $suite"
	# A suite without stories reports its failures as any other Go test does.
	grep -qE '^ *failed: ' "$logs/$suite" || tail -30 "$logs/$suite" | sed 's/^ */failed: /'
done
grep -hoE '^ *failed: .*' "$logs"/* | sed 's/^ *//'
echo "e2e: $((SECONDS - start)) s"
[ "$mode" != --long ] || cat >docs/dev/long-stories.md <<EOF
# Long stories

Written by \`make e2e-long\` on $(date -u +%F), on a machine with $(nproc) cores and Linux $(uname -r).

These stories of \`test/e2e\` are not in \`make test\`.

| suite | story | result | seconds |
| --- | --- | --- | --- |
$(sed -nE 's/^ +--- (PASS|FAIL|SKIP): ([^/]+)\/([^/ ]+) \(([0-9]+).*/| \2 | \3 | \1 | \4 |/p' "$logs"/* |
	sed 's/PASS/passed/; s/FAIL/failed/; s/SKIP/skipped/' | sort)
EOF
exit $failed
