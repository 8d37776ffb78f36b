// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
)

// Each row renders the chart with values, as for Helm's --set, and checks the fields that depend on them. If the schema
// refuses the values, wantErr is the part of Helm's message that names the value: Helm can also fail for other reasons.
func TestChart_values(t *testing.T) {
	for _, test := range []struct {
		name, set, wantErr string
		want               func(t *testing.T, all objects)
	}{
		{name: "defaults", want: expectNoPrivileges},
		{name: "probes on a busy node", want: expectPatientProbes},
		{name: "certificate", set: "controller.certManager=true", want: expectCertificate},
		{name: "authority of the certificate", set: "controller.certManager=true", want: expectAuthority},
		{
			name: "AppArmor and SELinux", want: expectSecurityModules,
			set: "plugin.dhcp=true,plugin.appArmorProfile.type=Unconfined,plugin.seLinuxOptions.type=spc_t",
		},
		{name: "volumes with SELinux", set: "plugin.seLinuxOptions.type=spc_t", want: expectNoFileOfProcess1},
		{name: "user", set: "runAsUser=1000", want: expectUser},
		{name: "no user", set: "runAsUser=null", want: expectNoUser},
		{
			name: "pull secrets and priority classes", want: expectSecretsAndPriorities,
			set: "image.pullSecrets={a},plugin.priorityClassName=p,controller.priorityClassName=p",
		},
		{name: "directory of the hook", set: "plugin.hookDir=/opt/dra", want: expectHookDirectory},
		{name: "BPF file system", set: "plugin.mountBPFFS=true", want: expectMountOnNode},
		{
			name: "ports of the controller", want: expectPorts,
			set: "controller.webhookPort=10250,controller.healthPort=10251",
		},
		{name: "network of the nodes", set: "controller.hostNetwork=true", want: expectHostNetwork},

		{name: "unknown field", set: "config.networks[0].nam=x", wantErr: "additional properties 'nam' not allowed"},
		{name: "word as a number", set: "plugin.verbosity=loud", wantErr: "at '/plugin/verbosity': got string, want integer"},
		{name: "unknown mode", set: "controller.mode=both", wantErr: "at '/controller/mode': value must be one of"},
		{name: "no webhook port", set: "controller.webhookPort=0", wantErr: "at '/controller/webhookPort': minimum: got 0"},
		{name: "no health port", set: "controller.healthPort=0", wantErr: "at '/controller/healthPort': minimum: got 0"},
		{
			name: "no quantity", set: "config.networks[0].name=a,config.networks[0].bandwidth=fast",
			wantErr: "at '/config/networks/0/bandwidth': 'fast' does not match pattern",
		},
		{name: "root", set: "runAsUser=0", wantErr: "at '/runAsUser': minimum: got 0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			defer func() {
				if t.Failed() {
					t.Logf("the values were --set '%s'", test.set)
				}
			}()
			if test.wantErr != "" {
				expectRefused(t, test.set, test.wantErr)
				return
			}
			test.want(t, mustRender(t, test.set))
		})
	}
}

func TestChart_acceptsValuesOfTestClusters(t *testing.T) {
	values := filepath.Join(root, "test/env/values.yaml")
	if _, err := os.ReadFile(values); err != nil { // cached results depend on the files that the test itself opens
		t.Fatal(err)
	}
	all, err := render(t, "x", "", "--values", values)
	if err != nil {
		t.Fatalf("render the chart with %s: %v", values, err)
	}
	podTemplates(t, all) // fails if a pod has unknown fields
}

// expectRefused fails the test unless the schema of the chart refuses values with a message that contains a text.
func expectRefused(t *testing.T, set, want string) {
	t.Helper()
	_, err := render(t, "x", set)
	if err == nil {
		t.Errorf("the schema accepts %s", set)
	} else if !strings.Contains(err.Error(), want) {
		t.Errorf("with %s: got the error %v, want %q", set, err, want)
	}
}

// field returns a field of an object.
func field(t *testing.T, all objects, key string, path ...string) any {
	t.Helper()
	if all[key] == nil {
		t.Fatalf("the chart renders no %s", key)
	}
	value, found, err := unstructured.NestedFieldNoCopy(all[key].Object, path...)
	if !found || err != nil {
		t.Errorf("%s has no field %s: %v", key, strings.Join(path, "."), err)
	}
	return value
}

