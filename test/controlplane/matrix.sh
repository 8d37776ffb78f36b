#!/bin/bash
# Runs the control plane's tests on each version of Kubernetes that is supported,
# and writes down when that was and how it ended.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=docs/dev/matrix.md
table=
failed=0
run() { # VERSION GATES NOTE
	local log start result
	log=$(mktemp)
	echo "matrix: Kubernetes $1, gates $2"
	start=$SECONDS
	if CONTROLPLANE=1 CONTROLPLANE_VERSION=$1 CONTROLPLANE_GATES=$2 go test -v -count=1 -timeout 40m ./test/controlplane >"$log" 2>&1; then
		result="passed: $(grep -c '^--- PASS' "$log") tests"
	else
		result="**failed**: $(grep '^--- FAIL' "$log" | awk '{print $3}' | paste -sd, -)"
		failed=1
		grep -E '^(---|    )' "$log"
	fi
	local mode=bridge
	grep -q 'mode: native' "$log" && mode=native
	table+="| $1 | $2 | $mode | $(date -u +%F) | $result in $((SECONDS - start)) s | $3 |"$'\n'
	rm -f "$log"
}
run v1.37.1 default ""
run v1.37.1 all "PodGroups of Kubernetes' own"
run v1.36.3 default ""
run v1.35.4 capacity "consumable capacity is off by default"
run v1.34.4 capacity "consumable capacity is off by default"
cat >$out <<EOF
# Versions of Kubernetes

Written by \`make test-matrix\`: the tests of test/controlplane on a real API
server, scheduler and controller manager of each version, with simulated nodes.
On real nodes the driver is tested with v1.37.1 only.

| version | feature gates | mode | last run | result | note |
| --- | --- | --- | --- | --- | --- |
$table
EOF
sed -i '${/^$/d}' $out
exit $failed
