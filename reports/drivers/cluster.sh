#!/bin/sh
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# cluster.sh DRIVER CLUSTER [flags of dra-conformance run]: deploys a driver of this folder with the manifests of its
# release on the node n1 of a cluster of `bin/cluster up`, whose container runtime serves NRI, tests it, and removes it.
# Only the manifests' image and the path of its program are replaced. Run it in the root of the repository, as root,
# after `make bin/dra-conformance bin/images/dra-conformance.tar bin/peers/DRIVER`.
set -eu
driver=$1 cluster=$2
shift 2
folder=reports/drivers/$driver
version=$(sed -n 's/^  version: //p' "$folder/cluster.yaml")
image=registry.local/$driver:$version
module=$(cd "$folder" && go list -f '{{.Module.Dir}}' "$(go list tool)")
work=$(mktemp -d)

remove() {
	"$cluster/kubectl" delete --ignore-not-found --filename "$work/manifests.yaml" >"$work/log" 2>&1 || cat "$work/log"
	"$cluster/node" n1 sh "$PWD/$folder/node.sh" down 2>/dev/null || :
	rm -r "$work"
}
trap remove EXIT

printf 'bin/peers/%s /%s\nLICENSE /tmp/LICENSE\n' "$driver" "$driver" >"$work/contents.txt" # the driver needs /tmp
bin/cluster image --contents "$work/contents.txt" --tag "$image" --out "$work/image.tar"
bin/cluster load --dir "$cluster" "$work/image.tar" bin/images/dra-conformance.tar
sh "$folder/manifests.sh" "$module" "$image" >"$work/manifests.yaml"
if [ -e "$folder/node.sh" ]; then "$cluster/node" n1 sh "$PWD/$folder/node.sh" up; fi
"$cluster/kubectl" apply --filename "$work/manifests.yaml" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$cluster/kubectl" label namespace default --overwrite resource.kubernetes.io/admin-access=true >"$work/log"
name=$(sed -n 's/^driver: //p' "$folder/cluster.yaml")
slices=
for _ in $(seq 60); do
	slices=$("$cluster/kubectl" get resourceslices --field-selector "spec.driver=$name" --output name)
	[ -z "$slices" ] || break
	sleep 1 # the driver starts
done
[ -n "$slices" ] || { echo "$driver published no ResourceSlice in 60 s"; "$cluster/kubectl" get pods --all-namespaces; exit 1; }
"$cluster/node" n1 sh -c 'cd "$1" && shift && exec bin/dra-conformance run "$@"' sh "$PWD" \
	--config "$folder/cluster.yaml" --kubeconfig "$(realpath "$cluster/kubeconfig")" "$@"
