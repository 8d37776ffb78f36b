#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# Gives a team a quota of bandwidth with the real Kueue, as docs/user/kueue.md describes: a Job waits for quota, a Job
# with a higher priority preempts another and uses its bandwidth, and a Job that Kueue would charge wrongly is denied.
# The demo fails if any of these steps fails.
set -euo pipefail
cd "$(dirname "$0")/../.."
cluster=.cluster-kueue
kubectl=$cluster/kubectl
trap 'make --no-print-directory cluster-down CLUSTER=$cluster' EXIT

# fail MESSAGE: prints the state of the cluster and the message, and ends the demo.
fail() {
  $kubectl get workloads,jobs,pods,resourceclaims,podgroups.scheduling.dra-shared.dev >&2 || true
  $kubectl get workloads -o 'jsonpath={range .items[*]}{.metadata.name}: {.status.conditions}{"\n"}{end}' >&2 || true
  $kubectl get events --sort-by=.metadata.creationTimestamp 2>/dev/null | tail -n 20 >&2 || true
  echo "demo-kueue: $1" >&2
  exit 1
}

# expect SUBJECT WANT COMMAND...: fails unless the command prints WANT.
expect() {
  local got
  got=$("${@:3}") || fail "$1: a command failed"
  [ "$got" = "$2" ] || fail "$1: got \"$got\", want \"$2\""
}

# await SUBJECT WANT COMMAND...: waits until the command prints WANT.
await() {
  local got='' deadline=$((SECONDS + 60))
  until got=$("${@:3}") && [ "$got" = "$2" ]; do
    [ $SECONDS -lt $deadline ] || fail "$1: got \"$got\", want \"$2\""
    sleep 1
  done
}

# field OBJECT JSONPATH: prints a field of an object.
field() { $kubectl get "$1" -o "jsonpath=$2"; }

# workload JOB JSONPATH: prints a field of the Workload that Kueue creates for a Job.
workload() { $kubectl get workloads -o "jsonpath={range .items[?(@.metadata.ownerReferences[0].name==\"$1\")]}$2{end}"; }

# charge JOB: prints the bandwidth that Kueue charges for a Job. Kueue counts it in Ki.
charge() {
  workload "$1" '{.status.admission.podSetAssignments[0].resourceUsage.nic\.dra-shared\.dev/bandwidth}' |
    numfmt --from=auto --to=si
}

# all_pods JOB: prints the number of pods of a Job.
all_pods() { $kubectl get pods -l "job-name=$1" -o name | wc -l; }

# grants: prints for each claim its grant, and whether its pod can use it and the kernel enforces it.
grants() {
  $kubectl get resourceclaims -o 'jsonpath={range .items[*]}{.status.allocation.devices.results[*].consumedCapacity.bandwidth}{range .status.devices[*]} {.conditions[?(@.type=="Ready")].status} {.conditions[?(@.type=="BandwidthEnforced")].status}{end}{"\n"}{end}'
}

# await_pods JOB PODS: waits until the pods of a Job are ready.
await_pods() {
  $kubectl wait "job/$1" --for="jsonpath={.status.ready}=$2" --timeout=60s >/dev/null || fail "Job $1: $2 pods are not ready"
}

# complete JOB: ends the pods of a Job successfully.
complete() {
  local pod
  for pod in $($kubectl get pods -l "job-name=$1" -o name); do
    $kubectl exec "$pod" -- /bin/nettool exit || fail "$pod: cannot end it"
  done
  $kubectl wait "job/$1" --for=condition=Complete --timeout=60s >/dev/null || fail "Job $1 is not complete"
}

# show: prints the Workloads, the pods that have not ended, and the claims with their grants.
show() {
  $kubectl get workloads
  $kubectl get pods --field-selector=status.phase!=Succeeded
  $kubectl get resourceclaims -o 'custom-columns=CLAIM:.metadata.name,DEVICE:.status.allocation.devices.results[0].device,BANDWIDTH:.status.allocation.devices.results[0].consumedCapacity.bandwidth'
}

