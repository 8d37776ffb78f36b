#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Runs a Job whose pods share two claims of the Job (KEP-762): it is suspended, resumed, and deleted. Then the real
# JobSet controller runs a JobSet with a claim for each of its Jobs: it is restarted after a failure, and deleted.
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

bin/cluster load --dir $cluster bin/images/jobset.tar
$kubectl apply --server-side -k demo/jobset/controller >/dev/null
# Its kubelet would mount the certificate of its webhooks, which it makes at its first start, more than a minute later.
$kubectl -n jobset-system wait secret/jobset-webhook-server-cert --for=jsonpath='{.data.tls\.crt}' --timeout=60s
$kubectl -n jobset-system delete pods --all
$kubectl -n jobset-system rollout status deployment/jobset-controller-manager --timeout=120s
echo; echo "Two Jobs of a JobSet have a claim each, for their two pods:"
timeout 60 bash -c "until $kubectl apply -f demo/jobset/jobset.yaml; do sleep 1; done" # when its webhooks answer
claims() { # waits until both Jobs of the JobSet in its attempt RESTARTS have their pods, and two claims exist
  local deadline=$((SECONDS + 90))
  until [ "$($kubectl get jobs -l "jobset.sigs.k8s.io/restart-attempt=$1" -o 'jsonpath={.items[*].status.ready}')" = "2 2" ] &&
    [ "$($kubectl get resourceclaims --no-headers | wc -l)" = 2 ]; do
    [ $SECONDS -lt $deadline ] || { $kubectl get jobsets,jobs,pods,resourceclaims; exit 1; }
    sleep 1
  done
  $kubectl get resourceclaims -o 'custom-columns=NAME:.metadata.name,JOB:.metadata.ownerReferences[0].name,RESERVED FOR:.status.reservedFor[*].name'
}
claims 0
echo; echo "After a Job has failed, because one of its pods has exceeded its deadline, the JobSet starts again, with new claims:"
$kubectl patch "$($kubectl get pods -o name | head -n 1)" --type=merge -p '{"spec":{"activeDeadlineSeconds":1}}'
claims 1
echo; echo "After the JobSet is deleted, the claims are deleted too:"
$kubectl delete jobset cohort --timeout=60s
$kubectl wait resourceclaims --all --for=delete --timeout=60s
$kubectl get resourceclaims
