#!/bin/bash
# Copyright The dra-driver-shared Authors.
# SPDX-License-Identifier: Apache-2.0

# The pod network of a node, in place of kindnetd: a bridge for the node's own pods, and
# a route to the pods of each other node. It follows the Node objects until the watch
# ends, and systemd starts it again.
set -euo pipefail
name=$(hostname)
config=/etc/cni/net.d/10-pods.conflist
mkdir -p "$(dirname $config)"
kubectl --kubeconfig=/etc/kubernetes/kubelet.conf get nodes --watch \
  -o jsonpath='{.metadata.name} {.spec.podCIDR} {.status.addresses[?(@.type=="InternalIP")].address}{"\n"}' |
  while read -r node cidr address; do
    [ -n "$address" ] || continue # the node has no podCIDR yet
    if [ "$node" != "$name" ]; then
      ip route replace "$cidr" via "${address%% *}"
    elif [ ! -e $config ]; then
      cat >$config.new <<CONFLIST
{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "cni0",
 "isGateway": true, "ipMasq": true, "hairpinMode": true,
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "$cidr"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
CONFLIST
      mv $config.new $config
    fi
  done
