#!/bin/sh
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# manifests.sh MODULE IMAGE: prints the manifests of the release, for one device of each CPU.
set -eu
for file in "$1"/manifests/base/*.yaml; do
	echo ---
	sed -e "s,registry.k8s.io/dra-driver-cpu/dra-driver-cpu:v0.2.0,$2," -e 's,/dracpu$,/dra-driver-cpu,' \
		-e 's/^        args:/        command:/' -e 's/imagePullPolicy: Always/imagePullPolicy: Never/' \
		-e 's/- --cpu-device-mode=grouped/- --cpu-device-mode=individual\n        - --hostname-override=n1/' "$file"
done
