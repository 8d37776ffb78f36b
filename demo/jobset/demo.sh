#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs a Job whose pods share two claims of the Job (KEP-762): it is suspended, resumed, and deleted.
set -euo pipefail
cd "$(dirname "$0")/../.."
cluster=.cluster-jobset
trap 'make --no-print-directory cluster-down CLUSTER=$cluster' EXIT
make --no-print-directory cluster-down CLUSTER=$cluster
make --no-print-directory cluster-up CLUSTER=$cluster
$cluster/network bin/helm upgrade dra-shared deployments/helm/dra-driver-shared --kubeconfig $cluster/kubeconfig \
  --namespace dra-shared-system --reuse-values --set controller.jobClaims=true --wait --timeout 60s >/dev/null
kubectl=$cluster/kubectl
$kubectl apply -f demo/jobset/job.yaml
$kubectl wait job/train --for=jsonpath='{.status.ready}'=3 --timeout=60s
echo; echo "Three pods share two claims of the Job:"
$kubectl get pods,resourceclaims
echo; echo "The references of each container:"
$kubectl get pods -o 'jsonpath={range .items[*]}{.metadata.name}{range .spec.containers[*]}  {.name}: {.resources.claims[*].name}{end}{"\n"}{end}'
echo; echo "While the Job is suspended, its claims have no devices:"
$kubectl patch job train --type=merge -p '{"spec":{"suspend":true}}'
$kubectl wait pods -l job-name=train --for=delete --timeout=60s
timeout 60 bash -c "while [ \"\$($kubectl get resourceclaims -o 'jsonpath={.items[*].status.allocation}')\" ]; do sleep 1; done"
$kubectl get resourceclaims
$kubectl patch job train --type=merge -p '{"spec":{"suspend":false}}'
$kubectl wait job/train --for=jsonpath='{.status.ready}'=3 --timeout=60s
echo; echo "After the Job is deleted, its claims are deleted too:"
$kubectl delete job train --timeout=60s
$kubectl wait resourceclaims --all --for=delete --timeout=60s
$kubectl get resourceclaims
