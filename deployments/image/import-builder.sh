#!/usr/bin/env bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Imports a builder image for the Dockerfile without a registry: Debian packages,
# and the Go toolchain and the trusted certificates of this machine. It needs
# root, mmdebstrap, and Docker.
#
# usage: import-builder.sh NAME:TAG
set -euo pipefail
tag=$1
# shellcheck disable=SC1091 # a file of the system
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
goroot=$(go env GOROOT)
# shellcheck disable=SC2016 # mmdebstrap expands $1, the root of the new system
mmdebstrap --variant=minbase --include=ca-certificates,clang,libbpf-dev,llvm,make \
	--customize-hook='mkdir -p "$1/usr/local/go"' \
	--customize-hook="cp -a '$goroot/.' \"\$1/usr/local/go\"" \
	--customize-hook='cp /etc/ssl/certs/ca-certificates.crt "$1/etc/ssl/certs/ca-certificates.crt"' "$suite" - |
	${DOCKER:-docker} import \
		--change 'ENV PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' - "$tag"
