#!/bin/sh
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# manifests.sh MODULE IMAGE: prints the manifests of the release, for one device of each CPU. Where the kernel does not
# show the caches of CPUs, it adds the topology that node.sh writes.
set -eu
topology='/^        volumeMounts:$/a\        - {name: topology, mountPath: /sys/devices/system/cpu}
/^      volumes:$/a\      - {name: topology, hostPath: {path: /var/lib/dra-driver-cpu-topology}}'
[ ! -e /sys/devices/system/cpu/cpu0/cache ] || topology=
for file in "$1"/manifests/base/*.yaml; do
	echo ---
	sed -e "s,registry.k8s.io/dra-driver-cpu/dra-driver-cpu:v0.2.0,$2," -e 's,/dracpu$,/dra-driver-cpu,' \
		-e 's/^        args:/        command:/' -e 's/imagePullPolicy: Always/imagePullPolicy: Never/' \
		-e 's/- --cpu-device-mode=grouped/- --cpu-device-mode=individual\n        - --hostname-override=n1/' \
		-e "$topology" "$file"
done
