#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs the stories of stories.sh with each container runtime, and writes the results
# into docs/dev/matrix.md, after each of them. bin/e2e.test must exist.
#
# usage: runtimes.sh STORIES [RUNTIME/OCI-RUNTIME...]: STORIES is a regular expression.
# Without combinations, it runs all of them. The rows of other combinations do not
# change.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=docs/dev/matrix.md
stories=${1:?usage: runtimes.sh STORIES [RUNTIME/OCI-RUNTIME...]}
shift
all="containerd/runc containerd/crun containerd-1.7/runc cri-o/crun cri-o-1.34/crun cri-o/runc"
selected=" ${*:-$all} "
failed=0
rows=$(mktemp -d) # a file for each combination that ran
trap 'rm -rf "$rows"' EXIT

# version PROGRAM: prints the version of a program of a node.
version() { "$@" --version 2>/dev/null | grep -oEm1 'v?[0-9]+\.[0-9]+\.[0-9]+'; }

# row RUNTIME/OCI-RUNTIME: prints the row of the last run.
row() { cat "$rows/${1/\//-}" 2>/dev/null || grep "^| ${1%/*} [^|]*| ${1#*/} " $out; }

# run RUNTIME/OCI-RUNTIME: runs the stories and writes the table with their result.
run() {
	local result cri=${1%/*} oci=${1#*/} dirs
	echo "runtimes: $1"
	result=$(E2E_RUNTIME=$cri E2E_OCI_RUNTIME=$oci test/e2e/stories.sh "$stories") || failed=1
	dirs=$(bin/cluster binaries --runtime "$cri" 2>/dev/null)
	runtime() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p" <<<"$dirs"; }
	case $cri in cri-o*) cri="$cri $(version "$(runtime Runtime)/crio")" ;; *) cri="$cri $(version "$(runtime Runtime)/containerd")" ;; esac
	case $oci in crun) oci="$oci $(version crun)" ;; *) oci="$oci $(version "$(runtime Node)/runc")" ;; esac
	echo "| $cri | $oci | $(date -u +%F) | $result |" | tee "$rows/${1/\//-}"
	table | test/env/section.sh $out
}

# table: prints the section of the matrix.
table() {
	cat <<EOF
## Container runtimes

Written by \`make test-runtimes\`, which runs the stories of TestOneNode, TestAddresses, and TestIsolation in test/e2e on a
node of the test cluster with each runtime, or those that RUN selects.

| runtime | OCI runtime | last run | result |
| --- | --- | --- | --- |
EOF
	for combination in $all; do row "$combination"; done
}

for selection in $all; do
	[[ $selected != *" $selection "* ]] || run "$selection"
done
exit $failed
