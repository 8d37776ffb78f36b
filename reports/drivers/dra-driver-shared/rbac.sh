#!/bin/sh
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# rbac.sh: prints the role of the plugin in the chart. `make chart-check` compares rbac.yaml with it.
set -eu
bin/helm template dra-driver-shared deployments/helm/dra-driver-shared --show-only templates/rbac.yaml | awk '
	/^---/ { if (document ~ kind && document ~ name) printf "%s", document; document = ""; next }
	!/^ *#/ && !/^ *app\.kubernetes\.io/ && !/^  labels:/ && NF { document = document $0 "\n" }
	BEGIN { kind = "(^|\n)kind: ClusterRole\n"; name = "\n  name: dra-driver-shared-plugin\n" }
'
