// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// privileges checks that the plugin uses each permission of its ClusterRole. Then it removes each
// capability and mount of the plugin, one at a time, and checks that a function of the plugin
// fails without it.
func (f *faults) privileges(ctx context.Context, t *testing.T) {
	// With Refuse, links get addresses only if the plugin can look for duplicates.
	if err := f.cluster.Install(ctx, "config.networks[1].duplicateAddressDetection=Refuse"); err != nil {
		t.Fatal(err)
	}
	f.measureRollout(ctx, t)
	if err := f.checkFunctions(ctx); err != nil {
		t.Fatalf("plugin with all privileges: %v", err)
	}
	f.expectDropped(ctx, t, unix.CAP_PERFMON)
	if err := f.checkAddresses(ctx); err != nil {
		t.Fatalf("addresses of pools with all privileges: %v", err)
	}
	f.checkPermissions(ctx, t)
	spare, limit := f.spare(ctx, t), f.rollout
	for _, p := range f.listPrivileges(ctx, t) {
		f.kubectl(ctx, t, append([]string{"-n", system, "patch", "--type=json"}, p.patch...)...)
		if p.restart {
			f.kubectl(ctx, t, "-n", system, "rollout", "restart", "daemonset/dra-shared-plugin")
		}
		check := f.checkFunctions
		if p.name == "capability NET_RAW" {
			check = f.checkAddresses
		}
		if f.rollout = limit; spare[p.name] != "" {
			f.rollout = waitTimeout // a slow machine must not look like a missing privilege
		}
		err := check(ctx)
		if reason := spare[p.name]; reason != "" {
			if err != nil {
				t.Errorf("plugin without %s: %v, want everything to work: %s", p.name, err, reason)
			}
		} else if err == nil {
			t.Errorf("plugin without %s: everything works, want a failure; remove the privilege from the chart", p.name)
		} else {
			t.Logf("plugin without %s: %s", p.name, strings.SplitN(err.Error(), "\n", 2)[0])
		}
		f.restore(ctx, t, p)
	}
	f.rollout = waitTimeout
	if err := f.checkFunctions(ctx); err != nil {
		t.Errorf("plugin with all privileges restored: %v", err)
	}
}

// checkPermissions compares the plugin's ClusterRole with the API server's audit log: the
// plugin has made a request for each verb and resource of the role, and the API server has
// refused none. Permissions that the audit log cannot show are in unobservable.
func (f *faults) checkPermissions(ctx context.Context, t *testing.T) {
	t.Helper()
	used, unknown := f.usedPermissions(t, "system:serviceaccount:"+system+":dra-shared-plugin"), maps.Clone(unobservable)
	for _, rule := range f.role(ctx, t).Rules {
		for _, verb := range rule.Verbs {
			permission := verb + " " + strings.Join(rule.Resources, ",") + " " + strings.Join(rule.APIGroups, ",")
			reason, isUnobservable := unknown[permission]
			delete(unknown, permission)
			switch {
			case used[permission] && isUnobservable:
				t.Errorf("the plugin uses the permission %q: remove it from unobservable (%s)", permission, reason)
			case !used[permission] && !isUnobservable:
				t.Errorf("the plugin has not used the permission %q: remove it from the chart", permission)
			}
		}
	}
	for permission := range unknown {
		t.Errorf("unobservable lists the permission %q, which the plugin does not have: remove the entry", permission)
	}
	t.Logf("the plugin used the permissions %s", strings.Join(slices.Sorted(maps.Keys(used)), "; "))
}

