#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Takes each privilege of the plugin away in turn, and writes what fails to docs/dev/privileges.md. bin/e2e.test must
# exist. It restarts the plugin about 25 times, too often for each run of CI.
set -euo pipefail
cd "$(dirname "$0")/../.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
(cd test/e2e && E2E=1 exec ../../bin/e2e.test -test.v -test.timeout 40m -test.run '^TestPrivileges$') | tee "$log"
cat >docs/dev/privileges.md <<EOF
# Privileges of the plugin

Written by \`make test-privileges\` on $(date -u +%F), on a machine with $(nproc) cores and Linux $(uname -r).

\`TestPrivileges\` in \`test/e2e\` takes each privilege of the chart away in turn, on a real cluster, and expects that
something fails. It compares the permissions with the audit log of the API server.
[SECURITY.md](../../SECURITY.md) states what the privileges are for.

| without | fails |
| --- | --- |
$(sed -nE 's/^ *privileges_test.go:[0-9]+: plugin without (capability|mount|permission to) ([^ ]+( [^ :]+)?): (.*)/| \1 `\2` | \4 |/p' "$log" |
	sed -E 's/-[0-9]{10,}//g; s/after [0-9.]+s: //; s/ -o jsonpath=[^ ]*//g; s/^(.{200}).*/\1 ... |/')
EOF
