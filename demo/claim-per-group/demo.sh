#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs two groups of pods, each with one claim, first on a cluster without Kubernetes'
# own PodGroups (bridge mode) and then on a cluster with them (native mode).
set -euo pipefail
cd "$(dirname "$0")/../.."
cluster=.cluster-groups
trap 'make --no-print-directory cluster-down CLUSTER=$cluster' EXIT
for gates in default all; do
  make --no-print-directory cluster-down CLUSTER=$cluster
  make --no-print-directory cluster-up CLUSTER=$cluster GATES=$gates
  kubectl=$cluster/kubectl
  $kubectl apply -f demo/claim-per-group/groups.yaml
  $kubectl rollout status deployment/team-1 deployment/team-2 --timeout=60s
  $kubectl wait drapg/team-1 drapg/team-2 --for=condition=Reserved --timeout=60s
  echo; echo "Feature gates: $gates"; echo
  $kubectl get drapg
  $kubectl get pods,resourceclaims
  echo; echo "The consumers that each claim is reserved for:"
  $kubectl get resourceclaims -o 'jsonpath={range .items[*]}{.metadata.name}{"\n"}{range .status.reservedFor[*]}  {.apiGroup} {.resource} {.name}{"\n"}{end}{end}'
  echo; echo "After the pods are deleted, the claims stay; after the groups are deleted, the claims are deleted too:"
  $kubectl delete deployment team-1 team-2 --timeout=60s
  $kubectl wait pods --all --for=delete --timeout=60s
  $kubectl get resourceclaims
  $kubectl delete drapg team-1 team-2 --timeout=60s
  $kubectl wait resourceclaims --all --for=delete --timeout=60s
  $kubectl get resourceclaims
done