// expectNoPrivileges expects no mount below /sys, where the AppArmor profile of containerd denies writes.
func expectNoPrivileges(t *testing.T, all objects) {
	t.Helper()
	for name, pod := range podTemplates(t, all) {
		for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			if s := c.SecurityContext; s == nil || s.Privileged != nil && *s.Privileged {
				t.Errorf("%s: the container %s has the security context %v", name, c.Name, s)
			}
			for _, mount := range c.VolumeMounts {
				if strings.HasPrefix(mount.MountPath+"/", "/sys/") {
					t.Errorf("%s: the container %s has a mount at %s", name, c.Name, mount.MountPath)
				}
			}
		}
	}
}

// expectPatientProbes expects enough time and CPU that the kubelet does not restart the plugin of a busy node.
func expectPatientProbes(t *testing.T, all objects) {
	t.Helper()
	plugin := podTemplates(t, all)["plugin"].Spec.Containers[0]
	for check, probe := range map[string]*corev1.Probe{
		"started": plugin.StartupProbe, "ready": plugin.ReadinessProbe, "alive": plugin.LivenessProbe,
	} {
		if probe == nil || probe.Exec == nil || !slices.Contains(probe.Exec.Command, "--check="+check) ||
			probe.TimeoutSeconds != 6 {
			t.Errorf("got the probe %v, want --check=%s with timeoutSeconds 6", probe, check)
		}
	}
	if p := plugin.LivenessProbe; p == nil || p.PeriodSeconds != 8 || p.FailureThreshold != 4 {
		t.Errorf("got the liveness probe %v, want periodSeconds 8 and failureThreshold 4", p)
	}
	if cpu := plugin.Resources.Requests.Cpu().String(); cpu != "50m" {
		t.Errorf("got the request of CPU %s, want 50m", cpu)
	}
}

// expectCertificate expects that the controller mounts the Secret that cert-manager writes the certificate to.
func expectCertificate(t *testing.T, all objects) {
	t.Helper()
	want := field(t, all, "Certificate/x-controller-webhook", "spec", "secretName")
	pod := podTemplates(t, all)["controller"].Spec
	if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool {
		return v.Name == "webhook" && v.Secret != nil && v.Secret.SecretName == want
	}) {
		t.Errorf("the controller has the volumes %v, want webhook with the Secret %v", pod.Volumes, want)
	}
}

// expectAuthority expects that an authority issues the certificate: the renewal of a self-signed one would replace what
// the API server trusts.
func expectAuthority(t *testing.T, all objects) {
	t.Helper()
	const authority = "x-controller-webhook-ca"
	issuer := field(t, all, "Certificate/x-controller-webhook", "spec", "issuerRef", "name")
	if got := field(t, all, fmt.Sprintf("Issuer/%v", issuer), "spec", "ca", "secretName"); got != authority {
		t.Errorf("the issuer has the authority %v, want %s", got, authority)
	}
	if got := field(t, all, "Certificate/"+authority, "spec", "secretName"); got != authority {
		t.Errorf("the authority has the Secret %v, want %s", got, authority)
	}
	if got := field(t, all, "Certificate/"+authority, "spec", "isCA"); got != true {
		t.Errorf("the authority has isCA %v, want true", got)
	}
}

func expectSecurityModules(t *testing.T, all objects) {
	t.Helper()
	for _, c := range podTemplates(t, all)["plugin"].Spec.Containers {
		if p := c.SecurityContext.AppArmorProfile; p == nil || p.Type != corev1.AppArmorProfileTypeUnconfined {
			t.Errorf("%s: got the AppArmor profile %v, want Unconfined", c.Name, p)
		}
		if o := c.SecurityContext.SELinuxOptions; o == nil || o.Type != "spc_t" {
			t.Errorf("%s: got the SELinux options %v, want the type spc_t", c.Name, o)
		}
	}
}

