#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs the control plane's tests on each supported version of Kubernetes, or on the versions
# given as arguments (VERSION or VERSION/GATES), and records the date and the result of each.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=docs/dev/matrix.md
failed=0
rows=$(mktemp)
run() { # VERSION GATES NOTE
	if [ -n "$only" ] && [[ " $only " != *" $1 "* && " $only " != *" $1/$2 "* ]]; then
		grep "^| $1 | $2 |" $out >>"$rows"
		return
	fi
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
	echo "| $1 | $2 | $(sed -n 's/^mode: //p' "$log") | $(date -u +%F) | $result in $((SECONDS - start)) s | $3 |" >>"$rows"
	rm -f "$log"
}
only="$*"
run v1.37.1 default ""
run v1.37.1 all "Kubernetes' own PodGroups"
run v1.37.1 workload "Kubernetes' own PodGroups, without their claims"
run v1.36.3 default ""
run v1.35.4 capacity "consumable capacity is off by default"
run v1.34.4 capacity "consumable capacity is off by default"
{
	cat <<EOF
## Kubernetes

Written by \`make test-matrix\`, which runs the tests of test/controlplane on the API
server, scheduler, and controller manager of each version, with simulated nodes.
[Kubelets](#kubelets) has the results on real nodes.

| version | feature gates | mode | last run | result | note |
| --- | --- | --- | --- | --- | --- |
EOF
	cat "$rows"
} | test/env/section.sh $out
rm -f "$rows"
exit $failed
