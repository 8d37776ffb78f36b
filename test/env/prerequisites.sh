#!/bin/sh
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Checks for Go and for the programs and libraries that building and running the
# test cluster needs. Where apt-get exists, it installs those that are missing.
#
# usage: prerequisites.sh [clang|dhcp|lab|runtimes|kind-docker|kind-node|kind]. In addition, clang installs the compiler
# of BPF programs; dhcp, the DHCP servers and clients, and the firewall, that tests run; lab, the tools that boot
# kernels and make images of virtual machines; runtimes, the dependencies of CRI-O and crun; kind-docker, a Docker
# daemon; kind-node, the tools that make a node image of kind. kind installs only the dependencies of a cluster of kind.
set -eu
missing=
command -v go >/dev/null || { echo "prerequisites: Go is not installed: see https://go.dev/doc/install" >&2; exit 1; }
if [ "${1-}" != kind ]; then
  command -v gcc >/dev/null || missing="$missing gcc libc6-dev"
  command -v pkg-config >/dev/null || missing="$missing pkg-config"
  pkg-config --static --exists libseccomp 2>/dev/null || missing="$missing libseccomp-dev"
  command -v ip >/dev/null || missing="$missing iproute2"
  command -v nsenter >/dev/null || missing="$missing util-linux"
fi
if [ "${1-}" = dhcp ]; then
  [ -x /usr/sbin/dhcpd ] || missing="$missing isc-dhcp-server"
  [ -x /usr/sbin/dhclient ] || missing="$missing isc-dhcp-client"
  [ -x /usr/sbin/dnsmasq ] || missing="$missing dnsmasq-base"
  command -v iptables >/dev/null || missing="$missing iptables"
fi
if [ "${1-}" = clang ]; then
  command -v clang >/dev/null || missing="$missing clang"
  command -v llvm-strip >/dev/null || missing="$missing llvm"
  [ -e /usr/include/bpf/bpf_helpers.h ] || missing="$missing libbpf-dev"
fi
if [ "${1-}" = lab ]; then
  command -v qemu-system-x86_64 >/dev/null || missing="$missing qemu-system-x86"
  command -v mmdebstrap >/dev/null || missing="$missing mmdebstrap"
  busybox modprobe --help >/dev/null 2>&1 || missing="$missing busybox-static"
  command -v depmod >/dev/null || missing="$missing kmod"
  command -v xz >/dev/null || missing="$missing xz-utils"
  command -v mke2fs >/dev/null || missing="$missing e2fsprogs"
fi
if [ "${1-}" = runtimes ]; then
  for program in crun conmon skopeo; do
    command -v $program >/dev/null || missing="$missing $program"
  done
fi
add_docker() {
  missing="$missing docker.io"
  # Newer releases of Debian have the command in a separate package.
  ! apt-cache show docker-cli >/dev/null 2>&1 || missing="$missing docker-cli"
}
case "${1-}" in
kind) command -v docker >/dev/null || add_docker ;;
kind-docker) command -v dockerd >/dev/null || add_docker ;;
kind-node) command -v mmdebstrap >/dev/null || missing="$missing mmdebstrap" ;;
esac
[ -z "$missing" ] && exit 0
echo "prerequisites: missing:$missing"
command -v apt-get >/dev/null || {
  echo "prerequisites: apt-get is not available: install the content of these Debian packages:$missing" >&2
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