make --no-print-directory cluster-down CLUSTER=$cluster
make --no-print-directory cluster-up CLUSTER=$cluster
bin/cluster load --dir $cluster bin/images/kueue.tar
$kubectl apply --server-side -k demo/kueue/controller >/dev/null
# Its kubelet would mount the certificate of its webhooks, which it makes at its first start, more than a minute later.
$kubectl -n kueue-system wait secret/kueue-webhook-server-cert --for=jsonpath='{.data.tls\.crt}' --timeout=60s
$kubectl -n kueue-system delete pods --all
$kubectl -n kueue-system rollout status deployment/kueue-controller-manager --timeout=120s
timeout 60 bash -c "until $kubectl apply -f demo/kueue/queue.yaml; do sleep 1; done" # when its webhooks answer
$cluster/network bin/helm upgrade dra-shared deployments/helm/dra-driver-shared --kubeconfig $cluster/kubeconfig \
  --namespace dra-shared-system --reuse-values --set controller.kueue.enabled=true \
  --set 'controller.kueue.deviceClasses={nic.dra-shared.dev}' \
  --set-json 'controller.reservedFor=[{"apiGroup":"batch","resource":"jobs"}]' --wait --timeout 60s >/dev/null
$kubectl wait clusterqueue/team --for=condition=Active --timeout=60s

echo; echo "The quota of the team is 800 Mbit/s. The pods of a Job use 400 Mbit/s each, and another such Job waits:"
$kubectl apply -f demo/kueue/job.yaml
await_pods train-1 2
sed 's/train-1/train-2/' demo/kueue/job.yaml | $kubectl apply -f -
quota='{.status.conditions[?(@.type=="QuotaReserved")].status}'
await "quota of Job train-2" False workload train-2 "$quota"
await "claims of Job train-1" $'400M True True\n400M True True' grants
show
expect "charge of Job train-1" 800M charge train-1
message=$(workload train-2 '{.status.conditions[?(@.type=="QuotaReserved")].message}')
echo "Job train-2: $message"
[[ $message == *"insufficient unused quota for nic.dra-shared.dev/bandwidth"* ]] || fail "Job train-2 does not wait for bandwidth"
expect "suspension of Job train-2" true field job/train-2 '{.spec.suspend}'
expect "pods of Job train-2" 0 all_pods train-2
echo; echo "The first Job ends, and the second one runs:"
complete train-1
await_pods train-2 2
await "claims of Job train-2" $'400M True True\n400M True True' grants
show
expect "charge of Job train-2" 800M charge train-2
complete train-2
$kubectl delete job train-1 train-2

echo; echo "A Job whose pod uses the claim of a PodGroup:"
$kubectl apply -f demo/kueue/background.yaml
await_pods background 1
$kubectl wait drapg/background --for=condition=Reserved --timeout=60s >/dev/null || fail "PodGroup background does not hold its claim"
await "claim of PodGroup background" '400M True True' grants
show
expect "charge of Job background" 400M charge background
claim=$($kubectl get resourceclaims -o name)
uid=$(field "$claim" '{.metadata.uid}')

echo; echo "An urgent Job preempts it. The claim of the PodGroup is released, because the quota and the NIC have no room for both:"
$kubectl apply -f demo/kueue/urgent.yaml
await_pods urgent 2
await "suspension of Job background" true field job/background '{.spec.suspend}'
await "pods of Job background" 0 all_pods background
await "condition Reserved of PodGroup background" Released field drapg/background '{.status.conditions[?(@.type=="Reserved")].reason}'
show
expect "preemption of Job background" Preempted workload background '{.status.conditions[?(@.type=="Evicted")].reason}'
expect "allocation of the claim of PodGroup background" '' field "$claim" '{.status.allocation}'
expect "charge of Job urgent" 800M charge urgent

echo; echo "The urgent Job ends. The other one is resumed, and the same claim is allocated again:"
complete urgent
await_pods background 1
await "condition Reserved of PodGroup background" Held field drapg/background '{.status.conditions[?(@.type=="Reserved")].reason}'
$kubectl delete job urgent
await "claim of PodGroup background" '400M True True' grants
expect "UID of the claim of PodGroup background" "$uid" field "$claim" '{.metadata.uid}'
expect "charge of Job background" 400M charge background
show

echo; echo "Kueue would charge the claim of the PodGroup for each pod of this Job. Admission denies it:"
if message=$($kubectl apply -f demo/kueue/refused.yaml 2>&1); then
  fail "Job refused was created"
fi
echo "$message"
[[ $message == *'Kueue would charge ResourceClaimTemplate "share" 2 times, once for each pod'* ]] ||
  fail "Job refused: the message does not name the reason"

echo; echo "All of this happened in $SECONDS s, including the start of the cluster."
