#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Compares attaching with an address of a pool, with a static address, and with the IPAM plugins host-local and
# whereabouts, and writes the section about it in docs/dev/scale-addresses.md. bin/cni, bin/whereabouts-config, and
# bin/cluster must exist. The machine should be otherwise idle.
#
# usage: addresses.sh [PODS [RUNS]]: PODS are the pods of each run.
set -euo pipefail
cd "$(dirname "$0")/../.."
pods=${1:-100} runs=${2:-3}
control_plane=$PWD/.cluster-addresses
results=$(mktemp)
trap 'rm -f "$results"; bin/cluster down --dir "$control_plane"' EXIT

# Starts an API server with etcd for whereabouts, and writes its configuration and a kubeconfig of its service account,
# as its DaemonSet does on a node. No other component runs: whereabouts needs none, and they would use processor time.
start_control_plane() {
	local kubectl=$control_plane/kubectl kubeconfig=$control_plane/whereabouts.kubeconfig
	bin/cluster down --dir "$control_plane"
	bin/cluster up --dir "$control_plane" --nodes 0
	bin/cluster stop --dir "$control_plane" kube-controller-manager
	bin/cluster stop --dir "$control_plane" kube-scheduler
	"$kubectl" apply -f bin/whereabouts-config
	"$kubectl" wait --for condition=Established --timeout 60s crd --all
	cp "$control_plane/kubeconfig" "$kubeconfig"
	"$kubectl" --kubeconfig "$kubeconfig" config set-credentials whereabouts \
		--token "$("$kubectl" create token --namespace kube-system whereabouts)" >/dev/null
	"$kubectl" --kubeconfig "$kubeconfig" config set-context --current --user whereabouts
	echo '{"datastore": "kubernetes", "kubernetes": {"kubeconfig": "'"$kubeconfig"'"}}' >"$control_plane/whereabouts.conf"
}

run_benchmarks() {
	go test -run '^$' -bench BenchmarkAddresses -benchtime "${pods}x" -count "$runs" ./test/crash
	start_control_plane >&2
	cd test/bench
	BENCH_CONTROL_PLANE=$control_plane go test -run '^$' -bench 'BenchmarkIPAM$' -benchtime "${pods}x" \
		-count "$runs" -timeout 60m .
}

run_benchmarks | tee >(cat >&2) | grep '^Benchmark' >"$results"
test/env/section.sh docs/dev/scale-addresses.md <<EOT
## Attaching

Written by \`make bench-addresses\` on $(date -u +%F), on a machine with $(nproc) cores and Linux $(uname -r).

*pool* and *static* are the times of the plugin's part of the hook, measured alternately with an address of a pool and
with one that the claim names, next to 50 pods with addresses of the pool. *together* is the same for 50 more pods with
addresses of the pool that start together. \`writes/pod\` counts the writes of AddressBlocks while the first 50 pods
start: a node takes 64 addresses at a time from 10.20.0.0/16, and 32 from 10.20.0.0/22 (\`blockSize\` of the
[pool](../user/reference/addresspool.md)).

*start* and *end* of CNI are ADD and DEL through libcni of the plugin macvlan with host-local or whereabouts
$(cat test/whereabouts/version), next to 50 pods with addresses of the same plugin. They include the processes of the plugins;
[Performance](performance.md) has times with the process of the hook. \`parallel\` is the number of pods that start
together, and then end together.

whereabouts has its default settings. It uses the API server and etcd of [test/cluster](../../test/cluster), on the
same machine. In other clusters, requests can take longer: this etcd does not wait for its disk, and there is no network
in between. The numbers of requests for each pod come from the audit log. \`start-writes\` and \`end-writes\` change the
Lease that lets one pod at a time proceed (three times), the IPPool, and an OverlappingRangeIPReservation. When 50 pods
start together, they include writes of the Lease that fail because of a conflict. \`left\` counts addresses that are
still allocated after DEL.

Times depend on the machine and on what else it does; compare those of one run.

\`\`\`text
$(sed -E 's/[0-9.]+ ns\/op//; s/[ \t]+/ /g' "$results")
\`\`\`
EOT