// usedPermissions returns the permissions that a user has used since the cluster was started,
// each as VERB RESOURCE GROUP. It fails the test if the API server refused one.
func (f *faults) usedPermissions(t *testing.T, user string) map[string]bool {
	t.Helper()
	log, err := os.Open(filepath.Join(f.cluster.Dir, "logs/audit.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	used := map[string]bool{}
	for events := json.NewDecoder(log); ; {
		var event struct {
			Verb        string
			User        struct{ Username string }
			ObjectRef   struct{ Resource, Subresource, APIGroup string }
			Annotations map[string]string
		}
		switch err := events.Decode(&event); {
		// The API server may be writing the last event.
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return used
		case err != nil:
			t.Fatalf("audit log: %v", err)
		}
		object := event.ObjectRef
		if event.User.Username != user || object.Resource == "" {
			continue
		}
		permission := event.Verb + " " + path.Join(object.Resource, object.Subresource) + " " + object.APIGroup
		used[permission] = true
		if decision := event.Annotations["authorization.k8s.io/decision"]; decision != "allow" {
			t.Errorf("the API server's decision about %q of %s: got %s, want allow", permission, user, decision)
		}
	}
}

// unobservable maps permissions that do not appear in the audit log to the reason.
var unobservable = map[string]string{
	"list addresspools network.dra-shared.dev": watchList,
	driverVerb + " " + driverResource + " resource.k8s.io": "the API server checks it while it serves a patch of " +
		"resourceclaims/status",
}

const (
	watchList = "clients send list requests only to API servers that do not stream lists " +
		"(WatchList, on by default since Kubernetes 1.34)"
	driverVerb, driverResource = "associated-node:patch", "resourceclaims/driver"
)

// spare returns the privileges that the plugin does not need on the node's kernel, with
// the reason for each. The plugin drops them.
func (f *faults) spare(ctx context.Context, t *testing.T) map[string]string {
	t.Helper()
	key := f.kubectl(ctx, t, "get", "resourceslices", "-o",
		`jsonpath={.items[*].spec.devices[?(@.name=="nic0")].attributes.senderKey.string}`)
	if key != "NetnsCookie" {
		return nil
	}
	const reason = "the kernel's tc programs can ask for the cookie of a network namespace"
	return map[string]string{"capability PERFMON": reason}
}

// expectDropped fails the test if a running plugin of the node n1 has a capability.
func (f *faults) expectDropped(ctx context.Context, t *testing.T, capability int) {
	t.Helper()
	out, err := f.cluster.Node(ctx, "n1", "sh", "-c",
		"for p in $(pgrep -x dra-shared-plug); do grep CapPrm /proc/$p/status; done")
	if err != nil {
		t.Fatal(err)
	}
	sets := strings.Fields(strings.ReplaceAll(out, "CapPrm:", ""))
	if len(sets) == 0 {
		t.Fatal("the node n1 has no process of the plugin")
	}
	for _, set := range sets {
		bits, err := strconv.ParseUint(set, 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		if bits>>capability&1 == 1 {
			t.Errorf("the plugin has the capabilities %s, want capability %d dropped", set, capability)
		}
	}
}

// measureRollout sets how long a plugin may take to become ready. A slow machine then does not make a plugin without a
// privilege fail.
func (f *faults) measureRollout(ctx context.Context, t *testing.T) {
	t.Helper()
	f.kubectl(ctx, t, "-n", system, "rollout", "restart", "daemonset/dra-shared-plugin")
	start := time.Now()
	if err := f.awaitPlugin(ctx, 60*time.Second); err != nil {
		t.Fatal(err)
	}
	f.rollout = max(6*time.Second, 3*time.Since(start).Round(time.Second))
	t.Logf("a plugin with all privileges must become ready within %v", f.rollout)
}

type privilege struct {
	name    string
	patch   []string // arguments of `kubectl patch` that remove the privilege
	restore []string // arguments of `kubectl patch` that restore it
	restart bool     // whether the plugin must be restarted to notice
}

// restore restores a privilege and waits until the plugin is ready.
func (f *faults) restore(ctx context.Context, t *testing.T, p privilege) {
	t.Helper()
	f.kubectl(ctx, t, append([]string{"-n", system, "patch", "--type=json"}, p.restore...)...)
	if p.restart {
		f.kubectl(ctx, t, "-n", system, "rollout", "restart", "daemonset/dra-shared-plugin")
	}
	// A plugin that never became ready blocks the rolling update.
	f.kubectl(ctx, t, "-n", system, "delete", "pod", "--all", "--grace-period=1", "--wait=false")
	if err := f.awaitPlugin(ctx, 60*time.Second); err != nil {
		t.Fatal(err)
	}
}

// listPrivileges returns the privileges that the chart gave to the plugin, as the
// cluster has them, except the permissions that checkPermissions checks.
func (f *faults) listPrivileges(ctx context.Context, t *testing.T) (all []privilege) {
	t.Helper()
	var set struct {
		Spec struct {
			Template struct {
				Spec struct {
					Containers []struct {
						SecurityContext struct{ Capabilities struct{ Add []string } }
						VolumeMounts    []struct{ Name, MountPath string }
					}
				}
			}
		}
	}
	if err := f.cluster.Get(ctx, &set, "-n", system, "daemonset", "dra-shared-plugin"); err != nil {
		t.Fatal(err)
	}
	const daemonSet, container0 = "daemonset/dra-shared-plugin", "/spec/template/spec/containers/0/"
	container := set.Spec.Template.Spec.Containers[0]
	for i, c := range container.SecurityContext.Capabilities.Add {
		path := fmt.Sprintf(container0+"securityContext/capabilities/add/%d", i)
		all = append(all, newPrivilege(t, "capability "+c, daemonSet, path, c))
	}
	for i, m := range container.VolumeMounts {
		value := map[string]string{"name": m.Name, "mountPath": m.MountPath}
		path := fmt.Sprintf(container0+"volumeMounts/%d", i)
		all = append(all, newPrivilege(t, "mount "+m.MountPath, daemonSet, path, value))
	}
	for i, rule := range f.role(ctx, t).Rules {
		if slices.Equal(rule.Resources, []string{driverResource}) {
			p := newPrivilege(t, "permission to "+driverVerb+" "+driverResource, pluginRole, fmt.Sprintf("/rules/%d", i), rule)
			p.restart = true
			all = append(all, p)
		}
	}
	return all
}

// newPrivilege returns the privilege that the value at path gives an object.
func newPrivilege(t *testing.T, name, object, path string, value any) privilege {
	t.Helper()
	raw, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return privilege{
		name:    name,
		patch:   []string{object, "-p", fmt.Sprintf(`[{"op": "remove", "path": %q}]`, path)},
		restore: []string{object, "-p", fmt.Sprintf(`[{"op": "add", "path": %q, "value": %s}]`, path, raw)},
	}
}

const pluginRole = "clusterrole/dra-shared-plugin"

// role returns the plugin's ClusterRole.
func (f *faults) role(ctx context.Context, t *testing.T) (role rbacv1.ClusterRole) {
	t.Helper()
	if err := f.cluster.Get(ctx, &role, pluginRole); err != nil {
		t.Fatal(err)
	}
	return role
}

// awaitPlugin waits until the DaemonSet is rolled out and the plugin is ready.
func (f *faults) awaitPlugin(ctx context.Context, timeout time.Duration) error {
	_, err := f.cluster.Kubectl(ctx, "-n", system, "rollout", "status", "daemonset/dra-shared-plugin",
		"--timeout="+timeout.String())
	return err
}

// checkFunctions uses every function that the plugin needs privileges for, and
// checks that the API server denied nothing to it.
func (f *faults) checkFunctions(ctx context.Context) (err error) {
	if err := f.awaitPlugin(ctx, f.rollout); err != nil {
		return errors.New("the plugin does not become ready")
	}
	name := "check-" + fmt.Sprint(time.Now().UnixNano())
	unreferenced := "unreferenced-" + name
	if err := f.apply(ctx, shareManifest(name)+"---\n"+unreferencedManifest(unreferenced)); err != nil {
		return err
	}
	defer func() {
		_, _ = f.cluster.Kubectl(ctx, "delete", "pod", "--all", "--force", "--grace-period=0")
		_, _ = f.cluster.Kubectl(ctx, "delete", "resourceclaim", "--all", "--wait=false")
		_, _ = f.cluster.Kubectl(ctx, "delete", "resourceslice", "surplus", "--ignore-not-found")
	}()
	for _, check := range []struct{ want, args string }{
		{"True", "get pod " + name + ` -o jsonpath={.status.conditions[?(@.type=="Ready")].status}`},
		{
			"Attached NetnsCookie Enforced",
			"get resourceclaim " + name + " -o jsonpath={.status.devices[0].conditions[*].reason}",
		},
		{"NotReferenced", "get resourceclaim " + unreferenced + " -o jsonpath={.status.devices[0].conditions[0].reason}"},
		{"NotReferenced", "get events -o jsonpath={.items[?(@.reason==\"NotReferenced\")].reason} " +
			"--field-selector involvedObject.name=" + unreferenced},
	} {
		if err := f.awaitOutput(ctx, check.want, check.args); err != nil {
			return err
		}
	}
	if err := f.checkPublishing(ctx); err != nil {
		return err
	}
	if err := f.flapLink(ctx, name); err != nil {
		return err
	}
	log, err := f.cluster.Kubectl(ctx, "-n", system, "logs", "daemonset/dra-shared-plugin")
	for _, line := range strings.Split(log, "\n") {
		if strings.Contains(strings.ToLower(line), "forbidden") {
			return errors.New(line)
		}
	}
	return err
}

// checkAddresses makes the plugin take a block of addresses, return a part of it, and
// return the rest.
func (f *faults) checkAddresses(ctx context.Context) error {
	if err := f.awaitPlugin(ctx, f.rollout); err != nil {
		return errors.New("the plugin does not become ready")
	}
	name := "addresses-" + fmt.Sprint(time.Now().UnixNano())
	if err := f.apply(ctx, checkedPool+"---\n"+shareManifest(name)); err != nil {
		return err
	}
	const assigned = "get addresspool check -o jsonpath={.status.assigned}"
	defer func() {
		_, _ = f.cluster.Kubectl(ctx, "delete", "pod", "--all", "--force", "--grace-period=0")
		_, _ = f.cluster.Kubectl(ctx, "delete", "resourceclaim", "--all", "--wait=false")
	}()
	for _, check := range []struct{ want, args string }{
		{"True", "get pod " + name + ` -o jsonpath={.status.conditions[?(@.type=="Ready")].status}`},
		{"1", assigned}, // the pool is short, so the node returns the other address
	} {
		if err := f.awaitOutput(ctx, check.want, check.args); err != nil {
			return err
		}
	}
	if _, err := f.cluster.Kubectl(ctx, "delete", "pod", name, "--force", "--grace-period=0"); err != nil {
		return err
	}
	if err := f.awaitOutput(ctx, "0", assigned); err != nil {
		return err
	}
	if _, err := f.cluster.Kubectl(ctx, "delete", "addresspool", "check"); err != nil {
		return err
	}
	log, err := f.cluster.Kubectl(ctx, "-n", system, "logs", "daemonset/dra-shared-plugin")
	if strings.Contains(strings.ToLower(log), "forbidden") {
		return errors.New("the API server denied something to the plugin; see its log")
	}
	return err
}

// checkedPool is the default pool of the network of shareManifest. It has one block of
// two addresses.
const checkedPool = `apiVersion: network.dra-shared.dev/v1alpha1
kind: AddressPool
metadata: {name: check}
spec: {network: backup, default: true, subnet: 10.20.0.0/16, ranges: [10.20.9.2-10.20.9.3], blockSize: 2}
`

// checkPublishing makes the plugin create, delete, and update ResourceSlices.
func (f *faults) checkPublishing(ctx context.Context) error {
	const devices = "get resourceslices -o jsonpath={.items[*].spec.devices[*].name}"
	if _, err := f.cluster.Kubectl(ctx, "delete", "resourceslices", "--all"); err != nil {
		return err
	}
	if err := f.apply(ctx, surplusSlice); err != nil {
		return err
	}
	// The plugin reconciles its slices when a NIC appears or disappears, and
	// otherwise every 30 s.
	if _, err := f.cluster.Node(
		ctx, "n1", "ip", "link", "add", "nic9", "type", "veth", "peer", "name", "far9",
	); err != nil {
		return err
	}
	deleted := false
	defer func() {
		if !deleted {
			_, _ = f.cluster.Node(ctx, "n1", "ip", "link", "delete", "nic9")
		}
	}()
	for _, check := range []struct{ want, args string }{
		{"nic0 nic1 nic9", devices}, {"", "get resourceslice surplus --ignore-not-found -o name"},
	} {
		if err := f.awaitOutput(ctx, check.want, check.args); err != nil {
			return err
		}
	}
	if _, err := f.cluster.Node(ctx, "n1", "ip", "link", "delete", "nic9"); err != nil {
		return err
	}
	deleted = true
	return f.awaitOutput(ctx, "nic0 nic1", devices)
}

// awaitOutput waits until kubectl prints exactly want. It waits longer on a machine where a plugin takes longer to
// become ready.
func (f *faults) awaitOutput(ctx context.Context, want, args string) error {
	return eventually.Poll(ctx, max(6*time.Second, f.rollout/3), func() error {
		out, err := f.cluster.Kubectl(ctx, strings.Fields(args)...)
		if err == nil && out != want {
			err = fmt.Errorf("output of kubectl %s: got %q, want %q", args, out, want)
		}
		return err
	})
}

// flapLink sets the pod's link down and up twice. The plugin then emits equal events, which it reports as a series.
func (f *faults) flapLink(ctx context.Context, pod string) error {
	for range 2 {
		for _, state := range []string{"down", "up"} {
			script := "for p in $(pgrep -f -x /bin/nettool); do " +
				"nsenter -t $p -n ip link set net1 " + state + " 2>/dev/null && exit; done; exit 1"
			if _, err := f.cluster.Node(ctx, "n1", "sh", "-c", script); err != nil {
				return err
			}
			want := map[string]string{"down": "False", "up": "True"}[state]
			if err := eventually.Poll(ctx, 10*time.Second, func() error {
				out, err := f.cluster.Kubectl(ctx, "get", "resourceclaim", pod,
					"-o", `jsonpath={.status.devices[0].conditions[?(@.type=="Ready")].status}`)
				if err == nil && out != want {
					err = fmt.Errorf("condition Ready of claim %s with its link %s: got %q, want %s", pod, state, out, want)
				}
				return err
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// surplusSlice is a slice of the plugin's pool that the plugin did not create. The
// plugin deletes it.
const surplusSlice = `apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: surplus}
spec: {driver: dra-shared.dev, nodeName: n1, pool: {name: n1, generation: 0, resourceSliceCount: 1}}
`

// unreferencedManifest returns a claim and a pod that lists it, with a container that does not reference it.
func unreferencedManifest(name string) string {
	manifest := strings.ReplaceAll(shareManifest(name), ", resources: {claims: [{name: nic}]}", "")
	metadata := "kind: Pod\nmetadata: {name: " + name
	return strings.Replace(manifest, metadata+"}",
		metadata+", annotations: {dra-shared.dev/claim-references: Explicit}}", 1)
}
