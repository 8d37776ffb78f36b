#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs the stories of stories.sh on nodes with the kubelets of each supported version,
# under a control plane of their own version and of the newest, and writes the results
# into docs/dev/matrix.md. bin/e2e.test must exist.
#
# usage: kubelets.sh STORIES [KUBELET/CONTROL-PLANE...]: STORIES is a regular expression.
# Without combinations, it runs all of them. The rows of other combinations do not
# change.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=docs/dev/matrix.md
stories=${1:?usage: kubelets.sh STORIES [KUBELET/CONTROL-PLANE...]}
shift
all="v1.36.3/v1.36.3 v1.36.3/v1.37.1 v1.35.4/v1.35.4 v1.35.4/v1.37.1 v1.34.4/v1.34.4 v1.34.4/v1.37.1"
failed=0
rows=$(mktemp)
trap 'rm -f "$rows"' EXIT

# run KUBELET/CONTROL-PLANE: runs the stories and adds a row.
run() {
	local kubelet=${1%/*} kubernetes=${1#*/} gates=default result
	if [[ " $selected " != *" $1 "* ]]; then
		grep "^| $kubelet | $kubernetes |" $out >>"$rows"
		return
	fi
	case $kubelet in v1.3[45].*) gates=capacity ;; esac # consumable capacity is off by default
	echo "kubelets: kubelet $kubelet, control plane $kubernetes, gates $gates"
	bin/cluster build --kubernetes "$kubernetes" --kubelet "$kubelet" || exit
	result=$(E2E_KUBERNETES=$kubernetes E2E_KUBELET=$kubelet E2E_GATES=$gates test/e2e/stories.sh "$stories") || failed=1
	echo "| $kubelet | $kubernetes | $gates | $(date -u +%F) | $result |" >>"$rows"
}
selected=${*:-$all}
for combination in $all; do run "$combination"; done
{
	cat <<EOF
## Kubelets

Written by \`make test-kubelets\`, which runs the stories of TestOneNode, TestAddresses, and TestIsolation in test/e2e on
a node of the test cluster with each version of the kubelet, or those that RUN selects. The gates are sets of
\`cluster up --gates\`: \`capacity\` turns on consumable capacity, which is off by default before Kubernetes 1.36.

| kubelet | control plane | feature gates | last run | result |
| --- | --- | --- | --- | --- |
EOF
	cat "$rows"
} | test/env/section.sh $out
exit $failed