// expectNoFileOfProcess1 expects no mount that SELinux refuses: a file with the type of process 1.
func expectNoFileOfProcess1(t *testing.T, all objects) {
	t.Helper()
	for _, volume := range podTemplates(t, all)["plugin"].Spec.Volumes {
		if volume.HostPath != nil && strings.HasPrefix(volume.HostPath.Path, "/proc/1") {
			t.Errorf("the volume %s is %s of the node", volume.Name, volume.HostPath.Path)
		}
	}
}

func expectUser(t *testing.T, all objects) {
	t.Helper()
	pods := podTemplates(t, all)
	for _, name := range []string{"controller", "uninstall-check"} {
		if u := pods[name].Spec.Containers[0].SecurityContext.RunAsUser; ptr.Deref(u, 0) != 1000 {
			t.Errorf("%s: got runAsUser %d, want 1000", name, ptr.Deref(u, 0))
		}
	}
}

func expectNoUser(t *testing.T, all objects) {
	t.Helper()
	for name, pod := range podTemplates(t, all) {
		if u := pod.Spec.Containers[0].SecurityContext.RunAsUser; u != nil {
			t.Errorf("%s: got runAsUser %d, want none", name, *u)
		}
	}
}

func expectSecretsAndPriorities(t *testing.T, all objects) {
	t.Helper()
	pods := podTemplates(t, all)
	for name, pod := range pods {
		if s := pod.Spec.ImagePullSecrets; len(s) != 1 || s[0].Name != "a" {
			t.Errorf("%s: got the pull secrets %v, want a", name, s)
		}
	}
	for _, name := range []string{"plugin", "controller"} {
		if got := pods[name].Spec.PriorityClassName; got != "p" {
			t.Errorf("%s: got priorityClassName %q, want p", name, got)
		}
	}
}

func expectHookDirectory(t *testing.T, all objects) {
	t.Helper()
	pod := podTemplates(t, all)["plugin"].Spec
	expectDirectory(t, "plugin.hookDir", pod, "hook", "--hook-dir=/opt/dra", "/opt/dra")
}

func expectMountOnNode(t *testing.T, all objects) {
	t.Helper()
	for _, c := range podTemplates(t, all)["plugin"].Spec.InitContainers {
		for _, mount := range c.VolumeMounts {
			if p := mount.MountPropagation; p != nil && *p == corev1.MountPropagationBidirectional {
				return
			}
		}
	}
	t.Error("no init container of the plugin has a mount that propagates to the node")
}

func expectPorts(t *testing.T, all objects) {
	t.Helper()
	controller := podTemplates(t, all)["controller"].Spec.Containers[0]
	for _, argument := range []string{"--webhook-port=10250", "--health-address=:10251"} {
		if !slices.Contains(controller.Args, argument) {
			t.Errorf("the controller has the arguments %v, want %s", controller.Args, argument)
		}
	}
	for name, port := range map[string]int32{"webhook": 10250, "health": 10251} {
		if !slices.Contains(controller.Ports, corev1.ContainerPort{Name: name, ContainerPort: port}) {
			t.Errorf("the controller has the ports %v, want %s with %d", controller.Ports, name, port)
		}
	}
	for name, probe := range map[string]*corev1.Probe{
		"readiness": controller.ReadinessProbe, "liveness": controller.LivenessProbe,
	} {
		if probe == nil || probe.HTTPGet == nil || probe.HTTPGet.Port.IntValue() != 10251 {
			t.Errorf("got the %s probe %v, want port 10251", name, probe)
		}
	}
}

// expectHostNetwork expects an update that does not wait for a node with free ports.
func expectHostNetwork(t *testing.T, all objects) {
	t.Helper()
	spec := decode[appsv1.Deployment](t, all, "Deployment/x-controller").Spec
	pod := spec.Template.Spec
	if !pod.HostNetwork || pod.DNSPolicy != corev1.DNSClusterFirstWithHostNet {
		t.Errorf("got hostNetwork %t with dnsPolicy %s, want true with ClusterFirstWithHostNet",
			pod.HostNetwork, pod.DNSPolicy)
	}
	if u := spec.Strategy.RollingUpdate; u == nil || u.MaxUnavailable.String() != "1" {
		t.Errorf("got the strategy %v, want maxUnavailable 1", spec.Strategy)
	}
}
