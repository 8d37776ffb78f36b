#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Gives each pod of a Deployment and of a StatefulSet an address of a pool, scales them,
# and loses a node.
set -euo pipefail
cd "$(dirname "$0")/../.."
cluster=.cluster-addresses
trap 'make --no-print-directory cluster-down CLUSTER=$cluster' EXIT
make --no-print-directory cluster-down CLUSTER=$cluster
make --no-print-directory cluster-up CLUSTER=$cluster NODES=2
$cluster/network bin/helm upgrade dra-shared deployments/helm/dra-driver-shared --kubeconfig $cluster/kubeconfig \
  --namespace dra-shared-system --reuse-values --set controller.addressQuarantine=10s --wait --timeout 60s >/dev/null
kubectl=$cluster/kubectl

# addresses: prints the pool, and each pod with its node and its address.
addresses() {
  $kubectl get addresspools
  $kubectl get addressblocks -o custom-columns=BLOCK:.metadata.name,NODE:.spec.node,RANGES:.spec.ranges
  $kubectl get resourceclaims -o 'jsonpath={range .items[*]}{.status.reservedFor[0].name}{"\t"}{.status.allocation.devices.results[0].pool}{"\t"}{.status.devices[0].networkData.ips[0]}{"\n"}{end}' | sort
}

# await_addresses N: waits until N claims have an address, and fails unless all differ.
await_addresses() {
  local ips='{range .items[*]}{.status.devices[0].networkData.ips[0]}{"\n"}{end}' found
  for _ in $(seq 120); do
    found=$($kubectl get resourceclaims -o "jsonpath=$ips" | grep . || true)
    if [ "$(wc -w <<<"$found")" -eq "$1" ]; then
      [ "$(sort -u <<<"$found" | wc -l)" -eq "$1" ] || { echo "two pods have the same address:" $found >&2; exit 1; }
      return
    fi
    sleep 1
  done
  echo "$(wc -w <<<"$found") claims have an address, want $1" >&2
  exit 1
}

$kubectl apply -f demo/addresses/pool.yaml -f demo/addresses/workloads.yaml
$kubectl rollout status deployment/web statefulset/db --timeout=60s
await_addresses 8
echo; echo "Six pods of a Deployment and two of a StatefulSet, each with an address of the pool:"
addresses
$kubectl scale deployment/web --replicas=12
$kubectl rollout status deployment/web --timeout=60s
await_addresses 14
echo; echo "Scaled to 12 and 2 pods. The nodes take more blocks:"
addresses
$kubectl scale deployment/web --replicas=3
await_addresses 5
echo; echo "Scaled to 3 and 2 pods:"
addresses
echo; echo "The node n2 is lost. Its pods move to n1, and the pool gets its addresses back:"
$cluster/node n2 pkill -STOP -f 'kube kubelet .*-override=n2'
$kubectl delete node n2
timeout 300 bash -c "while $kubectl get addressblocks -o 'jsonpath={.items[*].spec.node}' | grep -q n2; do sleep 1; done"
$kubectl rollout status deployment/web statefulset/db --timeout=60s
await_addresses 5
addresses
