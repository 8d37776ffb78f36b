// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/dra-shared/dra-driver-shared/test/eventually"
)

// otherController is the program of another project that runs next to the driver's controller,
// with its webhooks and its own rights. Its manifests come from its module. The pod of its
// Deployment is simulated, and the process answers at the address of that pod.
type otherController struct {
	// name is the name of the program in bin, of the directory of its configuration in test,
	// and the prefix of its namespace, <name>-system.
	name string
	// account is the name of its service account.
	account string
	// service and secret are the names of the Service and the Secret of its webhooks.
	service, secret string
	// port is the port of its webhooks. It must not be 9443, the port of the driver's own
	// webhook server, which has the same address in the tests.
	port int
	// certificates is the directory that the kubelet would mount the Secret in.
	certificates string
}

func (o otherController) namespace() string { return o.name + "-system" }

// user returns the name of the service account as a user.
func (o otherController) user() string {
	return "system:serviceaccount:" + o.namespace() + ":" + o.account
}

// startOther installs the controller, and runs it until the test ends. It waits until
// probe, a request that its webhooks must answer, succeeds.
func (e *testEnv) startOther(t *testing.T, o otherController, probe func(context.Context) error) {
	t.Helper()
	ctx := t.Context()
	if out, err := e.installOther(ctx, o); err != nil {
		t.Fatalf("install %s: %v\n%s", o.name, err, out)
	}
	if err := os.RemoveAll(o.certificates); err != nil { // another cluster's certificates
		t.Fatal(err)
	}
	process := exec.Command(filepath.Join(e.cluster.Root, "bin", o.name),
		"--config", filepath.Join(e.cluster.Root, "test", o.name, "config.yaml"))
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := e.impersonate(kubeconfig, o.user()); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(e.cluster.Dir, "logs", o.name+".log"))
	if err != nil {
		t.Fatal(err)
	}
	process.Env, process.Stdout, process.Stderr = append(os.Environ(), "KUBECONFIG="+kubeconfig), log, log
	process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := process.Start(); err != nil {
		t.Fatalf("start %s: %v", o.name, err)
	}
	t.Cleanup(func() {
		_ = process.Process.Kill()
		_ = process.Wait()
		if t.Failed() {
			raw, _ := os.ReadFile(log.Name())
			t.Logf("log of %s:\n%s", o.name, raw[max(0, len(raw)-4000):])
		}
	})
	eventually.Eventually(t, timeout, o.name+" has the certificate of its webhooks", func() error {
		return e.mountCertificates(ctx, o)
	})
	eventually.Eventually(t, timeout, "the webhooks of "+o.name+" answer", func() error { return probe(ctx) })
}

// installOther applies the manifests of the controller's module, unless an earlier test has
// applied them.
func (e *testEnv) installOther(ctx context.Context, o otherController) (string, error) {
	service := types.NamespacedName{Namespace: o.namespace(), Name: o.service}
	if err := e.client.Get(ctx, service, &corev1.Service{}); err == nil {
		return "", nil
	}
	out, err := e.cluster.Kubectl(ctx, "apply", "--server-side", "-k",
		filepath.Join(e.cluster.Root, "bin", o.name+"-config/default"))
	if err != nil {
		return out, err
	}
	return e.cluster.Kubectl(ctx, "--namespace", service.Namespace, "patch", "service", service.Name, "--type=merge",
		"-p", fmt.Sprintf(`{"spec":{"ports":[{"port":443,"targetPort":%d}]}}`, o.port))
}

// impersonate writes a kubeconfig file for a service account.
func (e *testEnv) impersonate(file, account string) error {
	c, err := clientcmd.LoadFromFile(filepath.Join(e.cluster.Dir, "kubeconfig"))
	if err != nil {
		return err
	}
	if err := clientcmd.ResolveLocalPaths(c); err != nil {
		return err
	}
	for _, info := range c.AuthInfos {
		info.Impersonate = account
		info.ImpersonateGroups = []string{"system:serviceaccounts", "system:authenticated"}
	}
	return clientcmd.WriteToFile(*c, file)
}

// clientOf returns a client of a user or a service account.
func (e *testEnv) clientOf(t *testing.T, user string) client.Client {
	t.Helper()
	identity := rest.CopyConfig(e.config)
	identity.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:authenticated"}}
	if strings.HasPrefix(user, "system:serviceaccount:") {
		identity.Impersonate.Groups = append(identity.Impersonate.Groups, "system:serviceaccounts")
	}
	c, err := client.New(identity, client.Options{Scheme: e.client.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// requireOther skips a test with another controller that is too long for every run.
func requireOther(t *testing.T, name string) *testEnv {
	t.Helper()
	e := requireTestEnv(t)
	if os.Getenv(envOther) != name {
		t.Skipf("takes long: run `make test-%s`", name)
	}
	return e
}

// mountCertificates writes the Secret of the webhooks to files, as the kubelet does.
func (e *testEnv) mountCertificates(ctx context.Context, o otherController) error {
	var secret corev1.Secret
	if err := e.client.Get(ctx, types.NamespacedName{Namespace: o.namespace(), Name: o.secret}, &secret); err != nil {
		return err
	}
	if len(secret.Data["tls.crt"]) == 0 {
		return errors.New("the Secret is empty")
	}
	if err := os.MkdirAll(o.certificates, 0o700); err != nil {
		return err
	}
	for file, content := range secret.Data {
		if err := os.WriteFile(filepath.Join(o.certificates, file), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}
