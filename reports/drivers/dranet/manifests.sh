#!/bin/sh
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# manifests.sh MODULE IMAGE: prints the manifests of the release, and a DeviceClass as in its documentation.
set -eu
sed -e "s,registry.k8s.io/networking/dranet:stable,$2," -e 's,/dranet$,/dranet,; s/^        args:/        command:/' "$1/install.yaml"
cat <<'END'
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: dra.net}
spec: {selectors: [{cel: {expression: 'device.driver == "dra.net"'}}]}
END
