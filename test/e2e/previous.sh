#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Builds the image of the previous release from its last commit, with the tag "previous",
# and prints the directory with image.tar, the chart, and the values that its tests
# install it with. Later runs find them in the cache. bin/cluster must exist. The exit
# status is 3 if the commit is not in this clone.
set -euo pipefail
cd "$(dirname "$0")/../.."
# This release must accept the hook protocol and the records of that release. After a
# rollback, that release must read the records of this release; see RELEASE.md.
last=0a89f34ea3de3b69e01fc5d898f72acfcdc02def
git() { command git -c safe.directory="$PWD" "$@"; } # CI runs this as root in the clone of a user
commit=$(git rev-parse --quiet --verify "$last^{commit}") || {
	echo "commit $last is not in this clone; \`git fetch --unshallow\` adds the commits that a shallow clone lacks" >&2
	exit 3
}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/dra-shared
dir=$cache/release-${commit:0:12}
if [ ! -d "$dir" ]; then
	cluster=$PWD/bin/cluster
	mkdir -p "$cache"
	building=$(mktemp -d "$cache/release-building-XXXXXX")
	trap 'rm -rf "$building"' EXIT
	mkdir "$building/source" "$building/release"
	git archive "$commit" | tar -x -C "$building/source"
	(
		cd "$building/source"
		for program in $(grep -oE '^bin/[^ ]+' deployments/image/contents.txt); do
			CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w" -o "$program" "./cmd/${program#bin/}"
		done
		"$cluster" image --contents deployments/image/contents.txt \
			--tag registry.local/dra-driver-shared:previous --out "$building/release/image.tar"
		cp -r deployments/helm/dra-driver-shared "$building/release/chart"
		cp test/env/values.yaml "$building/release/values.yaml"
	) >&2
	mv "$building/release" "$dir"
fi
echo "$dir"
