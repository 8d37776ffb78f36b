#!/bin/sh
# Checks what building and running the test cluster needs beside Go, and
# installs it on Debian and its relatives.
set -eu
missing=
command -v go >/dev/null || { echo "Go is missing: https://go.dev/doc/install" >&2; exit 1; }
command -v gcc >/dev/null || missing="$missing gcc libc6-dev"
command -v pkg-config >/dev/null || missing="$missing pkg-config"
pkg-config --static --exists libseccomp 2>/dev/null || missing="$missing libseccomp-dev"
command -v ip >/dev/null || missing="$missing iproute2"
command -v nsenter >/dev/null || missing="$missing util-linux"
if [ "${1-}" = clang ]; then # to compile the BPF programs
  command -v clang >/dev/null || missing="$missing clang"
  command -v llvm-strip >/dev/null || missing="$missing llvm"
  [ -e /usr/include/bpf/bpf_helpers.h ] || missing="$missing libbpf-dev"
fi
[ -z "$missing" ] && exit 0
echo "prerequisites: missing:$missing"
command -v apt-get >/dev/null || { echo "install what these Debian packages hold:$missing" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "run as root: apt-get install -y$missing" >&2; exit 1; }
echo "prerequisites: apt-get install$missing"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # a list of words
apt-get install -qq -y --no-install-recommends $missing >/dev/null 2>&1 || { apt-get update -qq && apt-get install -qq -y --no-install-recommends $missing >/dev/null; }
