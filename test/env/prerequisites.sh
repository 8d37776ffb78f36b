#!/bin/sh
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Checks for Go and for the programs and libraries that building and running the
# test cluster needs. Where apt-get exists, it installs those that are missing.
#
# usage: prerequisites.sh [clang]: with clang, also what compiles BPF programs.
set -eu
missing=
command -v go >/dev/null || { echo "prerequisites: Go is not installed: see https://go.dev/doc/install" >&2; exit 1; }
command -v gcc >/dev/null || missing="$missing gcc libc6-dev"
command -v pkg-config >/dev/null || missing="$missing pkg-config"
pkg-config --static --exists libseccomp 2>/dev/null || missing="$missing libseccomp-dev"
command -v ip >/dev/null || missing="$missing iproute2"
command -v nsenter >/dev/null || missing="$missing util-linux"
if [ "${1-}" = clang ]; then
  command -v clang >/dev/null || missing="$missing clang"
  command -v llvm-strip >/dev/null || missing="$missing llvm"
  [ -e /usr/include/bpf/bpf_helpers.h ] || missing="$missing libbpf-dev"
fi
[ -z "$missing" ] && exit 0
echo "prerequisites: missing:$missing"
command -v apt-get >/dev/null || {
  echo "prerequisites: apt-get is not available: install what these Debian packages contain:$missing" >&2
  exit 1
}
[ "$(id -u)" = 0 ] || {
  echo "prerequisites: run as root: apt-get install -y$missing" >&2
  exit 1
}
echo "prerequisites: apt-get install$missing"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # a list of packages
install() { apt-get install -qq -y --no-install-recommends $missing >/dev/null; }
install 2>/dev/null || { apt-get update -qq && install; }
