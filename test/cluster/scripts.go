// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
)

// Scripts that a person or a test uses to run commands in the cluster. They pass on standard input and the caller's
// files, and work from any directory.
const (
	// kubectl enters only the network namespace, so `-f FILE` reads the caller's files. kubectl ends before garbage
	// collection would be worth its time.
	kubectlScript = `#!/bin/sh
# kubectl ARGS...: runs kubectl against this cluster.
GOGC=off GOMEMLIMIT=256MiB exec nsenter --target "$(cat %[1]s/init.pid)" --net -- \
  %[2]s/kubectl --kubeconfig %[1]s/kubeconfig "$@"
`
	// n1.pid holds a process ID of the cluster's PID namespace, so the script
	// enters that namespace before the node's. A node that runs on another machine
	// has a script n1.exec, which runs commands there.
	nodeScript = `#!/bin/sh
# node NAME CMD...: runs CMD in the network and mount namespaces of node NAME.
[ $# -ge 2 ] && [ -x "%[1]s/$1.exec" ] && { script="%[1]s/$1.exec"; shift; exec "$script" "$@"; }
[ $# -ge 2 ] && [ -f "%[1]s/$1.pid" ] || { echo "usage: $0 n1|n2 CMD..." >&2; exit 2; }
name=$1; shift
exec nsenter --target "$(cat %[1]s/init.pid)" --net --mount --pid -- \
  nsenter --target "$(cat "%[1]s/$name.pid")" --net --mount -- env PATH="%[4]s:%[3]s:%[3]s/cni:$PATH" "$@"
`
	podScript = `#!/bin/sh
# pod NAMESPACE/NAME CMD...: runs CMD of this machine in the pod's network namespace, and with the
# rights of the pod's root in its user namespace if it has one.
[ $# -ge 2 ] || { echo "usage: $0 NAMESPACE/NAME CMD..." >&2; exit 2; }
pod=$1; shift
location=$(%[1]s/kubectl get pod -n "${pod%%%%/*}" "${pod#*/}" -o 'jsonpath={.metadata.uid} {.spec.nodeName}') || exit
uid=${location%%%% *} node=${location#* }
[ -x "%[1]s/$node.exec" ] && exec "%[1]s/$node.exec" pod-exec "$uid" "$@"
for cgroup in $(grep -ls "pod$uid" /proc/[0-9]*/cgroup); do
  pid=${cgroup#/proc/}; pid=${pid%%/cgroup}
  # CRI-O's monitor is in the cgroup of the pod and in the network namespace of the node.
  grep -qsx conmon "/proc/$pid/comm" && continue
  user=
  [ "$(readlink "/proc/$pid/ns/user")" = "$(readlink /proc/self/ns/user)" ] || user=--user
  exec nsenter --target "$pid" --net $user -- "$@"
done
echo "no process of pod $pod found: is it running?" >&2; exit 1
`
	networkScript = `#!/bin/sh
# network CMD...: runs CMD of this machine in the cluster's network namespace, in which
# the control plane and the switch between the NICs are.
exec nsenter --target "$(cat %[1]s/init.pid)" --net -- "$@"
`
)

// writeScripts writes the scripts into the cluster's directory.
func (c *cluster) writeScripts(o options) error {
	var err error
	for name, text := range map[string]string{
		"kubectl": kubectlScript, "node": nodeScript, "pod": podScript, "network": networkScript,
	} {
		script := fmt.Sprintf(text+"%.0[1]s%.0[2]s%.0[3]s%.0[4]s", c.dir, o.Bin.Kubectl, o.Bin.Node, o.Bin.Runtime)
		err = errors.Join(err, os.WriteFile(c.path(name), []byte(script), 0o755))
	}
	return err
}
