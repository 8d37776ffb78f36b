#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs the stories of stories.sh with each container runtime, and writes the results
# into docs/dev/matrix.md. bin/e2e.test must exist.
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
rows=$(mktemp)
trap 'rm -f "$rows"' EXIT

# version PROGRAM: prints the version of a program of a node.
version() { "$@" --version 2>/dev/null | grep -oEm1 'v?[0-9]+\.[0-9]+\.[0-9]+'; }

# run RUNTIME/OCI-RUNTIME: runs the stories and adds a row.
run() {
	local result cri=${1%/*} oci=${1#*/} dirs
	if [[ $selected != *" $1 "* ]]; then
		grep "^| $cri [^|]*| $oci " $out >>"$rows"
		return
	fi
	echo "runtimes: $1"
	result=$(E2E_RUNTIME=$cri E2E_OCI_RUNTIME=$oci test/e2e/stories.sh "$stories") || failed=1
	dirs=$(bin/cluster binaries --runtime "$cri" 2>/dev/null)
	runtime() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p" <<<"$dirs"; }
	case $cri in cri-o*) cri="$cri $(version "$(runtime Runtime)/crio")" ;; *) cri="$cri $(version "$(runtime Runtime)/containerd")" ;; esac
	case $oci in crun) oci="$oci $(version crun)" ;; *) oci="$oci $(version "$(runtime Node)/runc")" ;; esac
	echo "| $cri | $oci | $(date -u +%F) | $result |" >>"$rows"
}
for combination in $all; do run "$combination"; done
{
	cat <<EOF
## Container runtimes

Written by \`make test-runtimes\`, which runs the stories of TestOneNode, TestAddresses, and TestIsolation in test/e2e on a
node of the test cluster with each runtime, or those that RUN selects.

| runtime | OCI runtime | last run | result |
| --- | --- | --- | --- |
EOF
	cat "$rows"
} | test/env/section.sh $out
exit $failed
