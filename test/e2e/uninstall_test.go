// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

const idleGroup = `apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: idle}
spec: {spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: nic.dra-shared.dev}}]}}}
---
apiVersion: scheduling.dra-shared.dev/v1beta1
kind: PodGroup
metadata: {name: idle}
spec:
  schedulingPolicy: {basic: {}}
  resourceClaims: [{name: net, resourceClaimTemplateName: idle}]
`

// uninstall uninstalls the chart while a claim holds a share, and afterward. With a
// share the chart's hook refuses; without, nothing may remain.
func (f *faults) uninstall(ctx context.Context, t *testing.T) {
	const name = "with-share"
	if err := f.apply(ctx, shareManifest(name)); err != nil {
		t.Fatal(err)
	}
	if err := f.awaitReady(ctx, name, waitTimeout); err != nil {
		t.Fatal(err)
	}
	err := f.helmUninstall(ctx)
	want := "claims hold shares: default/" + name + " (1 in total): delete their pods first"
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Fatalf("uninstall while a pod has a share: got error %v, want one that contains %q", err, want)
	}
	f.uninstallWithoutHooks(ctx, t)
	if err := f.remove(ctx, name); err != nil {
		t.Fatal(err)
	}
	if err := f.helmUninstall(ctx); err != nil {
		t.Fatal(err)
	}
	if err := eventually.Poll(ctx, 60*time.Second, func() error { return f.findRemains(ctx) }); err != nil {
		t.Errorf("after the uninstallation: %v", err)
	}
	if err := f.cluster.Install(ctx); err != nil {
		t.Error(err)
	}
}

// uninstallWithoutHooks skips the check. The pod keeps running and its share stays
// enforced, and PodGroups survive, until the chart is installed again.
func (f *faults) uninstallWithoutHooks(ctx context.Context, t *testing.T) {
	t.Helper()
	if err := f.apply(ctx, idleGroup); err != nil {
		t.Fatal(err)
	}
	const groups = "podgroups.scheduling.dra-shared.dev"
	group := f.kubectl(ctx, t, "get", groups, "idle", "-o", "jsonpath={.metadata.uid}")
	if err := f.helmUninstall(ctx, "--no-hooks"); err != nil {
		t.Fatal(err)
	}
	out, err := f.cluster.Node(ctx, "n1", "tc", "class", "show", "dev", "nic1")
	if err != nil || !strings.Contains(out, "rate 20Mbit") {
		t.Errorf("classes of nic1 without a plugin: got error %v and output %q, want a class with rate 20Mbit", err, out)
	}
	if err := f.cluster.Install(ctx); err != nil {
		t.Fatal(err)
	}
	now := f.kubectl(ctx, t, "get", groups, "idle", "-o", "jsonpath={.metadata.uid}{.metadata.deletionTimestamp}")
	if now != group {
		t.Errorf("UID and deletion timestamp of PodGroup idle after reinstallation: got %q, want %q", now, group)
	}
	f.kubectl(ctx, t, "delete", groups, "idle", "--timeout=30s")
}

func (f *faults) helmUninstall(ctx context.Context, flags ...string) error {
	args := []string{"uninstall", "dra-shared", "-n", system, "--wait", "--timeout=60s"}
	if out, err := f.cluster.Helm(ctx, append(args, flags...)...); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// findRemains returns an error that lists what the driver left on the node and in
// the API.
func (f *faults) findRemains(ctx context.Context) error {
	onNode, err := f.cluster.Node(ctx, "n1", "sh", "-euc", listRemains)
	if err != nil {
		return err
	}
	objects, err := f.cluster.Kubectl(ctx, "get",
		"resourceslices,deviceclasses,clusterroles,validatingadmissionpolicies,jobs", "-A", "-o", "name")
	if err != nil {
		return err
	}
	remains := strings.TrimSpace(onNode)
	for object := range strings.FieldsSeq(objects) {
		if strings.Contains(object, "dra-shared") {
			remains += "\n" + object
		}
	}
	if remains != "" {
		return fmt.Errorf("the driver left:\n%s", indent(remains))
	}
	return nil
}

// listRemains prints the driver's files, links, queues, filters, programs, and maps. It
// fails if a query fails: only objects that do not exist count as removed.
const listRemains = `
find_in() { if [ -e "$1" ]; then find "$@"; fi; }
for dir in /var/lib/kubelet/plugins/dra-shared.dev /run/dra-shared /var/lib/kubelet/plugins_registry; do
  find_in "$dir" -type f -not -path '*/locks/*' -o -type s
done
find_in /var/run/cdi -name 'dra-shared*'
if [ -e /sys/fs/bpf/dra-shared ]; then echo /sys/fs/bpf/dra-shared; fi
links=$(ip -brief link)
printf '%s\n' "$links" | sed -nE '/^(ifb-|hp[io]-|dra-trial)/p'
for nic in nic0 nic1; do
  queues=$(tc qdisc show dev $nic)
  printf '%s\n' "$queues" | sed -nE "/htb|d5a/s/^/$nic: /p"
  case $queues in *clsact*)
    filters=$(tc filter show dev $nic egress; tc filter show dev $nic ingress)
    printf '%s' "$filters" | sed "s/^/$nic: /" ;;
  esac
done`
