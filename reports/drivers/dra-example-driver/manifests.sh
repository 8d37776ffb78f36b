#!/bin/sh
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# manifests.sh MODULE IMAGE: prints what the chart of the release installs.
set -eu
bin/helm template dra-example "$1/deployments/helm/dra-example-driver" --namespace kube-system \
	--set "image.repository=${2%:*},image.tag=${2##*:},gpuDeviceStatus=true" |
	sed 's,\["dra-example-kubeletplugin"\],["/dra-example-driver"],'
