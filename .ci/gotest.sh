#!/usr/bin/env bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs go test. If LOGS names a directory, as in `make test`, a file in it receives the output, with the tests
# that were skipped.
#
# If RERUNS names a directory, as in `make test`, up to five tests that fail run once
# more, because one test that depends on time or load should not discard the results of all
# suites. A test that then passes is flaky. Its name goes to a file in the directory, and
# `make test` prints it at the end. A data race, a crash, or more failures are final.
#
# usage: gotest.sh FLAG... -- PACKAGE...
set -euo pipefail
flags=()
while [ "$1" != -- ]; do
	flags+=("$1")
	shift
done
shift
[ -n "${RERUNS:-}" ] || exec go test -vet=off "${flags[@]}" "$@"
log=$(mktemp "${LOGS:-$RERUNS}/XXXXXX")
"$(dirname "$0")/../bin/gotestsum" --format standard-quiet \
	--rerun-fails=1 --rerun-fails-max-failures=5 --rerun-fails-run-root-test --rerun-fails-abort-on-data-race \
	--rerun-fails-report "$(mktemp "$RERUNS/XXXXXX")" --packages "$*" -- -vet=off "${flags[@]}" 2>&1 | tee "$log"
